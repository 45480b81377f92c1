"""`analyze` from data to table and pictures: the encoder and its baselines on a sample of images, layer by layer.

The measures themselves are in explain.py and analysis.py, the drawing in figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anechoic.data import Source, Subset, open_source
from anechoic.errors import UserError
from anechoic.evals.analysis import eigenvector_colours, tsne
from anechoic.evals.bank import Features, batches, features_of
from anechoic.evals.encoders import Encoder, baselines
from anechoic.evals.explain import explain
from anechoic.evals.features import Pooling, evaluating, patch_maps
from anechoic.evals.knn import nearest
from anechoic.models import family_of
from anechoic.models.layers import Network, patchify, unpatchify
from anechoic.report.tables import text_table
from anechoic.rng import Draws

COLUMNS = {
    "rank_rows": "rank",
    "entropy_rows": "entropy",
    "rank_columns": "rank, centred",
    "cka": "CKA with 0",
    "cosine": "cosine with 0",
    "input_share": "input share",
    "branch_ratio": "branch/shortcut",
    "gain": "gain",
    "token_norm": "norm",
    "silhouette": "silhouette",
    "knn": "k-NN",
}


def open_maybe_labelled(where: str, *, channels: int, samples: int) -> Source:
    """At most `samples` evenly spaced images, with labels if the data has them."""
    try:
        source = open_source(where, labels=True, channels=channels)
    except UserError:
        # Either there are no labels, which is fine here, or no data, which the second attempt reports.
        source = open_source(where, channels=channels)
    if samples < 2:
        raise UserError(f"An analysis needs at least 2 samples, not {samples}.")
    if len(source) <= samples:
        return source
    return Subset(source, np.linspace(0, len(source) - 1, samples).round().astype(np.int64))


def analyse(
    encoder: Encoder,
    where: str,
    *,
    samples: int = 5000,
    layers: Sequence[int] | Literal["all"] = "all",
    poolings: Sequence[Pooling] = (),
    with_baselines: bool = True,
    figures: Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """rows: encoder, layer, pooling and every measure; samples, classes; figures: the files drawn."""
    source = open_maybe_labelled(where, channels=encoder.channels, samples=samples)
    chosen = tuple(poolings) or tuple(p for p in ("class", "mean") if p in encoder.poolings)
    rows, of_encoder = [], None
    for judged in [encoder, *(baselines(encoder, seed=seed) if with_baselines else [])]:
        own = judged is encoder
        usable = [p for p in chosen if p in judged.poolings] or list(judged.poolings)
        # The echo is measured against layer 0, so a baseline's table has it too.
        wanted = layers if own else (0, -1)
        features = features_of(judged, source, layers=wanted, poolings=usable, device=device)
        labels = None if source.labels is None else source.labels[features.ids]
        images = next(batches(judged, source, device=device))
        found = explain(judged, features.sets, images, labels=labels, seed=seed)
        last = len(judged.widths) - 1
        rows += [{"encoder": judged.name, **row} for row in found if own or row["layer"] == last]
        if own:
            of_encoder = features
    metrics: dict[str, Any] = {"samples": len(source), "rows": rows}
    if source.labels is not None:
        metrics["classes"] = len(np.unique(source.labels))
    if figures is not None:
        assert of_encoder is not None
        metrics["figures"] = [str(path) for path in draw_all(encoder, source, of_encoder, rows, figures, device, seed)]
    return metrics


# ---- pictures


def draw_all(
    encoder: Encoder, source: Source, features: Features, rows: list[dict], folder: Path, device: str, seed: int
) -> list[Path]:
    """Every picture that the encoder and the data allow."""
    from anechoic.report import figures

    images = next(batches(encoder, source, device=device))
    curves = {
        name: {
            f"{pooling} token": [
                row[key] for row in rows if row["encoder"] == encoder.name and row["pooling"] == pooling
            ]
            for pooling in dict.fromkeys(row["pooling"] for row in rows if row["encoder"] == encoder.name)
        }
        for key, name in (
            ("rank_rows", "effective rank"),
            ("rank_columns", "effective rank, centred"),
            ("cka", "CKA with the embedding"),
        )
        if all(key in row for row in rows if row["encoder"] == encoder.name)
    }
    drawn = figures.draw_layers(curves, folder / "layers", title=encoder.name)
    last = list(features.sets.values())[-1]
    if source.labels is not None:
        labels = source.labels[features.ids]
        ten = np.random.default_rng(seed).permutation(np.unique(labels))[:10]
        which = np.flatnonzero(np.isin(labels, ten))[:2000]
        names = source.classes or tuple(map(str, range(int(labels.max()) + 1)))
        points = tsne(last[which], seed=seed)
        drawn += figures.draw_tsne(points, labels[which], folder / "tsne", names=names, title=encoder.name)
    drawn += draw_nearest(encoder, images, last, None if source.labels is None else labels, folder)
    if encoder.widths[-1] >= 3:
        colours = eigenvector_colours(patch_maps(encoder.model, images[:16])).numpy(force=True)
        title = "first three singular vectors of the patches"
        drawn += figures.draw_maps(to_pixels(encoder, images[:16]), colours, folder / "maps", title=title)
    if isinstance(encoder.model, Network) and family_of(encoder.model.config) == "mae":
        found = reconstructions(encoder, images[:6], seed=seed)
        kind = "normalised patches" if encoder.model.config.norm_pix else "pixels"  # type: ignore[attr-defined]
        drawn += figures.draw_reconstructions(*found, folder / "reconstructions", title=f"trained on {kind}")
    return drawn


def draw_nearest(
    encoder: Encoder, images: Tensor, vectors: np.ndarray, labels: np.ndarray | None, folder: Path
) -> list[Path]:
    """The five nearest of the first batch for six of its images, without the image itself."""
    from anechoic.report import figures

    count = len(images)
    k = min(5, count - 1)
    queries = np.linspace(0, count - 1, min(6, count)).astype(int)
    found = nearest(vectors[:count], vectors[queries], k=k + 1)
    # The image itself is one of its neighbours, the first unless others are equal to it.
    keep = np.array([[j for j in row if j != q][:k] for q, row in zip(queries, found.indices.tolist(), strict=True)])
    similarities = np.array(
        [
            [s for s, j in zip(values, row, strict=True) if j != q][:k]
            for q, values, row in zip(queries, found.similarities.tolist(), found.indices.tolist(), strict=True)
        ]
    )
    pixels = to_pixels(encoder, images)
    return figures.draw_neighbours(
        pixels[queries],
        pixels[keep],
        folder / "neighbours",
        similarities=similarities,
        correct=None if labels is None else labels[keep] == labels[queries][:, None],
        title=encoder.name,
    )


def to_pixels(encoder: Encoder, images: Tensor) -> np.ndarray:
    """Normalised (n, C, H, W) -> (n, H, W, C) in 0 .. 1."""
    shape = (1, -1, 1, 1)
    std, mean = (torch.tensor(values, device=images.device).view(shape) for values in (encoder.std, encoder.mean))
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy(force=True)


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


# ---- words


def layer_text(metrics: Mapping[str, Any]) -> str:
    rows = metrics["rows"]
    shown = {key: name for key, name in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    header = ["encoder", "layer", "pooling", *shown.values()]
    cells = [[row["encoder"], row["layer"], row["pooling"], *(row.get(key) for key in shown)] for row in rows]
    notes = (
        f"{metrics['samples']} samples. rank = exp(entropy), each sample's mean removed as in the paper; centred: the "
        "mean over samples removed. Layer 0 is the embedding; input share is what is left of it on the identity path."
    )
    drawn = "".join(f"\n{path}" for path in metrics.get("figures", ()))
    return text_table(header, cells) + "\n" + notes + drawn


def dynamics_text(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    keys = ("run", "alpha_min", "seen", "accuracy", "entropy_rows", "rank_rows", "rank_columns")
    points = text_table(keys, [[point[key] for key in keys] for point in found["points"]])
    columns = ("seen", "runs", "r_rows", "low_rows", "high_rows", "r_columns")
    if not found["correlations"]:
        return points + "\nNo checkpoint is common to all runs, so there is no correlation."
    return points + "\n\n" + text_table(columns, [[row[key] for key in columns] for row in found["correlations"]])
