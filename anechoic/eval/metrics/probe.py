"""The linear probe as a metric: accuracy of every (layer, pooling) under the protocol of the spec.

The heads are in probe_heads.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anechoic.data import Augment, Loader
from anechoic.eval.eval_data import Split
from anechoic.eval.features import Key, Rows, extract_batches
from anechoic.eval.metrics.probe_heads import in100_probe, logistic_probe, mae_probe
from anechoic.eval.tensors import as_tensor

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


def probe_metric(subject: Subject) -> Rows:
    """probe: top-1 in 0 .. 1, with the details of the protocol."""
    if subject.spec.protocol == "mae":
        return mae_rows(subject)
    split = subject.split()
    return logistic_rows(split, subject) if subject.spec.protocol == "logistic" else in100_rows(split, subject)


def logistic_rows(split: Split, subject: Subject) -> Rows:
    rows: Rows = {}
    for key, vectors in split.train.items():
        train, test = (as_tensor(x).to(subject.measuring) for x in (vectors, split.test[key]))
        found = logistic_probe(train, split.train_labels, test, split.test_labels, seed=subject.spec.seed)
        held_out = {f"{regularizer:.3g}": accuracy for regularizer, accuracy in found.held_out.items()}
        rows[key] = {"probe": found.accuracy, "regularizer": found.regularizer, "held_out": held_out}
    return rows


def in100_rows(split: Split, subject: Subject) -> Rows:
    """Layers of one width are trained side by side; a network whose widths differ takes one round per width."""
    rows: Rows = {}
    for keys in by_width(split.train):
        found = in100_probe(
            {key: split.train[key] for key in keys},
            split.train_labels,
            {key: split.test[key] for key in keys},
            split.test_labels,
            epochs=subject.spec.epochs or 200,
            batch_size=subject.spec.batch_size or 1024,
            seed=subject.spec.seed,
            device=subject.device,
        )
        for key in keys:
            curve = {str(epoch): values[key][0] for epoch, values in found.curve.items()}
            norm = as_tensor(split.test[key]).norm(dim=1).mean().item()
            rows[key] = {"probe": found.accuracy[key][0], "feature_norm": norm, "curve": curve}
    return rows


def by_width(sets: Mapping[Key, Any]) -> list[list[Key]]:
    groups: dict[int, list[Key]] = {}
    for key, vectors in sets.items():
        groups.setdefault(vectors.shape[1], []).append(key)
    return list(groups.values())


def mae_rows(subject: Subject) -> Rows:
    """Random resized crops of 8 to 100 % of the area, drawn once, and flips; the encoder runs on every batch."""
    encoder, spec, where = subject.encoder, subject.spec, subject.device
    source, split = subject.eval_data.train, subject.split()
    assert source is not None, "the mae protocol augments its train images, so it needs them"
    assert subject.eval_data.train_labels is not None
    encoder.model.to(where)
    epochs = spec.epochs or 90
    batch_size = min(spec.batch_size or 16384, len(source))
    batches_per_epoch = len(source) // batch_size
    augment = Augment(kind="crop", scale=(0.08, 1.0), tries=1, flip=True)
    labels = torch.from_numpy(subject.eval_data.train_labels)
    rows: Rows = {}
    for keys in by_width(split.test):
        stream = iter(
            Loader(
                source,
                image_size=encoder.image_size,
                batch_size=batch_size,
                seed=spec.seed,
                augment=augment,
                shuffle=True,
                drop_last=True,
            )
        )
        layers, poolings = sorted({k[0] for k in keys}), list(dict.fromkeys(k[1] for k in keys))

        def epoch_batches(
            epoch: int, stream: Any = stream, layers: Any = layers, poolings: Any = poolings
        ) -> Iterator[tuple[Mapping[Any, Tensor], Tensor]]:
            for batch in itertools.islice(stream, batches_per_epoch):
                images = encoder.prepare(batch.images.to(where), batch.ids)
                parts = list(extract_batches(encoder.model, images.split(256), layers=layers, poolings=poolings))
                # Inference tensors cannot take part in training; a concatenated copy outside that mode can.
                yield {key: torch.cat([part[key].clone() for part in parts]) for key in parts[0]}, labels[batch.ids]

        found = mae_probe(
            epoch_batches,
            {key: split.test[key] for key in keys},
            split.test_labels,
            num_classes=int(max(split.train_labels.max(), split.test_labels.max())) + 1,
            batches_per_epoch=batches_per_epoch,
            batch_size=batch_size,
            epochs=epochs,
            seed=spec.seed,
            device=where,
        )
        for key in keys:
            curve = {str(epoch): values[key][0] for epoch, values in found.curve.items()}
            rows[key] = {"probe": found.accuracy[key][0], "best": found.best[key][0], "curve": curve}
    return rows
