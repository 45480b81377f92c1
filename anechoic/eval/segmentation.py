"""Unsupervised segmentation: spectral clustering of patches across images, matched to classes and scored by mean IoU.

Zhang, Yunis and Maire (2024), the version with one graph over the tokens of many images: soft assignments approximate
eigenvectors of that graph. No label is used before matching. (Figure 4.)
Legend: n tokens of a batch, N images, C channels of the assignment, S side of a table, h side of the token grid,
K clusters, H x W pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.config import Count, Positive, Section, Share, Whole
from anechoic.data import decode
from anechoic.data.decoding import Undecodable, decode_labels
from anechoic.data.preprocess import Preprocess, computable
from anechoic.data.source import MAX_CLASSES, is_image_name
from anechoic.data.stored import READERS, decode_stored, has_reader, read_label_image, reads_stored
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.features import patch_maps
from anechoic.eval.projections import eigenvector_colors
from anechoic.models.network import Network, TransformerConfig
from anechoic.runtime.devices import pick_device
from anechoic.storage.safe_io import parse_table, read_regular, read_text, reason

SIDE = 32
# The picture of all cells of all images is made from this number of images.
SHOWN = 16
# Folders of images and of their masks, relative to the data: plain, and the layout of COCO-Stuff.
LAYOUTS = (("images", "masks"), ("images/val2017", "annotations/val2017"), ("val2017", "annotations/val2017"))


# ---- from folders to scores


@dataclass(frozen=True)
class SpectralOptions(Section):
    """The published settings; `epochs` and `batch` decide the cost."""

    channels: Count = 100
    epochs: Count = 201
    batch: Count = 40
    neighbors: Count = 50
    threshold: float = 0.1
    steps: Count = 5
    lr: Positive = 1e-2
    ema: Share = 0.99
    seed: Whole = 12345


class Segmented(NamedTuple):
    """scores: hungarian and greedy (miou, accuracy, iou), and how many images, clusters and classes there were.
    pixels (n, H, W, C) and colors (n, h, w, 3) in 0 .. 1: the first images and a picture of their cells."""

    scores: dict[str, Any]
    pixels: np.ndarray
    colors: np.ndarray


def larger(encoder: Encoder) -> Encoder:
    """The encoder at 256 / 224 of its image size, in whole patches, where its positions can be made for any grid."""
    config = getattr(encoder.model, "config", None)
    if not isinstance(encoder.model, Network) or not isinstance(config, TransformerConfig):
        return encoder
    patch = config.patch_size
    return replace(
        encoder,
        preprocess=replace(encoder.preprocess, image_size=round(encoder.image_size * 256 / 224 / patch) * patch),
    )


def segment_images(
    encoder: Encoder,
    where: str,
    options: SpectralOptions,
    *,
    clusters: int | None = None,
    classes: int | None = None,
    void: int = 255,
    mapping: Path | None = None,
    listed: Path | None = None,
    samples: int | None = None,
    device: str = "auto",
) -> Segmented:
    if samples is not None and samples < 1:
        raise UserError(f"--samples counts images, at least 1, not {samples}.")
    if options.channels < 3:
        raise UserError(f"The maps are colored by three eigenvectors, so --channels cannot be {options.channels}.")
    pairs = find_pairs(where, listed=listed)[:samples]
    table = None if mapping is None else read_mapping(mapping, void=void)
    images, labels = read_all(pairs, encoder.preprocess, mapping=table)
    known = labels[labels != void]
    if not len(known):
        raise UserError(f"Every pixel of the masks is void ({void}), so nothing can be scored; set --void.")
    classes = classes or int(known.max()) + 1
    clusters = clusters or classes
    cells = len(images) * 32 * 32
    if clusters > cells:
        raise UserError(f"{clusters} clusters are more than the {cells} cells there are; choose fewer --clusters.")
    if clusters > options.channels:
        raise UserError(f"{clusters} clusters need as many channels; raise --channels above {options.channels}.")
    place = pick_device(device)
    encoder.model.to(place)
    normalized = encoder.preprocess.apply(images)
    tokens = torch.cat([patch_maps(encoder.model, part.to(place)).float().clone() for part in normalized.split(64)])
    tables = spectral_tables(tokens, options)
    found = upsample(cluster(tables, clusters=clusters), images.shape[-1])
    result = score_maps(found, labels, clusters=clusters, classes=classes, void=void)
    scores = {**result, "images": len(images), "clusters": clusters, "classes": classes}
    colors = eigenvector_colors(soft_cells(tables[:SHOWN], side=64)).numpy(force=True)
    shown = encoder.preprocess.invert(normalized[:SHOWN]).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    return Segmented(scores, shown, colors)


# ---- images and masks


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
        {path.stem: path for path in sorted(folder.iterdir()) if is_image_name(path.name) or reads_stored(path.name)}
        for folder in layout
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


def read_pair(pair: Pair, preprocess: Preprocess, *, mapping: np.ndarray | None) -> tuple[Tensor, np.ndarray]:
    """Image (C, s, s) and labels (s, s): shorter side resized (bilinear; nearest for labels), then the middle."""
    image_size, channels, pixels = preprocess.image_size, preprocess.channels, preprocess.pixels
    try:
        data, marks = read_regular(pair.image), read_regular(pair.mask)
        if pixels.stored:
            image = computable(decode_stored(data, name=pair.image.name, pixels=pixels, channels=channels))
        else:
            image = decode(data, channels=channels)
        stored = pair.mask.suffix.lower() in READERS and has_reader(pair.mask.suffix.lower())
        mask = read_label_image(marks, name=pair.mask.name) if stored else decode_labels(marks)
    except (Undecodable, OSError) as error:
        raise UserError(
            f"{pair.image.name} or its mask {pair.mask.name} cannot be read ({reason(error)}); repair or remove both."
        ) from error
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        raise UserError(f"{pair.mask} must hold one label per pixel; it holds {mask.dtype} of shape {mask.shape}.")
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


def read_all(pairs: Sequence[Pair], preprocess: Preprocess, *, mapping: np.ndarray | None) -> tuple[Tensor, np.ndarray]:
    """Images (N, C, s, s) and labels (N, s, s)."""
    both = [read_pair(pair, preprocess, mapping=mapping) for pair in pairs]
    return torch.stack([image for image, _ in both]), np.stack([labels for _, labels in both])


# ---- spectral clustering


def token_graph(tokens: Tensor, *, neighbors: int = 50, threshold: float = 0.1) -> Tensor:
    """tokens (B, hw, D) -> A = D^-1 W, sparse (n, n), n = B hw.

    W keeps, for every token, its most similar tokens (cosine) within its own image and as many in the other images,
    without itself; similarities up to the threshold become 0, and W is symmetrized. A token without neighbors has a
    row of zeros.
    """
    B, per_image, _ = tokens.shape
    x = F.normalize(tokens.flatten(0, 1), dim=1)
    rows, columns, values = [], [], []
    for b in range(B):
        first = b * per_image
        own = torch.arange(first, first + per_image, device=x.device)
        similarities = x[own] @ x.T
        inside = similarities[:, own].clone().fill_diagonal_(0)
        similarities[:, own] = 0
        for part, offset in ((inside, first), (similarities, 0)):
            best, where = part.topk(min(neighbors, part.shape[1]), dim=1)
            keep = best > threshold
            rows.append(own[:, None].expand_as(where)[keep])
            columns.append(where[keep] + offset)
            values.append(best[keep])
    row, column, value = torch.cat(rows), torch.cat(columns), torch.cat(values) / 2
    n = len(x)
    indices = torch.stack([torch.cat([row, column]), torch.cat([column, row])])
    w = torch.sparse_coo_tensor(indices, torch.cat([value, value]), (n, n), check_invariants=True).coalesce()
    degree = torch.zeros(n, device=x.device).index_add_(0, w.indices()[0], w.values())
    scale = torch.where(degree > 0, 1 / degree.clamp(min=1e-12) + 1e-6, 0.0)
    return torch.sparse_coo_tensor(
        w.indices(), w.values() * scale[w.indices()[0]], (n, n), check_invariants=True
    ).coalesce()


def symmetric_part(a: Tensor) -> Tensor:
    """(A + A^T) / 2 in compressed rows: the same quadratic form as A, and its own transpose."""
    with warnings.catch_warnings():
        # This layout is several times faster to multiply with; torch calls it beta once per process.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return ((a + a.T.coalesce()) / 2).coalesce().to_sparse_csr()


def spectral_loss(assignments: Tensor, a: Tensor, *, weight: float = 1.0) -> Tensor:
    """assignments (n, C) >= 0, a the symmetric part of A (n, n). With z_c the L2-normalized columns:

    mean_c | weight (z_c^T A z_c - 1) |  +  mean_{c != c'} weight (z_c . z_c')^2.
    """
    z = F.normalize(assignments, dim=0)
    with torch.no_grad():
        image = a @ z
    # z^T A z and its gradient 2 A z for symmetric A, with one product instead of two.
    product = (z * image).sum(dim=0)
    eigenvalues = 2 * product - product.detach()
    overlaps = z.T @ z
    C = len(overlaps)
    off_diagonal = overlaps.square().sum() - overlaps.diagonal().square().sum()
    return (weight * (eigenvalues - 1)).abs().mean() + weight * off_diagonal / max(1, C * (C - 1))


def pooled(tables: Tensor, side: int) -> Tensor:
    """Tables (B, C, S, S) -> soft assignments of the tokens (B side^2, C), averaged over each token's cells."""
    p = F.adaptive_avg_pool2d(tables.softmax(dim=1), side)
    return p.permute(0, 2, 3, 1).flatten(0, 2)


