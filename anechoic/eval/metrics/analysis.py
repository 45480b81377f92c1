"""Numbers that explain features: effective rank, similarity to the input (the echo), correlation, t-SNE, RGB maps.

Arrays or tensors in, numbers or arrays out; nothing here runs a network, reads a file or draws a picture. Paper: Eq. 6
(effective rank), Figures 3, 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from anechoic.errors import NotFiniteError, UserError

Center = Literal["columns", "rows", "none"]


class EffectiveRank(NamedTuple):
    """entropy: the paper's rho(A) = -sum p ln p; rank: exp(entropy), or 0 when there is no spectrum at all."""

    entropy: float
    rank: float


def effective_rank(features: np.ndarray | Tensor, *, center: Center = "columns") -> EffectiveRank:
    """Entropy of the spectrum of the samples' covariance, and its exponential. features: (n, d).

    p_i = s_i^2 / sum_j s_j^2 for the singular values s of the centered features, H = -sum p_i ln p_i (0 ln 0 = 0).
    "columns" removes the mean over samples, so the spectrum is that of the usual d x d covariance; "rows" removes each
    sample's own mean over channels, the literal reading of the paper's n x n matrix; "none" removes nothing, as for a
    matrix of weights. Features that do not vary have rank 0 and entropy 0.
    """
    if center not in get_args(Center):
        raise UserError(f"center must be one of {', '.join(get_args(Center))}, not {center!r}.")
    features = as_tensor(features)
    z = as_matrix(features)
    resolution = torch.finfo(features.dtype).eps if features.is_floating_point() else 0.0
    centered = z if center == "none" else z - z.mean(dim=0 if center == "columns" else 1, keepdim=True)
    # Deviations below the resolution of the given numbers are rounding, not information.
    largest = z.abs().max().item()
    if centered.abs().max().item() <= 4 * resolution * largest:
        return EffectiveRank(0.0, 0.0)
    energies = torch.linalg.eigvalsh(gram(centered / centered.abs().max())).clamp(min=0)
    p = energies / energies.sum()
    entropy = max(0.0, -torch.special.xlogy(p, p).sum().item())
    return EffectiveRank(entropy, math.exp(entropy))


def gram(z: Tensor) -> Tensor:
    """The smaller of z z^T and z^T z; their non-zero eigenvalues, the squared singular values of z, are the same."""
    return z @ z.T if len(z) <= z.shape[1] else z.T @ z


def as_tensor(array: np.ndarray | Tensor) -> Tensor:
    """A tensor that shares the array's memory where it may be written; a read-only file of features is copied."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = np.array(array)
    return torch.as_tensor(array)


def doubled(x: Tensor) -> Tensor:
    """In double precision, on its device or, where that has none, on the processor."""
    return x.to(exact_device(x.device)).double()


def exact_device(device: torch.device) -> torch.device:
    """Where vectors of this device can be computed with in double precision: Apple's accelerator has none."""
    return torch.device("cpu") if device.type == "mps" else device


def as_matrix(features: np.ndarray | Tensor) -> Tensor:
    """(n, d) in float64; empty, misshapen or non-finite features are refused."""
    z = as_tensor(features)
    if z.ndim != 2 or z.numel() == 0:
        raise UserError(f"Features must be a non-empty matrix (samples, channels); got the shape {tuple(z.shape)}.")
    z = doubled(z)
    if not torch.isfinite(z).all():
        raise NotFiniteError(
            "The features contain NaN or infinity: the weights are damaged, so use an earlier checkpoint."
        )
    return z


def linear_cka(a: np.ndarray | Tensor, b: np.ndarray | Tensor) -> float:
    """||B^T A||^2 / (||A^T A|| ||B^T B||) of the column-centered matrices (Kornblith et al. 2019); constant: 0."""
    a, b = as_matrix(a), as_matrix(b)
    a, b = a - a.mean(0), b - b.mean(0)
    norms = torch.linalg.norm(gram(a)) * torch.linalg.norm(gram(b))
    if norms == 0:
        return 0.0
    # With fewer samples than channels the n x n products are the smaller ones: <A A^T, B B^T> is the same number.
    small = len(a) < min(a.shape[1], b.shape[1])
    overlap = ((a @ a.T) * (b @ b.T)).sum() if small else (b.T @ a).square().sum()
    return (overlap / norms).item()


