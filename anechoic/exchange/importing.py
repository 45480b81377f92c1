"""Other people's checkpoints as our networks: which network it is, its config from the shapes, and a strict fit.

Known are the original MAE, the authors' decayed MAE, SiT and decayed SiT, and ViTs of timm and transformers. Reading
files is in reading.py, names are in layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.errors import UserError
from anechoic.exchange.layouts import (
    MAE_TO_OURS,
    TIMM_TO_OURS,
    Tensors,
    count_blocks,
    is_sincos,
    rename,
    sit_to_ours,
    square_side,
    transformers_to_timm,
)
from anechoic.exchange.reading import Checkpoint, read_checkpoint
from anechoic.models import SIT_SIZES, VIT_SIZES, build
from anechoic.models.layers import Network, NetworkConfig
from anechoic.models.mae import MAEConfig
from anechoic.models.preprocess import Preprocess
from anechoic.models.sit import SiTConfig
from anechoic.models.vit import ViTConfig


@dataclass(frozen=True)
class Choices:
    """What a checkpoint does not tell: the decay it was trained with, and heads, which leave no trace in shapes."""

    alpha_min: float | None = None
    num_heads: int | None = None
    decoder_num_heads: int | None = None


@dataclass(frozen=True)
class Imported:
    """The network in evaluation mode, what the file was, and names of the file that need no place in the network."""

    network: Network
    kind: str
    preprocess: Preprocess
    left_out: list[str] = field(default_factory=list)
    wrapper: str | None = None


def import_checkpoint(path: Path, choices: Choices) -> Imported:
    checkpoint = read_checkpoint(path)
    tensors = checkpoint.tensors
    if any(name.startswith(("vit.embeddings.", "embeddings.")) for name in tensors):
        tensors = transformers_to_timm(tensors)
    kind, convert = recognise(tensors)
    _check_alpha(kind, choices)
    config, renamed, left_out = convert(tensors, checkpoint.settings, choices)
    network = build(config)
    marks = {name: value for name, value in network.state_dict().items() if name.endswith(("alphas", "betas"))}
    fit(network, {**renamed, **marks})
    return Imported(network.eval(), kind, _preprocess(config, checkpoint), left_out, checkpoint.wrapper)


# ---- which network


Converted = tuple[NetworkConfig, Tensors, list[str]]


def recognise(tensors: Mapping[str, Tensor]) -> tuple[str, Callable[..., Converted]]:
    """The kind of checkpoint by the names that only it has, and how to convert it."""
    if "x_embedder.proj.weight" in tensors:
        return ("decayed SiT" if "enc_blocks.0.attn.qkv.weight" in tensors else "SiT"), _sit
    if "decoder_embed.weight" in tensors and "cls_token" in tensors:
        return ("decayed MAE" if "decoder_cls_token" in tensors else "MAE"), _mae
    if "cls_token" in tensors and "blocks.0.attn.qkv.weight" in tensors:
        return "ViT", _vit
    raise UserError(
        f"This checkpoint is of no known architecture: it has the names {', '.join(sorted(tensors)[:4])}, ...; known "
        f"are MAE, SiT, their decayed versions, and ViT (timm, transformers)."
    )


def _check_alpha(kind: str, choices: Choices) -> None:
    decayed = kind.startswith("decayed")
    if decayed and choices.alpha_min is None:
        raise UserError(
            f"A {kind} file does not say with which alpha_min it was trained: pass --alpha-min (0.6 in the paper)."
        )
    if not decayed and choices.alpha_min not in (None, 1.0):
        raise UserError(
            f"This {kind} was trained with plain shortcuts: import it without --alpha-min, then convert it with "
            f"anechoic.decay(model, {choices.alpha_min}, preserve=True)."
        )


# ---- configs from shapes


def _vit(tensors: Tensors, settings: Mapping[str, Any], choices: Choices) -> Converted:
    dim, depth = tensors["cls_token"].shape[-1], count_blocks(tensors)
    left_out = [name for name in tensors if name.startswith("pooler.")]
    kept = {name: value for name, value in tensors.items() if name not in left_out}
    fixed = is_sincos(_table(kept, "pos_embed"), num_prefix_tokens=1)
    if fixed:
        left_out.append("pos_embed")
        del kept["pos_embed"]
    config = ViTConfig(
        **_patches(tensors, "patch_embed.proj.weight", tensors["pos_embed"].shape[1] - 1),
        **_blocks(tensors, dim=dim, depth=depth, num_heads=_heads(choices.num_heads, settings, dim, depth, VIT_SIZES)),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        norm_eps=settings.get("layer_norm_eps", 1e-6),
        positions="sincos" if fixed else "learned",
        norm="norm.weight" in tensors,
        num_classes=len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        pool="mean" if "fc_norm.weight" in tensors else "class",
    )
    return config, rename(kept, TIMM_TO_OURS), left_out


def _mae(tensors: Tensors, settings: Mapping[str, Any], choices: Choices) -> Converted:
    dim, depth = tensors["cls_token"].shape[-1], count_blocks(tensors)
    skips = "decoder_cls_token" in tensors
    left_out = ["pos_embed", "decoder_pos_embed"]
    for name in left_out:
        if not is_sincos(_table(tensors, name), num_prefix_tokens=1):
            raise UserError(
                f"The {name} of this masked autoencoder is not the fixed sine-cosine table, which ours needs."
            )
    decoder_dim = tensors["decoder_embed.weight"].shape[0]
    eps = settings.get("layer_norm_eps", 1e-6)
    config = MAEConfig(
        **_patches(tensors, "patch_embed.proj.weight", tensors["pos_embed"].shape[1] - 1),
        **_blocks(tensors, dim=dim, depth=depth, num_heads=_heads(choices.num_heads, settings, dim, depth, VIT_SIZES)),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        norm_eps=eps,
        decoder_norm_eps=eps,
        skips=skips,
        alpha_min=choices.alpha_min or 1.0,
        encoder_norm="norm.weight" in tensors,
        decoder_dim=decoder_dim,
        decoder_depth=count_blocks(tensors, "decoder_blocks"),
        decoder_num_heads=choices.decoder_num_heads or settings.get("decoder_num_attention_heads") or 16,
        mask_ratio=settings.get("mask_ratio", 0.75),
        norm_pix=settings.get("norm_pix_loss", True),
    )
    kept = {name: value for name, value in tensors.items() if name not in left_out}
    return config, rename(kept, MAE_TO_OURS), left_out


def _sit(tensors: Tensors, settings: Mapping[str, Any], choices: Choices) -> Converted:
    dim = len(tensors["x_embedder.proj.bias"])
    renamed = sit_to_ours(tensors)
    depth = count_blocks(renamed)
    if not is_sincos(_table(renamed, "pos_embed"), num_prefix_tokens=0):
        raise UserError("The pos_embed of this SiT is not the fixed sine-cosine table, which ours needs.")
    rows = len(renamed["label_embed.weight"]) if "label_embed.weight" in renamed else 0
    config = SiTConfig(
        **_patches(renamed, "patch_embed.proj.weight", renamed.pop("pos_embed").shape[1]),
        **_blocks(renamed, dim=dim, depth=depth, num_heads=_heads(choices.num_heads, settings, dim, depth, SIT_SIZES)),
        skips="skips.0.weight" in renamed,
        alpha_min=choices.alpha_min or 1.0,
        # SiT is trained with dropped labels, so the last row is the null label.
        num_classes=rows - 1 if rows else None,
        label_dropout=0.1,
    )
    return config, renamed, ["pos_embed"]


def _table(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors or tensors[name].ndim != 3:
        raise UserError(f"This checkpoint has no table {name} of shape (1, tokens, width).")
    return tensors[name]


def _patches(tensors: Mapping[str, Tensor], name: str, count: int) -> dict[str, Any]:
    _, in_channels, patch_size, _ = tensors[name].shape
    return {"in_channels": in_channels, "patch_size": patch_size, "image_size": square_side(count) * patch_size}


def _blocks(tensors: Mapping[str, Tensor], *, dim: int, depth: int, num_heads: int) -> dict[str, Any]:
    hidden = len(tensors["blocks.0.mlp.fc1.weight"])
    return {"dim": dim, "depth": depth, "num_heads": num_heads, "mlp_ratio": hidden / dim}


def _heads(given: int | None, settings: Mapping[str, Any], dim: int, depth: int, sizes: Mapping[str, Any]) -> int:
    """As asked for or as the folder's config says, else as in the published size, else heads of width 64."""
    told = given or settings.get("num_attention_heads") or settings.get("model_args", {}).get("num_heads")
    published = [size["num_heads"] for size in sizes.values() if (size["dim"], size["depth"]) == (dim, depth)]
    if told or published:
        return int(told or published[0])
    if dim % 64:
        raise UserError(f"A width of {dim} and depth of {depth} is no published size: pass --num-heads.")
    return dim // 64


def _preprocess(config: NetworkConfig, checkpoint: Checkpoint) -> Preprocess:
    """Mean and std of the folder's processor, else ImageNet's for colour images, else none (latents)."""
    processor, timm = checkpoint.processor, checkpoint.settings.get("pretrained_cfg", {})
    colour = config.in_channels == 3
    channels = config.in_channels
    mean = processor.get("image_mean") or timm.get("mean") or (IMAGENET_MEAN if colour else (0.0,) * channels)
    std = processor.get("image_std") or timm.get("std") or (IMAGENET_STD if colour else (1.0,) * channels)
    return Preprocess.from_json({"mean": mean, "std": std, "image_size": config.size[0], "channels": channels})


# ---- the fit


def fit(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Load all of the tensors into all of the network, or say precisely what does not fit."""
    wanted = network.state_dict()
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
    with torch.no_grad():
        network.load_state_dict({name: value.to(wanted[name].dtype) for name, value in tensors.items()})


def _some(names: Sequence[str], count: int = 6) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
