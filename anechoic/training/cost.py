"""What a training costs before it is started: parameters, memory by part, operations, hours and what bounds them.

Nothing is measured and nothing is allocated. The network runs once forwards and backwards on tensors without content,
which tells every operation, its size and what is kept for the backward pass; the rest is arithmetic with the numbers of
a device's data sheet. Each operation takes as long as its products or its bytes need, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from anechoic.config import Config
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.mae import MaskedAutoencoder
from anechoic.models.sit import SiT
from anechoic.models.uvit import UViT
from anechoic.training.build import model_options

GB = 1e9


@dataclass(frozen=True)
class Device:
    """Of a data sheet: dense products in 10^12 a second, memory in GB, GB a second to memory and to peers."""

    bfloat16: float
    float32: float
    memory: float
    bandwidth: float
    link: float


DEVICES = {
    "t4": Device(65.0, 8.1, 16, 320, 12),
    "v100": Device(125.0, 15.7, 32, 900, 150),
    "a10": Device(125.0, 31.2, 24, 600, 25),
    "a40": Device(149.7, 37.4, 48, 696, 25),
    "a100": Device(312.0, 19.5, 80, 2039, 300),
    "l40s": Device(362.0, 91.6, 48, 864, 25),
    "rtx4090": Device(165.2, 82.6, 24, 1008, 25),
    "h100": Device(989.0, 67.0, 80, 3350, 450),
    "h200": Device(989.0, 67.0, 141, 4800, 450),
}
# What kernels reach of the data sheet: large products and copies are rarely faster. Memory keeps a part for itself.
PRODUCTS_REACH, BYTES_REACH, MEMORY_REACH = 0.7, 0.8, 0.92
# Views and allocations: they move nothing.
FREE = {
    *("view", "reshape", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "chunk", "detach", "alias", "unbind", "as_strided", "lift_fresh", "empty"),
    *("empty_like", "new_empty", "empty_strided", "narrow", "_reshape_alias", "unfold", "diagonal", "movedim"),
}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


# ---- one pass without content


@dataclass
class Pass:
    """Of a forward and backward pass: products, seconds' worth of products and bytes by dtype, and bytes kept."""

    flops: float = 0.0
    # (products, bytes, whether they are in bfloat16) of every operation
    operations: list[tuple[float, float, bool]] = field(default_factory=list)
    kept: float = 0.0
    kept_in_blocks: list[float] = field(default_factory=list)
    block_inputs: float = 0.0


class Recorder(TorchDispatchMode):
    """Notes the products and bytes of every operation."""

    def __init__(self, found: Pass) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in FREE:
            return out
        tensors = [value for value in flat((args, kwargs or {}, out)) if isinstance(value, Tensor)]
        size = sum(value.numel() * value.element_size() for value in tensors)
        flops = float(products(func, name, args, kwargs or {}, out))
        self.found.flops += flops
        low = any(value.dtype == torch.bfloat16 for value in tensors)
        self.found.operations.append((flops, size, low))
        return out


def flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from flat(item)
    else:
        yield tree


