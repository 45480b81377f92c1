"""Whitening: vectors whose every direction has the same variance, so that no few of them decide every cosine.

Fitted and applied a chunk at a time, so that a file of vectors larger than memory can be whitened. Arrays or tensors
in, tensors out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.errors import NotFiniteError
from anechoic.eval.metrics.analysis import as_tensor

Scaling = Literal["raw", "standardized", "whitened", "centered"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
# Directions with less than this share of the largest variance are not blown up.
FLOOR = 1e-6
CHUNK = 16384


class Affine(NamedTuple):
    """x (n, D) -> (x - mean) @ matrix in double precision, float32 out; a vector as matrix scales channels."""

    mean: Tensor
    matrix: Tensor

    def __call__(self, x: np.ndarray | Tensor) -> Tensor:
        centered = as_tensor(x).double() - self.mean
        return (centered * self.matrix if self.matrix.ndim == 1 else centered @ self.matrix).float()


def fitted(features: np.ndarray | Tensor, scaling: Scaling) -> Affine | None:
    """What brings vectors (n, D) like these to this scaling: centered to mean 0; each channel to deviation 1 too; all
    directions to the same variance. None leaves them as they are."""
    if scaling == "raw":
        return None
    n = len(features)
    mean = sum(part.sum(dim=0) for part in chunks(features)) / n
    assert isinstance(mean, Tensor)
    if not torch.isfinite(mean).all():
        raise NotFiniteError(
            "The features contain NaN or infinity: the weights are damaged, so use another checkpoint."
        )
    if scaling == "centered":
        return Affine(mean, torch.ones_like(mean))
    if scaling == "standardized":
        variance = sum((part - mean).square().sum(dim=0) for part in chunks(features)) / n
        assert isinstance(variance, Tensor)
        return Affine(mean, 1 / variance.sqrt().clamp(min=1e-12))
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=mean.device)
    for part in chunks(features):
        centered = part - mean
        covariance += centered.T @ centered
    variances, directions = torch.linalg.eigh(covariance / n)
    return Affine(mean, directions / (variances.clamp(min=0) + FLOOR * variances[-1].clamp(min=1e-30)).sqrt())


def rescaled(features: np.ndarray | Tensor, scaling: Scaling) -> Tensor:
    """The vectors (n, D) under the scaling fitted to them, float32."""
    change = fitted(features, scaling)
    return as_tensor(features).float() if change is None else change(features)


def unit_vectors(features: np.ndarray | Tensor, change: Affine | None) -> Tensor:
    """The changed vectors (n, D), each of length 1, without a second copy of all of them."""
    found = torch.empty(features.shape, dtype=torch.float32)
    start = 0
    for part in chunks(features):
        changed = part.float() if change is None else change(part)
        found[start : start + len(part)] = F.normalize(changed, dim=1)
        start += len(part)
    return found


def chunks(features: np.ndarray | Tensor) -> Iterator[Tensor]:
    """Stretches of the vectors in double precision; a file is read as it is passed."""
    for start in range(0, len(features), CHUNK):
        yield as_tensor(features[start : start + CHUNK]).double()
