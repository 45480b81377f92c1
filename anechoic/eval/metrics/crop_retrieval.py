"""Crop retrieval: is an image found by another crop of it? It needs no label.

How well it predicts accuracy was measured on labeled data (docs/report.md). verdict.py draws conclusions from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from anechoic.data import Augment, Source, Subset
from anechoic.eval.encoders import Encoder
from anechoic.eval.eval_data import evenly
from anechoic.eval.feature_cache import batches
from anechoic.eval.feature_scaling import rescaled
from anechoic.eval.features import Key, Rows, extract_batches
from anechoic.eval.metrics.knn import unit_rows

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

# Two crops of 30 to 80 % of the area share some of their pixels, never in the same places.
CROP = Augment(kind="crop", scale=(0.3, 0.8), flip=False)
# Images among which a crop is looked for, and pairs of crops of each.
CROPPED, PAIRS = 512, 2


def crops_metric(subject: Subject) -> Rows:
    """crop_retrieval: the share of crops whose nearest other crop, one of each image, is of the same image.

    crop_error is its standard error over images. Channels are standardized first, so that no loud channel decides
    alone. Nothing for data that has no pixels to crop, such as latents.
    """
    source = subject.eval_data.test
    if source.transform is not None or len(source) < 2:
        return {}
    source = Subset(source, evenly(len(source), CROPPED))
    keys = list(subject.sets)
    hits: dict[Key, list[np.ndarray]] = {key: [] for key in keys}
    for pair in range(PAIRS):
        seeds = (subject.spec.seed + 2 * pair, subject.spec.seed + 2 * pair + 1)
        one, other = (
            crop_features(subject.encoder, source, keys, device=str(subject.device), seed=seed) for seed in seeds
        )
        for key in keys:
            hits[key].append(found_again(one[key], other[key]))
    found = {}
    for key, shares in hits.items():
        per_image = np.mean(shares, axis=0)
        error = float(per_image.std()) / math.sqrt(len(per_image))
        found[key] = {"crop_retrieval": float(per_image.mean()), "crop_error": error}
    return found


def crop_features(
    encoder: Encoder, source: Source, keys: list[Key], *, device: str, seed: int
) -> dict[Key, np.ndarray]:
    """Features (n, D) of one crop of every image; the crop is a function of seed and image."""
    stream = batches(encoder, source, device=device, augment=CROP, seed=seed)
    layers, poolings = sorted({layer for layer, _ in keys}), list(dict.fromkeys(pooling for _, pooling in keys))
    parts: dict[Key, list[np.ndarray]] = {key: [] for key in keys}
    for found in extract_batches(encoder.model, stream, layers=layers, poolings=poolings, forward=encoder.forward):
        for key in keys:
            parts[key].append(found[key].numpy(force=True))
    return {key: np.concatenate(values) for key, values in parts.items()}


def found_again(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n,) 1.0 where the row of `other` most similar to a row of `one` is its own, by cosine of standardized channels.

    Rows that tie with another count as not found: equal features tell nothing apart.
    """
    both = rescaled(np.concatenate([one, other]), "standardized")
    a, b = unit_rows(both[: len(one)], name="crop"), unit_rows(both[len(one) :], name="crop")
    similarities = a @ b.T
    own = similarities.diagonal().clone()
    similarities.fill_diagonal_(-torch.inf)
    return (own > similarities.amax(dim=1)).double().numpy()
