"""How far two sets of images are apart in the features of a network: Frechet distance, KID, precision and recall.

Three stages, each of which can be saved and tested: images -> features -> statistics -> numbers. It neither generates
images nor trains. Heusel et al. 2017 (FID), Binkowski et al. 2018 (KID), Kynkäänniemi et al. 2019 (precision, recall).

n samples, D features.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data.arrays import read_npz, read_npz_names
from anechoic.errors import NotFiniteError, UserError
from anechoic.eval.extractors import Extractor
from anechoic.storage.files import make_folder, write_aside
from anechoic.storage.safe_io import of_kind, parse_table

KEPT = 10_000
"""Features kept beside mean and scatter, in the order they came, for the measures that need points."""

FORMAT = "anechoic-feature-statistics-1"


@dataclass(frozen=True)
class Statistics:
    """Of n feature vectors: their mean (D,), scatter sum((f - mean)(f - mean)^T) (D, D), and the first of them.

    Double precision. `extractor` and `images` say where they come from.
    """

    count: int
    mean: np.ndarray
    scatter: np.ndarray
    points: np.ndarray
    extractor: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)

    @property
    def covariance(self) -> np.ndarray:
        """Unbiased."""
        return self.scatter / (self.count - 1)


def statistics(features: np.ndarray | Tensor, *, extractor: dict[str, Any] | None = None) -> Statistics:
    """Of features (n, D)."""
    points = np.asarray(features, dtype=np.float32)
    if not np.isfinite(points).all():
        raise NotFiniteError("The extractor's features contain NaN or infinity: choose another, or another checkpoint.")
    double = points.astype(np.float64)
    mean = double.mean(axis=0)
    centered = double - mean
    return Statistics(len(points), mean, centered.T @ centered, points[:KEPT], extractor or {})


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Statistics of the union: scatter_a + scatter_b + n_a n_b / n (mean_a - mean_b)(mean_a - mean_b)^T."""
    refuse_mismatch(a, b)
    count = a.count + b.count
    shift = b.mean - a.mean
    return replace(
        a,
        count=count,
        mean=a.mean + shift * (b.count / count),
        scatter=a.scatter + b.scatter + np.outer(shift, shift) * (a.count * b.count / count),
        points=np.concatenate([a.points, b.points])[:KEPT],
    )


def measure_images(batches: Iterable[Tensor], extractor: Extractor, *, images: dict[str, Any]) -> Statistics:
    """Statistics of batches of uint8 images (B, C, H, W); `images` describes them in the receipt."""
    total: Statistics | None = None
    for batch in batches:
        part = statistics(extractor(batch).numpy(force=True), extractor=extractor.receipt())
        total = part if total is None else merge(total, part)
    if total is None or total.count < 2:
        raise UserError("a Frechet distance needs at least 2 images on each side.")
    return replace(total, images={**images, "count": total.count})


# ---- files ----------------------------------------------------------------------------------------------------------


def check_statistics_file(path: Path) -> None:
    """Refuse, before anything is measured, a name that `load_statistics` would not read; its folder is made."""
    if path.suffix != ".npz" or path.is_dir():
        raise UserError(f"Statistics are kept in an .npz file, which {path} is not: name one.")
    make_folder(path.absolute().parent)


def save_statistics(path: Path, found: Statistics) -> None:
    """One .npz with plain arrays and a JSON receipt."""
    check_statistics_file(path)
    receipt = {"format": FORMAT, "extractor": found.extractor, "images": found.images}
    with write_aside(path) as new, open(new, "wb") as file:
        np.savez(
            file,
            count=found.count,
            mean=found.mean,
            scatter=found.scatter,
            points=found.points,
            receipt=json.dumps(receipt, sort_keys=True),
        )


def is_statistics(path: Path) -> bool:
    """Whether a file was written by `save_statistics`."""
    if path.suffix != ".npz" or not path.is_file():
        return False
    return read_npz_names(path) >= {"count", "mean", "scatter", "points", "receipt"}


def load_statistics(path: Path) -> Statistics:
    arrays = read_npz(path)
    count, mean, scatter, points = (arrays.get(name) for name in ("count", "mean", "scatter", "points"))
    receipt = parse_table(str(arrays.get("receipt")), where=f"The receipt in {path}")
    made = {name: of_kind(receipt, name, dict, where=f"The receipt in {path}") for name in ("extractor", "images")}
    if count is None or mean is None or scatter is None or points is None or mean.ndim != 1:
        raise UserError(f"{path} holds no complete statistics; write them again.")
    wanted = {"count": (), "scatter": (len(mean), len(mean)), "points": (len(points), len(mean))}
    for name, shape in wanted.items():
        if arrays[name].shape != shape or arrays[name].dtype.kind not in "fiu":
            raise UserError(f"{path} holds {name} of the shape {arrays[name].shape}, not {shape}; write them again.")
    if not (count >= 2 and all(np.isfinite(value).all() for value in (mean, scatter, points))):
        raise UserError(f"{path} holds statistics that are not numbers of images; write them again.")
    return Statistics(int(count), mean, scatter, points, **made)


