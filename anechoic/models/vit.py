"""The vision transformer: patches and a class token through pre-norm blocks, with decayed or plain shortcuts.

It is the encoder of the masked autoencoder and, with a head, a classifier; the decoder lives in mae.py.
Legend: B batch, N patches, K kept patches, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.choices import HeadPooling, Positions
from anechoic.models.layers import (
    Block,
    Gelu,
    PatchEmbed,
    as_precise_as,
    block_norms,
    check_images,
    patchify,
    sincos_positions,
    take,
    tapped,
    weight_and_bias,
    xavier_linears,
    zero_branch_outputs,
)
from anechoic.models.network import Network, NetworkConfig, TransformerConfig
from anechoic.shortcut import Read, Slot, Stream, Write


@dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """norm_eps: a number, or one per norm (two a block, then the final norm, then the head's).

    position_scale multiplies fixed positions (folding needs it). With num_classes > 0 a head reads the class token, or
    the mean of the patch tokens through a norm of its own.
    """

    qkv_bias: bool = True
    gelu: Gelu = "none"
    positions: Positions = "sincos"
    position_scale: float = 1.0
    norm: bool = True
    num_classes: int = 0
    pool: HeadPooling = "class"
    drop_path: float = 0.0


class VisionTransformer(Network):
    """forward(images (B, C, H, W)) -> tokens (B, 1 + N, D), or logits (B, num_classes) if there is a head."""

    config: ViTConfig
    blocks: Sequence[Block]
    num_prefix_tokens = 1

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        dim, depth = config.dim, config.depth
        self.patch_embed = PatchEmbed(config.in_channels, config.patch_size, dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position_scale = config.position_scale
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.zeros(1, 1 + config.grid_size[0] * config.grid_size[1], dim))
        else:
            self.register_buffer("positions", sincos_positions(dim, config.grid_size)[None], persistent=False)

        head_norm = config.num_classes > 0 and config.pool == "mean"
        eps = config.eps_per_norm(2 * depth + config.norm + head_norm)
        shortcuts = config.make_shortcuts()
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            Block(
                dim,
                config.num_heads,
                mlp_ratio=config.mlp_ratio,
                qkv_bias=config.qkv_bias,
                gelu=config.gelu,
                shortcuts=shortcuts[2 * i : 2 * i + 2],
                eps=eps[2 * i : 2 * i + 2],
                drop_path=config.drop_path * i / max(1, depth - 1),
            )
            for i in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=eps[2 * depth]) if config.norm else None
        self.head_norm = nn.LayerNorm(dim, eps=eps[-1]) if head_norm else None
        self.head = nn.Linear(dim, config.num_classes) if config.num_classes > 0 else None
        self.mark(shortcuts)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        xavier_linears(self)
        # As a matrix; the bias keeps the convolution's default, as in the reference implementation.
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.view(self.config.dim, -1))
        nn.init.normal_(self.class_token, std=0.02)
        if self.config.positions == "learned":
            nn.init.trunc_normal_(self.positions, std=0.02)
        if self.config.zero_init:
            zero_branch_outputs(self.stream().events)
        if self.head is not None:
            # Small for a fine-tuned mean, as in MAE's recipe; the usual 0.01 for a class-token head.
            nn.init.trunc_normal_(self.head.weight, std=2e-5 if self.config.pool == "mean" else 0.01)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.tokens(images)
        if self.head is None:
            return tokens
        if self.head_norm is None:
            return self.head(tokens[:, 0])
        return self.head(self.head_norm(tokens[:, 1:].mean(dim=1)))

    def tokens(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 1 + N, D), after the final norm if there is one."""
        check_images(images, self.config.in_channels)
        H, W = images.shape[2:]
        p = self.config.patch_size
        x = self.embed_tokens(patchify(images, p), (H // p, W // p))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None else self.norm(x)

    def embed_tokens(self, patches: Tensor, grid: tuple[int, int], keep: Tensor | None = None) -> Tensor:
        """Patches (B, N, p*p*C) -> stream (B, 1 + N, D); with keep (B, K) only those patches are embedded."""
        of_class, of_patches = self.positions_for(grid)
        if keep is not None:
            patches = take(patches, keep)
            of_patches = of_patches[keep]
        x = torch.add(self.patch_embed(patches), of_patches, alpha=self.position_scale)
        start = self.class_token if of_class is None else self.class_token + of_class
        return as_precise_as(torch.cat([start.expand(x.shape[0], -1, -1), x], dim=1), patches)

    def positions_for(self, grid: tuple[int, int]) -> tuple[Tensor | None, Tensor]:
        """Positions of the class token (None if it has none) and of the patches (N, D), for any grid."""
        if self.config.positions == "sincos":
            if grid == self.config.grid_size:
                return None, self.positions[0]
            return None, sincos_positions(self.config.dim, grid).to(self.positions)
        of_class, of_patches = self.positions[0, :1], self.positions[0, 1:]
        if grid != self.config.grid_size:
            table = of_patches.T.reshape(1, -1, *self.config.grid_size)
            of_patches = F.interpolate(table, size=grid, mode="bicubic", antialias=True)[0].flatten(1).T
        return of_class, of_patches

    def current_config(self) -> NetworkConfig:
        config = cast(ViTConfig, super().current_config())
        return dataclasses.replace(config, position_scale=self.position_scale)

    def norms(self) -> list[nn.LayerNorm]:
        return block_norms(self.blocks) + [norm for norm in (self.norm, self.head_norm) if norm is not None]

    def stream(self) -> Stream:
        positions = Slot(self, "positions" if self.config.positions == "learned" else "position_scale")
        return Stream(
            events=(
                Write((*weight_and_bias(self.patch_embed.proj), Slot(self, "class_token"), positions)),
                *tapped(self.blocks),
                Read(norms=() if self.norm is None else (self.norm,)),
            ),
            ends_raw=self.norm is None,
        )
