"""Silhouette of the classes: how well they separate in feature space."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from anechoic.eval.features import Rows
from anechoic.eval.tensors import as_matrix

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


def silhouette_metric(subject: Subject) -> Rows:
    """None where there are too few samples or classes."""
    scores = {key: silhouette(features, subject.required_labels) for key, features in subject.sets.items()}
    return {key: {"silhouette": None if math.isnan(score) else score} for key, score in scores.items()}


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
