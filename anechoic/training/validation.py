"""Validation during training, on held-out samples and without labels.

The loss with fixed masks and noise, effective rank and token norm of every block, branches relative to their
shortcuts; k-NN on request. (Section 5.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from anechoic.config import Config
from anechoic.data import Source, Subset
from anechoic.data.in_memory import InMemory
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.process import process_of
from anechoic.eval.denoisers import Denoiser, denoiser_of
from anechoic.eval.encoders import Encoder
from anechoic.eval.eval_data import EvalData
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.features import evaluating
from anechoic.rng import SampleGenerator
from anechoic.training.build import reads_without_labels
from anechoic.training.objectives import Objective


class Samples(NamedTuple):
    """A batch for an objective: normalized images (B, C, H, W), and labels (B,) if the data has them."""

    images: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class Validator:
    """Measures on held-out samples; `votes` are the training samples of the k-NN validation."""

    config: Config
    objective: Objective
    preprocess: Preprocess
    held_out: InMemory
    votes: InMemory | None

    def measure(self, model: Any) -> dict[str, Any]:
        """Return held_out_loss (and other values of the objective), values per block and per Shortcut, knn_accuracy."""
        device = next(model.parameters()).device
        record: dict[str, Any] = {f"held_out_{name}": value for name, value in self.losses(model, device).items()}
        if not reads_without_labels(model.config):
            return record  # statistics of its blocks would depend on the labels
        metrics = ("statistics",) if self.votes is None else ("statistics", "knn")
        encoder = self.encoder(model)
        spec = EvalSpec(metrics, poolings=("mean",), noise=(0.0,) if isinstance(encoder, Denoiser) else ())
        votes = None if self.votes is None else self.votes.labels
        eval_data = EvalData(self.votes, self.held_out, votes, self.held_out.labels)
        found = Evaluator(spec, device=str(device), cached=False).run(encoder, eval_data)
        record |= found.network
        if self.votes is not None:
            record["knn_accuracy"] = found.value("knn", pooling="mean")
        return record

    def encoder(self, model: nn.Module) -> Encoder | Denoiser:
        process = process_of(self.config.objective.name, self.config.objective.options)
        if process is not None:
            return denoiser_of(model, process, self.preprocess, name="run")
        return Encoder("run", model, self.preprocess)

    @torch.no_grad()
    def losses(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return means over the held-out samples in eval mode, with the same masks and noise every time."""
        sums: dict[str, float] = {}
        images, labels = self.held_out.images, self.held_out.labels
        with evaluating(model):
            for rows in torch.arange(len(images)).split(min(256, self.config.optim.batch_size)):
                known = None if labels is None else torch.from_numpy(labels)[rows].to(device)
                batch = Samples(self.preprocess.apply(images[rows].to(device)), known)
                ids = self.held_out.ids[rows].to(device)
                for name, value in self.objective(
                    model, batch, SampleGenerator(self.config.seed, ids, torch.zeros_like(ids))
                ).items():
                    sums[name] = sums.get(name, 0.0) + value.item() * len(ids)
        return {name: value / len(images) for name, value in sums.items()}


def make_validator(
    config: Config,
    objective: Objective,
    source: Source,
    train_indices: np.ndarray,
    held_out_indices: np.ndarray,
    *,
    preprocess: Preprocess,
) -> Validator:
    """Read the held-out samples, and the first training samples for k-NN, without augmentation."""
    held_out, votes = (
        InMemory.of(Subset(source, indices), image_size=config.data.image_size, seed=config.seed)
        if len(indices)
        else None
        for indices in (held_out_indices, train_indices[: config.validation.knn])
    )
    assert held_out is not None, "a run without held-out samples has no validation"
    return Validator(config, objective, preprocess, held_out, votes)
