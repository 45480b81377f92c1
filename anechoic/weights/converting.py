"""The config and the renamed tensors of each kind of checkpoint: sizes from shapes, the rest as told.

Which kind a file is, and whether the result fits, is decided in importing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from anechoic.errors import UserError
from anechoic.models import SIT_SIZES, UVIT_SIZES, VIT_SIZES
from anechoic.models.mae import MAEConfig
from anechoic.models.network import NetworkConfig
from anechoic.models.sit import SiTConfig
from anechoic.models.uvit import UViTConfig
from anechoic.models.vit import ViTConfig
from anechoic.weights.checkpoint_metadata import Told
from anechoic.weights.layouts import (
    MAE_TO_OURS,
    TIMM_TO_OURS,
    UVIT_TO_OURS,
    Tensors,
    count_blocks,
    is_sincos,
    rename,
    sit_to_ours,
    square_side,
)

# The config, the tensors under our names, and the names in the file that need no place in the network.
Converted = tuple[NetworkConfig, Tensors, list[str]]
Converter = Callable[[Tensors, Told], Converted]

# What the authors of the decayed networks call alpha_min, and what they trained with.
AUTHORS_ALPHA = {"decayed MAE": ("min_decay", 0.6), "decayed SiT": ("min_sigma", 0.8)}
# Label tables of published checkpoints: rows -> classes. One row more than classes is the null label's.
PUBLISHED_CLASSES = {10: 10, 11: 10, 100: 100, 101: 100, 1000: 1000, 1001: 1000}
DISTILLED, REGISTERS = "a distillation token, as DeiT's distilled models have", "register tokens"
# The last or first part of a tensor's name -> what it shows the network to have.
RELATIVES = {
    **dict.fromkeys(("dist_token", "distillation_token", "head_dist", "distillation_classifier"), DISTILLED),
    **dict.fromkeys(("reg_token", "reg_tokens", "register_tokens"), REGISTERS),
}


# ---- one converter a kind


def vit(tensors: Tensors, told: Told) -> Converted:
    dim, depth = width_of(tensors, "cls_token"), count_blocks(tensors)
    left_out = [name for name in tensors if name.startswith("pooler.")]
    kept = {name: value for name, value in tensors.items() if name not in left_out}
    table = positions(tensors, "pos_embed", dim, num_prefix_tokens=1)
    fixed = is_sincos(table, num_prefix_tokens=1)
    if fixed:
        left_out.append("pos_embed")
        del kept["pos_embed"]
    config = ViTConfig(
        **patches(tensors, table.shape[1] - 1),
        **sizes(tensors, told, VIT_SIZES, dim=dim, depth=depth),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        gelu=told.gelu(),
        alpha_min=alpha_min("ViT", told),
        norm_eps=told.eps(1e-6),
        positions="sincos" if fixed else "learned",
        norm="norm.weight" in tensors,
        num_classes=len(shaped(tensors, "head.weight", 2)) if "head.weight" in tensors else 0,
        pool="mean" if "fc_norm.weight" in tensors else "class",
    )
    return config, rename(kept, TIMM_TO_OURS), left_out


def mae(tensors: Tensors, told: Told) -> Converted:
    dim, depth = width_of(tensors, "cls_token"), count_blocks(tensors)
    decoder_dim = len(shaped(tensors, "decoder_embed.weight", 2))
    decoder_depth = count_blocks(tensors, "decoder_blocks")
    skips = "decoder_cls_token" in tensors
    if skips:
        check_skips(depth, decoder_depth)
    left_out = ["pos_embed", "decoder_pos_embed"]
    tables = [
        positions(tensors, name, width, num_prefix_tokens=1)
        for name, width in zip(left_out, (dim, decoder_dim), strict=True)
    ]
    for name, table in zip(left_out, tables, strict=True):
        if not is_sincos(table, num_prefix_tokens=1):
            raise UserError(
                f"The {name} of this masked autoencoder is not the fixed sine-cosine table, which ours needs."
            )
    eps = told.eps(1e-6)
    config = MAEConfig(
        **patches(tensors, tables[0].shape[1] - 1),
        **sizes(tensors, told, VIT_SIZES, dim=dim, depth=depth),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        gelu=told.gelu(),
        norm_eps=eps,
        decoder_norm_eps=eps,
        skips=skips,
        alpha_min=alpha_min("decayed MAE" if skips else "MAE", told),
        encoder_norm="norm.weight" in tensors,
        decoder_dim=decoder_dim,
        decoder_depth=decoder_depth,
        decoder_num_heads=told.answer_or(16, "decoder_num_heads", int, "decoder_num_attention_heads"),
        mask_ratio=told.answer_or(0.75, "mask_ratio", float, "mask_ratio"),
        norm_pix=told.answer_or(True, "norm_pix", bool, "norm_pix_loss"),
    )
    kept = {name: value for name, value in tensors.items() if name not in left_out}
    return config, rename(kept, MAE_TO_OURS), left_out


def sit(tensors: Tensors, told: Told) -> Converted:
    decayed = "enc_blocks.0.attn.qkv.weight" in tensors
    dim = len(shaped(tensors, "x_embedder.proj.bias", 1))
    renamed = sit_to_ours(tensors)
    table = positions(renamed, "pos_embed", dim, num_prefix_tokens=0)
    if not is_sincos(table, num_prefix_tokens=0):
        raise UserError("The pos_embed of this SiT is not the fixed sine-cosine table, which ours needs.")
    del renamed["pos_embed"]
    num_classes, has_null = classes(renamed, "label_embed.weight", told)
    config = SiTConfig(
        **patches(renamed, table.shape[1]),
        **sizes(renamed, told, SIT_SIZES, dim=dim, depth=count_blocks(renamed)),
        skips="skips.0.weight" in renamed,
        alpha_min=alpha_min("decayed SiT" if decayed else "SiT", told),
        num_classes=num_classes,
        label_dropout=0.1 if has_null else 0.0,
    )
    return config, renamed, ["pos_embed"]


def uvit(tensors: Tensors, told: Told) -> Converted:
    """U-ViT of Bao et al.: an embedded time through an MLP, or text, would be other networks than ours."""
    for name, what in (("time_embed.0.weight", "an MLP behind its time token"), ("context_embed.weight", "text")):
        if name in tensors:
            raise UserError(f"This U-ViT was trained with {what} ({name}), which ours does not have.")
    half, behind = count_blocks(tensors, "in_blocks"), count_blocks(tensors, "out_blocks")
    if half != behind:
        raise UserError(f"This U-ViT has {half} blocks before its middle one and {behind} behind it: it is incomplete.")
    renamed = rename(tensors, UVIT_TO_OURS)
    dim = len(shaped(tensors, "patch_embed.proj.bias", 1))
    num_classes, has_null = classes(renamed, "label_embed.weight", told)
    prefix = 1 if num_classes is None else 2
    table = positions(tensors, "pos_embed", dim, num_prefix_tokens=prefix)
    config = UViTConfig(
        **patches(tensors, table.shape[1] - prefix),
        **sizes(tensors, told, UVIT_SIZES, dim=dim, depth=2 * half, first="in_blocks.0"),
        alpha_min=alpha_min("U-ViT", told),
        num_classes=num_classes,
        # The published huge models dropped a tenth of the labels, the large ones more.
        label_dropout=(0.1 if dim == UVIT_SIZES["huge"]["dim"] else 0.15) if has_null else 0.0,
        final_conv="final_conv.weight" in renamed,
    )
    return config, renamed, []


# ---- what is told and what only looks right


def alpha_min(kind: str, told: Told) -> float:
    """The decay: 1 for plain networks, and for the authors' what their file or the user says."""
    if kind in AUTHORS_ALPHA:
        name, usual = AUTHORS_ALPHA[kind]
        found = told.answer("alpha_min", float, name)
        if found is None:
            raise UserError(
                f"This {kind} file does not say with which alpha_min it was trained: pass --alpha-min (its authors' "
                f"own is {usual}), or give the training checkpoint, which keeps it as {name}."
            )
        return found
    in_file = told.file(float, "min_decay", "min_sigma")
    if in_file is not None and in_file[1] != 1:
        raise UserError(
            f"The file says {in_file[0]} = {in_file[1]}, but its tensors are those of a plain {kind}: which network it "
            f"is cannot be told."
        )
    found = told.answer("alpha_min", float)
    if found not in (None, 1):
        raise UserError(
            f"This {kind} was trained with plain shortcuts: import it without --alpha-min, then convert it with "
            f"anechoic.decay(model, {found}, preserve=True)."
        )
    return 1.0


