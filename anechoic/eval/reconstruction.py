"""What a masked autoencoder makes of hidden patches, and prepared images as pictures again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data.pixels import stretched
from anechoic.eval.encoders import Encoder
from anechoic.eval.features import evaluating
from anechoic.models import family_of
from anechoic.models.layers import patchify, unpatchify
from anechoic.models.mae import mask_by_noise
from anechoic.models.network import Network
from anechoic.rng import SampleGenerator


def reconstructs(encoder: Encoder) -> bool:
    return isinstance(encoder.model, Network) and family_of(encoder.model.config) == "mae"


def to_pixels(encoder: Encoder, images: Tensor, like: Tensor | None = None) -> np.ndarray:
    """Prepared (n, C, H, W) -> (n, H, W, C) in 0 .. 1; stored values are stretched by the percentiles of `like`."""
    if encoder.preprocess.pixels.stored:
        values, known = (x.permute(0, 2, 3, 1).numpy(force=True) for x in (images, images if like is None else like))
        return stretched(values, known)
    return encoder.preprocess.invert(images).clamp(0, 1).permute(0, 2, 3, 1).numpy(force=True)


@torch.inference_mode()
def reconstructions(encoder: Encoder, images: Tensor, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """images, hidden places and predictions of a masked autoencoder, (n, H, W, C), (n, H, W) and (n, H, W, C).

    As many patches are hidden as in training, drawn from the seed.
    """
    model: Any = encoder.model
    rows, columns = grid_of(encoder, images)
    ids = torch.arange(len(images), device=images.device)
    noise = SampleGenerator(seed, ids, torch.zeros_like(ids)).uniform("mask", rows * columns)
    with evaluating(model):
        _, prediction, mask = model(images, noise)
    return in_pixels(encoder, images, mask.bool(), prediction)


@torch.inference_mode()
def filled_in(encoder: Encoder, images: Tensor, hidden: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same with these patches hidden, bool (n, N), the same number in every image and not all of them."""
    model: Any = encoder.model
    masking = mask_by_noise(hidden.float(), int((~hidden[0]).sum()))
    grid = grid_of(encoder, images)
    with evaluating(model):
        taps = model.encode(patchify(images, model.config.patch_size), grid, masking.ids_keep)
        decoded = model.decode(taps, masking.ids_restore, grid)
        prediction = model.predictor(model.decoder_norm(decoded[:, 1:]))
    return in_pixels(encoder, images, hidden, prediction)


def grid_of(encoder: Encoder, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches."""
    model: Any = encoder.model
    return images.shape[2] // model.config.patch_size, images.shape[3] // model.config.patch_size


def in_pixels(
    encoder: Encoder, images: Tensor, hidden: Tensor, prediction: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, hidden places and predictions as pictures.

    A network trained on normalized patches predicts them up to each patch's own mean and deviation, which are put back.
    """
    model: Any = encoder.model
    p, grid = model.config.patch_size, grid_of(encoder, images)
    if model.config.norm_pix:
        variance, mean = torch.var_mean(patchify(images, p), dim=-1, keepdim=True)
        prediction = prediction * (variance + 1e-6).sqrt() + mean
    places = hidden.view(len(images), *grid).repeat_interleave(p, 1).repeat_interleave(p, 2)
    predicted = unpatchify(prediction, p, grid)
    return to_pixels(encoder, images), places.numpy(force=True), to_pixels(encoder, predicted, like=images)
