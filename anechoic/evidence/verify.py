"""Whether a record measured again says the same: every number of two records, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Another processor rounds differently, and training amplifies it; by this much per cent points two accuracies of the
# same seed may differ. On the same kind of machine and the same commit nothing may differ at all.
TOLERANCE_POINTS = 3.0
SAME = ("processor", "system", "torch", "numpy")


@dataclass(frozen=True)
class Comparison:
    """compared: how many numbers; largest: of the absolute differences of the headline numbers."""

    identical: bool
    compared: int
    largest: float
    within_tolerance: bool
    same_machine: bool


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested JSON with its path."""
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{name}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from numbers(item, f"{name}.{i}")


def compare(record: dict[str, Any], again: dict[str, Any]) -> Comparison:
    first, second = dict(numbers(record["metrics"])), dict(numbers(again["metrics"]))
    headline = [key for key, value in record["metrics"].items() if isinstance(value, float)]
    differences = [abs(record["metrics"][key] - again["metrics"].get(key, float("inf"))) for key in headline]
    largest = max(differences, default=0.0)
    identical = first == second
    return Comparison(
        identical=identical,
        compared=len(first),
        largest=largest,
        within_tolerance=identical or largest <= TOLERANCE_POINTS,
        same_machine=all(record["machine"].get(key) == again["machine"].get(key) for key in SAME),
    )


def verdict_text(record: dict[str, Any], again: dict[str, Any], found: Comparison) -> str:
    """One sentence that also says what a difference may come from."""
    if found.identical:
        return f"all {found.compared} numbers are the same."
    reasons = []
    if record["commit"] != again["commit"]:
        reasons.append(f"it was made at commit {record['commit']}, this is {again['commit']}")
    if not found.same_machine:
        reasons.append("it was made on another kind of machine")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return (
        f"the headline numbers differ by at most {found.largest:.3g}, and {TOLERANCE_POINTS:g} points are allowed{why}."
    )
