"""How other programs name the tensors of a network, translated to our names and back.

The layout of timm is also that of the original MAE, so it stands in the middle: transformers <-> timm <-> ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anechoic.errors import UserError
from anechoic.models.layers import sincos_positions

Tensors = dict[str, Tensor]
Rules = Sequence[tuple[str, str]]


def rename(tensors: Mapping[str, Tensor], rules: Rules) -> Tensors:
    """Every name rewritten by the first rule (pattern, replacement) that matches all of it."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    renamed = {}
    for name, value in tensors.items():
        match = next(((found, new) for pattern, new in compiled if (found := pattern.fullmatch(name))), None)
        renamed[name if match is None else match[0].expand(match[1])] = value
    return renamed


# ---- ours <-> timm

TIMM_TO_OURS: Rules = [
    (r"cls_token", "class_token"),
    (r"pos_embed", "positions"),
    (r"fc_norm\.(.*)", r"head_norm.\1"),
]
OURS_TO_TIMM: Rules = [
    (r"class_token", "cls_token"),
    (r"positions", "pos_embed"),
    (r"head_norm\.(.*)", r"fc_norm.\1"),
]
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


def sit_to_ours(tensors: Mapping[str, Tensor]) -> Tensors:
    """SiT, original (blocks) and decayed (enc_blocks, dec_blocks with a skip each)."""
    half = count_blocks(tensors, "enc_blocks")
    halves = {}
    for name, value in tensors.items():
        second = re.fullmatch(r"dec_blocks\.(\d+)\.(.*)", name)
        if second is None:
            halves[re.sub(r"^enc_blocks\.", "blocks.", name)] = value
        elif second[2].startswith("skip."):
            halves[f"skips.{second[1]}.{second[2].removeprefix('skip.')}"] = value
        else:
            halves[f"blocks.{int(second[1]) + half}.{second[2]}"] = value
    return rename(
        halves,
        [
            (r"x_embedder\.(.*)", r"patch_embed.\1"),
            (r"t_embedder\.mlp\.(.*)", r"time_embed.\1"),
            (r"y_embedder\.embedding_table\.weight", "label_embed.weight"),
            (r"(blocks\.\d+)\.adaLN_modulation\.1\.(.*)", r"\1.modulation.\2"),
            (r"final_layer\.adaLN_modulation\.1\.(.*)", r"modulation.\1"),
            (r"final_layer\.linear\.(.*)", r"predictor.\1"),
        ],
    )


# ---- transformers <-> timm