def mean_cosine(a: np.ndarray | Tensor, b: np.ndarray | Tensor) -> float:
    """Mean over samples of the cosine between corresponding rows; a zero row counts as cosine 0."""
    return torch.cosine_similarity(as_matrix(a), as_matrix(b), dim=1, eps=1e-300).mean().item()


class Correlation(NamedTuple):
    """Pearson's r and the ends of its confidence interval; NaN where it is not defined."""

    r: float
    low: float
    high: float


def pearson(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, *, confidence: float = 0.95
) -> Correlation:
    """Pearson's coefficient of two series (n,) with the interval tanh(atanh(r) ± z / sqrt(n - 3)) of Fisher.

    The interval needs four points; a series that does not vary has no coefficient.
    """
    from scipy.stats import pearsonr

    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise UserError(f"A correlation needs two series of the same length, at least 2; got {x.shape} and {y.shape}.")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(math.nan, math.nan, math.nan)
    found = pearsonr(x, y)
    if len(x) < 4:
        return Correlation(float(found.statistic), math.nan, math.nan)
    low, high = found.confidence_interval(confidence)
    return Correlation(float(found.statistic), float(low), float(high))


def silhouette(features: np.ndarray | Tensor, labels: np.ndarray, *, samples: int = 5000) -> float:
    """Mean silhouette of the classes under the cosine distance, on at most `samples` evenly spaced samples.

    NaN when fewer than two classes are present or every class has a single member.
    """
    from sklearn.metrics import silhouette_score

    z = as_matrix(features).numpy(force=True)
    chosen = np.unique(np.linspace(0, len(z) - 1, min(len(z), samples)).astype(int))
    z, labels = z[chosen], np.asarray(labels)[chosen]
    present = len(np.unique(labels))
    if not 2 <= present < len(labels):
        return math.nan
    lengths = np.linalg.norm(z, axis=1, keepdims=True)
    return float(silhouette_score(z / np.where(lengths == 0, 1, lengths), labels))


def tsne(features: np.ndarray | Tensor, *, perplexity: float = 30.0, seed: int = 0) -> np.ndarray:
    """(n, 2) coordinates of t-SNE, started from the principal components; perplexity is lowered for few samples."""
    from sklearn.manifold import TSNE

    z = as_matrix(features).float().numpy(force=True)
    if len(z) < 4:
        raise UserError(f"t-SNE needs at least 4 samples; there are {len(z)}.")
    perplexity = min(perplexity, (len(z) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(z)


def eigenvector_colors(cells: Tensor, *, first: int = 0) -> Tensor:
    """RGB of Figure 4: cells (n, h, w, C), one vector per place of n images, to (n, h, w, 3) in 0 .. 1.

    Each vector is L2-normalized; left singular vectors first .. first + 2 of all places of all images together (no
    centering) become red, green and blue, each min-max scaled over all images, so a color means the same everywhere.
    """
    n, h, w, C = cells.shape
    if first + 3 > C:
        raise UserError(f"{C} channels have no singular vectors {first} to {first + 2}; choose a smaller first.")
    flat = torch.nn.functional.normalize(doubled(cells.reshape(-1, C)), dim=1)
    # u = X v / s; the scale s disappears in the min-max below, and v comes from the small C x C product.
    _, directions = torch.linalg.eigh(flat.T @ flat)
    u = flat @ directions.flip(1)[:, first : first + 3]
    # A singular vector has no sign of its own: make its largest component positive, so that pictures are repeatable.
    u = u * torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
    low, high = u.amin(0), u.amax(0)
    return ((u - low) / (high - low).clamp(min=1e-12)).view(n, h, w, 3).float()
