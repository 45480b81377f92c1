"""Validation during training, on held-out samples.

The loss with fixed masks and noise, effective rank and token norm of every block, branches relative to their
shortcuts; on request k-NN, and the accuracy on labeled images that no training reads. (Section 5.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from anechoic.config import Config
from anechoic.data import Source, Subset
from anechoic.data.in_memory import InMemory
from anechoic.data.latents import is_latents
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.generate import Decoder, contact_sheet
from anechoic.diffusion.process import Process, process_of
from anechoic.diffusion.samplers import sample_batch, samplers_for
from anechoic.errors import UserError
from anechoic.eval.denoisers import Denoiser, denoiser_of
from anechoic.eval.encoders import Encoder
from anechoic.eval.eval_data import EvalData, check_classes
from anechoic.eval.eval_data import split as split_labeled
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.features import evaluating
from anechoic.eval.reconstruction import reconstructions, reconstructs
from anechoic.rng import SampleGenerator
from anechoic.training.build import network_config, open_data, reads_without_labels
from anechoic.training.objectives import Objective

# Images of a validation's picture, their largest side, and the steps to sample one.
PICTURES, PICTURE_SIDE, PICTURE_STEPS = 8, 96, 20
# Maximum number of labeled images that vote and fit a probe, and of those that are tested.
LABELED_TRAIN, LABELED_TEST = 3072, 1024


class Samples(NamedTuple):
    """A batch for an objective: normalized images (B, C, H, W), and labels (B,) if the data has them."""

    images: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class Validator:
    """Measures on held-out samples; `votes` are the training samples of the k-NN validation, `labeled` other images."""

    config: Config
    objective: Objective
    preprocess: Preprocess
    held_out: InMemory
    votes: InMemory | None
    labeled: EvalData | None = None

    def measure(self, model: Any) -> dict[str, Any]:
        """Return held_out_loss (and others of the objective), values per block and Shortcut, knn_accuracy, labels_*."""
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
        if self.labeled is not None:
            accuracy = Evaluator(replace(spec, metrics=("knn", "probe")), device=str(device), cached=False)
            found = accuracy.run(encoder, self.labeled)
            record |= {f"labels_{name}": found.value(name, pooling="mean") for name in accuracy.spec.metrics}
        return record

    def encoder(self, model: nn.Module) -> Encoder | Denoiser:
        process = process_of(self.config.objective.name, self.config.objective.options)
        if process is not None:
            return denoiser_of(model, process, self.preprocess, name="run")
        return Encoder("run", model, self.preprocess)

    def picture(self, model: Any, *, reconstructed: bool) -> Any:
        """Return a small contact sheet (of Pillow): samples of a denoiser or, on request, masked reconstructions.

        None where the network makes no pictures. The noise, the images and their masks are the same every time.
        """
        if self.preprocess.channels not in (1, 3) or self.preprocess.pixels.stored or model.latents is not None:
            return None
        encoder, process = self.encoder(model), process_of(self.config.objective.name, self.config.objective.options)
        if process is not None:
            pixels = denoised(model, process, self.preprocess, seed=self.config.seed)
        elif reconstructed and isinstance(encoder, Encoder) and reconstructs(encoder):
            images = self.preprocess.apply(self.held_out.images[:PICTURES].to(next(model.parameters()).device))
            pixels = stages(*reconstructions(encoder, images, seed=self.config.seed))
        else:
            return None
        if max(pixels.shape[2:]) > PICTURE_SIDE:
            pixels = nn.functional.interpolate(pixels, PICTURE_SIDE, mode="bilinear", antialias=True)
        return contact_sheet(pixels, columns=PICTURES)

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


@torch.no_grad()
def denoised(model: Any, process: Process, preprocess: Preprocess, *, seed: int) -> Tensor:
    """Return samples of the network as it is, uint8 (PICTURES, C, H, W), of all classes in turn."""
    ids = torch.arange(PICTURES, device=next(model.parameters()).device)
    classes = model.config.num_classes
    with evaluating(model):
        x, _ = sample_batch(
            model,
            ids,
            shape=(model.config.in_channels, *model.config.size),
            process=process,
            sampler=samplers_for(process)[0],
            steps=PICTURE_STEPS,
            seed=seed,
            labels=None if classes is None else ids % classes,
            null=classes,
        )
    return Decoder(preprocess)(x).cpu()


def stages(images: np.ndarray, hidden: np.ndarray, predicted: np.ndarray) -> Tensor:
    """Return the images, what the encoder sees of them, and with the prediction: uint8 (3 n, C, H, W)."""
    rows = [images, np.where(hidden[..., None], 0.5, images), np.where(hidden[..., None], predicted, images)]
    return torch.from_numpy((255 * np.concatenate(rows)).round().astype(np.uint8)).permute(0, 3, 1, 2)


def make_validator(
    config: Config,
    objective: Objective,
    source: Source,
    train_indices: np.ndarray,
    held_out_indices: np.ndarray,
    *,
    preprocess: Preprocess,
    labeled: EvalData | None = None,
) -> Validator:
    """Read the held-out samples, the first training samples for k-NN, and labeled ones, without augmentation."""

    def read(part: Source) -> InMemory:
        return InMemory.of(part, image_size=config.data.image_size, seed=config.seed)

    num_votes = 0 if source.labels is None else config.validation.knn
    held_out, votes = (
        read(Subset(source, indices)) if len(indices) else None
        for indices in (held_out_indices, train_indices[:num_votes])
    )
    assert held_out is not None, "a run without held-out samples has no validation"
    if labeled is not None:
        assert labeled.train is not None
        assert labeled.train_labels is not None
        assert labeled.test_labels is not None
        train, test = read(labeled.train), read(labeled.test)
        # Unreadable images are skipped.
        train_labels, test_labels = labeled.train_labels[train.ids.numpy()], labeled.test_labels[test.ids.numpy()]
        labeled = EvalData(train, test, train_labels, test_labels, labeled.classes)
    return Validator(config, objective, preprocess, held_out, votes, labeled)


def open_labeled(config: Config, where: str) -> EvalData:
    """Open labeled images for the validations of a run, a fifth of them to be tested; the training never reads them."""
    if config.data.holdout == 0:
        raise UserError("--validation-labels needs validations, and this run has none: set data.holdout above 0.")
    if not reads_without_labels(network_config(config)):
        raise UserError(
            "--validation-labels runs the network without labels, which needs label_dropout above 0 in its training."
        )
    if is_latents(where) != is_latents(config.data.source):
        raise UserError(
            f"--validation-labels {where} and the data of the run must both be images, or both latents: choose others."
        )
    source = open_data(replace(config, data=replace(config.data, source=where, labels=True)))
    found = split_labeled(source, holdout=0.2, seed=0)
    return check_classes(found.first(max_train=LABELED_TRAIN, max_test=LABELED_TEST))
