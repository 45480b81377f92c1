"""Linear probes of a denoiser's features: every block at every noise level, from one pass over the images per level.

A denoiser has no single representation: its features depend on how noisy its input is. Which (layer, level) counts is
chosen on held-out training data; the largest test accuracy is reported beside it and called what it is. The probes
themselves are probe.py's. (Table 4; the paper reports the best over layers and noise levels.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anechoic.data import Augment, Loader, Source, latents, normalise
from anechoic.diffusion.generation import find_process, open_denoiser
from anechoic.diffusion.process import Process, encode
from anechoic.errors import UserError
from anechoic.evals.bank import pick_device
from anechoic.evals.features import Key, extract
from anechoic.evals.labelled import Labelled, LabelledFeatures, open_labelled, split_indices
from anechoic.evals.protocols import in100_rows, logistic_rows
from anechoic.report.tables import percent, text_table
from anechoic.rng import Draws

HELD_OUT = 0.1
"""Share of the training data that chooses the layer and the level."""


@dataclass(frozen=True)
class Denoiser:
    """A trained denoiser as an encoder; `prepare` turns uint8 images of `image_size` into what it reads."""

    model: Any
    process: Process
    image_size: int
    channels: int
    prepare: Callable[[Tensor], Tensor]
    device: torch.device


class Row(NamedTuple):
    """One cell of the table: top-1 on held-out training data and on test data."""

    noise: float
    layer: int
    held_out: float
    accuracy: float


@dataclass(frozen=True)
class NoisyProbe:
    """All rows; `chosen` is best on held-out training data, `best_on_test` is the test-selected maximum."""

    rows: list[Row]

    @property
    def chosen(self) -> Row:
        return max(self.rows, key=lambda row: row.held_out)

    @property
    def best_on_test(self) -> Row:
        return max(self.rows, key=lambda row: row.accuracy)

    def metrics(self) -> dict[str, Any]:
        return {
            "accuracy": self.chosen.accuracy,
            "chosen": self.chosen._asdict(),
            "test_selected_maximum": self.best_on_test._asdict(),
            "rows": [row._asdict() for row in self.rows],
        }

    def text(self) -> str:
        """A table of test accuracies, layers down, noise levels across; the chosen cell carries a star."""
        levels = list(dict.fromkeys(row.noise for row in self.rows))
        layers = list(dict.fromkeys(row.layer for row in self.rows))
        cells = {(row.layer, row.noise): row for row in self.rows}

        def cell(layer: int, level: float) -> str:
            row = cells[layer, level]
            return f"{percent(row.accuracy):.2f}{'*' if row is self.chosen else ' '}"

        table = text_table(
            ["layer", *(f"t={level:g}" for level in levels)],
            [[layer, *(cell(layer, level) for level in levels)] for layer in layers],
        )
        chosen, best = self.chosen, self.best_on_test
        return "\n".join(
            [
                "Linear probe of layers x noise levels, test top-1 in per cent",
                table,
                f"* chosen on held-out training data: layer {chosen.layer} at noise {chosen.noise:g}, "
                f"test {percent(chosen.accuracy):.2f}",
                f"test-selected maximum (optimistic): layer {best.layer} at noise {best.noise:g}, "
                f"test {percent(best.accuracy):.2f}",
            ]
        )


def open_noisy(path: str | Path, *, device: str = "auto") -> Denoiser:
    """The denoiser of a run; one that reads latents gets its images through the autoencoder they were made with."""
    model, config = open_denoiser(Path(path))
    where = pick_device(device)
    process = find_process(model, config, asked=None)
    source = config.get("data", {}).get("source", "")
    if source and latents.is_latents(source):
        card = latents.read_card(source)
        vae = latents.load_vae(card.vae, device=where)
        scale = latents.matching_scale(card, vae)

        def to_latents(images: Tensor) -> Tensor:
            moments = latents.encode_moments(vae, images.to(where, torch.float32) / 127.5 - 1)
            return moments.chunk(2, dim=1)[0] * scale

        return Denoiser(model.to(where), process, card.image_size, vae.config.in_channels, to_latents, where)
    known = model.preprocess

    def to_floats(images: Tensor) -> Tensor:
        return normalise(images.to(where), known["mean"], known["std"])

    return Denoiser(model.to(where), process, known["image_size"], known["channels"], to_floats, where)


def noisy_features(
    denoiser: Denoiser, source: Source, *, level: float, layers: Sequence[int] | Literal["all"], seed: int, part: int
) -> tuple[dict[Key, np.ndarray], np.ndarray]:
    """Features (n, D) by layer, the mean over patch tokens, at one noise level; and the ids of the samples (n,).

    The noise of a sample is a function of (seed, sample, part), part telling training from test data.
    """
    ids: list[Tensor] = []
    process = denoiser.process
    t = process.time_of_noise(torch.tensor(level, device=denoiser.device))

    def noised() -> Iterator[Tensor]:
        loader = Loader(source, image_size=denoiser.image_size, batch_size=256, augment=Augment("centre"))
        for batch in loader:
            ids.append(batch.ids)
            x = denoiser.prepare(batch.images)
            draws = Draws(seed, batch.ids.to(x.device), torch.full_like(batch.ids, part).to(x.device))
            yield process.mix(x, draws.normal("probe", *x.shape[1:]), t)

    forward = partial(encode, denoiser.model, process=process, level=level)
    found = extract(denoiser.model, noised(), layers=layers, poolings=("mean",), forward=forward)
    return found, torch.cat(ids).numpy()


def level_features(
    denoiser: Denoiser, labelled: Labelled, *, level: float, layers: Sequence[int] | Literal["all"], seed: int
) -> LabelledFeatures:
    """Both parts at one level."""
    (train, train_ids), (test, test_ids) = (
        noisy_features(denoiser, source, level=level, layers=layers, seed=seed, part=part)
        for part, source in enumerate((labelled.train, labelled.test))
    )
    return LabelledFeatures(train, labelled.train_labels[train_ids], test, labelled.test_labels[test_ids])


def held_out_part(features: LabelledFeatures, *, seed: int) -> LabelledFeatures:
    """The training features alone, a tenth of them in the place of the test data."""
    kept, held = split_indices(len(features.train_labels), holdout=HELD_OUT, seed=seed)
    return LabelledFeatures(
        {key: x[kept] for key, x in features.train.items()},
        features.train_labels[kept],
        {key: x[held] for key, x in features.train.items()},
        features.train_labels[held],
    )


def probe_noise(
    run: str | Path,
    *,
    train: str | None,
    test: str | None,
    levels: Sequence[float],
    layers: Sequence[int] | Literal["all"] = "all",
    protocol: str = "logistic",
    holdout: float = 0.2,
    epochs: int = 200,
    batch_size: int = 1024,
    device: str = "auto",
    seed: int = 0,
) -> NoisyProbe:
    """Probe every layer at every noise level, from 0 (the image) to 1 (noise), by logistic regression or in100."""
    for level in levels:
        if not 0 <= level < 1:
            raise UserError(f"a noise level lies between 0 (the image) and 1 (pure noise), not at {level:g}.")
    if protocol not in ("logistic", "in100"):
        raise UserError(f"features at noise levels are probed with logistic or in100, not {protocol}.")
    denoiser = open_noisy(run, device=device)
    labelled = open_labelled(train, test, holdout=holdout, seed=seed, channels=denoiser.channels)

    def accuracies(features: LabelledFeatures) -> dict[int, float]:
        rows = (
            logistic_rows(features, seed=seed)
            if protocol == "logistic"
            else in100_rows(features, epochs=epochs, batch_size=batch_size, device=device, seed=seed)
        )
        return {row["layer"]: row["accuracy"] for row in rows}

    found: list[Row] = []
    for level in levels:
        features = level_features(denoiser, labelled, level=level, layers=layers, seed=seed)
        held_out, tested = accuracies(held_out_part(features, seed=seed)), accuracies(features)
        found += [Row(level, layer, held_out[layer], tested[layer]) for layer in tested]
    return NoisyProbe(found)
