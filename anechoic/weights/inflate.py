"""A network for RGB as one for n channels: the patch embedding and the pixel head are inflated."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.mae import MAEConfig
from anechoic.models.network import Network
from anechoic.models.vit import ViTConfig

EMBEDDING, HEAD = "patch_embed.proj.weight", ("predictor.weight", "predictor.bias")


def inflate(network: Network, preprocess: Preprocess, channels: int) -> tuple[Network, Preprocess]:
    """Return the network and the preprocessing for images of `channels` channels.

    Every new channel gets the mean of the color filters times 3 / channels: an image whose channels are all alike has
    the embedding of the same gray image. In the head of a masked autoencoder each gets the mean of the color rows.
    """
    config = network.config
    if not isinstance(config, ViTConfig | MAEConfig) or config.in_channels != 3:
        raise UserError(
            f"Only ViTs and masked autoencoders for 3 channels are inflated, not one for {config.in_channels}."
        )
    if channels < 1:
        raise UserError(f"--channels {channels} is no number of channels: give 1 or more.")
    wide = build(replace(config, in_channels=channels))
    tensors = {name: _inflated(name, value, channels) for name, value in network.state_dict().items()}
    wide.load_state_dict(tensors)
    mean, std = (sum(values) / len(values) for values in (preprocess.mean, preprocess.std))
    return wide.eval(), replace(preprocess, mean=(mean,) * channels, std=(std,) * channels, channels=channels)


def _inflated(name: str, value: Tensor, channels: int) -> Tensor:
    if name.endswith(EMBEDDING):  # (D, 3, p, p)
        return value.mean(dim=1, keepdim=True).repeat(1, channels, 1, 1) * (3 / channels)
    if name.endswith(HEAD):  # (p * p * 3, ...), ordered (row, column, channel)
        rows = value.unflatten(0, (-1, 3)).mean(dim=1, keepdim=True)
        return torch.repeat_interleave(rows, channels, dim=1).flatten(0, 1)
    return value
