"""Evaluation of frozen features: a spec says what is measured, `Evaluator(spec).run(encoder, labeled)` measures it.

Everybody who evaluates (verbs, demo, sweeps and the paper's tables, training dynamics, the monitor of a run) chooses a
spec and words the result. A metric is one function in a file of this room and one row of METRICS; it knows features and
labels, never who asked. Features are extracted in one pass, always carry the ids of their images, and labels follow
the ids, so an unreadable image never shifts one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from anechoic.config import Count, Positive, Section, Share, Whole
from anechoic.errors import UserError, nearest_name
from anechoic.eval.denoisers import Denoiser, NoisyEncoder
from anechoic.eval.encoders import Encoder
from anechoic.eval.eval_data import EvalData, Split, split_features
from anechoic.eval.feature_cache import Features, features_of, usable_poolings
from anechoic.eval.features import Key, Pooling, choose_layers
from anechoic.eval.metrics.analysis import exact_device
from anechoic.runtime.devices import pick_device

Layers = tuple[int, ...] | Literal["all"]


class Metric(NamedTuple):
    """function: "module:name". Of features: Subject -> {(layer, pooling): named values}, a row each. Of the network:
    Subject -> named values of the network as a whole, which need no features."""

    function: str
    of: Literal["features", "network"] = "features"

    def __call__(self, subject: Subject) -> Any:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(subject)


METRICS = {
    "knn": Metric("anechoic.eval.metrics.knn:knn_metric"),
    "knn_standardized": Metric("anechoic.eval.metrics.knn:standardized_knn_metric"),
    "knn_whitened": Metric("anechoic.eval.metrics.knn:whitened_knn_metric"),
    "retrieval": Metric("anechoic.eval.metrics.retrieval:retrieval_metric"),
    "retrieval_standardized": Metric("anechoic.eval.metrics.retrieval:standardized_retrieval_metric"),
    "retrieval_whitened": Metric("anechoic.eval.metrics.retrieval:whitened_retrieval_metric"),
    "group_vote": Metric("anechoic.eval.metrics.retrieval:group_metric"),
    "probe": Metric("anechoic.eval.metrics.probe_protocols:probe_metric"),
    "selection": Metric("anechoic.eval.metrics.probe_protocols:selection_metric"),
    "rank": Metric("anechoic.eval.metrics.layers:rank_metric"),
    "norm": Metric("anechoic.eval.metrics.layers:norm_metric"),
    "echo": Metric("anechoic.eval.metrics.layers:echo_metric"),
    "crops": Metric("anechoic.eval.metrics.crop_retrieval:crops_metric"),
    "silhouette": Metric("anechoic.eval.metrics.layers:silhouette_metric"),
    "components": Metric("anechoic.eval.metrics.branches:components_metric"),
    "branches": Metric("anechoic.eval.metrics.branches:branches_metric", of="network"),
    "stream": Metric("anechoic.eval.metrics.layers:stream_metric", of="network"),
    "statistics": Metric("anechoic.eval.metrics.layers:statistics_metric", of="network"),
    "reconstruction": Metric("anechoic.eval.metrics.crop_retrieval:reconstruction_metric", of="network"),
    "accuracy": Metric("anechoic.eval.metrics.classifier:accuracy_metric", of="network"),
}


@dataclass(frozen=True)
class EvalSpec(Section):
    """What is measured. None and () mean: as the encoder and the data allow."""

    metrics: tuple[str, ...] = ("knn",)
    """names from METRICS"""
    layers: Layers = (-1,)
    """0 is the embedding, k the k-th block, -1 the encoder's output"""
    poolings: tuple[Pooling, ...] = ()
    """class, mean (of patches) or all (tokens); () is each that the encoder has"""
    neighbors: tuple[Count, ...] = ()
    """votes of k-NN; () is 20, or as many as there are"""
    temperature: Positive = 0.07
    """a neighbor's vote is exp(similarity / temperature)"""
    protocol: Literal["logistic", "in100", "mae"] = "logistic"
    """of the linear probe: converged, as the paper on ImageNet-100, or as MAE on ImageNet-1K"""
    epochs: Count | None = None
    """of in100 (200) and mae (90)"""
    batch_size: Count | None = None
    """of in100 (1024) and mae (16384); never more than there are samples"""
    noise: tuple[Share, ...] = ()
    """levels at which a denoiser's features are read"""
    max_train: Count | None = None
    """at most so many train samples, evenly spaced"""
    max_test: Count | None = None
    """at most so many test samples, evenly spaced"""
    rank_samples: Count | None = None
    """samples whose effective rank is measured, from the first"""
    holdout: Share = 0.2
    """share of a single source that is tested where a metric needs two parts"""
    seed: Whole = 0
    """of held-out parts, of heads and of noise"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.metrics:
            if name not in METRICS:
                raise UserError(f"There is no metric {name!r}; {nearest_name(name, METRICS)}")


@dataclass(frozen=True)
class Subject:
    """What metrics measure: an encoder, its data, and its features of both parts (none for metrics of the network)."""

    encoder: Encoder
    eval_data: EvalData
    spec: EvalSpec
    device: torch.device
    train: Features | None = None
    test: Features | None = None

    @property
    def sets(self) -> Mapping[Key, np.ndarray]:
        """The tested features by (layer, pooling)."""
        assert self.test is not None, "a metric of the network has no features"
        return self.test.sets

    @property
    def labels(self) -> np.ndarray | None:
        """Of the tested features."""
        assert self.test is not None
        return None if self.eval_data.test_labels is None else self.eval_data.test_labels[self.test.ids]

    @property
    def measuring(self) -> torch.device:
        """Where vectors are compared: on the network's device, if that is exact enough."""
        return exact_device(self.device)

    def split(self) -> Split:
        """Both parts with labels; of a single source the share `holdout` is tested."""
        labels = self.labels
        if labels is None:
            raise UserError("This needs labels and the data has none; sort the images into one folder per class.")
        if self.train is None:
            return split_features(self.sets, labels, self.spec.holdout, seed=self.spec.seed)
        assert self.eval_data.train_labels is not None
        return Split(self.train.sets, self.eval_data.train_labels[self.train.ids], self.sets, labels)

    def under(self, spec: EvalSpec) -> Subject:
        """The same features under another spec, as many of them as it asks for."""
        keys = wanted_keys(self.encoder, spec)
        train, test = (
            None if part is None else replace(part, sets={key: part.sets[key] for key in keys})
            for part in (self.train, self.test)
        )
        return replace(self, spec=spec, train=train, test=test)


