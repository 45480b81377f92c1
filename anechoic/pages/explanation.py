"""The pictures of `anechoic analyze`: layers, a map, neighbors, patches and reconstructions of an encoder on data.

Images are sampled evenly over the whole source by a seed, and neighbors are searched in all of it. Numbers come from
the evaluator, drawing is figures.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data import Subset
from anechoic.eval.encoders import Encoder
from anechoic.eval.evaluator import Subject
from anechoic.eval.feature_cache import batches
from anechoic.eval.features import patch_maps
from anechoic.eval.metrics.knn import nearest
from anechoic.eval.projections import eigenvector_colors, tsne
from anechoic.eval.reconstruction import reconstructions, reconstructs, to_pixels
from anechoic.index.collection import sampled
from anechoic.pages import figures
from anechoic.storage.files import write_into

CURVES = {
    "rank_rows": "effective rank",
    "rank_columns": "effective rank, centered",
    "cka": "CKA with the embedding",
}
QUERIES, NEIGHBORS, CLASSES, POINTS = 6, 5, 10, 2000


def draw_all(subject: Subject, rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write every picture that the encoder and the data allow, or none; rows: those of the encoder."""
    with write_into(folder) as new:
        return [folder / path.name for path in _draw_each(subject, rows, new)]


def _draw_each(subject: Subject, rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    encoder, seed = subject.encoder, subject.spec.seed
    assert subject.test is not None
    vectors, labels = list(subject.sets.values())[-1], subject.labels
    drawn = draw_layers(rows, folder / "layers", title=encoder.name)
    if labels is not None:
        drawn += draw_map(subject, vectors, labels, folder / "tsne", seed=seed)
    drawn += draw_neighbors(subject, vectors, labels, folder / "neighbors", seed=seed)
    images = images_of(subject, sampled(len(vectors), 16, seed=seed))
    if encoder.widths[-1] >= 3:
        colors = eigenvector_colors(patch_maps(encoder.model, images)).numpy(force=True)
        title = "first three singular vectors of the patches"
        drawn += figures.draw_maps(to_pixels(encoder, images), colors, folder / "maps", title=title)
    if reconstructs(encoder):
        found = reconstructions(encoder, images[sampled(len(images), 6, seed=seed)], seed=seed)
        config: Any = encoder.model.config
        kind = "normalized patches" if config.norm_pix else "pixels"
        drawn += figures.draw_reconstructions(*found, folder / "reconstructions", title=f"trained on {kind}")
    return drawn


def images_of(subject: Subject, rows: np.ndarray) -> Tensor:
    """The prepared images behind these rows of the tested features."""
    assert subject.test is not None
    encoder: Encoder = subject.encoder
    chosen = Subset(subject.eval_data.test, subject.test.ids[rows])
    return torch.cat(list(batches(encoder, chosen, device=str(subject.device))))


def draw_layers(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> list[Path]:
    curves = {
        name: {
            f"{pooling} token": {row["layer"]: row[key] for row in rows if row["pooling"] == pooling}
            for pooling in dict.fromkeys(row["pooling"] for row in rows)
        }
        for key, name in CURVES.items()
        if all(key in row for row in rows)
    }
    return figures.draw_layers(curves, path, title=title)


def draw_map(subject: Subject, vectors: np.ndarray, labels: np.ndarray, path: Path, *, seed: int) -> list[Path]:
    """t-SNE of ten classes drawn by the seed, all of them present."""
    ten = np.random.default_rng(seed).permutation(np.unique(labels))[:CLASSES]
    of_ten = np.flatnonzero(np.isin(labels, ten))
    which = of_ten[sampled(len(of_ten), POINTS, seed=seed)]
    if len(which) < 4:
        return []
    points = tsne(vectors[which], seed=seed)
    return figures.draw_tsne(points, labels[which], path, names=names_of(subject), title=subject.encoder.name)


def names_of(subject: Subject) -> Sequence[str]:
    labels = subject.eval_data.test_labels
    assert labels is not None
    return subject.eval_data.classes or tuple(map(str, range(int(labels.max()) + 1)))


def draw_neighbors(
    subject: Subject, vectors: np.ndarray, labels: np.ndarray | None, path: Path, *, seed: int
) -> list[Path]:
    """The nearest images in the whole source for some of its images, without the image itself."""
    k = min(NEIGHBORS, len(vectors) - 1)
    if k < 1:
        return []
    queries = sampled(len(vectors), QUERIES, seed=seed)
    found = nearest(vectors, vectors[queries], k=k + 1)
    # The image itself is one of its neighbors, the first unless others are equal to it.
    pairs = zip(found.indices.tolist(), found.similarities.tolist(), strict=True)
    kept = [
        [(j, s) for j, s in zip(*pair, strict=True) if j != query][:k]
        for query, pair in zip(queries.tolist(), pairs, strict=True)
    ]
    indices = np.array([[j for j, _ in row] for row in kept])
    pixels = to_pixels(subject.encoder, images_of(subject, np.concatenate([queries, indices.flatten()])))
    return figures.draw_neighbors(
        pixels[: len(queries)],
        pixels[len(queries) :].reshape(*indices.shape, *pixels.shape[1:]),
        path,
        similarities=np.array([[s for _, s in row] for row in kept]),
        names=[[caption(subject, int(j)) for j in (query, *row)] for query, row in zip(queries, indices, strict=True)],
        correct=None if labels is None else labels[indices] == labels[queries][:, None],
        title=subject.encoder.name,
    )


def caption(subject: Subject, row: int) -> str:
    """The class of an image, or the end of its name."""
    assert subject.test is not None
    index = int(subject.test.ids[row])
    if subject.eval_data.test_labels is not None:
        return names_of(subject)[int(subject.eval_data.test_labels[index])]
    return Path(subject.eval_data.test.name(index)).name[-18:]
