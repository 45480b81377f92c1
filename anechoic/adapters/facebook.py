"""The authors' own checkpoint files: MAE, SiT and U-ViT as published, and the decayed MAE and SiT.

Their encoders name tensors as timm does. Which file it is, and whether the result fits, is decided in
weights/importing.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from anechoic.adapters.checkpoint_metadata import CheckpointMetadata
from anechoic.adapters.tensors import (
    Converted,
    Layout,
    Rules,
    Tensors,
    alpha_min,
    count_blocks,
    patches,
    positions,
    rename,
    require_sincos,
    shaped,
    transformer_sizes,
    width_of,
)
from anechoic.errors import UserError
from anechoic.models import SIT_SIZES, UVIT_SIZES, VIT_SIZES
from anechoic.models.mae import MAEConfig
from anechoic.models.sit import SiTConfig
from anechoic.models.uvit import UViTConfig

# What the authors of the decayed networks call alpha_min, and what they trained with.
AUTHORS_ALPHA = {"decayed MAE": ("min_decay", 0.6), "decayed SiT": ("min_sigma", 0.8)}
# Label tables of published checkpoints: rows -> classes. One row more than classes is the null label's.
PUBLISHED_CLASSES = {10: 10, 11: 10, 100: 100, 101: 100, 1000: 1000, 1001: 1000}

# The masked autoencoder, original and decayed: its encoder is a part of its own in our network.
MAE_TO_OURS: Rules = [
    (r"cls_token", "encoder.class_token"),
    (r"((?:patch_embed|blocks|norm)\..*)", r"encoder.\1"),
    (r"decoder_cls_token", "decoder_class_token"),
    (r"decoder_pred\.(.*)", r"predictor.\1"),
    (r"skip\.(\d+)\.fc\.0\.(.*)", r"skips.\1.fc1.\2"),
    (r"skip\.(\d+)\.fc\.2\.(.*)", r"skips.\1.fc2.\2"),
    (r"skip\.(\d+)\.mask_token", r"skips.\1.mask_token"),
]
UVIT_TO_OURS: Rules = [
    (r"pos_embed", "positions"),
    (r"label_emb\.weight", "label_embed.weight"),
    (r"decoder_pred\.(.*)", r"predictor.\1"),
    (r"final_layer\.(.*)", r"final_conv.\1"),
]
SIT_TO_OURS: Rules = [
    (r"x_embedder\.(.*)", r"patch_embed.\1"),
    (r"t_embedder\.mlp\.(.*)", r"time_embed.\1"),
    (r"y_embedder\.embedding_table\.weight", "label_embed.weight"),
    (r"(blocks\.\d+)\.adaLN_modulation\.1\.(.*)", r"\1.modulation.\2"),
    (r"final_layer\.adaLN_modulation\.1\.(.*)", r"modulation.\1"),
    (r"final_layer\.linear\.(.*)", r"predictor.\1"),
]


def recognize(tensors: Tensors) -> Layout | None:
    """Return the kind of checkpoint by the names that only it has."""
    if "x_embedder.proj.weight" in tensors:
        decayed = "enc_blocks.0.attn.qkv.weight" in tensors
        return Layout("decayed SiT" if decayed else "SiT", tensors, read_sit)
    if "mid_block.attn.qkv.weight" in tensors and "patch_embed.proj.weight" in tensors:
        return Layout("U-ViT", tensors, read_uvit)
    if "decoder_embed.weight" in tensors and "cls_token" in tensors:
        return Layout("decayed MAE" if "decoder_cls_token" in tensors else "MAE", tensors, read_mae)
    return None


def read_mae(tensors: Tensors, metadata: CheckpointMetadata) -> Converted:
    dim, depth = width_of(tensors, "cls_token"), count_blocks(tensors)
    decoder_dim = len(shaped(tensors, "decoder_embed.weight", 2))
    decoder_depth = count_blocks(tensors, "decoder_blocks")
    skips = "decoder_cls_token" in tensors
    if skips:
        check_skips(depth, decoder_depth)
    widths = {"pos_embed": dim, "decoder_pos_embed": decoder_dim}
    tables = {name: positions(tensors, name, width, num_prefix_tokens=1) for name, width in widths.items()}
    for name, table in tables.items():
        require_sincos(name, table, num_prefix_tokens=1, network="masked autoencoder")
    eps = metadata.eps(1e-6)
    config = MAEConfig(
        **patches(tensors, tables["pos_embed"].shape[1] - 1),
        **transformer_sizes(tensors, metadata, VIT_SIZES, dim=dim, depth=depth),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        gelu=metadata.gelu(),
        norm_eps=eps,
        decoder_norm_eps=eps,
        skips=skips,
        alpha_min=authors_alpha_min("decayed MAE", metadata) if skips else alpha_min("MAE", metadata),
        encoder_norm="norm.weight" in tensors,
        decoder_dim=decoder_dim,
        decoder_depth=decoder_depth,
        decoder_num_heads=metadata.value_or(16, "decoder_num_heads", int, "decoder_num_attention_heads"),
        mask_ratio=metadata.value_or(0.75, "mask_ratio", float, "mask_ratio"),
        norm_pix=metadata.value_or(True, "norm_pix", bool, "norm_pix_loss"),
    )
    used = {name: value for name, value in tensors.items() if name not in tables}
    return Converted(config, rename(used, MAE_TO_OURS), list(tables))


def check_skips(depth: int, decoder_depth: int) -> None:
    """The authors take a skip from every second block; ours spread them over the decoder there is."""
    if depth % 2:
        raise UserError(f"A decayed MAE takes a skip from every second encoder block, and this one has {depth} blocks.")
    if depth // 2 > decoder_depth:
        raise UserError(
            f"This decayed MAE has {depth // 2} skip layers and {decoder_depth} decoder blocks, so its shallowest "
            f"skips were never used; ours spreads {decoder_depth} over the encoder, which is another network."
        )


def read_sit(tensors: Tensors, metadata: CheckpointMetadata) -> Converted:
    decayed = "enc_blocks.0.attn.qkv.weight" in tensors
    dim = len(shaped(tensors, "x_embedder.proj.bias", 1))
    renamed = rename(joined_halves(tensors), SIT_TO_OURS)
    table = positions(renamed, "pos_embed", dim, num_prefix_tokens=0)
    require_sincos("pos_embed", table, num_prefix_tokens=0, network="SiT")
    del renamed["pos_embed"]
    num_classes, has_null = classes(renamed, metadata)
    config = SiTConfig(
        **patches(renamed, table.shape[1]),
        **transformer_sizes(renamed, metadata, SIT_SIZES, dim=dim, depth=count_blocks(renamed)),
        skips="skips.0.weight" in renamed,
        alpha_min=authors_alpha_min("decayed SiT", metadata) if decayed else alpha_min("SiT", metadata),
        num_classes=num_classes,
        label_dropout=0.1 if has_null else 0.0,
    )
    return Converted(config, renamed, ["pos_embed"])


def joined_halves(tensors: Mapping[str, Tensor]) -> Tensors:
    """Rename enc_blocks and dec_blocks, the latter with a skip each, to blocks and skips."""
    half = count_blocks(tensors, "enc_blocks")
    joined = {}
    for name, value in tensors.items():
        second = re.fullmatch(r"dec_blocks\.(\d+)\.(.*)", name)
        if second is None:
            joined[re.sub(r"^enc_blocks\.", "blocks.", name)] = value
        elif second[2].startswith("skip."):
            joined[f"skips.{second[1]}.{second[2].removeprefix('skip.')}"] = value
        else:
            joined[f"blocks.{int(second[1]) + half}.{second[2]}"] = value
    return joined


def read_uvit(tensors: Tensors, metadata: CheckpointMetadata) -> Converted:
    """U-ViT of Bao et al.: an embedded time through an MLP, or text, would be other networks than ours."""
    for name, what in (("time_embed.0.weight", "an MLP behind its time token"), ("context_embed.weight", "text")):
        if name in tensors:
            raise UserError(f"This U-ViT was trained with {what} ({name}), which ours does not have.")
    half, behind = count_blocks(tensors, "in_blocks"), count_blocks(tensors, "out_blocks")
    if half != behind:
        raise UserError(f"This U-ViT has {half} blocks before its middle one and {behind} behind it: it is incomplete.")
    renamed = rename(tensors, UVIT_TO_OURS)
    dim = len(shaped(tensors, "patch_embed.proj.bias", 1))
    num_classes, has_null = classes(renamed, metadata)
    prefix = 1 if num_classes is None else 2
    table = positions(tensors, "pos_embed", dim, num_prefix_tokens=prefix)
    config = UViTConfig(
        **patches(tensors, table.shape[1] - prefix),
        **transformer_sizes(tensors, metadata, UVIT_SIZES, dim=dim, depth=2 * half, first="in_blocks.0"),
        alpha_min=alpha_min("U-ViT", metadata),
        num_classes=num_classes,
        # The published huge models dropped a tenth of the labels, the large ones more.
        label_dropout=(0.1 if dim == UVIT_SIZES["huge"]["dim"] else 0.15) if has_null else 0.0,
        final_conv="final_conv.weight" in renamed,
    )
    return Converted(config, renamed, [])


def authors_alpha_min(kind: str, metadata: CheckpointMetadata) -> float:
    name, usual = AUTHORS_ALPHA[kind]
    found = metadata.value("alpha_min", float, name)
    if found is None:
        raise UserError(
            f"This {kind} file does not state the alpha_min it was trained with: pass --alpha-min (its authors' own is "
            f"{usual}), or give the training checkpoint, which has it as {name}."
        )
    return found


def classes(tensors: Mapping[str, Tensor], metadata: CheckpointMetadata) -> tuple[int | None, bool]:
    """Return (number of classes or None, whether a row of the table is the null label's)."""
    if "label_embed.weight" not in tensors:
        return None, False
    rows = len(shaped(tensors, "label_embed.weight", 2))
    number = metadata.value("num_classes", int, "num_classes")
    if number is None:
        number = metadata.assumed["num_classes"] = PUBLISHED_CLASSES.get(rows)
    if number is None:
        raise UserError(
            f"The label table has {rows} rows, and the file does not state whether one is the null label's: pass "
            f"--num-classes {rows - 1} if so, else --num-classes {rows}."
        )
    if rows - number not in (0, 1):
        raise UserError(f"The label table has {rows} rows, which is not {number} classes with or without a null label.")
    return number, rows == number + 1
