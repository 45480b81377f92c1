"""The choice of layer, pooling and k on held-out training data: never on test labels, whose table is only reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anechoic.eval.evaluator import EvalSpec, Evaluator, Subject
from anechoic.eval.metrics.registry import find_metric

# Metrics whose features may be scaled.
SCALED = ("knn", "retrieval")


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """("knn", "knn_whitened", "rank") -> {"knn": ["knn", "knn_whitened"]}: metrics of which one row is chosen.

    They have a train split, of which a part can be held out, and one number per row, a share.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        metric = find_metric(name)
        if metric.per == "features" and metric.share and "train split" in metric.needs:
            family = next((base for base in SCALED if name.startswith(f"{base}_")), name)
            found.setdefault(family, []).append(name)
    return found


def selection_rows(subject: Subject, spec: EvalSpec, *, device: str) -> list[dict[str, Any]]:
    """Return the rows of the subject, measured on a held-out tenth of the training data.

    MAE's probe would train its heads a second time, so logistic regression chooses for it.
    """
    names = tuple(name for members in families(spec.metrics).values() for name in members)
    if not names:
        return []
    held_out = subject.for_selection()
    assert held_out.train is not None
    count = len(held_out.train.ids)
    ks = tuple(k for k in spec.neighbors if k <= count) or (count,)
    protocol = "logistic" if spec.protocol == "mae" else spec.protocol
    choosing = replace(spec, metrics=names, neighbors=ks, protocol=protocol)
    return Evaluator(choosing, device=device).measure(held_out).rows


def choose(rows: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return layer, pooling (k, scaling, noise) of the best accuracy on held-out training data, and its test accuracy.

    `test_maximum` is the largest number of the table, which was selected on test labels.
    """
    candidates = [
        {**where(row), **choice, "held_out": held, "accuracy": accuracy}
        for row, selection in zip(rows, held_out, strict=True)
        for name in names
        for choice, held, accuracy in alternatives_of(name, row, selection)
    ]
    best = max(candidates, key=lambda candidate: candidate["held_out"])
    return {**best, "test_maximum": max(candidate["accuracy"] for candidate in candidates)}


def alternatives_of(
    name: str, row: Mapping[str, Any], held_out: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], float, float]]:
    """Yield (choice, held-out accuracy, test accuracy) of a metric in one row: of every k, if it has several."""
    scaling = {"scaling": name.partition("_")[2]} if "_" in name else {}
    by_k = row.get(f"{name}_by_k")
    if by_k is None:
        yield scaling, held_out[name], row[name]
        return
    held_by_k = held_out[f"{name}_by_k"]
    for k, accuracy in by_k.items():
        # More neighbors than the held-out split has cannot be tried; its largest k stands for them.
        yield {"k": k, **scaling}, held_by_k.get(k, held_by_k[max(held_by_k)]), accuracy


def where(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("noise", "layer", "pooling") if name in row}
