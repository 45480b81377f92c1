"""FSDP2: weights, gradients and optimizer state sharded over ranks, each with some rows of every tensor.

sharded_checkpoint.py saves them. FSDP2 is imported when used: that takes a second.
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
    """Shard the module in place: a block's weights are gathered while it computes, all others while the module does.

    All ranks must have the same weights. dtype: of gathered weights on a GPU (on a CPU a norm needs weights as precise
    as its input). Gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # The warning is about changing a block's output in place.
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
    library = sys.modules.get("torch.distributed.tensor")  # not imported: no such tensors
    return library is not None and isinstance(tensor, library.DTensor)


def local(tensor: Any) -> Tensor:
    """Return this rank's rows, in the same memory; all of an ordinary tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def full_tensor(tensor: Any) -> Tensor:
    """Return all rows on every rank; a collective call."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def distribute(value: Tensor, like: Any) -> Tensor:
    """Return a full value on the device of `like` and sharded as it is, without communication."""
    value = value.to(like.device)
    if not is_distributed(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def gather_to_rank_zero(world: World, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors unsharded on rank 0, nothing on other ranks; a collective call."""
    found = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor.detach())
        if world.is_rank_zero:
            found[name] = value
    return found