def refuse_mismatch(a: Statistics, b: Statistics) -> None:
    """Features of two extractors, or of two ways to resize, are not comparable."""
    different = sorted(
        name for name in a.extractor.keys() | b.extractor.keys() if a.extractor.get(name) != b.extractor.get(name)
    )
    if different or a.mean.shape != b.mean.shape:
        raise UserError(
            "these statistics come from different extractors (they differ in "
            f"{', '.join(different) or 'the number of features'}); measure both sides with the same one."
        )


# ---- numbers --------------------------------------------------------------------------------------------------------


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """||mean_a - mean_b||^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)).

    The trace of the root is the sum of the square roots of the eigenvalues of C_a^(1/2) C_b C_a^(1/2), which is
    symmetric, so no eigenvalue can turn out complex.
    """
    refuse_mismatch(a, b)
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    product = np.linalg.eigvalsh(root @ b.covariance @ root)
    root_trace = np.sqrt(np.clip(product, 0, None)).sum()
    shift = a.mean - b.mean
    return float(shift @ shift + np.trace(a.covariance) + np.trace(b.covariance) - 2 * root_trace)


def kernel_distance(
    a: np.ndarray, b: np.ndarray, *, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """KID: mean and deviation over random subsets of the unbiased squared MMD of the kernel (x.y / D + 1)^3."""
    size = min(subset_size, len(a), len(b))
    generator = np.random.default_rng(seed)
    estimates = []
    for _ in range(subsets):
        x, y = (points[generator.choice(len(points), size, replace=False)].astype(np.float64) for points in (a, b))
        estimates.append(squared_mmd(x, y))
    return float(np.mean(estimates)), float(np.std(estimates))


def squared_mmd(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased: an element is not compared with itself."""

    def kernel(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return (p @ q.T / p.shape[1] + 1) ** 3

    def within(p: np.ndarray) -> float:
        values = kernel(p, p)
        return (values.sum() - np.trace(values)) / (len(p) * (len(p) - 1))

    return float(within(x) + within(y) - 2 * kernel(x, y).mean())


def precision_recall(real: np.ndarray, generated: np.ndarray, *, neighbors: int = 3) -> tuple[float, float]:
    """Share of generated points inside the real manifold, and of real ones inside the generated manifold.

    A manifold is the union of balls around its points, each as wide as the distance to its k-th nearest neighbor.
    """
    x, y = (torch.from_numpy(np.ascontiguousarray(points, dtype=np.float32)) for points in (real, generated))
    return coverage(x, y, neighbors=neighbors), coverage(y, x, neighbors=neighbors)


def coverage(manifold: Tensor, queries: Tensor, *, neighbors: int, chunk: int = 1024) -> float:
    """Share of queries (m, D) that lie in a ball of the manifold (n, D)."""
    k = min(neighbors, len(manifold) - 1)
    # The nearest point to each is itself, at distance 0.
    radii = torch.cat([torch.cdist(part, manifold).kthvalue(k + 1).values for part in manifold.split(chunk)])
    inside = [(torch.cdist(part, manifold) <= radii).any(dim=1) for part in queries.split(chunk)]
    return float(torch.cat(inside).float().mean())


def compare(real: Statistics, generated: Statistics, *, seed: int = 0) -> dict[str, float]:
    """All numbers; the distance is named after the extractor. Warns where the estimate is known to be biased."""
    refuse_mismatch(real, generated)
    smallest, dimensions = min(real.count, generated.count), len(real.mean)
    if smallest < dimensions:
        warnings.warn(
            f"{smallest} images are fewer than the {dimensions} features: the Frechet distance is biased upwards; "
            "use more images, or compare only at equal numbers.",
            stacklevel=2,
        )
    kid, deviation = kernel_distance(real.points, generated.points, seed=seed)
    precision, recall = precision_recall(real.points, generated.points)
    return {
        real.extractor.get("metric", "fd"): frechet_distance(real, generated),
        "kid": kid,
        "kid_deviation": deviation,
        "precision": precision,
        "recall": recall,
    }
