"""Loss of a masked autoencoder on hidden patches, beside that of predicting the mean patch. It needs no label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anechoic.eval.feature_cache import batches
from anechoic.eval.features import evaluating
from anechoic.eval.reconstruction import reconstructs
from anechoic.eval.tensors import doubled
from anechoic.models.layers import patchify
from anechoic.models.mae import normalize_patches
from anechoic.rng import SampleGenerator

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


@torch.inference_mode()
def reconstruction_metric(subject: Subject) -> dict[str, float]:
    """masked_loss: of an autoencoder on hidden patches, masks drawn from the seed; mean_patch_loss: that of predicting
    the mean of all hidden patches for each of them. Nothing for other networks."""
    encoder = subject.encoder
    if not reconstructs(encoder):
        return {}
    model: Any = encoder.model
    p, first, losses = model.config.patch_size, 0, 0.0
    squares, total, count = 0.0, torch.zeros(()), 0
    with evaluating(model):
        for images in batches(encoder, subject.eval_data.test, device=str(subject.device)):
            ids = torch.arange(first, first + len(images), device=images.device)
            patches = patchify(images, p)
            noise = SampleGenerator(subject.spec.seed, ids, torch.zeros_like(ids)).uniform("mask", patches.shape[1])
            loss, _, mask = model(images, noise)
            hidden = targets(patches, mask, normalized=model.config.norm_pix)
            losses += loss.item() * len(images)
            squares += hidden.square().mean(dim=1).sum().item()
            total = total + hidden.sum(dim=0).cpu()
            count, first = count + len(hidden), first + len(images)
    mean = total / count
    return {"masked_loss": losses / first, "mean_patch_loss": squares / count - mean.square().mean().item()}


def targets(patches: Tensor, mask: Tensor, *, normalized: bool) -> Tensor:
    """What the autoencoder is to predict: the hidden ones (M, P) of all patches (B, N, P), in double precision."""
    hidden = patches[mask.bool()]
    return doubled(normalize_patches(hidden) if normalized else hidden)
