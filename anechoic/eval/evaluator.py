"""Evaluation of frozen features: `Evaluator(spec).run(encoder, eval_data)` measures the metrics of the spec.

Commands, demo, sweeps, tables, training dynamics and validation choose a spec and word the result. The metrics are rows
of metrics/registry.py. Features are extracted in one pass and carry the ids of their images; labels are looked up by
id, so that an unreadable image never shifts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from anechoic.choices import AllLayers, ProbeProtocol
from anechoic.config import Count, Positive, Section, Share, Whole
from anechoic.data import Source, Subset
from anechoic.data.split import hold_out_share
from anechoic.errors import UserError
from anechoic.eval.denoisers import Denoiser, NoisyEncoder
from anechoic.eval.encoders import Encoder
from anechoic.eval.eval_data import EvalData, Split
from anechoic.eval.feature_cache import Features, features_of, usable_poolings
from anechoic.eval.features import Key, Pooling, choose_layers
from anechoic.eval.metrics.registry import columns, find_metric
from anechoic.eval.tensors import exact_device
from anechoic.runtime.devices import pick_device

Layers = tuple[int, ...] | AllLayers


# Share of the train samples that `select` holds out.
SELECTION = 0.1


@dataclass(frozen=True)
class EvalSpec(Section):
    """What is measured. None and () mean: what the encoder and the data allow."""

    metrics: tuple[str, ...] = ("knn",)
    """names of registered metrics"""
    layers: Layers = (-1,)
    """0 is the embedding, k the k-th block, -1 the encoder's output"""
    poolings: tuple[Pooling, ...] = ()
    """class, mean (of patches) or all (tokens); () is each that the encoder has"""
    neighbors: tuple[Count, ...] = ()
    """numbers of neighbors of k-NN; () is 20, or all train samples if there are fewer"""
    temperature: Positive = 0.07
    """a neighbor's vote is exp(similarity / temperature)"""
    protocol: ProbeProtocol = "logistic"
    """of the linear probe: converged, as the paper on ImageNet-100, or as MAE on ImageNet-1K"""
    epochs: Count | None = None
    """of in100 (200) and mae (90)"""
    batch_size: Count | None = None
    """of in100 (1024) and mae (16384); never more than there are samples"""
    noise: tuple[Share, ...] = ()
    """levels at which a denoiser's features are read"""
    max_train: Count | None = None
    """maximum number of train samples, evenly spaced"""
    max_test: Count | None = None
    """maximum number of test samples, evenly spaced"""
    rank_samples: Count | None = None
    """the effective rank is measured on the first samples, up to this number"""
    holdout: Share = 0.2
    """share of a single source that becomes the test split where a metric needs a train split"""
    select: bool = False
    """also measure metrics that need a train split on held-out train samples, for choosing among rows"""
    seed: Whole = 0
    """of held-out samples, of heads and of noise"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.metrics:
            find_metric(name)


@dataclass(frozen=True)
class Subject:
    """What metrics measure: an encoder, its data, and its features of both splits (none if no metric reads them)."""

    encoder: Encoder
    eval_data: EvalData
    spec: EvalSpec
    device: torch.device
    train: Features | None = None
    test: Features | None = None
    held_out: bool = False
    """whether the test split was held out of a single source"""

    @property
    def sets(self) -> Mapping[Key, np.ndarray]:
        """The test features by (layer, pooling)."""
        assert self.test is not None, "a metric per layer or network has no features"
        return self.test.sets

    @property
    def labels(self) -> np.ndarray | None:
        """The labels of the test features."""
        assert self.test is not None
        return None if self.eval_data.test_labels is None else self.eval_data.test_labels[self.test.ids]

    @property
    def required_labels(self) -> np.ndarray:
        labels = self.labels
        assert labels is not None, "the evaluator checks what a metric needs"
        return labels

    @property
    def measuring(self) -> torch.device:
        """The device on which vectors are compared: the network's, if it has double precision."""
        return exact_device(self.device)

    def split(self) -> Split:
        """Return both splits with labels."""
        train_labels = self.eval_data.train_labels
        assert self.train is not None, "the evaluator holds a train split out"
        assert train_labels is not None
        return Split(self.train.sets, train_labels[self.train.ids], self.sets, self.required_labels)

    def with_train(self) -> Subject:
        """Return the subject with a train split: of a single source the share `holdout` becomes the test split."""
        if self.train is not None:
            return self
        assert self.test is not None
        divided = self.divide(self.test, self.eval_data.test, self.required_labels, self.spec.holdout)
        return replace(divided, held_out=True)

    def for_selection(self) -> Subject:
        """Return the train split alone, a part of it in the role of the test split."""
        complete = self.with_train()
        data, train = complete.eval_data, complete.train
        assert train is not None
        assert data.train is not None
        assert data.train_labels is not None
        return complete.divide(train, data.train, data.train_labels[train.ids], SELECTION)

    def divide(self, features: Features, source: Source, labels: np.ndarray, share: float) -> Subject:
        """Return these samples in two splits."""
        parts = hold_out_share(len(labels), share, seed=self.spec.seed)
        train, test = (
            Features({key: x[rows] for key, x in features.sets.items()}, np.arange(len(rows)), features.skipped)
            for rows in parts
        )
        kept, held = (Subset(source, features.ids[rows]) for rows in parts)
        train_labels, test_labels = (labels[rows] for rows in parts)
        eval_data = EvalData(kept, held, train_labels, test_labels, self.eval_data.classes)
        return replace(self, eval_data=eval_data, train=train, test=test)

    def with_spec(self, spec: EvalSpec) -> Subject:
        """Return the features that another spec asks for."""
        keys = wanted_keys(self.encoder, spec)
        train, test = (
            None if part is None else replace(part, sets={key: part.sets[key] for key in keys})
            for part in (self.train, self.test)
        )
        return replace(self, spec=spec, train=train, test=test)

    def unmet(self, name: str) -> str | None:
        """Return why the metric cannot be measured, or None."""
        labels, facets = self.eval_data.test_labels, self.eval_data.test.facets
        for need in find_metric(name).needs:
            if need == "labels" and labels is None:
                return (
                    f"The metric {name} needs labels, and the data has none; sort the images into a folder per class."
                )
            if need == "styles" and not {"object", "style", "group"} <= facets.keys():
                return f"The metric {name} needs data that knows object and style of each image, as emoji does."
        return None


