"""From records to statements: means over seeds with 95 % intervals, paired differences, and whether signs agree.

Intervals are Student's t over seeds; a difference is formed seed by seed, because both sides share the seed's data
order, crops and masks. Fewer than two seeds have no interval. Nothing here draws or writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anechoic.pages.estimates import Estimate, estimate
from anechoic.sweeps.records import Records, dig

# ---- over training


def over_time(records: Records, variant: str, key: str) -> dict[int, Estimate]:
    """samples seen -> estimate, at every checkpoint that all seeds have"""
    tables = [
        {row["seen"]: dig(row, key) for row in metrics["over_time"]}
        for metrics in records.metrics(variant).values()
        if "over_time" in metrics
    ]
    common = sorted(set.intersection(*map(set, tables))) if tables else []
    return {seen: estimate(table[seen] for table in tables) for seen in common}


def paired_over_time(
    records: Records, ours: str, base: str, key: str
) -> tuple[list[int], list[list[float]], list[int]]:
    """(seeds, a list of differences per seed, samples seen) at the checkpoints that all runs have."""
    a, b = records.metrics(ours), records.metrics(base)
    seeds = sorted(seed for seed in a.keys() & b.keys() if "over_time" in a[seed] and "over_time" in b[seed])
    tables = {
        seed: [{row["seen"]: row[key] for row in metrics[seed]["over_time"]} for metrics in (a, b)] for seed in seeds
    }
    common = [set(part) for pair in tables.values() for part in pair]
    seen = sorted(set.intersection(*common)) if common else []
    return seeds, [[tables[seed][0][x] - tables[seed][1][x] for x in seen] for seed in seeds], seen


# ---- agreement with the paper


def verdict(ours: Estimate, paper: float | None) -> str:
    """Whether a difference has the sign the paper found; undecided where the interval contains 0."""
    if ours.n == 0:
        return "not run"
    if ours.half is None:
        return "one seed"
    if paper is None or paper == 0:
        return {1: "higher", -1: "lower", 0: "undecided"}[ours.sign]
    if ours.sign == 0:
        return "undecided"
    return "agrees" if ours.sign == math.copysign(1, paper) else "opposite"


def order_agreement(ours: Sequence[float], paper: Sequence[float]) -> float | None:
    """Kendall's tau of two rankings, from -1 (reversed) to 1 (the same); None for fewer than three or for ties only."""
    if len(ours) < 3:
        return None
    from scipy.stats import kendalltau

    tau = float(kendalltau(ours, paper).statistic)
    return None if math.isnan(tau) else tau


# ---- the crossover


def crossover(lengths: Sequence[float], differences: Sequence[float]) -> float | None:
    """Where a difference first goes from negative to positive, interpolated over log length; None if it never does."""
    for (x0, d0), (x1, d1) in zip(
        zip(lengths, differences, strict=True), zip(lengths[1:], differences[1:], strict=True), strict=False
    ):
        if d0 < 0 <= d1:
            share = -d0 / (d1 - d0)
            return float(math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))))
    return None


@dataclass(frozen=True)
class Onset:
    """A straight line through (log2 length, difference): where it reaches 0, and the range 95 % of resamples allow."""

    slope: float
    at: float | None
    low: float | None
    high: float | None


def extrapolate(lengths: Sequence[float], per_seed: Sequence[Sequence[float]], *, resamples: int = 2000) -> Onset:
    """per_seed: one list of differences per seed, along `lengths`. Seeds are resampled with replacement."""
    x = np.log2(np.asarray(lengths, dtype=float))
    table = np.asarray(per_seed, dtype=float)

    def line(values: np.ndarray) -> tuple[float, float]:
        slope, start = np.polyfit(x, values.mean(axis=0), 1)
        return float(slope), float(-start / slope) if slope > 0 else math.inf

    slope, root = line(table)
    rng = np.random.default_rng(0)
    roots = np.sort([line(table[rng.integers(0, len(table), len(table))])[1] for _ in range(resamples)])
    low, high = roots[int(0.025 * resamples)], roots[int(0.975 * resamples) - 1]
    return Onset(slope, *(2.0**value if value < 60 else None for value in (root, low, high)))
