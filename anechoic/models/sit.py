"""SiT: a velocity predictor modulated by time and label (adaLN-zero), plain or with additive long skips and decay.

Paths, losses and samplers live elsewhere. (Architecture of Ma et al. 2024; the decayed variant follows the paper's
released code: halves without a middle block, x + linear(skip) before the attention of every block of the second half.)
Legend: B batch, N tokens, D width, C channels, p patch side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.models.layers import (
    Attention,
    Mlp,
    PatchEmbed,
    PreNormBlock,
    block_norms,
    check_images,
    label_rows,
    labels_or_null,
    patchify,
    sincos_positions,
    tapped,
    time_embedding,
    unpatchify,
    xavier_linears,
)
from anechoic.models.network import Network, TransformerConfig
from anechoic.shortcut import Add, Event, Read, Shortcut, Stream


@dataclass(frozen=True, kw_only=True)
class SiTConfig(TransformerConfig):
    """num_classes None is unconditional, otherwise the number of real classes; a null row follows them when
    label_dropout > 0. The gates start at zero, so zero_init is always true."""

    image_size: int | tuple[int, int] = 32
    in_channels: int = 4
    zero_init: bool | None = True
    patch_size: int = 2
    skips: bool = False
    num_classes: int | None = 1000
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skips and self.depth % 2:
            raise UserError(f"Skips join two halves of equal depth: choose an even depth, not {self.depth}.")
        if not self.zero_init:
            raise UserError("SiT's gates start at zero by design: leave zero_init at True.")


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (B, N, D) * (1 + scale (B, D)) + shift (B, D)"""
    return torch.addcmul(shift[:, None], x, 1 + scale[:, None])


class ModulatedBlock(PreNormBlock):
    """x = shortcut(x, gate * f(modulated norm of x)), attention then MLP; shifts, scales and gates come from c."""

    def __init__(
        self, dim: int, num_heads: int, *, mlp_ratio: float, shortcuts: Sequence[Shortcut], eps: Sequence[float]
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps[0], elementwise_affine=False)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=eps[1], elementwise_affine=False)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), gelu="tanh")
        self.modulation = nn.Linear(dim, 6 * dim)
        self.shortcut1, self.shortcut2 = shortcuts

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.run(self.compute, x, c)

    def compute(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).chunk(6, dim=1)
        x = self.shortcut1(x, gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1)))
        return self.shortcut2(x, gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2)))


class SiT(Network):
    """forward(x (B, C, H, W), t (B,), labels (B,) or None) -> x's shape."""

    config: SiTConfig
    positions: Tensor
    blocks: Sequence[ModulatedBlock]
    num_prefix_tokens = 0
    TIME_WIDTH = 256

    def __init__(self, config: SiTConfig) -> None:
        super().__init__(config)
        dim, depth = config.dim, config.depth
        self.patch_embed = PatchEmbed(config.in_channels, config.patch_size, dim)
        self.register_buffer("positions", sincos_positions(dim, config.grid_size)[None], persistent=False)
        self.time_embed = nn.Sequential(nn.Linear(self.TIME_WIDTH, dim), nn.SiLU(), nn.Linear(dim, dim))
        rows = label_rows(config.num_classes, config.label_dropout)
        self.label_embed = nn.Embedding(rows, dim) if rows else None

        shortcuts = config.make_shortcuts()
        eps = config.eps_per_norm(2 * depth + 1)
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            ModulatedBlock(
                dim,
                config.num_heads,
                mlp_ratio=config.mlp_ratio,
                shortcuts=shortcuts[2 * i : 2 * i + 2],
                eps=eps[2 * i : 2 * i + 2],
            )
            for i in range(depth)
        )
        self.skips = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth // 2 if config.skips else 0))
        self.norm = nn.LayerNorm(dim, eps=eps[-1], elementwise_affine=False)
        self.modulation = nn.Linear(dim, 2 * dim)
        # Twice the channels, as in released checkpoints: the second half was a variance once, and is not read.
        self.predictor = nn.Linear(dim, config.patch_size**2 * config.in_channels * 2)
        self.mark(shortcuts)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        xavier_linears(self)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.view(self.config.dim, -1))
        for name, parameter in self.named_parameters():
            if name == "patch_embed.proj.bias":
                nn.init.zeros_(parameter)
            if name in ("time_embed.0.weight", "time_embed.2.weight", "label_embed.weight"):
                nn.init.normal_(parameter, std=0.02)
        # Gates at zero make every block the (decayed) identity; a zero predictor makes the first output 0.
        for layer in (*(block.modulation for block in self.blocks), self.modulation, self.predictor):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        check_images(x, self.config.in_channels)
        p = self.config.patch_size
        grid = (x.shape[2] // p, x.shape[3] // p)
        positions = self.positions if grid == self.config.grid_size else sincos_positions(self.config.dim, grid).to(x)
        c = self.time_embed(time_embedding(t, self.TIME_WIDTH).to(x.dtype))
        rows = labels_or_null(labels, x.shape[0], self.config.num_classes, self.config.label_dropout, x.device)
        if rows is not None:
            assert self.label_embed is not None
            c = c + self.label_embed(rows)
        h = self.patch_embed(patchify(x, p)) + positions
        half = len(self.blocks) - len(self.skips)
        taps: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= half:
                h = h + self.skips[i - half](taps.pop())
            h = block(h, c)
            if i < len(self.skips):
                taps.append(h)
        shift, scale = self.modulation(F.silu(c)).chunk(2, dim=1)
        patches = self.predictor(modulate(self.norm(h), shift, scale))
        return unpatchify(patches, p, grid)[:, : self.config.in_channels]

    def norms(self) -> list[nn.LayerNorm]:
        return [*block_norms(self.blocks), self.norm]

    def stream(self) -> Stream:
        """A norm reads the end of the stream, so its start need not be rescaled."""
        half = len(self.blocks) - len(self.skips)
        events: list[Event] = tapped(self.blocks[:half])
        for i, (skip, block) in enumerate(zip(self.skips, self.blocks[half:], strict=True)):
            events += [Add(skip, f"block{len(self.skips) - 1 - i}"), *block.branches()]  # type: ignore[arg-type]
        return Stream((*events, Read(norms=(self.norm,))), ends_raw=False)
