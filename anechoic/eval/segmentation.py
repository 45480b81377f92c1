"""Unsupervised segmentation: clusters of soft assignments, matched to classes and scored by the mean IoU.

Reads images and masks from folders. The clustering itself is in spectral.py; no label is used before matching.
Legend: N images, S side of a table, K clusters, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.data import decode
from anechoic.data.decoding import Undecodable, decode_labels
from anechoic.data.source import MAX_CLASSES, is_image_name
from anechoic.errors import UserError
from anechoic.storage.safe_io import parse_table, read_regular, read_text, reason

# Folders of images and of their masks, relative to the data: plain, and the layout of COCO-Stuff.
LAYOUTS = (("images", "masks"), ("images/val2017", "annotations/val2017"), ("val2017", "annotations/val2017"))


class Pair(NamedTuple):
    image: Path
    mask: Path


def find_pairs(root: str | Path, *, listed: Path | None = None) -> list[Pair]:
    """Images and the masks of the same name, in order of name; `listed`: a text file that names the images to take."""
    root = Path(root)
    layout = next(((root / i, root / m) for i, m in LAYOUTS if (root / i).is_dir() and (root / m).is_dir()), None)
    if layout is None:
        raise UserError(
            f"{root} must hold the folders images and masks (or COCO-Stuff's images/val2017, annotations/val2017)."
        )
    images, masks = (
        {path.stem: path for path in sorted(folder.iterdir()) if is_image_name(path.name)} for folder in layout
    )
    names = list(images) if listed is None else [Path(line.strip()).stem for line in read_lines(listed)]
    missing = [name for name in names if name not in images or name not in masks]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} images have no mask or do not exist; the first is {missing[0]!r}."
        )
    if not names:
        raise UserError(f"There are no images in {layout[0]}.")
    return [Pair(images[name], masks[name]) for name in names]


def read_lines(path: Path) -> list[str]:
    return [line for line in read_text(path).splitlines() if line.strip()]


def read_mapping(path: Path, *, void: int) -> np.ndarray:
    """A table of 256 entries, label -> class, from JSON ({"0": 9, ...}) or lines of two numbers; others become void.

    COCO-Stuff's 182 fine labels are mapped to 27 coarse classes this way; a negative class is void.
    """
    text = read_text(path)
    try:
        pairs = (
            parse_table(text, where=str(path))
            if text.lstrip().startswith("{")
            else dict(line.split()[:2] for line in text.splitlines() if line.strip())
        )
        numbers = {int(fine): int(coarse) for fine, coarse in pairs.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"{path} is no mapping of labels to classes ({error}); give JSON or lines of two numbers."
        ) from error
    table = np.full(256, void, dtype=np.int64)
    for fine, coarse in numbers.items():
        if not 0 <= fine < 256:
            raise UserError(f"{path} maps the label {fine}, but masks hold 0 to 255.")
        if coarse >= MAX_CLASSES:
            raise UserError(f"{path} maps to the class {coarse}, which is beyond {MAX_CLASSES:,}.")
        table[fine] = coarse if coarse >= 0 else void
    return table


def read_pair(pair: Pair, *, image_size: int, channels: int, mapping: np.ndarray | None) -> tuple[Tensor, np.ndarray]:
    """uint8 image (C, s, s) and labels (s, s): shorter side resized (bilinear; nearest for labels), then the middle."""
    try:
        image = decode(read_regular(pair.image), channels=channels)
        mask = decode_labels(read_regular(pair.mask))
    except (Undecodable, OSError) as error:
        raise UserError(
            f"{pair.image.name} or its mask {pair.mask.name} cannot be read ({reason(error)}); repair or remove both."
        ) from error
    if mask.ndim != 2:
        raise UserError(f"{pair.mask} must hold one label per pixel; it has the shape {mask.shape}.")
    if mapping is not None and mask.max() > 255:
        raise UserError(f"{pair.mask} holds the label {mask.max()}, and a mapping is for labels from 0 to 255.")
    if tuple(image.shape[1:]) != mask.shape:
        raise UserError(
            f"{pair.image.name} is {image.shape[2]} x {image.shape[1]} pixels and its mask "
            f"{mask.shape[1]} x {mask.shape[0]}; they must have the same size."
        )
    labels = torch.from_numpy(mask.astype(np.int64) if mapping is None else mapping[mask])
    height, width = mask.shape
    scale = image_size / min(height, width)
    size = (max(image_size, round(height * scale)), max(image_size, round(width * scale)))
    top, left = (size[0] - image_size) // 2, (size[1] - image_size) // 2
    window = (slice(top, top + image_size), slice(left, left + image_size))
    resized = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
    # Float64 holds every label exactly; nearest only copies.
    resized_labels = F.interpolate(labels[None, None].double(), size=size, mode="nearest-exact")[0, 0].long()
    return resized[:, *window], resized_labels[window].numpy()


def read_all(
    pairs: Sequence[Pair], *, image_size: int, channels: int, mapping: np.ndarray | None
) -> tuple[Tensor, np.ndarray]:
    """uint8 images (N, C, s, s) and labels (N, s, s)."""
    both = [read_pair(pair, image_size=image_size, channels=channels, mapping=mapping) for pair in pairs]
    return torch.stack([image for image, _ in both]), np.stack([labels for _, labels in both])


# ---- clusters


def cluster(tables: Tensor, *, clusters: int, seed: int = 0) -> np.ndarray:
    """Tables (N, C, S, S) -> cluster of every cell (N, S, S).

    Soft assignments of all cells of all images, their leading left singular vectors times singular values (randomized,
    not centered), then k-means.
    """
    from sklearn.cluster import KMeans

    N, C, S, _ = tables.shape
    if clusters > N * S * S:
        raise UserError(f"{clusters} clusters are more than the {N * S * S} cells there are; choose fewer --clusters.")
    cells = tables.softmax(dim=1).permute(0, 2, 3, 1).reshape(-1, C).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        u, s, _ = torch.svd_lowrank(cells, q=min(100, C, len(cells)), niter=10)
    coordinates = (u * s)[:, :clusters].numpy()
    found = KMeans(clusters, random_state=seed).fit_predict(coordinates)
    return found.reshape(N, S, S)


def upsample(clusters: np.ndarray, size: int) -> np.ndarray:
    """(N, S, S) -> (N, size, size), nearest."""
    wide = F.interpolate(torch.from_numpy(clusters)[:, None].double(), size=(size, size), mode="nearest-exact")
    return wide[:, 0].long().numpy()


# ---- scores


@dataclass(frozen=True)
class Scores:
    """miou, accuracy: of pixels that are not void, after matching; iou (classes,): absent classes count as 0."""

    miou: float
    accuracy: float
    iou: np.ndarray


def overlap_counts(found: np.ndarray, labels: np.ndarray, *, clusters: int, classes: int, void: int) -> np.ndarray:
    """(clusters, classes): how many pixels of each cluster carry each label; void pixels are left out."""
    valid = labels != void
    wrong = labels[valid & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise UserError(
            f"The masks hold the label {wrong[0]}, but there are {classes} classes; set --classes or --void."
        )
    pairs = found[valid] * classes + labels[valid]
    return np.bincount(pairs, minlength=clusters * classes).reshape(clusters, classes)


def match(counts: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """("hungarian", class of each cluster): one to one with the largest overlap, -1 for a cluster left over; ("greedy",
    ...): each cluster takes its most frequent class."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(counts, maximize=True)
    hungarian = np.full(len(counts), -1)
    hungarian[rows] = columns
    yield "hungarian", hungarian
    yield "greedy", counts.argmax(axis=1)


