"""What each layer of an encoder holds: effective rank, norm, the echo of the input, separation of classes.

The echo: how much of a layer's output is still the input embedding. Metrics of features are numbers per (layer,
pooling); metrics of the network need every token and are lists, one number per layer. (Sections 3.1 and 5; Figures 5
and 7.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data import Subset
from anechoic.eval.feature_cache import batches
from anechoic.eval.features import Key, block_gains, block_ratios, block_statistics
from anechoic.eval.metrics.analysis import effective_rank, linear_cka, mean_cosine, silhouette

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

Rows = dict[Key, dict[str, Any]]

# Every token of every layer is held in memory at once; so many samples suffice.
STREAM_SAMPLES = 256


# ---- of features


def rank_metric(subject: Subject) -> Rows:
    """entropy_ and rank_ of rows (as in the paper) and of columns."""
    found: Rows = {}
    for key, features in subject.sets.items():
        part = features[: subject.spec.rank_samples]
        row = found[key] = {}
        for center in ("columns", "rows"):
            row[f"entropy_{center}"], row[f"rank_{center}"] = effective_rank(part, center=center)
    return found


def norm_metric(subject: Subject) -> Rows:
    return {key: {"norm": float(torch.tensor(x).norm(dim=1).mean())} for key, x in subject.sets.items()}


def echo_metric(subject: Subject) -> Rows:
    """cka and cosine with layer 0, where that was extracted too and has as many channels."""
    found: Rows = {}
    for (layer, pooling), features in subject.sets.items():
        embedding = subject.sets.get((0, pooling))
        if embedding is not None and embedding.shape == features.shape:
            found[layer, pooling] = {
                "cka": linear_cka(features, embedding),
                "cosine": mean_cosine(features, embedding),
            }
    return found


def silhouette_metric(subject: Subject) -> Rows:
    """Of the classes; None where samples or classes are too few, and nothing at all without labels."""
    labels = subject.labels
    if labels is None:
        return {}
    scores = {key: silhouette(features, labels) for key, features in subject.sets.items()}
    return {key: {"silhouette": None if math.isnan(score) else score} for key, score in scores.items()}


# ---- of the network


def stream_metric(subject: Subject) -> dict[str, list[float | None]]:
    """token_norm, gain (product of the alphas so far), input_share (gain ||x_0|| / ||x_k||) and branch_ratio (what a
    block adds over what it keeps), one per layer; None where a layer (the embedding, a final norm) has none."""
    encoder, images = subject.encoder, some_images(subject)
    norms: list[float | None] = [*block_statistics(encoder.model, images, forward=encoder.forward)["token_norm"]]
    gains: list[float | None] = [1.0, *np.cumprod(block_gains(encoder.model)).tolist()]
    shares = [
        None if gain is None or not norm else gain * (norms[0] or 0.0) / norm
        for gain, norm in zip(gains, norms, strict=True)
    ]
    ratios: list[float | None] = [None, *block_ratios(encoder.model, images, forward=encoder.forward)]
    found = {"token_norm": norms, "gain": gains, "input_share": shares, "branch_ratio": ratios}
    return {name: values + [None] * (len(encoder.widths) - len(values)) for name, values in found.items()}


def statistics_metric(subject: Subject) -> dict[str, list[float]]:
    """As `block_statistics`, of the mean token: what a run is monitored by."""
    return block_statistics(subject.encoder.model, some_images(subject), forward=subject.encoder.forward)


def some_images(subject: Subject) -> Tensor:
    """The first tested samples, prepared, on the device."""
    first = Subset(subject.eval_data.test, np.arange(min(STREAM_SAMPLES, len(subject.eval_data.test))))
    return torch.cat(list(batches(subject.encoder, first, device=str(subject.device))))
