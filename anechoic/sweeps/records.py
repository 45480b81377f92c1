"""The records of a sweep by variant and seed, and means over seeds of any number in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anechoic.pages.estimates import Estimate, estimate
from anechoic.sweeps.trial import read_record


class Records:
    """The records of one group, or of several of the same variants, by variant and seed.

    The same trial in two groups counts once, as the first has it.
    """

    def __init__(self, *folders: Path) -> None:
        self.by_variant: dict[str, dict[int, dict[str, Any]]] = {}
        for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
            record = read_record(path)
            self.by_variant.setdefault(record["variant"], {}).setdefault(record["seed"], record)

    def metrics(self, variant: str) -> dict[int, dict[str, Any]]:
        """seed -> metrics of the runs that did not diverge"""
        return {
            seed: record["metrics"]
            for seed, record in self.by_variant.get(variant, {}).items()
            if not record["metrics"]["diverged"]
        }

    def diverged(self, variant: str) -> int:
        return sum(record["metrics"]["diverged"] for record in self.by_variant.get(variant, {}).values())

    def count(self, variant: str) -> int:
        return len(self.by_variant.get(variant, {}))

    def values(self, variant: str, key: str) -> dict[int, float]:
        """seed -> the number at `key`, whose parts are separated by dots and may index lists ("layers.mean.knn.-1")."""
        found = {seed: dig(metrics, key) for seed, metrics in self.metrics(variant).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, variant: str, key: str) -> Estimate:
        return estimate(self.values(variant, key).values())

    def differences(self, variant: str, baseline: str, key: str) -> list[float]:
        """Variant minus baseline, for every seed that both have."""
        ours, base = self.values(variant, key), self.values(baseline, key)
        return [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]

    def difference(self, variant: str, baseline: str, key: str) -> Estimate:
        return estimate(self.differences(variant, baseline, key))

    def curve(self, variant: str, key: str) -> list[Estimate]:
        """One estimate per entry of a list of numbers."""
        lists = [dig(metrics, key) for metrics in self.metrics(variant).values()]
        return [estimate(values) for values in zip(*[x for x in lists if x is not None], strict=False)]


def dig(value: Any, key: str) -> Any:
    """The part of nested JSON at a dotted path; None where there is none."""
    for part in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value
