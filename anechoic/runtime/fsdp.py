"""Weights, gradients and optimizer shared out over processes by FSDP2: each holds some rows of every tensor.

It wraps a module, and says of a tensor what this process holds of it and what all hold together. How such tensors are
kept on disk is parts.py's. FSDP2 is imported when it is used: that takes a second.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.models.layers import Block
from anechoic.models.sit import ModulatedBlock
from anechoic.runtime.distributed import World

BLOCKS = (Block, ModulatedBlock)


def shard(world: World, module: nn.Module, *, dtype: torch.dtype) -> nn.Module:
    """The module, in place: a block's weights are whole only while it computes, all others while the module does.

    All processes must have the same weights. dtype: in which weights travel and meet activations, on accelerators (on
    processors a norm wants weights as precise as its input); gradients are summed in float32, and what else is computed
    in which precision is autocast's business.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # It warns of what nobody does here: changing a block's output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh(world.device.type, (world.size,))
    rounded = dtype != torch.float32 and world.device.type != "cpu"
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if rounded else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in [part for part in module.modules() if isinstance(part, BLOCKS)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def is_distributed(tensor: Tensor) -> bool:
    library = sys.modules.get("torch.distributed.tensor")  # where nobody imported it there are none
    return library is not None and isinstance(tensor, library.DTensor)


def local(tensor: Any) -> Tensor:
    """What this process holds: its rows, in the same memory, or all of an ordinary tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def full_tensor(tensor: Any) -> Tensor:
    """All rows, in every process; all must ask at the same time."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def distribute(value: Tensor, like: Any) -> Tensor:
    """A whole value kept as `like` is: on its device, and shared out if that is, without any message."""
    value = value.to(like.device)
    if not is_distributed(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def gather_to_rank_zero(world: World, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of them whole in the first process, one after the other; nothing in the others."""
    found = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor.detach())
        if world.is_rank_zero:
            found[name] = value
    return found
