"""Estimate what a training costs: parameters, memory by part, FLOPs, and seconds on a GPU of a data sheet.

`forward_flops` and `step_flops` count the matrix products of the plain algorithm, so that work an implementation avoids
shows as speed. `passes_of` and `plan` run the network once forward and backward on fake tensors, which shows every
operation, its size and what the backward pass needs; each operation then takes as long as its products or its bytes
need, whichever is longer. A multiply-add counts as two FLOPs. timing.py times updates on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from anechoic.config import Config
from anechoic.errors import UserError
from anechoic.models import build, family_of, model_config
from anechoic.models.mae import MAEConfig, MaskedAutoencoder, skip_sources
from anechoic.models.network import NetworkConfig
from anechoic.models.sit import SiT
from anechoic.models.uvit import UViT
from anechoic.runtime.fsdp import BLOCKS
from anechoic.training.build import model_options
from anechoic.training.optim import is_body_matrix

GB = 1e9


# ---- FLOPs of the plain algorithm


def training_flops(config: Config) -> float:
    """Return the FLOPs of the whole training: three times the forward pass of every sample."""
    return 3.0 * forward_flops(model_config(config.model.name, **model_options(config))) * (config.optim.samples or 0)


def forward_flops(config: NetworkConfig) -> float:
    """Return the FLOPs of one image through a network of ours."""
    return mae_flops(config)[0] if isinstance(config, MAEConfig) else counted_flops(config)


@cache
def counted_flops(config: NetworkConfig) -> float:
    """Return what torch counts while the network runs on the meta device."""
    with torch.device("meta"):
        model = build(config).train()
        conditions = [torch.zeros(1)] if family_of(config) in ("uvit", "sit") else []
        if conditions and vars(config)["num_classes"] is not None:
            conditions.append(torch.zeros(1, dtype=torch.long))
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.zeros(1, config.in_channels, *config.size), *conditions)
    return float(counter.get_total_flops())


def mae_flops(config: MAEConfig) -> tuple[float, float]:
    """Return the FLOPs of one image through a masked autoencoder: (all, those of the patch embedding).

    All patches are embedded, the encoder sees the class token and the visible ones, the decoder sees and predicts all.
    """
    patches = config.grid_size[0] * config.grid_size[1]
    pixels = config.patch_size**2 * config.in_channels
    seen, tokens = 1 + config.num_kept, 1 + patches
    embedding = 2.0 * patches * pixels * config.dim
    encoder = config.depth * block_flops(seen, config.dim, config.mlp_ratio)
    decoder = config.decoder_depth * block_flops(tokens, config.decoder_dim, config.mlp_ratio)
    width = config.decoder_dim
    if config.skips:
        joins = 2.0 * tokens * width * width
        joins += len(skip_sources(config.depth, config.decoder_depth)) * skip_flops(tokens, config.dim, width)
    else:
        joins = 2.0 * seen * config.dim * width
    return embedding + encoder + joins + decoder + 2.0 * tokens * width * pixels, embedding


def block_flops(tokens: int, dim: int, mlp_ratio: float) -> float:
    """Return the FLOPs of queries, keys, values and projection, the MLP, and the two products of attention."""
    hidden = int(dim * mlp_ratio)
    return 2.0 * tokens * dim * (4 * dim + 2 * hidden) + 4.0 * tokens * tokens * dim


def skip_flops(tokens: int, encoder_dim: int, dim: int) -> float:
    """Return the FLOPs of a skip layer's MLP on the concatenation of encoder tokens and decoder tokens."""
    return 2.0 * tokens * dim * (encoder_dim + dim + dim)


def step_flops(config: MAEConfig, batch: int) -> float:
    """Return the FLOPs forward and backward: two products backward for each, but no gradient of the pixels."""
    forward, embedding = mae_flops(config)
    return batch * (3 * forward - embedding)


# ---- GPUs


@dataclass(frozen=True)
class Device:
    """Data sheet: dense TFLOP/s by precision, memory in GB, GB/s to memory and to other GPUs."""

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
# Share of the data sheet that large products and copies reach, and of the memory that is usable.
PRODUCTS_REACH, BYTES_REACH, MEMORY_REACH = 0.7, 0.8, 0.92
# Views and allocations move no bytes.
FREE = {
    *("view", "reshape", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "chunk", "detach", "alias", "unbind", "as_strided", "lift_fresh", "empty"),
    *("empty_like", "new_empty", "empty_strided", "narrow", "_reshape_alias", "unfold", "diagonal", "movedim"),
}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


# ---- one pass on fake tensors


@dataclass
class Pass:
    """A forward and backward pass: FLOPs, operations, and bytes saved for the backward pass."""

    flops: float = 0.0
    # (FLOPs, bytes, whether in bfloat16) of every operation
    operations: list[tuple[float, float, bool]] = field(default_factory=list)
    kept: float = 0.0
    kept_in_blocks: list[float] = field(default_factory=list)
    block_inputs: float = 0.0


class Recorder(TorchDispatchMode):
    """Record FLOPs and bytes of every operation."""

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
    """Return the FLOPs of an operation. Attention: two products, backward five of the same size."""
    if name.startswith(ATTENTION):
        backwards = name.endswith("backward")
        q, k = (args[1], args[2]) if backwards else (args[0], args[1])
        one = 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
        return (5 if backwards else 2) * one
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


