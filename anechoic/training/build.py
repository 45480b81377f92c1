"""Build what a config describes: data, loader, model, optimizer, preprocessing; and check the config before."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anechoic.config import Config, OptimConfig, to_json
from anechoic.data import Augment, Loader, Source, Subset, open_source
from anechoic.data.latents import Latents, is_latents
from anechoic.data.preprocess import Preprocess
from anechoic.data.source import Transform
from anechoic.errors import UserError
from anechoic.models import build_model, model_config
from anechoic.models.network import NetworkConfig
from anechoic.models.sit import SiTConfig
from anechoic.models.uvit import UViTConfig
from anechoic.surgery.fold import fold
from anechoic.surgery.param_groups import decay_factors, split_skips
from anechoic.training.muon import Muon, adamw
from anechoic.training.objectives import OBJECTIVES, make_objective
from anechoic.training.optim import match_scales, parameter_groups


def open_data(config: Config) -> Source:
    """Open the run's source; with labels only if they are used. A k-NN validation does without where there are none."""
    data = config.data
    if not data.source:
        raise UserError("No data is given: name it with --data.source.")

    def opened(labels: bool) -> Source:
        if is_latents(data.source):
            return Latents(data.source, labels=labels)
        return open_source(data.source, labels=labels, channels=data.channels, pixels=data.pixels, size=data.image_size)

    if data.labels or needs_labels(config):
        return opened(True)
    if config.validation.knn:
        with suppress(UserError):  # no labels, or no data, which is reported below
            return opened(True)
    return opened(False)


