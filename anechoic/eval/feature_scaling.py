"""Scaling of features: centered, standardized (deviation 1 per channel) or whitened (equal variance in all directions).

The one place where features are standardized. Fitted and applied a chunk at a time, so that a file of vectors larger
than memory can be scaled. Arrays or tensors in, tensors out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.choices import Scaling
from anechoic.eval.tensors import as_tensor, check_finite
from anechoic.storage.files import release

SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
# Directions with less than this share of the largest variance are not blown up.
FLOOR = 1e-6
CHUNK = 16384
# A deviation up to this fraction of the mean is that of a constant, but for rounding.
ROUNDING = 1e-6


class Affine(NamedTuple):
    """x (n, D) -> (x - mean) @ matrix in double precision, float32 out; a vector as matrix scales channels."""

    mean: Tensor
    matrix: Tensor

    def __call__(self, x: np.ndarray | Tensor) -> Tensor:
        centered = as_tensor(x).double() - self.mean
        return (centered * self.matrix if self.matrix.ndim == 1 else centered @ self.matrix).float()


def fit_scaling(features: np.ndarray | Tensor, scaling: Scaling) -> Affine | None:
    """Return the map that centers vectors (n, D), standardizes or whitens them; None for raw.

    A channel whose deviation is at the level of rounding is constant and becomes 0.
    """
    if scaling == "raw":
        return None
    n = len(features)
    mean = sum(part.sum(dim=0) for part in chunks(features)) / n
    assert isinstance(mean, Tensor)
    check_finite(mean)
    if scaling == "centered":
        return Affine(mean, torch.ones_like(mean))
    if scaling == "standardized":
        variance = sum((part - mean).square().sum(dim=0) for part in chunks(features)) / n
        assert isinstance(variance, Tensor)
        deviation = variance.sqrt()
        return Affine(mean, torch.where(deviation > ROUNDING * mean.abs(), 1 / deviation, 0.0))
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=mean.device)
    for part in chunks(features):
        centered = part - mean
        covariance += centered.T @ centered
    variances, directions = torch.linalg.eigh(covariance / n)
    return Affine(mean, directions / (variances.clamp(min=0) + FLOOR * variances[-1].clamp(min=1e-30)).sqrt())


def is_constant(features: np.ndarray | Tensor) -> bool:
    """Return whether all vectors (n, D) are equal, but for rounding: scaled to deviation 1, only noise would remain."""
    scaling = fit_scaling(features, "standardized")
    return scaling is not None and not bool(scaling.matrix.any())


def apply_scaling(features: np.ndarray | Tensor, change: Affine | None) -> Tensor:
    """Return the scaled vectors, float32."""
    return as_tensor(features).float() if change is None else change(features)


def rescaled(features: np.ndarray | Tensor, scaling: Scaling) -> Tensor:
    """Return the vectors (n, D) under the scaling fitted to them, float32."""
    return apply_scaling(features, fit_scaling(features, scaling))


def unit_vectors(features: np.ndarray | Tensor, change: Affine | None) -> Tensor:
    """The changed vectors (n, D), each of length 1, without a second copy of all of them."""
    found = torch.empty(features.shape, dtype=torch.float32)
    start = 0
    for part in unit_chunks(features, change):
        found[start : start + len(part)] = part
        start += len(part)
    return found


def unit_chunks(features: np.ndarray | Tensor, change: Affine | None) -> Iterator[Tensor]:
    """Yield the changed vectors, each of length 1, float32, a stretch at a time."""
    for part in chunks(features):
        yield F.normalize(apply_scaling(part, change), dim=1)


def chunks(features: np.ndarray | Tensor) -> Iterator[Tensor]:
    """Stretches of the vectors in double precision; a file is read as it is passed."""
    for start in range(0, len(features), CHUNK):
        yield as_tensor(features[start : start + CHUNK]).double()
        release(features)
