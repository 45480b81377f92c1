"""The first principal components of the features: their variance, and how much of it color and contrast explain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anechoic.eval.feature_cache import batches
from anechoic.eval.features import Rows
from anechoic.eval.tensors import as_tensor

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

COMPONENTS = 3


def components_metric(subject: Subject) -> Rows:
    """Shares in 0 .. 1. common_share: of the vectors' squared length, their mean's, which every cosine contains.
    first_share and three_share: of the variance, that of the first principal component and of the first three.
    look_share: of the variance of those three, what mean color and contrast of the image explain, by least squares."""
    images = batches(subject.encoder, subject.eval_data.test, device=str(subject.device))
    look = torch.cat([_look(part) for part in images]).double().cpu()
    look = torch.cat([look, torch.ones(len(look), 1, dtype=torch.float64)], dim=1)
    found: Rows = {}
    for key, features in subject.sets.items():
        x = as_tensor(features).double().cpu()
        mean = x.mean(dim=0)
        centered = x - mean
        variances, directions = torch.linalg.eigh(centered.T @ centered)
        total = variances.clamp(min=0).sum().clamp(min=1e-30)
        scores = centered @ directions[:, -COMPONENTS:]
        unexplained = scores - look @ torch.linalg.lstsq(look, scores).solution
        found[key] = {
            "common_share": float(mean.square().sum() / x.square().sum(dim=1).mean().clamp(min=1e-30)),
            "first_share": float(variances[-1] / total),
            "three_share": float(variances[-COMPONENTS:].sum() / total),
            "look_share": float(1 - unexplained.square().sum() / scores.square().sum().clamp(min=1e-30)),
        }
    return found


def _look(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C + 1): the mean of every channel, and the deviation of all pixels from it."""
    mean = images.mean(dim=(2, 3))
    contrast = (images - mean[:, :, None, None]).square().mean(dim=(1, 2, 3)).sqrt()
    return torch.cat([mean, contrast[:, None]], dim=1)
