"""The masked autoencoder: an encoder on the visible patches, a decoder that predicts the hidden ones.

With skips (the decayed MAE of the paper) the decoder starts without content and reads the encoder only through skip
layers; without them it is the original MAE. Pooling, probing and training live elsewhere. (Sections 3.2 and 4.)
Legend: B batch, N patches, K kept patches, M masked patches, E encoder width, D decoder width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.models.layers import (
    Block,
    Gelu,
    as_precise_as,
    check_images,
    patchify,
    sincos_positions,
    take,
    tapped,
    xavier_linears,
    zero_branch_outputs,
)
from anechoic.models.network import Network, NetworkConfig, TransformerConfig, check_heads
from anechoic.models.vit import VisionTransformer, ViTConfig
from anechoic.shortcut import Read, Slot, Stream, Tap, Write


@dataclass(frozen=True, kw_only=True)
class MAEConfig(TransformerConfig):
    """zero_init None: true, except for the original MAE (no skips, no decay). encoder_norm None: not skips.
    predicted: share of the masked patches that a training step computes and predicts (all of them in the paper).

    norm_eps belongs to the encoder; the decoder is never decayed and has one eps.
    """

    zero_init: bool | None = None
    encoder_norm: bool | None = None
    qkv_bias: bool = True
    gelu: Gelu = "none"
    position_scale: float = 1.0
    skips: bool = True
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_num_heads: int = 16
    decoder_norm_eps: float = 1e-6
    mask_ratio: float = 0.75
    predicted: float = 1.0
    norm_pix: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.decoder_dim, self.decoder_num_heads)
        if not 0 <= self.mask_ratio < 1 or self.num_kept < 1:
            raise UserError(
                f"mask_ratio {self.mask_ratio} leaves no patch of {math.prod(self.grid_size)} visible: lower it."
            )
        if self.num_kept == math.prod(self.grid_size):
            raise UserError(
                f"mask_ratio {self.mask_ratio} hides no patch of {math.prod(self.grid_size)}, so there is nothing to "
                "predict: raise it."
            )
        if not 0 < self.predicted <= 1:
            raise UserError(f"predicted is the share of masked patches to predict, not {self.predicted}: at most 1.")
        if self.skips and not skip_sources(self.depth, self.decoder_depth):
            raise UserError(
                "Skips need an encoder of at least 2 blocks and a decoder of at least 1: deepen it or set skips=False."
            )
        if self.zero_init is None:
            object.__setattr__(self, "zero_init", self.skips or any(alpha != 1 for alpha, _ in self.factors))
        if self.encoder_norm is None:
            object.__setattr__(self, "encoder_norm", not self.skips)

    @property
    def num_kept(self) -> int:
        return int(math.prod(self.grid_size) * (1 - self.mask_ratio))

    @property
    def encoder(self) -> ViTConfig:
        own = {field.name for field in dataclasses.fields(self)}
        shared = {field.name for field in dataclasses.fields(ViTConfig)} & own
        return ViTConfig(norm=bool(self.encoder_norm), **{name: getattr(self, name) for name in shared})


def skip_sources(depth: int, decoder_depth: int) -> list[int]:
    """Encoder blocks that feed decoder blocks 0, 1, ...: deepest first, spread down to the shallow ones."""
    n = min(depth // 2, decoder_depth)
    return [round(depth - 1 - i * (depth - 2) / max(1, n - 1)) for i in range(n)]


class Prediction(NamedTuple):
    """loss: mean squared error over masked patches. mask (B, N): 1 where hidden.

    prediction: (B, N, p*p*C) in evaluation; in training only the masked patches are predicted, (B, M, p*p*C), in the
    order of their noise, or the first of them where config.predicted is less than 1.
    """

    loss: Tensor
    prediction: Tensor
    mask: Tensor


class Masking(NamedTuple):
    """ids_keep (B, K) and ids_masked (B, M): patch indices. ids_restore (B, 1 + N): for class and patches, the row of
    [class, kept..., filler] that belongs there. mask (B, N)."""

    ids_keep: Tensor
    ids_masked: Tensor
    ids_restore: Tensor
    mask: Tensor

    def first_masked(self, share: float) -> Decoded:
        """The class, the kept patches, and as many of the masked ones as training is to predict."""
        kept, masked = self.ids_keep + 1, self.ids_masked[:, : max(1, round(share * self.ids_masked.shape[1]))] + 1
        tokens = torch.cat([torch.zeros_like(kept[:, :1]), kept, masked], dim=1)
        rows = torch.arange(tokens.shape[1], device=kept.device).expand_as(tokens)
        first = 1 + kept.shape[1]
        return Decoded(tokens, rows.clamp(max=first), rows[:, first:], masked - 1)


class Decoded(NamedTuple):
    """The tokens (B, T) of [class, patches...] that the decoder holds, their ids_restore, the rows (B, P) that predict,
    and the patches (B, P) of those rows."""

    tokens: Tensor
    ids_restore: Tensor
    rows: Tensor
    patches: Tensor


def mask_by_noise(noise: Tensor, num_kept: int) -> Masking:
    """Keep the num_kept patches of smallest noise (B, N) in every sample."""
    B = len(noise)
    shuffle = noise.argsort(dim=1, stable=True)
    restore = shuffle.argsort(dim=1)
    ids_restore = restore.clamp(max=num_kept) + 1
    class_row = torch.zeros(B, 1, dtype=ids_restore.dtype, device=ids_restore.device)
    mask = (restore >= num_kept).to(noise.dtype)
    return Masking(shuffle[:, :num_kept], shuffle[:, num_kept:], torch.cat([class_row, ids_restore], dim=1), mask)


def normalize_patches(patches: Tensor) -> Tensor:
    """Each patch to mean 0 and unbiased variance 1."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


