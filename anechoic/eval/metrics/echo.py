"""The echo of the input: how much of a layer's output is still the input embedding (Section 5, Figure 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from anechoic.eval.features import Rows
from anechoic.eval.metrics.rank import gram
from anechoic.eval.tensors import as_matrix

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


def echo_metric(subject: Subject) -> Rows:
    """cka and cosine with layer 0, where that was extracted too and has the same number of channels."""
    found: Rows = {}
    for (layer, pooling), features in subject.sets.items():
        embedding = subject.sets.get((0, pooling))
        if embedding is not None and embedding.shape == features.shape:
            found[layer, pooling] = {
                "cka": linear_cka(features, embedding),
                "cosine": mean_cosine(features, embedding),
            }
    return found


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
