"""Other people's checkpoints as our networks: which network it is, its config, and a strict fit.

Known are the original MAE, the authors' decayed MAE, SiT and decayed SiT, U-ViT, and ViTs of timm and transformers.
Reading files is in read_checkpoint.py; what their names and shapes mean is in adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anechoic.adapters.checkpoint_metadata import CheckpointMetadata, Choices, checked_numbers
from anechoic.adapters.registry import ADAPTERS
from anechoic.adapters.tensors import Layout, Tensors
from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.mae import MAEConfig
from anechoic.models.network import MARKS, Network, NetworkConfig
from anechoic.models.vit import ViTConfig
from anechoic.weights.read_checkpoint import Checkpoint, read_checkpoint

__all__ = ["Choices", "Imported", "import_checkpoint"]

DISTILLED, REGISTERS = "a distillation token, as DeiT's distilled models have", "register tokens"
# The last or first part of a tensor's name -> what it shows the network to have.
RELATIVES = {
    **dict.fromkeys(("dist_token", "distillation_token", "head_dist", "distillation_classifier"), DISTILLED),
    **dict.fromkeys(("reg_token", "reg_tokens", "register_tokens"), REGISTERS),
}


@dataclass(frozen=True)
class Imported:
    """The network in evaluation mode, and what the file was. left_out: its names without a counterpart in the network.
    assumed: values that neither the file nor the user stated."""

    network: Network
    kind: str
    preprocess: Preprocess
    left_out: list[str] = field(default_factory=list)
    wrapper: str | None = None
    assumed: dict[str, Any] = field(default_factory=dict)


def import_checkpoint(path: Path, choices: Choices) -> Imported:
    checkpoint = read_checkpoint(path)
    layout = recognize_layout(checkpoint.tensors)
    metadata = CheckpointMetadata(choices, checkpoint.arguments, checkpoint.settings)
    config, tensors, unused = layout.convert(layout.tensors, metadata)
    metadata.refuse_unused(layout.kind)
    preprocess = _preprocess(config, checkpoint)
    # Shapes are compared before memory is taken for what a damaged file may claim.
    with torch.device("meta"):
        check_fit(build(config), tensors)
    network = build(config)
    wanted = network.state_dict()
    marks = {name: value for name, value in wanted.items() if name.rpartition(".")[2] in MARKS}
    network.load_state_dict({**marks, **{name: value.to(wanted[name].dtype) for name, value in tensors.items()}})
    return Imported(network.eval(), layout.kind, preprocess, unused, checkpoint.wrapper, metadata.assumed)


def recognize_layout(tensors: Tensors) -> Layout:
    """Return the kind of checkpoint by the names that only it has."""
    refuse_relatives(tensors)
    for adapter in ADAPTERS.values():
        if adapter.reads and (found := adapter.load().recognize(tensors)):
            return found
    raise UserError(
        f"This checkpoint is of no known architecture: it has the names {', '.join(sorted(tensors)[:4])}, ...; known "
        f"are MAE, SiT, their decayed versions, U-ViT, and ViT (timm, transformers)."
    )


def refuse_relatives(tensors: Mapping[str, Tensor]) -> None:
    """Refuse networks with parts that ours do not have, by name."""
    if any(name.startswith("head.0.running_") for name in tensors):
        raise UserError(
            "This is a linear-probe checkpoint: its head is a batch norm and a linear map on a frozen encoder. Import "
            "the pre-trained checkpoint it started from, and fit a head with anechoic evaluate."
        )
    for name in tensors:
        what = RELATIVES.get(name.rpartition(".")[2]) or RELATIVES.get(name.partition(".")[0])
        if what:
            raise UserError(
                f"This ViT has {what} ({name}), and ours has one class token before the patches and no other: import "
                f"the version without."
            )


def _preprocess(config: NetworkConfig, checkpoint: Checkpoint) -> Preprocess:
    """Return the folder's mean and std, else the usual: ImageNet's for color images of encoders, -1 .. 1 for images of
    diffusion networks, none for latents."""
    channels = config.in_channels
    usual: tuple[Sequence[float], Sequence[float]] = ((0.0,) * channels, (1.0,) * channels)
    if channels == 3 and isinstance(config, ViTConfig | MAEConfig):
        usual = IMAGENET_MEAN, IMAGENET_STD
    elif channels in (1, 3) and not isinstance(config, ViTConfig | MAEConfig):
        usual = (0.5,) * channels, (0.5,) * channels
    found = {}
    timm = checkpoint.settings.get("pretrained_cfg")
    timm = timm if isinstance(timm, Mapping) else {}
    for name, default in zip(("mean", "std"), usual, strict=True):
        given = checkpoint.image_processor.get(f"image_{name}") or timm.get(name)
        found[name] = list(checked_numbers(name, given, channels) if given else default)
    return Preprocess.from_json({**found, "image_size": config.size[0], "channels": channels})


def check_fit(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Report precisely what of the tensors does not fit the network. Marks are the network's own."""
    wanted = {name: value for name, value in network.state_dict().items() if name.rpartition(".")[2] not in MARKS}
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    misshapen = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise UserError(f"The checkpoint does not fit the network it looks like ({'; '.join(problems)}).")
    unusable = [name for name, value in tensors.items() if not value.dtype.is_floating_point]
    if unusable:
        raise UserError(f"The checkpoint holds {tensors[unusable[0]].dtype} where weights belong ({_some(unusable)}).")


def _some(names: Sequence[str], count: int = 6) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