@contextmanager
def keeping(found: Pass, model: nn.Module) -> Iterator[None]:
    """Record the bytes saved for the backward pass, without parameters, and which of them belong to each block."""
    parameters = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # references keep storage addresses unique

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
    """Return the blocks that can be recomputed or sharded one by one."""
    return [module for module in model.modules() if isinstance(module, BLOCKS)]


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
    """Passes of SMALL and of twice as many samples, whose difference is what grows with the batch.

    parameters: of the whole network; body: of the matrices that Muon updates; low: whether in bfloat16.
    """

    small: Pass
    double: Pass
    parameters: int
    body: int
    largest_block: int
    low: bool

    def kept(self, batch: int, *, recompute: bool) -> float:
        """Return the bytes saved for the backward pass. Recomputing saves the blocks' inputs and one block's inside."""
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


# Some operations treat a single sample as a special case.
SMALL = 2


def grown(one: float, two: float, batch: int) -> float:
    """Extrapolate what is `one` for SMALL samples and `two` for twice as many to a batch."""
    return one + (two - one) * (batch - SMALL) / SMALL


def passes_of(config: Config) -> Passes:
    low = (config.precision or "bfloat16") == "bfloat16"
    with torch.device("meta"):
        model: Any = build(model_config(config.model.name, **model_options(config)))
    found = Pass(), Pass()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        # The first pass also builds cached tensors, so it does not count.
        for batch, one in ((SMALL, Pass()), (SMALL, found[0]), (2 * SMALL, found[1])):
            with torch.autocast("cpu", torch.bfloat16, enabled=low), Recorder(one):
                with keeping(one, model):
                    loss = loss_of(model, batch)
                loss.backward()
            model.zero_grad(set_to_none=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    body = sum(value.numel() for name, value in model.named_parameters() if is_body_matrix(name, value))
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks_of(model)), default=count)
    return Passes(*found, count, body, largest, low)


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """Bytes are for one GPU, seconds for one update, flops for the whole run."""

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
    """Estimate a training on `gpus` devices. images_per_second: what all data workers together decode, if limited."""
    batch, rest = divmod(config.optim.batch_size, gpus * config.optim.accumulate)
    if rest or not batch:
        raise UserError(
            f"A batch of {config.optim.batch_size} in {config.optim.accumulate} micro-batches cannot be shared by "
            f"{gpus} devices: choose another number of devices."
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


def optimizer_bytes(config: Config, passes: Passes) -> float:
    """Return the bytes of float32 optimizer state: two moments for AdamW, one momentum for Muon's matrices."""
    single = passes.body if config.optim.algorithm == "muon" else 0
    return 8.0 * (passes.parameters - single) + 4.0 * single


def memory_by_part(config: Config, passes: Passes, batch: int, *, gpus: int, fsdp: bool) -> dict[str, float]:
    """Return the bytes on one GPU. Weights, gradients, optimizer state and EMA are float32 in every precision."""
    shards = gpus if fsdp else 1
    weights = 4.0 * passes.parameters / shards
    parts = {
        "weights": weights,
        "gradients": weights,
        "optimizer": optimizer_bytes(config, passes) / shards,
        "activations": passes.kept(batch, recompute=config.recompute),
        "images": 4.0 * batch * config.data.channels * config.data.image_size**2,
    }
    if config.optim.ema:
        parts["EMA"] = weights
    if fsdp:
        # The current block and the prefetched one are unsharded.
        parts["gathered blocks"] = 2.0 * passes.largest_block * (2 if passes.low else 4)
    return parts


def seconds_by_part(
    config: Config, passes: Passes, batch: int, device: Device, *, gpus: int, fsdp: bool
) -> dict[str, float]:
    """Return the seconds of one update: compute-bound and memory-bound operations, the optimizer, communication."""
    found = {"products": 0.0, "bytes": 0.0}
    for one, two in zip(passes.small.operations, passes.double.operations, strict=True):
        flops, size = (grown(one[k], two[k], batch) for k in (0, 1))
        by_products = flops / ((device.bfloat16 if one[2] else device.float32) * 1e12 * PRODUCTS_REACH)
        by_bytes = size / (device.bandwidth * 1e9 * BYTES_REACH)
        found["products" if by_products > by_bytes else "bytes"] += max(by_products, by_bytes)
    # Recomputing adds a forward pass to the three that forward and backward cost.
    times = config.optim.accumulate * (4 / 3 if config.recompute else 1)
    seconds = {name: value * times for name, value in found.items()}
    # Weights and state are read and written, gradients read; the EMA reads the weights and is read and written.
    touched = (12.0 + (12.0 if config.optim.ema else 0.0)) * passes.parameters + 2 * optimizer_bytes(config, passes)
    seconds["optimizer"] = touched / (gpus if fsdp else 1) / (device.bandwidth * 1e9 * BYTES_REACH)
    # Every gradient passes each link twice; with FSDP weights are gathered twice besides. It overlaps with computing.
    exchanged = (4.0 + 4.0 * fsdp) * passes.parameters * 2 * (gpus - 1) / gpus
    seconds["exchange between devices"] = exchanged / (device.link * 1e9 * BYTES_REACH)
    return seconds


def parts_needed(config: Config, passes: Passes, *, gpus: int, device: Device, fsdp: bool) -> int | None:
    """Return the smallest number of micro-batches with which the batch fits; None if there is none."""
    each, rest = divmod(config.optim.batch_size, gpus)
    if rest:
        return None
    for parts in (count for count in range(1, each + 1) if each % count == 0):
        if fits(memory_by_part(config, passes, each // parts, gpus=gpus, fsdp=fsdp), device):
            return parts
    return None
