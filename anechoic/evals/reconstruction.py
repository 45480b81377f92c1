"""What a masked autoencoder makes of hidden patches, and prepared images as pictures again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.evals.encoders import Encoder
from anechoic.evals.features import evaluating
from anechoic.models import family_of
from anechoic.models.layers import patchify, unpatchify
from anechoic.models.network import Network
from anechoic.rng import Draws


def reconstructs(encoder: Encoder) -> bool:
    return isinstance(encoder.model, Network) and family_of(encoder.model.config) == "mae"


def to_pixels(encoder: Encoder, images: Tensor) -> np.ndarray:
    """Prepared (n, C, H, W) -> (n, H, W, C) in 0 .. 1."""
    return encoder.preprocess.invert(images).clamp(0, 1).permute(0, 2, 3, 1).numpy(force=True)


@torch.inference_mode()
def reconstructions(encoder: Encoder, images: Tensor, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """images, hidden places and predictions of a masked autoencoder, (n, H, W, C), (n, H, W) and (n, H, W, C).

    A network trained on normalised patches predicts them up to each patch's own mean and deviation, which are put back.
    """
    model: Any = encoder.model
    p = model.config.patch_size
    grid_size = (images.shape[2] // p, images.shape[3] // p)
    ids = torch.arange(len(images), device=images.device)
    noise = Draws(seed, ids, torch.zeros_like(ids)).uniform("mask", grid_size[0] * grid_size[1])
    with evaluating(model):
        _, prediction, mask = model(images, noise)
    if model.config.norm_pix:
        variance, mean = torch.var_mean(patchify(images, p), dim=-1, keepdim=True)
        prediction = prediction * (variance + 1e-6).sqrt() + mean
    hidden = mask.view(len(images), *grid_size).repeat_interleave(p, 1).repeat_interleave(p, 2)
    predicted = unpatchify(prediction, p, grid_size)
    return to_pixels(encoder, images), hidden.bool().numpy(force=True), to_pixels(encoder, predicted)