# Names inside a layer: of files, of the modules of version 5, and of timm.
IN_LAYER = [
    ("layernorm_before", "layernorm_before", "norm1"),
    ("layernorm_after", "layernorm_after", "norm2"),
    ("attention.output.dense", "attention.o_proj", "attn.proj"),
    ("intermediate.dense", "mlp.fc1", "mlp.fc1"),
    ("output.dense", "mlp.fc2", "mlp.fc2"),
]
QKV = [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")]


def transformers_to_timm(tensors: Mapping[str, Tensor]) -> Tensors:
    """ViT and ViTMAE as their files name them, or as the modules of transformers 5 do. Poolers have no counterpart."""
    rules: list[tuple[str, str]] = [
        (r"(?:vit\.)?embeddings\.cls_token", "cls_token"),
        (r"(?:vit\.)?embeddings\.position_embeddings", "pos_embed"),
        (r"(?:vit\.)?embeddings\.patch_embeddings\.projection\.(.*)", r"patch_embed.proj.\1"),
        (r"(?:vit\.)?layernorm\.(.*)", r"norm.\1"),
        (r"classifier\.(.*)", r"head.\1"),
        (r"decoder\.(mask_token|decoder_(?:pos_embed|embed|norm|pred).*)", r"\1"),
    ]
    # decoder_encoder.layer is what version 5 writes for the decoder's layers.
    places = [
        (r"(?:vit\.)?(?:encoder\.layer|layers)", "blocks"),
        (r"decoder\.(?:decoder_layers|decoder_encoder\.layer)", "decoder_blocks"),
    ]
    for place, blocks in places:
        for in_file, in_module, ours in IN_LAYER:
            names = f"(?:{re.escape(in_file)}|{re.escape(in_module)})"
            rules.append((rf"{place}\.(\d+)\.{names}\.(weight|bias)", rf"{blocks}.\1.{ours}.\2"))
        for i, (in_file, in_module) in enumerate(QKV):
            names = f"(?:attention\\.{in_file}|{in_module})"
            rules.append((rf"{place}\.(\d+)\.attention\.{names}\.(weight|bias)", rf"{blocks}.\1.attn.qkv.{i}.\2"))
    return _join_qkv(rename(tensors, rules))


def _join_qkv(tensors: Mapping[str, Tensor]) -> Tensors:
    """attn.qkv.{0,1,2}.weight -> attn.qkv.weight (3 D, D), where all three are there."""
    joined = dict(tensors)
    for name in tensors:
        found = re.fullmatch(r"(.*\.attn\.qkv)\.0\.(weight|bias)", name)
        parts = [f"{found[1]}.{i}.{found[2]}" for i in range(3)] if found else []
        if found and all(part in joined for part in parts):
            joined[f"{found[1]}.{found[2]}"] = torch.cat([joined.pop(part) for part in parts])
    return joined


def timm_to_transformers(tensors: Mapping[str, Tensor]) -> Tensors:
    """A timm ViT as the files of transformers name it; with a head it is ViTForImageClassification, else ViTModel."""
    split = {}
    for name, value in tensors.items():
        found = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name)
        if found is None:
            split[name] = value
            continue
        for (in_file, _), part in zip(QKV, value.chunk(3), strict=True):
            split[f"encoder.layer.{found[1]}.attention.attention.{in_file}.{found[2]}"] = part
    prefix = "vit." if "head.weight" in tensors else ""
    rules: list[tuple[str, str]] = [
        (r"cls_token", f"{prefix}embeddings.cls_token"),
        (r"pos_embed", f"{prefix}embeddings.position_embeddings"),
        (r"patch_embed\.proj\.(.*)", rf"{prefix}embeddings.patch_embeddings.projection.\1"),
        (r"norm\.(.*)", rf"{prefix}layernorm.\1"),
        (r"head\.(.*)", r"classifier.\1"),
        (r"(encoder\.layer\..*)", rf"{prefix}\1"),
    ]
    for in_file, _, ours in IN_LAYER:
        rules.append((rf"blocks\.(\d+)\.{re.escape(ours)}\.(.*)", rf"{prefix}encoder.layer.\1.{in_file}.\2"))
    return rename(split, rules)


def transformers_module(timm_name: str, *, prefix: str) -> str:
    """The module of transformers 5 that corresponds to a norm of timm's ViT."""
    rules = [
        (r"blocks\.(\d+)\.norm1", r"layers.\1.layernorm_before"),
        (r"blocks\.(\d+)\.norm2", r"layers.\1.layernorm_after"),
        (r"norm", "layernorm"),
    ]
    for pattern, replacement in rules:
        if re.fullmatch(pattern, timm_name):
            return prefix + re.sub(pattern, replacement, timm_name)
    raise AssertionError(f"{timm_name} is no norm of a ViT")


# ---- what tensors tell


def count_blocks(tensors: Mapping[str, Tensor], prefix: str = "blocks") -> int:
    """How many blocks there are; they are numbered from 0 without a gap."""
    found = {int(match[1]) for name in tensors if (match := re.match(rf"{prefix}\.(\d{{1,9}})\.", name))}
    absent = next((i for i in range(len(found)) if i not in found), None)
    if absent is not None:
        raise UserError(
            f"The checkpoint is incomplete: {prefix}.{absent} is missing, and {prefix}.{max(found)} is there."
        )
    return len(found)


def square_side(count: int) -> int:
    """The side of a square grid of this many patches."""
    side = round(count**0.5)
    if side * side != count:
        raise UserError(
            f"{count} positions make no square grid of patches: the image size cannot be told from this file."
        )
    return side


def is_sincos(positions: Tensor, *, num_prefix_tokens: int) -> bool:
    """Whether a table (1, prefix + N, D) is the fixed sine-cosine one, with zeros for the tokens before the patches."""
    table = positions[0].float()
    side = square_side(len(table) - num_prefix_tokens)
    if table.shape[1] % 4:
        return False
    expected = sincos_positions(table.shape[1], (side, side))
    prefix, patches = table[:num_prefix_tokens], table[num_prefix_tokens:]
    return bool(torch.allclose(patches, expected, atol=1e-4) and (prefix == 0).all())
