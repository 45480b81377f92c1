"""The probes as rows of a table: one row per (layer, pooling), whatever the protocol.

It joins features, or freshly augmented batches of them, to the heads of probe.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anechoic.data import Augment, Loader, normalise
from anechoic.evals.analysis import as_tensor
from anechoic.evals.bank import pick_device
from anechoic.evals.encoders import Encoder
from anechoic.evals.features import Key, Pooling, extract_batches
from anechoic.evals.labelled import Labelled, LabelledFeatures, labelled_features
from anechoic.evals.probe import in100_probe, logistic_probe, mae_probe


def logistic_rows(features: LabelledFeatures, *, seed: int, device: str = "auto") -> list[dict[str, Any]]:
    rows = []
    for (layer, pooling), vectors in features.train.items():
        where = pick_device(device)
        train, test = (as_tensor(x).to(where) for x in (vectors, features.test[layer, pooling]))
        found = logistic_probe(train, features.train_labels, test, features.test_labels, seed=seed)
        held_out = {f"{regulariser:.3g}": accuracy for regulariser, accuracy in found.held_out.items()}
        row = {"layer": layer, "pooling": pooling, "accuracy": found.accuracy, "regulariser": found.regulariser}
        rows.append({**row, "held_out": held_out})
    return rows


def in100_rows(
    features: LabelledFeatures, *, epochs: int, batch_size: int, device: str, seed: int
) -> list[dict[str, Any]]:
    """Layers of one width are trained side by side; a network whose widths differ takes one round per width."""
    rows = []
    for keys in by_width(features.train):
        found = in100_probe(
            {key: features.train[key] for key in keys},
            features.train_labels,
            {key: features.test[key] for key in keys},
            features.test_labels,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            device=pick_device(device),
        )
        for key in keys:
            curve = {str(epoch): values[key][0] for epoch, values in found.curve.items()}
            norm = as_tensor(features.test[key]).norm(dim=1).mean().item()
            row = {"layer": key[0], "pooling": key[1], "accuracy": found.accuracy[key][0], "feature_norm": norm}
            rows.append({**row, "curve": curve})
    return rows


def by_width(sets: Mapping[Key, Any]) -> list[list[Key]]:
    groups: dict[int, list[Key]] = {}
    for key, vectors in sets.items():
        groups.setdefault(vectors.shape[1], []).append(key)
    return list(groups.values())


def mae_rows(
    encoder: Encoder,
    labelled: Labelled,
    *,
    layers: Sequence[int] | Literal["all"],
    poolings: Sequence[Pooling],
    epochs: int,
    batch_size: int,
    device: str,
    seed: int,
) -> list[dict[str, Any]]:
    """Random resized crops of 8 to 100 % of the area, drawn once, and flips; the encoder runs on every batch."""
    test = labelled_features(encoder, labelled, layers=layers, poolings=poolings, device=device)
    where = pick_device(device)
    encoder.model.to(where)
    batch_size = min(batch_size, len(labelled.train))
    batches_per_epoch = len(labelled.train) // batch_size
    augment = Augment(kind="crop", scale=(0.08, 1.0), tries=1, flip=True)
    labels = torch.from_numpy(labelled.train_labels)
    rows = []
    for keys in by_width(test.test):
        stream = iter(
            Loader(
                labelled.train,
                image_size=encoder.image_size,
                batch_size=batch_size,
                seed=seed,
                augment=augment,
                shuffle=True,
                drop_last=True,
            )
        )
        wanted_layers, wanted_poolings = sorted({k[0] for k in keys}), list(dict.fromkeys(k[1] for k in keys))

        def epoch_batches(
            epoch: int, stream: Any = stream, layers: Any = wanted_layers, poolings: Any = wanted_poolings
        ) -> Iterator[tuple[Mapping[Any, Tensor], Tensor]]:
            for batch in itertools.islice(stream, batches_per_epoch):
                images = normalise(batch.images.to(where), encoder.mean, encoder.std)
                parts = list(extract_batches(encoder.model, images.split(256), layers=layers, poolings=poolings))
                # Inference tensors cannot take part in training; a concatenated copy outside that mode can.
                yield {key: torch.cat([part[key].clone() for part in parts]) for key in parts[0]}, labels[batch.ids]

        found = mae_probe(
            epoch_batches,
            {key: test.test[key] for key in keys},
            test.test_labels,
            num_classes=int(max(test.train_labels.max(), test.test_labels.max())) + 1,
            batches_per_epoch=batches_per_epoch,
            batch_size=batch_size,
            epochs=epochs,
            seed=seed,
            device=where,
        )
        for key in keys:
            curve = {str(epoch): values[key][0] for epoch, values in found.curve.items()}
            row = {"encoder": encoder.name, "layer": key[0], "pooling": key[1], "accuracy": found.accuracy[key][0]}
            rows.append({**row, "best": found.best[key][0], "curve": curve})
    return rows