@dataclass(frozen=True)
class Evaluation:
    """rows: named values of each (noise level,) layer and pooling; network: named values of the whole.

    skipped: (name, reason) of the images that could not be read.
    """

    rows: list[dict[str, Any]]
    network: dict[str, Any]
    counts: dict[str, int]
    skipped: tuple[tuple[str, str], ...] = ()

    def column(self, name: str, *, pooling: str) -> list[Any]:
        """One value per layer."""
        return [row[name] for row in self.rows if row["pooling"] == pooling]

    def value(self, name: str, *, pooling: str) -> Any:
        """Of the last layer measured; None where there is none."""
        return (self.column(name, pooling=pooling) or [None])[-1]


class Evaluator:
    """Measures what its spec says. cached: features are kept on disk by content, for whoever asks again."""

    def __init__(self, spec: EvalSpec, *, device: str = "auto", cached: bool = True) -> None:
        self.spec, self.device, self.cached = spec, device, cached

    def run(self, encoder: Encoder | Denoiser, eval_data: EvalData) -> Evaluation:
        parts = [self.measure(subject) for subject in self.subjects(encoder, eval_data)]
        rows = [row for part in parts for row in part.rows]
        skipped = tuple(dict.fromkeys(item for part in parts for item in part.skipped))
        return Evaluation(rows, parts[-1].network, parts[-1].counts, skipped)

    def subjects(self, encoder: Encoder | Denoiser, eval_data: EvalData) -> Iterator[Subject]:
        """The encoder, or a denoiser at each noise level, with its features."""
        if not isinstance(encoder, Denoiser):
            if self.spec.noise:
                raise UserError(
                    f"{encoder.name} is no diffusion model, so it has no features at noise levels: leave --noise out."
                )
            yield self.extract(encoder, eval_data)
            return
        if self.spec.protocol == "mae":
            raise UserError("Features at noise levels are probed with logistic or in100, not mae.")
        if not self.spec.noise:
            raise UserError(
                f"{encoder.name} is a diffusion model, whose features depend on the noise: say at which levels with "
                "--noise."
            )
        for level in self.spec.noise:
            yield self.extract(encoder.at(level, seed=self.spec.seed), eval_data)

    def extract(self, encoder: Encoder, eval_data: EvalData) -> Subject:
        spec = self.spec
        eval_data = eval_data.first(max_train=spec.max_train, max_test=spec.max_test)
        subject = Subject(encoder, eval_data, spec, pick_device(self.device))
        if not any(METRICS[name].of == "features" for name in spec.metrics):
            return subject
        train, test = (
            None
            if source is None
            else features_of(
                encoder.for_part(part),
                source,
                layers=spec.layers,
                poolings=spec.poolings or None,
                device=self.device,
                cached=self.cached,
            )
            for part, source in enumerate((eval_data.train, eval_data.test))
        )
        return replace(subject, train=train, test=test)

    def measure(self, subject: Subject) -> Evaluation:
        """The spec's metrics of a subject, which may have been extracted for another one with the same data."""
        if subject.spec is not self.spec:
            subject = subject.under(self.spec)
        about = {"noise": subject.encoder.level} if isinstance(subject.encoder, NoisyEncoder) else {}
        rows: dict[Key, dict[str, Any]] = {}
        network: dict[str, Any] = {}
        for name in self.spec.metrics:
            found = METRICS[name](subject)
            if METRICS[name].of == "network":
                network |= found
                continue
            for key, values in found.items():
                rows.setdefault(key, {**about, "layer": key[0], "pooling": key[1]}).update(values)
        # Two parts of one source know the same unreadable images.
        skipped = [item for part in (subject.train, subject.test) if part is not None for item in part.skipped]
        return Evaluation(list(rows.values()), network, counts(subject), tuple(dict.fromkeys(skipped)))


def counts(subject: Subject) -> dict[str, int]:
    """Samples of each part that were really used, and classes."""
    found = dict(subject.eval_data.counts)
    for name, part in (("train_samples", subject.train), ("test_samples", subject.test)):
        if part is not None:
            found[name] = len(part.ids)
    return found


def wanted_keys(encoder: Encoder, spec: EvalSpec) -> list[Key]:
    layers = choose_layers(spec.layers, count=len(encoder.widths))
    return [(layer, pooling) for layer in layers for pooling in usable_poolings(encoder, spec.poolings or None)]


def evaluate_all(
    encoders: Sequence[tuple[Encoder | Denoiser, EvalSpec]],
    eval_data: EvalData,
    *,
    device: str = "auto",
) -> Evaluation:
    """Several encoders on the same data: rows carry the encoder's name; the rest is that of the first."""
    found = [Evaluator(spec, device=device).run(encoder, eval_data) for encoder, spec in encoders]
    named = zip(encoders, found, strict=True)
    rows = [{"encoder": encoder.name, **row} for (encoder, _), evaluation in named for row in evaluation.rows]
    return replace(found[0], rows=rows)
