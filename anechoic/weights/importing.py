"""Other people's checkpoints as our networks: which network it is, its config, and a strict fit.

Known are the original MAE, the authors' decayed MAE, SiT and decayed SiT, U-ViT, and ViTs of timm and transformers.
Reading files is in reading.py, what they tell in told.py, names in layouts.py, sizes in converting.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.mae import MAEConfig
from anechoic.models.network import MARKS, Network, NetworkConfig
from anechoic.models.vit import ViTConfig
from anechoic.weights import converting
from anechoic.weights.checkpoint_metadata import Choices, Told, numbers
from anechoic.weights.layouts import transformers_to_timm
from anechoic.weights.read_checkpoint import Checkpoint, read_checkpoint


@dataclass(frozen=True)
class Imported:
    """The network in evaluation mode, what the file was, names of the file that need no place in the network, and what
    neither the file nor the user said."""

    network: Network
    kind: str
    preprocess: Preprocess
    left_out: list[str] = field(default_factory=list)
    wrapper: str | None = None
    assumed: dict[str, Any] = field(default_factory=dict)


def import_checkpoint(path: Path, choices: Choices) -> Imported:
    checkpoint = read_checkpoint(path)
    tensors = checkpoint.tensors
    if any(name.startswith(("vit.embeddings.", "embeddings.")) for name in tensors):
        tensors = transformers_to_timm(tensors)
    kind, convert = recognize(tensors)
    told = Told.by(checkpoint, choices)
    config, renamed, left_out = convert(tensors, told)
    told.refuse_unasked(kind)
    preprocess = _preprocess(config, checkpoint)
    # Shapes are compared before memory is taken for what a damaged file may claim.
    with torch.device("meta"):
        check_fit(build(config), renamed)
    network = build(config)
    load(network, renamed)
    return Imported(network.eval(), kind, preprocess, left_out, checkpoint.wrapper, told.assumed)


def recognize(tensors: Mapping[str, Tensor]) -> tuple[str, converting.Converter]:
    """The kind of checkpoint by the names that only it has, and how to convert it."""
    converting.refuse_relatives(tensors)
    if "x_embedder.proj.weight" in tensors:
        return ("decayed SiT" if "enc_blocks.0.attn.qkv.weight" in tensors else "SiT"), converting.sit
    if "mid_block.attn.qkv.weight" in tensors and "patch_embed.proj.weight" in tensors:
        return "U-ViT", converting.uvit
    if "decoder_embed.weight" in tensors and "cls_token" in tensors:
        return ("decayed MAE" if "decoder_cls_token" in tensors else "MAE"), converting.mae
    if "cls_token" in tensors and "blocks.0.attn.qkv.weight" in tensors:
        return "ViT", converting.vit
    raise UserError(
        f"This checkpoint is of no known architecture: it has the names {', '.join(sorted(tensors)[:4])}, ...; known "
        f"are MAE, SiT, their decayed versions, U-ViT, and ViT (timm, transformers)."
    )


def _preprocess(config: NetworkConfig, checkpoint: Checkpoint) -> Preprocess:
    """Mean and std of the folder's processor, else the usual: ImageNet's for color images of encoders, -1 .. 1 for
    images of diffusion networks, none for latents."""
    channels = config.in_channels
    usual: tuple[Sequence[float], Sequence[float]] = ((0.0,) * channels, (1.0,) * channels)
    if channels == 3 and isinstance(config, ViTConfig | MAEConfig):
        usual = IMAGENET_MEAN, IMAGENET_STD
    elif channels in (1, 3) and not isinstance(config, ViTConfig | MAEConfig):
        usual = (0.5,) * channels, (0.5,) * channels
    found = {}
    for name, default in zip(("mean", "std"), usual, strict=True):
        timm = checkpoint.settings.get("pretrained_cfg")
        said = checkpoint.processor.get(f"image_{name}") or (timm.get(name) if isinstance(timm, Mapping) else None)
        found[name] = list(numbers(name, said, channels) if said else default)
    return Preprocess.from_json({**found, "image_size": config.size[0], "channels": channels})


# ---- the fit


def check_fit(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Say precisely what of the tensors does not fit the network. Marks are the network's own."""
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


@torch.no_grad()
def load(network: Network, tensors: Mapping[str, Tensor]) -> None:
    wanted = network.state_dict()
    marks = {name: value for name, value in wanted.items() if name.rpartition(".")[2] in MARKS}
    network.load_state_dict({**marks, **{name: value.to(wanted[name].dtype) for name, value in tensors.items()}})


def _some(names: Sequence[str], count: int = 6) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