def spectral_tables(tokens: Tensor, options: SpectralOptions) -> Tensor:
    """tokens (N, h, h, D) -> averaged tables (N, C, S, S); a softmax over C makes them soft assignments.

    Every epoch visits the images in random batches; each batch builds its graph and takes `steps` AdamW steps on the
    tables of its images. The moving average of all tables moves once per batch.
    """
    N, h = tokens.shape[:2]
    if N < 1 or h < 2:
        raise UserError("Clustering needs at least one image of 2 x 2 patches; give larger images.")
    flat = tokens.flatten(1, 2)
    generator = torch.Generator().manual_seed(options.seed)
    start = torch.randn(N, options.channels, SIDE, SIDE, generator=generator).to(tokens.device)
    # One parameter per image: the optimizer passes over those that are not in the batch.
    tables = [table.clone().requires_grad_() for table in start]
    average = start
    optimizer = torch.optim.AdamW(tables, lr=options.lr, weight_decay=0.0)
    for _ in tqdm(range(options.epochs), desc="spectral clustering", leave=False, disable=None):
        for batch in torch.randperm(N, generator=generator).split(options.batch):
            graph = token_graph(flat[batch], neighbors=options.neighbors, threshold=options.threshold)
            a = symmetric_part(graph)
            for _ in range(options.steps):
                optimizer.zero_grad(set_to_none=True)
                own = torch.stack([tables[i] for i in batch.tolist()])
                spectral_loss(pooled(own, h), a, weight=SIDE / h).backward()
                optimizer.step()
            with torch.no_grad():
                average.lerp_(torch.stack(tables), 1 - options.ema)
    return average


def soft_cells(tables: Tensor, *, side: int) -> Tensor:
    """Tables (N, C, S, S) -> soft assignments (N, side, side, C) for the RGB picture, resized with antialiasing."""
    p = F.interpolate(tables.softmax(dim=1), size=(side, side), mode="bilinear", antialias=True)
    return p.permute(0, 2, 3, 1)


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
    """Return (clusters, classes): the number of pixels of each cluster with each label, without void pixels."""
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
