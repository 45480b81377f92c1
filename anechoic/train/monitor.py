"""Watching a run without labels: what the network makes of samples it is never trained on.

Measures the loss with fixed masks and noise, effective rank and token norm of every block, and how strong branches are
beside their shortcuts; k-NN only if asked for. It decides nothing. (Section 5.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from anechoic.config import Config
from anechoic.data import Augment, Loader, Source, Subset
from anechoic.evals.features import block_statistics, extract
from anechoic.evals.knn import knn_accuracy
from anechoic.rng import Draws
from anechoic.train.objectives import Objective

# The statistics of all blocks are held in memory at once; this many samples suffice for a rank.
STATISTICS_SAMPLES = 256
NEIGHBOURS = 20

# Objective -> "module:function" of (model, images), which runs a network that takes more than images to be looked at.
CLEAN_FORWARD: dict[str, str] = {
    "noise_prediction": "anechoic.diffusion.process:encode_clean_noise",
    "flow_matching": "anechoic.diffusion.process:encode_clean_flow",
}


class Samples(NamedTuple):
    """What an objective reads: normalised images (B, C, H, W), and labels (B,) if the data has them."""

    images: Tensor
    labels: Tensor | None


class Images(NamedTuple):
    """Samples in memory: uint8 images (n, C, H, W), ids (n,), labels (n,) or None."""

    images: Tensor
    ids: Tensor
    labels: Tensor | None


def split_indices(size: int, *, holdout: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) indices of `size` samples, each in order; the choice does not depend on the run's seed."""
    draws = Draws(0, torch.arange(size), torch.zeros(size, dtype=torch.int64))
    order = draws.words("holdout", 1)[:, 0].argsort(stable=True).numpy()
    return np.sort(order[holdout:]), np.sort(order[:holdout])


@dataclass(frozen=True)
class Monitor:
    """Looks at held-out samples; `bank` are training samples that vote in the k-NN test, if one is wanted.

    prepare turns uint8 images into what the network takes, on its device.
    """

    objective: Objective
    objective_name: str
    held_out: Images
    bank: Images | None
    seed: int
    batch_size: int
    prepare: Callable[[Tensor], Tensor]

    def measure(self, model: nn.Module) -> dict[str, Any]:
        """held_out_loss (and what else the objective tells), a number per block and per Shortcut, knn_accuracy."""
        images = self.prepare(self.held_out.images[:STATISTICS_SAMPLES])
        record: dict[str, Any] = {f"held_out_{name}": value for name, value in self.losses(model).items()}
        record |= block_statistics(model, images, forward=self.clean_forward(model))
        if self.bank is not None:
            record["knn_accuracy"] = self.knn(model, self.bank)
        return record

    @torch.no_grad()
    def losses(self, model: nn.Module) -> dict[str, float]:
        """Means over the held-out samples in eval mode; masks and noise are the same at every look."""
        was_training = model.training
        model.eval()
        sums: dict[str, float] = {}
        data = self.held_out
        for rows in torch.arange(len(data.ids)).split(self.batch_size):
            images = self.prepare(data.images[rows])
            ids = data.ids[rows].to(images.device)
            labels = None if data.labels is None else data.labels[rows].to(images.device)
            found = self.objective(model, Samples(images, labels), Draws(self.seed, ids, torch.zeros_like(ids)))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(ids)
        model.train(was_training)
        return {name: value / len(data.ids) for name, value in sums.items()}

    def knn(self, model: nn.Module, bank: Images) -> float:
        """How often training samples near a held-out one, by the last block's mean token, vote for its label."""
        train, test = (
            extract(
                model,
                (self.prepare(part) for part in data.images.split(self.batch_size)),
                poolings=("mean",),
                forward=self.clean_forward(model),
            )
            for data in (bank, self.held_out)
        )
        assert bank.labels is not None
        assert self.held_out.labels is not None
        (train_features,), (test_features,) = train.values(), test.values()
        k = min(NEIGHBOURS, len(train_features))
        return knn_accuracy(train_features, bank.labels, test_features, self.held_out.labels, ks=(k,))[k]

    def clean_forward(self, model: nn.Module) -> Callable[[Tensor], object] | None:
        if self.objective_name not in CLEAN_FORWARD:
            return None
        module, _, function = CLEAN_FORWARD[self.objective_name].partition(":")
        return partial(getattr(import_module(module), function), model)


def make_monitor(
    config: Config,
    objective: Objective,
    source: Source,
    train_indices: np.ndarray,
    held_out_indices: np.ndarray,
    *,
    prepare: Callable[[Tensor], Tensor],
) -> Monitor:
    """Reads the held-out samples, and the first training samples if a k-NN test is wanted, without augmentation."""

    def read(indices: np.ndarray) -> Images:
        batches = list(
            Loader(
                Subset(source, indices),
                image_size=config.data.image_size,
                batch_size=256,
                seed=config.seed,
                augment=Augment(kind="centre"),
                shuffle=False,
                drop_last=False,
            )
        )
        labels = [batch.labels for batch in batches if batch.labels is not None]
        return Images(
            torch.cat([batch.images for batch in batches]),
            torch.cat([batch.ids for batch in batches]),
            torch.cat(labels) if labels else None,
        )

    return Monitor(
        objective=objective,
        objective_name=config.objective.name,
        held_out=read(held_out_indices),
        bank=read(train_indices[: config.monitor.knn]) if config.monitor.knn else None,
        seed=config.seed,
        batch_size=min(256, config.optim.batch_size),
        prepare=prepare,
    )
