"""Means over seeds with 95 % intervals of Student's t. Fewer than two seeds have no interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds; half: half the width of its 95 % interval, None if it cannot be told from one seed."""

    mean: float
    half: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.half:.2f}" if self.half is not None else "")

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1


def estimate(values: Iterable[float]) -> Estimate:
    from scipy.stats import t

    numbers = [float(value) for value in values]
    n = len(numbers)
    if n < 2:
        return Estimate(numbers[0] if numbers else math.nan, None, n)
    half = float(t.ppf(0.975, n - 1)) * float(np.std(numbers, ddof=1)) / math.sqrt(n)
    return Estimate(float(np.mean(numbers)), half, n)
