"""The two parts of an evaluation: what votes and fits, and what is tested, with labels that mean the same classes.

It opens sources, takes evenly spaced parts of them and splits them; what is measured on them is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from anechoic.config import EIGHT_BIT, PixelConfig
from anechoic.data import Source, Subset, common_labels, open_source
from anechoic.data.split import hold_out_share
from anechoic.errors import UserError
from anechoic.eval.features import Key


@dataclass(frozen=True)
class EvalData:
    """Two sources and their labels; train is None where a part of test is held out in its place."""

    train: Source | None
    test: Source
    train_labels: np.ndarray | None
    test_labels: np.ndarray | None
    classes: tuple[str, ...] | None = None

    def first(self, *, max_train: int | None, max_test: int | None) -> EvalData:
        """Return a maximum of samples per split, evenly spaced, so that ordered data keeps all classes."""
        train, train_labels = _part(self.train, self.train_labels, max_train) if self.train else (None, None)
        test, test_labels = _part(self.test, self.test_labels, max_test)
        return replace(self, train=train, train_labels=train_labels, test=test, test_labels=test_labels)

    @property
    def counts(self) -> dict[str, int]:
        found = {"train_samples": 0 if self.train is None else len(self.train), "test_samples": len(self.test)}
        labels = [part for part in (self.train_labels, self.test_labels) if part is not None]
        if labels:
            found["classes"] = len(self.classes) if self.classes else int(max(part.max() for part in labels)) + 1
        return found


def _part(source: Source, labels: np.ndarray | None, count: int | None) -> tuple[Source, np.ndarray | None]:
    if count is None or count >= len(source):
        return source, labels
    indices = evenly(len(source), count)
    return Subset(source, indices), None if labels is None else labels[indices]


def evenly(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` indices of `count`, evenly spaced."""
    return np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64)


@dataclass(frozen=True)
class Split:
    """Feature sets (n, D) by (layer, pooling) and labels (n,), of what is fitted and of what is tested."""

    train: Mapping[Key, np.ndarray]
    train_labels: np.ndarray
    test: Mapping[Key, np.ndarray]
    test_labels: np.ndarray


# ---- opening


def open_eval_data(
    train: str | Source,
    test: str | None,
    *,
    holdout: float = 0.2,
    seed: int = 0,
    channels: int = 3,
    pixels: PixelConfig = EIGHT_BIT,
) -> EvalData:
    """Two sources, or one of which a seeded part is held out for testing."""
    first = open_source(train, labels=True, channels=channels, pixels=pixels)
    if test is None:
        return split(first, holdout=holdout, seed=seed)
    second = open_source(test, labels=True, channels=channels, pixels=pixels)
    train_labels, test_labels, classes = common_labels(first, second)
    return check_classes(EvalData(first, second, train_labels, test_labels, classes))


def split(source: Source, *, holdout: float, seed: int) -> EvalData:
    """The source in two parts; the labels' numbering stays."""
    train, test = hold_out_share(len(source), holdout, seed=seed)
    labels, _, classes = common_labels(source, source)
    return check_classes(EvalData(Subset(source, train), Subset(source, test), labels[train], labels[test], classes))


def check_classes(eval_data: EvalData) -> EvalData:
    assert eval_data.train_labels is not None
    if len(np.unique(eval_data.train_labels)) < 2:
        raise UserError(
            "The train data has one class only, so there is nothing to distinguish; give at least two classes."
        )
    return eval_data


def open_maybe_labeled(where: str, *, channels: int, pixels: PixelConfig = EIGHT_BIT) -> EvalData:
    """One source as the tested part, with labels if the data has them."""
    try:
        source = open_source(where, labels=True, channels=channels, pixels=pixels)
    except UserError:
        # Either there are no labels, which is fine here, or no data, which the second attempt reports.
        source = open_source(where, channels=channels, pixels=pixels)
    return EvalData(None, source, None, source.labels, source.classes)
