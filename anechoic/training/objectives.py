"""Objectives: callables (model, batch, generator) -> {"loss": scalar, ...}, by name.

An objective has no state; its random numbers come from the batch's generator, one stream per sample. A new one is a
row of OBJECTIVES. (Section 4.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError, nearest_name
from anechoic.rng import SampleGenerator


class Samples(Protocol):
    """What an objective reads of a batch: normalized images (B, C, H, W) and, if the data has them, labels (B,)."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor | None: ...


Objective = Callable[[Any, Samples, SampleGenerator], dict[str, Tensor]]


def masked_reconstruction() -> Objective:
    """The masked autoencoder's own loss; each sample's mask is drawn from its uniform noise (B, N)."""

    def loss(model: Any, batch: Samples, generator: SampleGenerator) -> dict[str, Tensor]:
        p = model.config.patch_size
        rows, columns = batch.images.shape[2] // p, batch.images.shape[3] // p
        return {"loss": model(batch.images, generator.uniform("mask", rows * columns)).loss}

    return loss


def supervised(*, label_smoothing: float = 0.0) -> Objective:
    """Cross-entropy of the model's logits (B, K) with labels: class numbers (B,), or soft targets (B, K)."""

    def loss(model: Any, batch: Samples, generator: SampleGenerator) -> dict[str, Tensor]:
        assert batch.labels is not None, "the training loop requires labels for this objective"
        logits = model(batch.images)
        classes = batch.labels if batch.labels.ndim == 1 else batch.labels.argmax(dim=1)
        accuracy = (logits.detach().argmax(dim=1) == classes).float().mean()
        return {"loss": F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing), "accuracy": accuracy}

    return loss


class Entry(NamedTuple):
    """builder: "module:function", which takes the objective's options. trains: the required beginning of the model's
    name. labels: whether it reads labels."""

    builder: str
    trains: str = ""
    labels: bool = False


OBJECTIVES = {
    "masked_reconstruction": Entry("anechoic.training.objectives:masked_reconstruction", trains="mae_"),
    "supervised": Entry("anechoic.training.objectives:supervised", labels=True),
    "finetuning": Entry("anechoic.training.finetuning:finetuning", labels=True),
    "noise_prediction": Entry("anechoic.diffusion.process:noise_prediction"),
    "flow_matching": Entry("anechoic.diffusion.process:flow_matching"),
}


def make_objective(name: str, *, preprocess: Preprocess | None = None, **options: Any) -> Objective:
    """Return the objective of this name; UserError for unknown names and options, with the nearest known one.

    An objective that changes pixels needs the run's Preprocess; without one it can be checked, but not used.
    """
    if name not in OBJECTIVES:
        raise UserError(f"There is no objective {name!r:.60}; {nearest_name(name, OBJECTIVES)}")
    module, _, function = OBJECTIVES[name].builder.partition(":")
    builder = getattr(import_module(module), function)
    parameters = list(inspect.signature(builder).parameters)
    known = [parameter for parameter in parameters if parameter != "preprocess"]
    for option in options:
        if option not in known:
            raise UserError(f"The objective {name} has no option {option!r}; {nearest_name(option, known)}")
    return builder(**options, preprocess=preprocess) if "preprocess" in parameters else builder(**options)