def classes(tensors: Mapping[str, Tensor], name: str, told: Told) -> tuple[int | None, bool]:
    """(number of classes or None, whether a row of the table is the null label's)"""
    if name not in tensors:
        return None, False
    rows = len(shaped(tensors, name, 2))
    number = told.answer("num_classes", int, "num_classes")
    if number is None:
        number = told.assumed["num_classes"] = PUBLISHED_CLASSES.get(rows)
    if number is None:
        raise UserError(
            f"The label table has {rows} rows, and the file does not say whether one is the null label's: pass "
            f"--num-classes {rows - 1} if so, else --num-classes {rows}."
        )
    if rows - number not in (0, 1):
        raise UserError(f"The label table has {rows} rows, which is not {number} classes with or without a null label.")
    return number, rows == number + 1


def refuse_relatives(tensors: Mapping[str, Tensor]) -> None:
    """Networks with parts that ours have not, named for what they are."""
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


def check_skips(depth: int, decoder_depth: int) -> None:
    """The authors take a skip from every second block; ours spread them over the decoder there is."""
    if depth % 2:
        raise UserError(f"A decayed MAE takes a skip from every second encoder block, and this one has {depth} blocks.")
    if depth // 2 > decoder_depth:
        raise UserError(
            f"This decayed MAE has {depth // 2} skip layers and {decoder_depth} decoder blocks, so its shallowest "
            f"skips were never used; ours spreads {decoder_depth} over the encoder, which is another network."
        )