def make_loader(
    config: Config,
    source: Source,
    indices: np.ndarray,
    *,
    start: int = 0,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> Loader:
    """Return endless batches of these samples from sample `start` on, in an order that depends on the seed alone."""
    data = config.data
    return Loader(
        Subset(source, indices),
        image_size=data.image_size,
        batch_size=config.optim.batch_size,
        seed=config.seed,
        augment=transform_of(config, source),
        shuffle=True,
        drop_last=True,
        start=start,
        workers=workers,
        rank=rank,
        world_size=world_size,
        device=device,
    )


def transform_of(config: Config, source: Source) -> Transform:
    """Return how the run crops and changes images."""
    data = config.data
    return source.transform or Augment(kind=data.augment, scale=data.scale, flip=data.flip, rotate=data.rotate)


def needs_labels(config: Config) -> bool:
    entry = OBJECTIVES.get(config.objective.name)
    return entry is not None and entry.labels


def model_options(config: Config) -> dict[str, Any]:
    shortcut = config.shortcut
    return {
        "image_size": config.data.image_size,
        "in_channels": config.data.channels,
        "alpha_min": shortcut.alpha_min,
        "schedule": shortcut.schedule,
        "form": shortcut.form,
        **config.model.options,
    }


def network_config(config: Config) -> NetworkConfig:
    return model_config(config.model.name, **model_options(config))


def make_model(config: Config) -> Any:
    """Return the network; with shortcut.via=groups the folded one, which starts with the same outputs."""
    model = build_model(config.model.name, **model_options(config))
    return split_skips(fold(model)) if config.shortcut.via == "groups" else model


def learning_rate_profile(config: Config, model: nn.Module) -> dict[str, float]:
    """Return the factor of the learning rate by parameter name; absent names have 1."""
    shortcut = config.shortcut
    if shortcut.via == "network":
        return {}
    return decay_factors(model, shortcut.alpha_min, schedule=shortcut.schedule)


def check(config: Config) -> None:
    """Raise UserError for wrong settings before data is opened or memory allocated."""
    make_objective(config.objective.name, **config.objective.options)
    wanted = OBJECTIVES[config.objective.name].trains
    if not config.model.name.startswith(wanted):
        raise UserError(
            f"{config.objective.name} trains a {wanted} model, not {config.model.name}: choose one of those."
        )
    network = network_config(config)
    theirs, ours = config.objective.options.get("num_classes"), getattr(network, "num_classes", None)
    if theirs is not None and theirs != ours:
        raise UserError(
            f"The objective counts {theirs} classes and the model {ours}: set num_classes in both objective.options "
            "and model.options to the data's."
        )
    if config.recompute and config.model.name.startswith("resnet"):
        raise UserError("Only blocks of transformers can be recomputed: set recompute to false.")
    if config.validation.knn and not reads_without_labels(network):
        raise UserError(
            "The k-NN validation runs the network without labels, for which it is not trained: set label_dropout above "
            "0, or validation.knn to 0."
        )
    if config.compile and config.shortcut.anneal:
        raise UserError(
            "A compiled network has its alphas built in, so they cannot be annealed: set shortcut.anneal to 0 or "
            "compile to false."
        )
    if config.shortcut.form == "both" and config.shortcut.anneal:
        raise UserError("The form 'both' has fixed factors, which are not annealed: set shortcut.anneal to 0.")
    if config.shortcut.via == "groups" and (config.shortcut.form != "identity" or config.shortcut.anneal):
        raise UserError(
            "Parameter groups express a fixed decay of the identity shortcuts: set shortcut.form to identity and "
            "shortcut.anneal to 0, or shortcut.via to network."
        )
    if config.fsdp:
        import_module("anechoic.runtime.sharded_checkpoint")  # UserError for an old torch
    if config.fsdp and config.compile:
        raise UserError("A compiled network cannot be sharded: set fsdp or compile to false.")
    if config.fsdp and config.shortcut.form == "learnable":
        raise UserError("A learnable alpha is a single number, which cannot be sharded: set fsdp to false.")
    if config.fsdp and config.model.name.startswith("resnet"):
        raise UserError("Only transformers can be sharded, block by block: set fsdp to false.")


def reads_without_labels(network: NetworkConfig) -> bool:
    """Return False for a class-conditional denoiser without a null label, True for all others."""
    if not isinstance(network, UViTConfig | SiTConfig):
        return True
    return network.num_classes is None or network.label_dropout > 0


def check_labels(config: Config, source: Source) -> None:
    """Raise UserError for labels above the network's classes; the next number is the null label."""
    classes = getattr(network_config(config), "num_classes", None)
    if classes is None or source.labels is None:
        return
    most = int(source.labels.max()) + 1
    if most > classes:
        raise UserError(
            f"The data has labels up to {most - 1} and the model {classes} classes, counted from 0: set num_classes in "
            f"model.options (and in objective.options, if it is there) to {most}, or give data that fits."
        )


def describe(config: Config, model: nn.Module, run_dir: Path, *, seen: int, brief: bool = False) -> str:
    """Return a line about the run and, unless brief, the frozen config, a line per section."""
    sections = {name: value for name, value in to_json(config).items() if isinstance(value, dict)}
    lines = [
        f"  {name}: " + ", ".join(f"{key} {value}" for key, value in section.items())
        for name, section in sections.items()
    ]
    rest = [f"{name} {value}" for name, value in to_json(config).items() if name not in sections and value != ""]
    assert config.optim.samples is not None
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    left = (config.optim.samples - seen) // config.optim.batch_size
    start = f"resuming after {seen:,} samples" if seen else "starting"
    summary = f"{run_dir}: {start}, {weights:,} weights, {left:,} updates to go"
    return summary if brief else "\n".join([summary, *lines, "  " + ", ".join(rest)])


def make_optimizer(
    model: nn.Module, optim: OptimConfig, *, profile: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """Return AdamW; or Muon, with AdamW for all but the matrices of the body. profile: learning_rate_profile's."""
    groups = parameter_groups(
        model,
        algorithm=optim.algorithm,
        weight_decay=optim.weight_decay,
        weight_decay_on=optim.weight_decay_on,
        exempt=optim.exempt,
        layer_decay=optim.layer_decay,
    )
    if profile:
        groups = match_scales(groups, profile, eps=optim.eps)
    if optim.algorithm == "muon":
        return Muon(groups, momentum=optim.momentum, betas=optim.betas, eps=optim.eps)
    return adamw(groups, lr=0.0, betas=optim.betas, eps=optim.eps)


def preprocess_of(config: Config) -> Preprocess:
    data = config.data
    assert data.mean is not None
    assert data.std is not None
    return Preprocess(data.mean, data.std, data.image_size, data.channels, data.pixels)
