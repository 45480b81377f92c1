"""Compare a record with its repetition: every number of two records, within the measured spread of seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.pages.tables import text_table
from anechoic.sweeps.trial import read_record

# On the same kind of machine and the same commit nothing should differ. Another CPU rounds differently, and training
# amplifies it until two runs of one seed differ like two seeds: by more than the allowed difference in one case of this
# many, if seeds are normally distributed.
ONE_IN = 1000
SAME = ("cpu", "system", "torch", "numpy")


@dataclass(frozen=True)
class Difference:
    """One headline number of both runs; allowed: None if no other seeds show its spread."""

    name: str
    recorded: float | None
    repeated: float | None
    allowed: float | None

    @property
    def size(self) -> float:
        """Return the absolute difference, infinite where one of the two is missing."""
        if self.recorded is None or self.repeated is None:
            return math.inf
        return abs(self.recorded - self.repeated)

    @property
    def within(self) -> bool:
        return self.size <= (self.allowed or 0.0)


@dataclass(frozen=True)
class Comparison:
    """compared: the number of numbers in the record, all of which are equal if identical."""

    identical: bool
    compared: int
    differences: Sequence[Difference]
    same_fate: bool
    same_machine: bool

    @property
    def largest(self) -> float:
        return max((found.size for found in self.differences), default=0.0) if self.same_fate else math.inf

    @property
    def within_tolerance(self) -> bool:
        return self.identical or (self.same_fate and all(found.within for found in self.differences))

    @property
    def table(self) -> str:
        rows = [[x.name, x.recorded, x.repeated, x.size, x.allowed] for x in self.differences]
        return text_table(["number", "recorded", "repeated", "difference", "allowed"], rows)


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


def neighbors_of(path: Path) -> list[dict[str, Any]]:
    """Return the records beside this one, whose seeds show how much numbers vary."""
    return [read_record(other) for other in sorted(path.parent.glob("*-seed*.json"))]


def of_same_data(path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of all folders beside this one's that were trained on the same data."""
    others = [read_record(other) for other in sorted(path.parent.parent.glob("*/*-seed*.json"))]
    return [other for other in others if source_of(other) == source_of(record)]


def source_of(record: Any) -> Any:
    """Return the data of a record; None for the file of another program, which lies there by chance."""
    for name in ("config", "data", "source"):
        record = record.get(name) if isinstance(record, dict) else None
    return record


def allowed_differences(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return number -> the largest difference of two seeds in one case of ONE_IN, by the spread within all variants."""
    from scipy.stats import t

    values: dict[str, dict[str, list[float]]] = {}
    for record in records:
        if not record["metrics"]["diverged"]:
            for name, value in headline(record["metrics"]).items():
                values.setdefault(name, {}).setdefault(record["variant"], []).append(value)
    allowed = {}
    for name, by_variant in values.items():
        freedom = sum(len(seeds) - 1 for seeds in by_variant.values())
        if freedom:
            variance = sum(float(np.var(seeds)) * len(seeds) for seeds in by_variant.values()) / freedom
            allowed[name] = float(t.ppf(1 - 0.5 / ONE_IN, freedom)) * math.sqrt(2 * variance)
    return allowed


def compare(
    record: dict[str, Any],
    again: dict[str, Any],
    neighbors: Sequence[dict[str, Any]] = (),
    same_data: Sequence[dict[str, Any]] = (),
) -> Comparison:
    """Compare two records; same_data shows the spread of numbers that have one seed each among the neighbors."""
    first, second = dict(numbers(record["metrics"])), dict(numbers(again["metrics"]))
    before, after = headline(record["metrics"]), headline(again["metrics"])
    # A record of an earlier version may lack what is measured now, but has no gap where there is a number now.
    shared = [*before, *(key for key in after if key in record["metrics"] and key not in before)]
    allowed = allowed_differences(same_data) | allowed_differences(neighbors)
    return Comparison(
        identical=first == second,
        compared=len(first),
        differences=[Difference(key, before.get(key), after.get(key), allowed.get(key)) for key in shared],
        same_fate=record["metrics"]["diverged"] == again["metrics"]["diverged"],
        same_machine=all(record["machine"].get(key) == again["machine"].get(key) for key in SAME),
    )


def verdict_text(record: dict[str, Any], again: dict[str, Any], found: Comparison) -> str:
    """Return one sentence, with the possible cause of a difference."""
    if found.identical:
        return f"all {found.compared} numbers are the same."
    if not found.same_fate:
        return "one of the two runs diverged and the other did not."
    reasons = []
    if record["commit"] != again["commit"]:
        reasons.append(f"it was made at {commit_of(record)}, this is {commit_of(again)}")
    if not found.same_machine:
        reasons.append("it was made on another kind of machine")
    if not reasons:
        reasons.append("although commit and machine are the same")
    outside = [x for x in found.differences if not x.within]
    limit = "all within the spread of seeds"
    if outside:
        limit = f"{len(outside)} beyond the spread of seeds: {', '.join(map(overstepped, outside))}"
    if not found.largest:
        return f"the {len(found.differences)} headline numbers are equal, others differ; {'; '.join(reasons)}."
    return (
        f"{len(found.differences)} headline numbers differ by at most {found.largest:.3g}, {limit}; "
        f"{'; '.join(reasons)}."
    )


def overstepped(found: Difference) -> str:
    spread = "no other seeds show its spread" if found.allowed is None else f"{found.allowed:.3g} is allowed"
    return f"{found.name} by {found.size:.3g} ({spread})"


def commit_of(record: dict[str, Any]) -> str:
    return f"commit {record['commit'][:9]}" if record["commit"] else "an unknown commit"
