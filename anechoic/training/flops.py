"""How many floating-point operations a network has: the matrix products of the plain algorithm.

A multiply-add counts as two. Work that an implementation avoids still counts, so that avoiding it shows as speed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from anechoic.models import build, family_of
from anechoic.models.mae import MAEConfig, skip_sources
from anechoic.models.network import NetworkConfig


def forward_flops(config: NetworkConfig) -> float:
    """Of one image through a network of ours."""
    return mae_flops(config)[0] if isinstance(config, MAEConfig) else counted_flops(config)


@cache
def counted_flops(config: NetworkConfig) -> float:
    """As torch counts them while the network runs, without allocating it."""
    with torch.device("meta"):
        model = build(config).train()
        image = torch.zeros(1, config.in_channels, *config.size)
        told = [torch.zeros(1)] if family_of(config) in ("uvit", "sit") else []
        if told and vars(config)["num_classes"] is not None:
            told.append(torch.zeros(1, dtype=torch.long))
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(image, *told)
    return float(counter.get_total_flops())


def mae_flops(config: MAEConfig) -> tuple[float, float]:
    """Of one image through the masked autoencoder: (all products, the patch embedding's share of them).

    All patches are embedded, the encoder sees the class token and the kept ones, the decoder sees and predicts all.
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
    """Queries, keys, values and projection; the MLP; the two products of attention."""
    hidden = int(dim * mlp_ratio)
    return 2.0 * tokens * dim * (4 * dim + 2 * hidden) + 4.0 * tokens * tokens * dim


def skip_flops(tokens: int, encoder_dim: int, dim: int) -> float:
    """The MLP of a skip layer on the concatenation of encoder tokens and decoder tokens."""
    return 2.0 * tokens * dim * (encoder_dim + dim + dim)


def step_flops(config: MAEConfig, batch: int) -> float:
    """Forward and backward: every product has two in the backward pass, but nobody asks for the pixels' gradient."""
    forward, embedding = mae_flops(config)
    return batch * (3 * forward - embedding)
