"""Compare a record with its repetition: every number of two records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Another CPU rounds differently, and training amplifies it: two accuracies of the same seed may differ by this many
# percentage points. On the same kind of machine and the same commit nothing should differ.
TOLERANCE_POINTS = 3.0
SAME = ("cpu", "system", "torch", "numpy")


@dataclass(frozen=True)
class Comparison:
    """compared: the number of numbers; largest: the largest absolute difference of the headline numbers, infinite where
    one of the two is missing or where only one of the runs diverged."""

    identical: bool
    compared: int
    largest: float
    within_tolerance: bool
    same_machine: bool


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of nested JSON with its path."""
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{name}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from numbers(item, f"{name}.{i}")


def headline(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that a record is compared by.

    These are its accuracies, or without any the last held-out loss in % of 1, the loss of predicting the mean of
    normalized pixels.
    """
    plain = {key: value for key, value in metrics.items() if isinstance(value, float)}
    if plain or not metrics["training"]:
        return plain
    loss = metrics["training"][-1].get("held_out_loss")
    return {} if loss is None else {"held_out_loss": 100 * loss}


def compare(record: dict[str, Any], again: dict[str, Any]) -> Comparison:
    first, second = dict(numbers(record["metrics"])), dict(numbers(again["metrics"]))
    before, after = headline(record["metrics"]), headline(again["metrics"])
    # A record of an earlier version may lack what is measured now, but has no gap where there is a number now.
    shared = before.keys() | (after.keys() & record["metrics"].keys())
    largest = max((abs(before.get(key, math.inf) - after.get(key, -math.inf)) for key in shared), default=0.0)
    if record["metrics"]["diverged"] != again["metrics"]["diverged"]:
        largest = math.inf
    identical = first == second
    return Comparison(
        identical=identical,
        compared=len(first),
        largest=largest,
        within_tolerance=identical or largest <= TOLERANCE_POINTS,
        same_machine=all(record["machine"].get(key) == again["machine"].get(key) for key in SAME),
    )


def verdict_text(record: dict[str, Any], again: dict[str, Any], found: Comparison) -> str:
    """Return one sentence, with the possible cause of a difference."""
    if found.identical:
        return f"all {found.compared} numbers are the same."
    if record["metrics"]["diverged"] != again["metrics"]["diverged"]:
        return "one of the two runs diverged and the other did not."
    reasons = []
    if record["commit"] != again["commit"]:
        reasons.append(f"it was made at commit {record['commit']}, this is {again['commit']}")
    if not found.same_machine:
        reasons.append("it was made on another kind of machine")
    if not reasons:
        reasons.append("although commit and machine are the same")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return (
        f"the headline numbers differ by at most {found.largest:.3g}, and {TOLERANCE_POINTS:g} points are allowed{why}."
    )
