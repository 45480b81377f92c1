"""Pearson's correlation with Fisher's confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anechoic.errors import UserError


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
