"""Effective rank: the entropy of the features' spectrum and its exponential (the paper's Eq. 6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from anechoic.choices import Centering as Center
from anechoic.errors import UserError
from anechoic.eval.tensors import as_matrix, as_tensor

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject
    from anechoic.eval.features import Rows


def rank_metric(subject: Subject) -> Rows:
    """entropy_ and rank_ of rows (as in the paper) and of columns."""
    found: Rows = {}
    for key, features in subject.sets.items():
        row = found[key] = {}
        for center in ("columns", "rows"):
            measured = effective_rank(features[: subject.spec.rank_samples], center=center)
            row[f"entropy_{center}"], row[f"rank_{center}"] = measured
    return found


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
