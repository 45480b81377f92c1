"""U-ViT: a noise predictor whose first and second half are joined by concatenating long skips.

Time and label enter as tokens. The decay runs over all blocks to the end of the second half. Schedules, losses and
samplers live elsewhere. (Section 5 of the paper; the architecture is that of Bao et al. 2023.)
Legend: B batch, N tokens, D width, C channels, p patch side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.models.layers import (
    Block,
    PatchEmbed,
    as_precise_as,
    block_norms,
    check_images,
    label_rows,
    labels_or_null,
    patchify,
    tapped,
    time_embedding,
    unpatchify,
    zero_branch_outputs,
)
from anechoic.models.network import Network, TransformerConfig
from anechoic.shortcut import Concatenate, Event, Read, Shortcut, Stream


@dataclass(frozen=True, kw_only=True)
class UViTConfig(TransformerConfig):
    """depth counts the blocks of both halves; a middle block comes on top. num_classes None is unconditional, otherwise
    the number of real classes; a null row follows them when label_dropout > 0."""

    image_size: int | tuple[int, int] = 32
    patch_size: int = 2
    norm_eps: float | tuple[float, ...] = 1e-5
    num_classes: int | None = None
    label_dropout: float = 0.0
    final_conv: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth % 2:
            raise UserError(f"U-ViT has two halves of equal depth: choose an even depth, not {self.depth}.")

    @property
    def num_blocks(self) -> int:
        return self.depth + 1


class OutBlock(Block):
    """A block of the second half: x = linear([x, skip]), then the usual block."""

    def __init__(
        self, dim: int, num_heads: int, *, mlp_ratio: float, shortcuts: Sequence[Shortcut], eps: Sequence[float]
    ):
        super().__init__(dim, num_heads, mlp_ratio=mlp_ratio, qkv_bias=False, shortcuts=shortcuts, eps=eps)
        self.skip_linear = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(as_precise_as(self.skip_linear(torch.cat([x, skip], dim=-1)), x))


class UViT(Network):
    """forward(x (B, C, H, W), t (B,), labels (B,) or None) -> x's shape."""

    config: UViTConfig
    in_blocks: Sequence[Block]
    out_blocks: Sequence[OutBlock]

    def __init__(self, config: UViTConfig) -> None:
        super().__init__(config)
        dim, half = config.dim, config.depth // 2
        self.patch_embed = PatchEmbed(config.in_channels, config.patch_size, dim)
        rows = label_rows(config.num_classes, config.label_dropout)
        self.label_embed = nn.Embedding(rows, dim) if rows else None
        self.num_prefix_tokens = 2 if rows else 1
        self.positions = nn.Parameter(
            torch.zeros(1, self.num_prefix_tokens + config.grid_size[0] * config.grid_size[1], dim)
        )

        shortcuts = config.make_shortcuts()
        eps = config.eps_per_norm(2 * config.num_blocks + 1)

        def block(i: int, kind: type[Block], **extra: Any) -> Block:
            pair = slice(2 * i, 2 * i + 2)
            return kind(
                dim, config.num_heads, mlp_ratio=config.mlp_ratio, shortcuts=shortcuts[pair], eps=eps[pair], **extra
            )

        self.in_blocks = nn.ModuleList(block(i, Block, qkv_bias=False) for i in range(half))  # type: ignore[assignment]
        self.mid_block = block(half, Block, qkv_bias=False)
        self.out_blocks = nn.ModuleList(block(half + 1 + i, OutBlock) for i in range(half))  # type: ignore[assignment]
        self.norm = nn.LayerNorm(dim, eps=eps[-1])
        self.predictor = nn.Linear(dim, config.patch_size**2 * config.in_channels)
        self.final_conv = nn.Conv2d(config.in_channels, config.in_channels, 3, padding=1) if config.final_conv else None
        self.mark(shortcuts)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Convolutions and the label table keep the framework's defaults, as in the reference implementation."""
        nn.init.trunc_normal_(self.positions, std=0.02)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        if self.config.zero_init:
            zero_branch_outputs(self.stream().events)

    @property
    def blocks(self) -> list[Block]:
        """Every block in execution order."""
        return [*self.in_blocks, self.mid_block, *self.out_blocks]

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        check_images(x, self.config.in_channels, self.config.size)
        x = self.embed_tokens(x, t, labels)
        taps = []
        for block in self.in_blocks:
            x = block(x)
            taps.append(x)
        x = self.mid_block(x)
        for out_block in self.out_blocks:
            x = out_block(x, taps.pop())
        patches = self.predictor(self.norm(x[:, self.num_prefix_tokens :]))
        image = unpatchify(patches, self.config.patch_size, self.config.grid_size)
        return image if self.final_conv is None else self.final_conv(image)

    def embed_tokens(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """-> stream (B, [label,] time, patches; D)"""
        patches = self.patch_embed(patchify(x, self.config.patch_size))
        tokens = [time_embedding(t, self.config.dim).to(patches.dtype)[:, None], patches]
        rows = labels_or_null(labels, x.shape[0], self.config.num_classes, self.config.label_dropout, x.device)
        if rows is not None:
            assert self.label_embed is not None
            tokens.insert(0, self.label_embed(rows)[:, None])
        return as_precise_as(torch.cat(tokens, dim=1) + self.positions, x)

    def norms(self) -> list[nn.LayerNorm]:
        return [*block_norms(self.blocks), self.norm]

    def stream(self) -> Stream:
        """The time token is a fixed sinusoid, so the stream starts as it is: its embeddings are not to be rescaled."""
        half = len(self.in_blocks)
        events: list[Event] = [*tapped(self.in_blocks), *self.mid_block.branches()]
        for i, block in enumerate(self.out_blocks):
            events += [Concatenate(block.skip_linear, f"block{half - 1 - i}"), *block.branches()]
        return Stream((*events, Read(norms=(self.norm,))), ends_raw=False)