def products(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    """Multiply-adds count as two. Attention: q k^T and its product with v; backwards five products of that size."""
    if name.startswith(ATTENTION):
        backwards = name.endswith("backward")
        q, k = (args[1], args[2]) if backwards else (args[0], args[1])
        one = 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
        return (5 if backwards else 2) * one
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


@contextmanager
def keeping(found: Pass, model: nn.Module) -> Iterator[None]:
    """Notes the bytes that wait for the backward pass, parameters apart, and which of them belong to each block."""
    parameters = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # tensors stay referenced, so that no storage's number is used twice

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in kept:
            kept[storage._cdata] = value
            found.kept += storage.nbytes()
        return value

    starts: list[float] = []

    def before(module: nn.Module, inputs: tuple) -> None:
        starts.append(found.kept)
        found.block_inputs += sum(x.numel() * x.element_size() for x in inputs if isinstance(x, Tensor))

    def after(module: nn.Module, inputs: tuple, output: Any) -> None:
        found.kept_in_blocks.append(found.kept - starts.pop())

    handles = [
        handle
        for block in blocks_of(model)
        for handle in (block.register_forward_pre_hook(before), block.register_forward_hook(after))
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield
    for handle in handles:
        handle.remove()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that can be recomputed or sharded one by one."""
    from anechoic.models.layers import Block
    from anechoic.models.sit import ModulatedBlock

    return [module for module in model.modules() if isinstance(module, Block | ModulatedBlock)]


def loss_of(model: Any, batch: int) -> Tensor:
    config = model.config
    images = torch.randn(batch, config.in_channels, *config.size)
    if isinstance(model, MaskedAutoencoder):
        return model(images).loss
    if isinstance(model, UViT | SiT):
        labels = None if config.num_classes is None else torch.zeros(batch, dtype=torch.long)
        return model(images, torch.rand(batch), labels).float().square().mean()
    return model(images).float().mean()


class Passes(NamedTuple):
    """Passes of SMALL and of twice as many samples, which give what grows with the batch and what does not (weights in
    another precision, for example); the parameters of all and of the largest block."""

    small: Pass
    double: Pass
    parameters: int
    largest_block: int
    low: bool

    def kept(self, batch: int, *, recompute: bool) -> float:
        """Bytes that wait for the backward pass. Recomputing keeps the blocks' inputs, and one block's inside."""
        small, double = self.small, self.double
        kept = grown(small.kept, double.kept, batch)
        if recompute and small.kept_in_blocks:
            kept -= grown(sum(small.kept_in_blocks), sum(double.kept_in_blocks), batch)
            kept += grown(max(small.kept_in_blocks), max(double.kept_in_blocks), batch)
            kept += grown(small.block_inputs, double.block_inputs, batch)
        return kept

    @property
    def flops_per_sample(self) -> float:
        return (self.double.flops - self.small.flops) / SMALL


# One sample is a special case to some operations.
SMALL = 2


def grown(one: float, two: float, batch: int) -> float:
    """What is `one` for SMALL samples and `two` for twice as many, for a batch."""
    return one + (two - one) * (batch - SMALL) / SMALL


def passes_of(config: Config) -> Passes:
    from anechoic.models import model_config

    low = (config.precision or "bfloat16") == "bfloat16"
    with torch.device("meta"):
        model: Any = build(model_config(config.model.name, **model_options(config)))
    found = Pass(), Pass()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        # The first pass also makes what is made once, so it does not count.
        for batch, one in ((SMALL, Pass()), (SMALL, found[0]), (2 * SMALL, found[1])):
            with torch.autocast("cpu", torch.bfloat16, enabled=low), Recorder(one):
                with keeping(one, model):
                    loss = loss_of(model, batch)
                loss.backward()
            model.zero_grad(set_to_none=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks_of(model)), default=count)
    return Passes(*found, count, largest, low)


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """Bytes are for one device; seconds for one update; products for the whole run."""

    parameters: int
    memory: dict[str, float]
    batch_per_device: int
    fits: bool
    samples: int
    flops_per_sample: float
    flops: float
    seconds: dict[str, float]
    hours: float
    bound: str
    use_of_peak: float


COMPUTE = ("products", "bytes", "optimizer")


def plan(
    config: Config,
    passes: Passes,
    *,
    gpus: int,
    device: Device,
    samples: int,
    fsdp: bool = False,
    images_per_second: float | None = None,
) -> Plan:
    """images_per_second: what all processes that decode can deliver together, if they may be the slowest."""
    batch, rest = divmod(config.optim.batch_size, gpus * config.optim.accumulate)
    if rest or not batch:
        raise UserError(
            f"A batch of {config.optim.batch_size} in {config.optim.accumulate} parts cannot be shared by {gpus} "
            f"devices: choose another number of them."
        )
    memory = memory_by_part(config, passes, batch, gpus=gpus, fsdp=fsdp)
    seconds = seconds_by_part(config, passes, batch, device, gpus=gpus, fsdp=fsdp)
    if images_per_second is not None:
        seconds["decoding images"] = config.optim.batch_size / images_per_second
    slowest = {"computing": sum(seconds[name] for name in COMPUTE)}
    slowest |= {name: value for name, value in seconds.items() if name not in COMPUTE}
    bound = max(slowest, key=slowest.__getitem__)
    update = slowest[bound]
    if bound == "computing":
        bound = max(COMPUTE, key=seconds.__getitem__)
    peak = (device.bfloat16 if passes.low else device.float32) * 1e12
    return Plan(
        parameters=passes.parameters,
        memory=memory,
        batch_per_device=batch,
        fits=fits(memory, device),
        samples=samples,
        flops_per_sample=passes.flops_per_sample,
        flops=passes.flops_per_sample * samples,
        seconds=seconds,
        hours=update * samples / config.optim.batch_size / 3600,
        bound=bound,
        use_of_peak=passes.flops_per_sample * config.optim.batch_size / gpus / update / peak,
    )


def fits(memory: Mapping[str, float], device: Device) -> bool:
    return sum(memory.values()) < MEMORY_REACH * device.memory * GB


def memory_by_part(config: Config, passes: Passes, batch: int, *, gpus: int, fsdp: bool) -> dict[str, float]:
    """Bytes on one device. Weights, gradients and AdamW's two moments are float32 whatever the products are in."""
    share = passes.parameters / gpus if fsdp else passes.parameters
    parts = {
        "weights": 4.0 * share,
        "gradients": 4.0 * share,
        "optimizer": 8.0 * share,
        "activations": passes.kept(batch, recompute=config.recompute),
        "images": 4.0 * batch * config.data.channels * config.data.image_size**2,
    }
    if config.optim.ema:
        parts["averaged weights"] = 4.0 * share
    if fsdp:
        # The block at work and the one fetched ahead are whole.
        parts["gathered blocks"] = 2.0 * passes.largest_block * (2 if passes.low else 4)
    return parts


def seconds_by_part(
    config: Config, passes: Passes, batch: int, device: Device, *, gpus: int, fsdp: bool
) -> dict[str, float]:
    """Of one update: operations that their products hold up, operations that their bytes do, the optimizer, peers."""
    found = {"products": 0.0, "bytes": 0.0}
    for one, two in zip(passes.small.operations, passes.double.operations, strict=True):
        flops, size = (grown(one[k], two[k], batch) for k in (0, 1))
        by_products = flops / ((device.bfloat16 if one[2] else device.float32) * 1e12 * PRODUCTS_REACH)
        by_bytes = size / (device.bandwidth * 1e9 * BYTES_REACH)
        found["products" if by_products > by_bytes else "bytes"] += max(by_products, by_bytes)
    # Recomputing adds a forward pass to the three that forward and backward cost.
    times = config.optim.accumulate * (4 / 3 if config.recompute else 1)
    seconds = {name: value * times for name, value in found.items()}
    # AdamW reads weight, gradient and two moments, and writes all but the gradient; averages are read and written too.
    touched = (28.0 + (12.0 if config.optim.ema else 0.0)) * passes.parameters / (gpus if fsdp else 1)
    seconds["optimizer"] = touched / (device.bandwidth * 1e9 * BYTES_REACH)
    # Every gradient passes each link twice; sharded, weights are gathered twice besides. It overlaps with computing.
    exchanged = (4.0 + 4.0 * fsdp) * passes.parameters * 2 * (gpus - 1) / gpus
    seconds["exchange between devices"] = exchanged / (device.link * 1e9 * BYTES_REACH)
    return seconds


def parts_needed(config: Config, passes: Passes, *, gpus: int, device: Device, fsdp: bool) -> int | None:
    """The smallest number of accumulated parts with which the batch fits; None if there is none."""
    each, rest = divmod(config.optim.batch_size, gpus)
    if rest:
        return None
    for parts in (count for count in range(1, each + 1) if each % count == 0):
        if fits(memory_by_part(config, passes, each // parts, gpus=gpus, fsdp=fsdp), device):
            return parts
    return None
