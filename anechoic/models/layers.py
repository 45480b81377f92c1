"""Layers that the transformers share: patches, positions, time, attention, MLP and the block.

Not here: whole networks (one file each), their base (network.py) and the shortcut itself (anechoic/shortcut.py).
Legend: B batch, N tokens, D width, H heads, C channels, p patch side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anechoic.choices import Gelu
from anechoic.errors import UserError
from anechoic.models import fused
from anechoic.models.network import check_grid
from anechoic.rng import SampleGenerator
from anechoic.shortcut import Branch, Event, Read, Shortcut, Slot, Tap


def check_images(images: Tensor, in_channels: int, size: tuple[int, int] | None = None) -> None:
    """size: the only (height, width) the network takes, where its positions are learned."""
    if images.ndim != 4 or images.shape[1] != in_channels or (size and tuple(images.shape[2:]) != size):
        wanted = f"(batch, {in_channels}, {size[0] if size else 'height'}, {size[1] if size else 'width'})"
        raise UserError(
            f"Expected images of shape {wanted}, not {tuple(images.shape)}: convert them or rebuild the model."
        )


# ---- patches


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) -> (B, N, p*p*C), row-major patches, each ordered (row, column, channel)."""
    B, C, H, W = images.shape
    p = patch_size
    check_grid((H, W), p)
    x = images.reshape(B, C, H // p, p, W // p, p)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, (H // p) * (W // p), p * p * C)


def unpatchify(patches: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """(B, N, p*p*C) -> (B, C, H, W), the inverse of patchify."""
    B, _, width = patches.shape
    p, (h, w) = patch_size, grid
    x = patches.reshape(B, h, w, p, p, width // (p * p))
    return x.permute(0, 5, 1, 3, 2, 4).reshape(B, width // (p * p), h * p, w * p)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, N, D) by index (B, K) -> (B, K, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def as_precise_as(stream: Tensor, given: Tensor) -> Tensor:
    """The start of a residual stream, at least in the precision of what the network was given.

    Under autocast, or with rounded weights (fsdp.py), products are rounded; the sum of all branches is not.
    """
    wanted = torch.promote_types(stream.dtype, given.dtype)
    return stream if stream.dtype == wanted else stream.to(wanted)  # no cast in an exported graph


class PatchEmbed(nn.Module):
    """The linear map of a patch, its weight kept in a convolution's shape (D, C, p, p) as ViT checkpoints have it."""

    def __init__(self, in_channels: int, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, N, p*p*C) as patchify orders them -> (B, N, D)"""
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # (D, p*p*C)
        return F.linear(patches, weight, self.proj.bias)


# ---- positions and time


def sincos_positions(dim: int, grid: tuple[int, int]) -> Tensor:
    """(N, D) fixed positions: the first half of the width encodes the column, the second the row, each [sin, cos]."""
    if dim % 4:
        raise UserError(f"Sine-cosine positions need a width divisible by 4, not {dim}.")
    # In float64 on the CPU: not every GPU has float64, and all can take the rounded result.
    steps = torch.arange(max(dim // 4, *grid), dtype=torch.float64, device="cpu")
    frequencies = 10000.0 ** (-steps[: dim // 4] / (dim // 4))
    waves = steps[: max(grid), None] * frequencies
    along = torch.cat([waves.sin(), waves.cos()], dim=1).float()  # (places on a side, D/2)
    h, w = grid
    table = torch.cat([along[None, :w].expand(h, -1, -1), along[:h, None].expand(-1, w, -1)], dim=2)
    return table.view(h * w, dim).to(torch.get_default_device())


def time_embedding(t: Tensor, dim: int) -> Tensor:
    """(B,) -> (B, dim): cosines then sines of t at frequencies 10000^(-j / (dim/2))."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


# ---- labels


def label_rows(num_classes: int | None, label_dropout: float) -> int:
    """Return the rows of the label table: the classes, and a null row if labels are dropped; 0 if unconditional."""
    if num_classes is None:
        return 0
    if num_classes < 1 or not 0 <= label_dropout < 1:
        raise UserError(
            f"num_classes must be positive and label_dropout in [0, 1), not {num_classes} and {label_dropout}."
        )
    return num_classes + (label_dropout > 0)


def labels_or_null(
    labels: Tensor | None, batch: int, num_classes: int | None, label_dropout: float, device: torch.device
) -> Tensor | None:
    """Return the table rows (B,) to look up: the labels, or the null row for all; None if unconditional."""
    if num_classes is None:
        if labels is not None:
            raise UserError("This network is unconditional and takes no labels: build it with num_classes.")
        return None
    if labels is None and label_dropout == 0:
        raise UserError("This network was built without a null label (label_dropout=0): give labels.")
    return torch.full((batch,), num_classes, device=device) if labels is None else labels


# ---- blocks


class Attention(nn.Module):
    """Multi-head self-attention, scale head_dim^-0.5."""

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x (B, N, D) -> (B, N, D), or only the outputs at rows (B, M) -> (B, M, D), which still attend to all of x."""
        B, D = x.shape[0], x.shape[2]
        if rows is None:
            q, k, v = self.split(self.qkv(x), 3)
        else:
            weight, bias = self.qkv.weight, self.qkv.bias
            first, others = (None, None) if bias is None else (bias[:D], bias[D:])
            (q,) = self.split(F.linear(take(x, rows), weight[:D], first), 1)
            k, v = self.split(F.linear(x, weight[D:], others), 2)
        x = F.scaled_dot_product_attention(q, k, v)  # (B, H, N or M, D/H)
        return self.proj(x.transpose(1, 2).reshape(B, -1, D))

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, N, parts * D) -> parts of (B, H, N, D/H)"""
        B, N, width = x.shape
        heads = x.view(B, N, parts, self.num_heads, width // parts // self.num_heads)
        return heads.permute(2, 0, 3, 1, 4).unbind(0)


# Exact, or approximated by a tanh: the two that are in use differ by up to 5e-4.


class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, dim: int, hidden: int, *, gelu: Gelu = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate=gelu)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DropPath(nn.Module):
    """Drops a branch for whole samples with the given rate and rescales the rest, in training only.

    In training every sample has its own number, see `give_generator`; else they come from torch's generator.
    """

    uniform: Tensor | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, fx: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return fx
        uniform = torch.rand(len(fx), device=fx.device) if self.uniform is None else self.uniform
        keep = uniform.view(-1, *[1] * (fx.ndim - 1)) >= self.rate
        return fx * (keep.to(fx.dtype) / (1 - self.rate))


class PreNormBlock(nn.Module):
    """norm1, attention, norm2 and MLP, joined to the stream by two Shortcuts.

    recompute: store only the inputs for the backward pass and compute the rest again.
    """

    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    attn: Attention
    mlp: Mlp
    shortcut1: Shortcut
    shortcut2: Shortcut
    recompute = False

    def run(self, compute: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(compute, *inputs, use_reentrant=False)
        return compute(*inputs)

    def branches(self) -> list[Branch]:
        """A factor on a branch scales its last linear map; a gate behind that map stays as it is."""
        return [
            Branch(self.shortcut1, Read(norms=(self.norm1,)), self.attn.proj),
            Branch(self.shortcut2, Read(norms=(self.norm2,)), self.mlp.fc2),
        ]


class Block(PreNormBlock):
    """Pre-norm transformer block: attention, then MLP, each joined to the stream by a Shortcut.

    use_fused: use the fused functions where they apply.
    """

    use_fused = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        gelu: Gelu = "none",
        shortcuts: Sequence[Shortcut] | None = None,
        eps: Sequence[float] = (1e-6, 1e-6),
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps[0])
        self.attn = Attention(dim, num_heads, qkv_bias=qkv_bias)
        self.norm2 = nn.LayerNorm(dim, eps=eps[1])
        self.mlp = Mlp(dim, int(dim * mlp_ratio), gelu=gelu)
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)
        self.shortcut1, self.shortcut2 = shortcuts or (Shortcut(kind="attention"), Shortcut(kind="mlp"))

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x (B, N, D) -> (B, N, D); with rows (B, M) only those tokens are computed -> (B, M, D)."""
        return self.run(self.compute, x, rows)

    def compute(self, x: Tensor, rows: Tensor | None) -> Tensor:
        if self.use_fused and fused.covers(self, x):
            x = fused.attention_branch(x, rows, self.norm1, self.attn, self.shortcut1)
            return fused.mlp_branch(x, self.norm2, self.mlp, self.shortcut2)
        fx = self.drop_path1(self.attn(self.norm1(x), rows))
        x = self.shortcut1(x if rows is None else take(x, rows), fx)
        return self.shortcut2(x, self.drop_path2(self.mlp(self.norm2(x))))


def set_block_options(model: nn.Module, *, fused: bool = True, recompute: bool = False) -> None:
    """Set how all blocks of a model compute in training: fused or not, and with less memory at the cost of time."""
    for module in model.modules():
        if isinstance(module, PreNormBlock):
            module.recompute = recompute
        if isinstance(module, Block):
            module.use_fused = fused


def give_generator(model: nn.Module, generator: SampleGenerator) -> None:
    """Let the next forward drop branches by numbers that belong to the samples, whichever rank computes them."""
    dropping = [module for module in model.modules() if isinstance(module, DropPath) and module.rate > 0]
    if dropping:
        uniform = generator.uniform("drop-path", len(dropping))
        for i, module in enumerate(dropping):
            module.uniform = uniform[:, i]


def tapped(blocks: Iterable[Any]) -> list[Event]:
    """Return the branches of each block, and after it a tap named by its index."""
    return [event for i, block in enumerate(blocks) for event in (*block.branches(), Tap(f"block{i}"))]


def block_norms(blocks: Iterable[PreNormBlock]) -> list[nn.LayerNorm]:
    return [norm for block in blocks for norm in (block.norm1, block.norm2)]


def weight_and_bias(module: nn.Module) -> tuple[Slot, ...]:
    return tuple(Slot(module, name) for name, _ in module.named_parameters(recurse=False) if name in ("weight", "bias"))


@torch.no_grad()
def xavier_linears(module: nn.Module) -> None:
    """Set Xavier-uniform weights and zero biases in every linear layer below module; norms start at 1 and 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def zero_branch_outputs(events: Iterable[Event]) -> None:
    """Zero the last map of every branch, so that training starts at the decayed identity and norms grow slowly."""
    for event in events:
        if isinstance(event, Branch):
            for slot in weight_and_bias(event.writer):
                nn.init.zeros_(getattr(slot.owner, slot.name))
