"""What each layer of an encoder holds: effective rank, the echo of the input, separation of classes.

It computes a row of numbers per (layer, pooling) and draws nothing. The echo: how much of a layer's output is still the
input embedding. (Sections 3.1 and 5; Figures 5 and 7.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from anechoic.evals.analysis import effective_rank, linear_cka, mean_cosine, silhouette
from anechoic.evals.encoders import Encoder
from anechoic.evals.features import Key, block_gains, block_ratios, block_statistics
from anechoic.evals.knn import knn_accuracy
from anechoic.evals.labelled import split_indices

NEIGHBOURS = 20


def explain(
    encoder: Encoder,
    sets: dict[Key, np.ndarray],
    images: Tensor,
    *,
    labels: np.ndarray | None = None,
    holdout: float = 0.2,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row per (layer, pooling). images: a normalised batch, for what needs every token; labels (n,) if there are any.

    Keys: layer, pooling, entropy and rank (both centrings), cka and cosine with layer 0, silhouette, knn (labels);
    of the layer: token_norm, gain (product of the alphas so far), input_share (gain ||x_0|| / ||x_k||) and branch_ratio
    (what the block adds over what it keeps).
    """
    of_layer = layer_numbers(encoder, images)
    poolings = list(dict.fromkeys(pooling for _, pooling in sets))
    rows = []
    for (layer, pooling), features in sets.items():
        embedding = sets.get((0, pooling))
        row: dict[str, Any] = {"layer": layer, "pooling": pooling}
        for centre in ("columns", "rows"):
            row[f"entropy_{centre}"], row[f"rank_{centre}"] = effective_rank(features, centre=centre)
        if embedding is not None and embedding.shape == features.shape:
            row["cka"], row["cosine"] = linear_cka(features, embedding), mean_cosine(features, embedding)
        if labels is not None:
            row |= separation(features, labels, holdout=holdout, seed=seed)
        rows.append(row | {name: values[layer] for name, values in of_layer.items()})
    return sorted(rows, key=lambda row: (poolings.index(row["pooling"]), row["layer"]))


def layer_numbers(encoder: Encoder, images: Tensor) -> dict[str, list[float | None]]:
    """Numbers of whole layers, one per layer; None where a layer (the embedding, a final norm) has no such number."""
    count = len(encoder.widths)
    images = images.to(next(encoder.model.parameters(), images).device)
    norms: list[float | None] = [*block_statistics(encoder.model, images)["token_norm"]]
    gains: list[float | None] = [1.0, *np.cumprod(block_gains(encoder.model)).tolist()]
    shares = [
        None if gain is None or not norm else gain * (norms[0] or 0.0) / norm
        for gain, norm in zip(gains, norms, strict=True)
    ]
    ratios: list[float | None] = [None, *block_ratios(encoder.model, images)]
    found = {"token_norm": norms, "gain": gains, "input_share": shares, "branch_ratio": ratios}
    return {name: values + [None] * (count - len(values)) for name, values in found.items()}


def separation(features: np.ndarray, labels: np.ndarray, *, holdout: float, seed: int) -> dict[str, float | None]:
    """Silhouette of the classes and k-NN accuracy of a held-out part; None where samples or classes are too few."""
    train, test = split_indices(len(labels), holdout=holdout, seed=seed)
    score = silhouette(features, labels)
    found: dict[str, float | None] = {"silhouette": None if math.isnan(score) else score, "knn": None}
    if len(np.unique(labels[train])) > 1:
        k = min(NEIGHBOURS, len(train))
        found["knn"] = knn_accuracy(features[train], labels[train], features[test], labels[test], ks=(k,))[k]
    return found