def score(counts: np.ndarray, class_of: np.ndarray) -> Scores:
    """IoU = TP / (TP + FP + FN + 1e-10) per class, over all pixels together."""
    classes = counts.shape[1]
    confusion = np.zeros((classes, classes))
    for i, c in enumerate(class_of):
        if c >= 0:
            confusion[c] += counts[i]
    hits = confusion.diagonal()
    truth = counts.sum(axis=0)  # pixels of clusters without a class are misses
    iou = hits / (confusion.sum(axis=1) + truth - hits + 1e-10)
    return Scores(float(iou.mean()), float(hits.sum() / max(1, counts.sum())), iou)


def score_maps(found: np.ndarray, labels: np.ndarray, *, clusters: int, classes: int, void: int) -> dict[str, Any]:
    """Both matchings' scores of cluster maps (N, s, s) against labels (N, s, s)."""
    counts = overlap_counts(found, labels, clusters=clusters, classes=classes, void=void)
    if not counts.any():
        raise UserError(f"Every pixel of the masks is void ({void}), so nothing can be scored; set --void.")
    results: dict[str, Any] = {}
    for name, class_of in match(counts):
        scores = score(counts, class_of)
        results[name] = {"miou": scores.miou, "accuracy": scores.accuracy, "iou": scores.iou.tolist()}
    return results