@dataclass(frozen=True)
class Evaluation:
    """rows: named values of each (noise level,) layer and pooling; network: values per layer and of the whole network.

    With `select`, a row's `selection` holds the same values on held-out train samples. skipped: (name, reason) of the
    images that could not be read.
    """

    rows: list[dict[str, Any]]
    network: dict[str, Any]
    counts: dict[str, int]
    skipped: tuple[tuple[str, str], ...] = ()

    def column(self, name: str, *, pooling: str) -> list[Any]:
        """Return one value per layer."""
        return [row[name] for row in self.rows if row["pooling"] == pooling]

    def value(self, name: str, *, pooling: str) -> Any:
        """Return the value of the last measured layer; None if there is none."""
        return (self.column(name, pooling=pooling) or [None])[-1]

    def table(self, metrics: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows with the values per layer beside those of features: what a table of these metrics shows."""
        per_layer = [value for name in metrics if find_metric(name).per == "layer" for value in columns([name])]
        return [row | {name: self.network[name][row["layer"]] for name in per_layer} for row in self.rows]


class Evaluator:
    """Measures the metrics of its spec. cached: features are cached on disk by content."""

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
                    f"{encoder.name} is no diffusion model, so it has no features at noise levels: omit --noise."
                )
            yield self.extract(encoder, eval_data)
            return
        if self.spec.protocol == "mae":
            raise UserError("Features at noise levels are probed with logistic or in100, not mae.")
        if not self.spec.noise:
            raise UserError(
                f"{encoder.name} is a diffusion model, whose features depend on the noise: choose levels with --noise."
            )
        for level in self.spec.noise:
            yield self.extract(encoder.at(level, seed=self.spec.seed), eval_data)

    def extract(self, encoder: Encoder, eval_data: EvalData) -> Subject:
        spec = self.spec
        eval_data = eval_data.first(max_train=spec.max_train, max_test=spec.max_test)
        subject = Subject(encoder, eval_data, spec, pick_device(self.device))
        for name in spec.metrics:
            if (reason := subject.unmet(name)) is not None:
                raise UserError(reason)
        if not any(find_metric(name).per == "features" for name in spec.metrics):
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
        """Measure a subject, which may have been extracted for another spec with the same data."""
        if subject.spec is not self.spec:
            subject = subject.with_spec(self.spec)
        about = {"noise": subject.encoder.level} if isinstance(subject.encoder, NoisyEncoder) else {}
        rows: dict[Key, dict[str, Any]] = {}
        network: dict[str, Any] = {}
        selecting = subject.for_selection() if self.spec.select else None
        for name in self.spec.metrics:
            metric = find_metric(name)
            found = metric(subject.with_train() if "train split" in metric.needs else subject)
            if metric.per != "features":
                network |= found
                continue
            for key, values in found.items():
                rows.setdefault(key, {**about, "layer": key[0], "pooling": key[1]}).update(values)
            if selecting is not None and "train split" in metric.needs:
                for key, values in metric(selecting).items():
                    rows[key].setdefault("selection", {}).update(values)
        # Two splits of one source know the same unreadable images.
        skipped = [item for part in (subject.train, subject.test) if part is not None for item in part.skipped]
        return Evaluation(list(rows.values()), network, counts(subject), tuple(dict.fromkeys(skipped)))


def usable_metrics(names: Sequence[str], encoder: Encoder, eval_data: EvalData) -> tuple[str, ...]:
    """Return those of the metrics that can be measured on this data; metrics of labels need two classes."""
    subject = Subject(encoder, eval_data, EvalSpec(()), torch.device("cpu"))
    one_class = eval_data.test_labels is not None and len(np.unique(eval_data.test_labels)) < 2
    return tuple(
        name for name in names if not subject.unmet(name) and not (one_class and "labels" in find_metric(name).needs)
    )


def counts(subject: Subject) -> dict[str, int]:
    """Return the number of samples used of each split, and of classes."""
    found = dict(subject.eval_data.counts)
    for name, part in (("train_samples", subject.train), ("test_samples", subject.test)):
        if part is not None:
            found[name] = len(part.ids)
    return found


def wanted_keys(encoder: Encoder, spec: EvalSpec) -> list[Key]:
    layers = choose_layers(spec.layers, count=len(encoder.widths))
    return [(layer, pooling) for layer in layers for pooling in usable_poolings(encoder, spec.poolings or None)]
