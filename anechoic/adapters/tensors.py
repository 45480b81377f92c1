"""What reading and writing the tensors of every foreign layout have in common: renaming, and sizes from shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anechoic.adapters.checkpoint_metadata import CheckpointMetadata
from anechoic.errors import UserError
from anechoic.models.layers import sincos_positions
from anechoic.models.network import NetworkConfig

Tensors = dict[str, Tensor]
Rules = Sequence[tuple[str, str]]
# Images -> tokens or logits, of a folder that its library opened.
Run = Callable[[Tensor], Tensor]
# In an exported folder: the library's name of each norm -> its eps, which the library's config cannot hold.
EPS_FILE = "norm_eps.json"


class Converted(NamedTuple):
    """unused: names in the file that have no counterpart in the network."""

    config: NetworkConfig
    tensors: Tensors
    unused: list[str]


class Layout(NamedTuple):
    """The kind of a checkpoint, its tensors under the names that `convert` reads, and the converter."""

    kind: str
    tensors: Tensors
    convert: Callable[[Tensors, CheckpointMetadata], Converted]


def rename(tensors: Mapping[str, Tensor], rules: Rules) -> Tensors:
    """Rewrite every name by the first rule (pattern, replacement) that matches all of it."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    renamed = {}
    for name, value in tensors.items():
        match = next(((found, new) for pattern, new in compiled if (found := pattern.fullmatch(name))), None)
        renamed[name if match is None else match[0].expand(match[1])] = value
    return renamed


# ---- sizes from shapes


def count_blocks(tensors: Mapping[str, Tensor], prefix: str = "blocks") -> int:
    """Return the number of blocks; they are numbered from 0 without a gap."""
    found = {int(match[1]) for name in tensors if (match := re.match(rf"{prefix}\.(\d{{1,9}})\.", name))}
    absent = next((i for i in range(len(found)) if i not in found), None)
    if absent is not None:
        raise UserError(
            f"The checkpoint is incomplete: {prefix}.{absent} is missing, and {prefix}.{max(found)} is there."
        )
    return len(found)


def shaped(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    """Return the tensor of this name, which must be there with this number of dimensions and not empty."""
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
        raise UserError(f"The table {name} has the shape {tuple(table.shape)}, which does not fit a width of {dim}.")
    return table


def square_side(count: int) -> int:
    """Return the side of a square grid of this many patches."""
    side = round(count**0.5)
    if side * side != count:
        raise UserError(f"{count} positions make no square grid of patches: this file does not fix the image size.")
    return side


def is_sincos(positions: Tensor, *, num_prefix_tokens: int) -> bool:
    """Return whether a table (1, prefix + N, D) is the fixed sine-cosine one, with zeros for the prefix tokens."""
    table = positions[0].float()
    side = square_side(len(table) - num_prefix_tokens)
    if table.shape[1] % 4:
        return False
    expected = sincos_positions(table.shape[1], (side, side))
    prefix, patches = table[:num_prefix_tokens], table[num_prefix_tokens:]
    return bool(torch.allclose(patches, expected, atol=1e-4) and (prefix == 0).all())


def require_sincos(name: str, table: Tensor, *, num_prefix_tokens: int, network: str) -> None:
    if not is_sincos(table, num_prefix_tokens=num_prefix_tokens):
        raise UserError(f"The {name} of this {network} is not the fixed sine-cosine table, which ours needs.")


def patches(tensors: Mapping[str, Tensor], count: int) -> dict[str, Any]:
    name = "patch_embed.proj.weight" if "patch_embed.proj.weight" in tensors else "x_embedder.proj.weight"
    _, in_channels, patch_size, width = shaped(tensors, name, 4).shape
    if patch_size != width:
        raise UserError(f"The patches of this checkpoint are {patch_size} x {width}, and ours are square.")
    return {"in_channels": in_channels, "patch_size": patch_size, "image_size": square_side(count) * patch_size}


def transformer_sizes(
    tensors: Mapping[str, Tensor],
    metadata: CheckpointMetadata,
    published: Mapping[str, Any],
    *,
    dim: int,
    depth: int,
    first: str = "blocks.0",
) -> dict[str, Any]:
    """Return width, depth, heads and the MLP's ratio. Heads: as stated, or of the published size, or of width 64."""
    hidden = len(shaped(tensors, f"{first}.mlp.fc1.weight", 2))
    heads = metadata.value("num_heads", int, "num_attention_heads", "model_args.num_heads")
    if heads is None:
        same = [size["num_heads"] for size in published.values() if (size["dim"], size["depth"]) == (dim, depth)]
        if not same and dim % 64:
            raise UserError(f"A width of {dim} and depth of {depth} is no published size: pass --num-heads.")
        metadata.assumed["num_heads"] = heads = same[0] if same else dim // 64
    return {"dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": hidden / dim}


def alpha_min(kind: str, metadata: CheckpointMetadata) -> float:
    """Return 1 for a layout of plain shortcuts, and refuse statements of another decay."""
    in_file = metadata.in_file(float, "min_decay", "min_sigma")
    if in_file is not None and in_file[1] != 1:
        raise UserError(
            f"The file has {in_file[0]} = {in_file[1]}, but its tensors are those of a plain {kind}: which network it "
            f"is remains unclear."
        )
    found = metadata.value("alpha_min", float)
    if found not in (None, 1):
        raise UserError(
            f"This {kind} was trained with plain shortcuts: import it without --alpha-min, then convert it with "
            f"anechoic.decay(model, {found}, preserve=True)."
        )
    return 1.0
