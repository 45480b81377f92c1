"""Means over seeds with 95 % intervals of Student's t. Fewer than two seeds have no interval of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

X = TypeVar("X", float, str)
# Seeds that are needed to estimate their spread.
ENOUGH = 3


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds; half: half the width of its 95 % interval, None for a single seed."""

    mean: float
    half: float | None
    n: int

    def __str__(self) -> str:
        return self.text()

    def text(self, *, digits: int = 2, sign: str = "") -> str:
        """Return mean and interval; sign: "+" for a difference."""
        return f"{self.mean:{sign}.{digits}f}" + (f" ± {self.half:.{digits}f}" if self.half is not None else "")

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def at(self, x: X) -> tuple[X, float, float]:
        """A point of a figure: where, the mean, half of its bar."""
        return x, self.mean, self.half or 0.0


def estimate(values: Iterable[float]) -> Estimate:
    from scipy.stats import t

    numbers = [float(value) for value in values]
    n = len(numbers)
    if n < 2:
        return Estimate(numbers[0] if numbers else math.nan, None, n)
    half = float(t.ppf(0.975, n - 1)) * float(np.std(numbers, ddof=1)) / math.sqrt(n)
    return Estimate(float(np.mean(numbers)), half, n)


def estimates_with_shared_spread(groups: Sequence[Sequence[float]]) -> list[Estimate]:
    """One estimate for each group; a group too small for a spread of its own has that of all groups together.

    The spread of all is the root of the squared deviations from each group's own mean over the sum of n - 1, and t has
    as many degrees of freedom: what is assumed is that seeds differ as much in a small group as in the others.
    """
    from scipy.stats import t

    freedom = sum(len(group) - 1 for group in groups if group)
    deviations = sum(float(np.var(group)) * len(group) for group in groups if group)

    def one(group: Sequence[float]) -> Estimate:
        if len(group) >= ENOUGH or not group or not freedom:
            return estimate(group)
        half = float(t.ppf(0.975, freedom)) * math.sqrt(deviations / freedom / len(group))
        return Estimate(float(np.mean(group)), half, len(group))

    return [one(group) for group in groups]