class SkipLayer(nn.Module):
    """x + MLP([encoder tokens with a mask token for the hidden ones, x]): one long skip into the decoder.

    The first linear is applied to the kept tokens and to the mask token once, and the results are put in place: the
    same sum as concatenating first, without the work for equal rows.
    """

    def __init__(self, encoder_dim: int, dim: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder_dim))
        self.fc1 = nn.Linear(encoder_dim + dim, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, x: Tensor, encoded: Tensor, ids_restore: Tensor) -> Tensor:
        """x (B, 1 + N, D), encoded (B, 1 + K, E), ids_restore (B, 1 + N) -> (B, 1 + N, D)"""
        E = encoded.shape[-1]
        rows = torch.cat([encoded, self.mask_token.expand(len(encoded), -1, -1)], dim=1)
        read = take(F.linear(rows, self.fc1.weight[:, :E]), ids_restore)
        own = F.linear(x, self.fc1.weight[:, E:], self.fc1.bias)
        return x + self.fc2(F.silu(read + own))


class MaskedAutoencoder(Network):
    """forward(images (B, C, H, W), noise (B, N) or None) -> Prediction; `encoder` is the VisionTransformer to keep."""

    config: MAEConfig
    decoder_positions: Tensor
    skips: Sequence[SkipLayer]

    def __init__(self, config: MAEConfig) -> None:
        super().__init__(config)
        dim = config.decoder_dim
        self.encoder = VisionTransformer(config.encoder)
        self.sources = skip_sources(config.depth, config.decoder_depth) if config.skips else []
        self.register_buffer("decoder_positions", sincos_positions(dim, config.grid_size)[None], persistent=False)
        if config.skips:
            self.decoder_class_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.decoder_embed = nn.Linear(dim, dim)
            self.skips = nn.ModuleList(SkipLayer(config.dim, dim) for _ in self.sources)  # type: ignore[assignment]
        else:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.decoder_embed = nn.Linear(config.dim, dim)
        eps = config.decoder_norm_eps
        self.decoder_blocks = nn.ModuleList(
            Block(
                dim,
                config.decoder_num_heads,
                mlp_ratio=config.mlp_ratio,
                qkv_bias=config.qkv_bias,
                gelu=config.gelu,
                eps=(eps, eps),
            )
            for _ in range(config.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(dim, eps=eps)
        self.predictor = nn.Linear(dim, config.patch_size**2 * config.in_channels)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        for part in (self.decoder_embed, self.decoder_blocks, self.predictor):
            xavier_linears(part)
        if self.config.skips:
            nn.init.normal_(self.decoder_class_token, std=0.02)
            for skip in self.skips:
                xavier_linears(skip)
                nn.init.normal_(skip.mask_token, std=0.02)
                nn.init.zeros_(skip.fc2.weight)
        else:
            nn.init.normal_(self.mask_token, std=0.02)
        if self.config.zero_init:
            zero_branch_outputs(tapped(self.decoder_blocks))
        if self.config.zero_init and self.config.skips:
            # The skip design starts from a prediction of exactly 0; the original path keeps its predictor.
            nn.init.zeros_(self.predictor.weight)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Prediction:
        check_images(images, self.config.in_channels)
        p = self.config.patch_size
        patches = patchify(images, p)
        B, N, _ = patches.shape
        grid = (images.shape[2] // p, images.shape[3] // p)
        if noise is None:
            noise = torch.rand(B, N, device=images.device)
        masking = mask_by_noise(noise, int(N * (1 - self.config.mask_ratio)))

        taps = self.encode(patches, grid, masking.ids_keep)
        asked = masking.ids_masked
        if not self.training:
            x = self.decode(taps, masking.ids_restore, grid)
            prediction = self.predictor(self.decoder_norm(x[:, 1:]))
            hidden = take(prediction, asked)
        elif self.config.predicted == 1:
            x = self.decode(taps, masking.ids_restore, grid, rows=asked + 1)
            hidden = prediction = self.predictor(self.decoder_norm(x))
        else:
            tokens, restore, rows, asked = masking.first_masked(self.config.predicted)
            x = self.decode(taps, restore, grid, rows=rows, tokens=tokens)
            hidden = prediction = self.predictor(self.decoder_norm(x))
        target = take(patches, asked)
        if self.config.norm_pix:
            target = normalize_patches(target)
        return Prediction(F.mse_loss(hidden, target), prediction, masking.mask)

    def encode(self, patches: Tensor, grid: tuple[int, int], keep: Tensor) -> list[Tensor]:
        """Return what the decoder reads (B, 1 + K, E): the skip sources, deepest first, or the encoder's output."""
        x = self.encoder.embed_tokens(patches, grid, keep)
        outputs = {}
        for i, block in enumerate(self.encoder.blocks):
            x = block(x)
            if i in self.sources:
                outputs[i] = x
        if self.config.skips:
            return [outputs[i] for i in self.sources]
        return [x if self.encoder.norm is None else self.encoder.norm(x)]

    def decode(
        self,
        taps: list[Tensor],
        ids_restore: Tensor,
        grid: tuple[int, int],
        *,
        rows: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """-> decoder stream (B, 1 + N, D) before the final norm, or only its rows (B, M). tokens (B, T): hold only
        these of the class and the patches; ids_restore and rows speak of them."""
        B = len(ids_restore)
        positions = self.decoder_positions
        if grid != self.config.grid_size:
            positions = sincos_positions(self.config.decoder_dim, grid)[None].to(positions)
        if self.config.skips:
            start = self.decoder_embed(torch.cat([self.decoder_class_token, positions], dim=1))
            start = as_precise_as(start, positions)
            x = start.expand(B, -1, -1) if tokens is None else start[0][tokens]
        else:
            read = torch.cat([self.decoder_embed(taps[0]), self.mask_token.expand(B, -1, -1)], dim=1)
            places = F.pad(positions, (0, 0, 1, 0))
            x = take(read, ids_restore) + (places if tokens is None else places[0][tokens])
        for i, block in enumerate(self.decoder_blocks):
            if i < len(self.sources):
                x = self.skips[i](x, taps[i], ids_restore)
            x = block(x, rows if i == self.config.decoder_depth - 1 else None)
        return x

    def current_config(self) -> NetworkConfig:
        config = cast(MAEConfig, super().current_config())
        return dataclasses.replace(config, position_scale=self.encoder.position_scale)

    def norms(self) -> list[nn.LayerNorm]:
        return self.encoder.norms()

    def stream(self) -> Stream:
        """The encoder's stream; the undecayed decoder reads it through the skip layers (or after a norm)."""
        encoder = self.encoder.stream()
        if not self.config.skips:
            return encoder
        readers = dict(zip((f"block{i}" for i in self.sources), self.skips, strict=True))
        events = []
        for event in encoder.events:
            events.append(event)
            if isinstance(event, Tap) and event.name in readers:
                skip = readers[event.name]
                # A mask token stands in for stream tokens, so it is in the stream's scale.
                events.append(Read(maps=(Slot(skip.fc1, "weight", columns=(0, self.config.dim)),)))
                events.append(Write((Slot(skip, "mask_token"),)))
        return Stream(tuple(events), encoder.ends_raw)
