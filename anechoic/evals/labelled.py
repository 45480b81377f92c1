"""Features of a train and a test part with their labels, for one encoder or for an encoder and its baselines.

It opens sources and splits them; which judge reads the result is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from anechoic.data import Source, Subset, common_labels, open_source
from anechoic.errors import UserError
from anechoic.evals.bank import features_of
from anechoic.evals.encoders import Encoder
from anechoic.evals.features import Key, Pooling


@dataclass(frozen=True)
class Labelled:
    """Two sources whose labels mean the same classes."""

    train: Source
    test: Source
    train_labels: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class LabelledFeatures:
    """Feature sets (n, D) by (layer, pooling) and labels (n,) of both parts; unreadable images are left out."""

    train: dict[Key, np.ndarray]
    train_labels: np.ndarray
    test: dict[Key, np.ndarray]
    test_labels: np.ndarray


def open_labelled(
    train: str | None, test: str | None, *, holdout: float = 0.2, seed: int = 0, channels: int = 3
) -> Labelled:
    """Two sources, or one of which a seeded part is held out for testing."""
    if train is None:
        raise UserError(
            "Data is missing: give --train SOURCE and --test SOURCE, or --train alone to hold out a part of it."
        )
    first = open_source(train, labels=True, channels=channels)
    if test is None:
        return split(first, holdout=holdout, seed=seed)
    second = open_source(test, labels=True, channels=channels)
    train_labels, test_labels, classes = common_labels(first, second)
    return checked(Labelled(first, second, train_labels, test_labels, classes))


def split(source: Source, *, holdout: float, seed: int) -> Labelled:
    """The source in two parts; the labels' numbering stays."""
    train, test = split_indices(len(source), holdout=holdout, seed=seed)
    labels, _, classes = common_labels(source, source)
    return checked(Labelled(Subset(source, train), Subset(source, test), labels[train], labels[test], classes))


def split_indices(count: int, *, holdout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) indices in ascending order, the test part a seeded random choice."""
    if not 0 < holdout < 1:
        raise UserError(f"--holdout is the share of the data to test on, between 0 and 1, not {holdout}.")
    order = np.random.default_rng(seed).permutation(count)
    num_test = round(holdout * count)
    if not 0 < num_test < count:
        raise UserError(f"{count} samples cannot be split with a holdout of {holdout}; give more data or --test.")
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def checked(labelled: Labelled) -> Labelled:
    if len(np.unique(labelled.train_labels)) < 2:
        raise UserError("The train data has one class only, so nothing can be told apart; give at least two classes.")
    return labelled


def labelled_features(
    encoder: Encoder,
    labelled: Labelled,
    *,
    layers: Sequence[int] | Literal["all"] = (-1,),
    poolings: Sequence[Pooling] | None = None,
    device: str = "auto",
) -> LabelledFeatures:
    train, test = (
        features_of(encoder, source, layers=layers, poolings=poolings, device=device)
        for source in (labelled.train, labelled.test)
    )
    return LabelledFeatures(train.sets, labelled.train_labels[train.ids], test.sets, labelled.test_labels[test.ids])