# ---- sizes from shapes


def shaped(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    """The tensor of this name, if it is there with so many dimensions and is not empty."""
    if name not in tensors:
        raise UserError(f"The checkpoint is incomplete: {name} is missing.")
    if tensors[name].ndim != ndim or tensors[name].numel() == 0:
        raise UserError(f"The checkpoint is damaged: {name} has the shape {tuple(tensors[name].shape)}.")
    return tensors[name]


def width_of(tensors: Mapping[str, Tensor], token: str) -> int:
    return shaped(tensors, token, 3).shape[-1]


def positions(tensors: Mapping[str, Tensor], name: str, dim: int, *, num_prefix_tokens: int) -> Tensor:
    if name not in tensors or tensors[name].ndim != 3:
        raise UserError(f"This checkpoint has no table {name} of shape (1, tokens, width).")
    table = shaped(tensors, name, 3)
    if table.shape[0] != 1 or table.shape[1] <= num_prefix_tokens or table.shape[2] != dim:
        raise UserError(
            f"The table {name} has the shape {tuple(table.shape)}, which does not go with a width of {dim}."
        )
    return table


def patches(tensors: Mapping[str, Tensor], count: int) -> dict[str, Any]:
    name = "patch_embed.proj.weight" if "patch_embed.proj.weight" in tensors else "x_embedder.proj.weight"
    _, in_channels, patch_size, width = shaped(tensors, name, 4).shape
    if patch_size != width:
        raise UserError(f"The patches of this checkpoint are {patch_size} x {width}, and ours are square.")
    return {"in_channels": in_channels, "patch_size": patch_size, "image_size": square_side(count) * patch_size}


def sizes(
    tensors: Mapping[str, Tensor],
    told: Told,
    published: Mapping[str, Any],
    *,
    dim: int,
    depth: int,
    first: str = "blocks.0",
) -> dict[str, Any]:
    """Width, depth, heads and the MLP's ratio. Heads: as told, else of the published size, else of width 64."""
    hidden = len(shaped(tensors, f"{first}.mlp.fc1.weight", 2))
    heads = told.answer("num_heads", int, "num_attention_heads", "model_args.num_heads")
    if heads is None:
        same = [size["num_heads"] for size in published.values() if (size["dim"], size["depth"]) == (dim, depth)]
        if not same and dim % 64:
            raise UserError(f"A width of {dim} and depth of {depth} is no published size: pass --num-heads.")
        told.assumed["num_heads"] = heads = same[0] if same else dim // 64
    return {"dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": hidden / dim}
