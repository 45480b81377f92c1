"""`segment` from folders to scores: features of every image, spectral clustering, k-means, matching, maps.

Its parts are in spectral.py and segment.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.features import patch_maps
from anechoic.eval.projections import eigenvector_colors
from anechoic.eval.segmentation import cluster, find_pairs, read_all, read_mapping, score_maps, upsample
from anechoic.eval.spectral import SpectralOptions, soft_cells, spectral_tables
from anechoic.models.network import Network, TransformerConfig
from anechoic.runtime.devices import pick_device

# The picture of all cells of all images is made from so many images.
SHOWN = 16


class Segmented(NamedTuple):
    """scores: hungarian and greedy (miou, accuracy, iou), and how many images, clusters and classes there were.
    pixels (n, H, W, C) and colors (n, h, w, 3) in 0 .. 1: the first images and a picture of their cells."""

    scores: dict[str, Any]
    pixels: np.ndarray
    colors: np.ndarray


def larger(encoder: Encoder) -> Encoder:
    """The encoder at 256 / 224 of its image size, in whole patches, where its positions can be made for any grid."""
    config = getattr(encoder.model, "config", None)
    if not isinstance(encoder.model, Network) or not isinstance(config, TransformerConfig):
        return encoder
    patch = config.patch_size
    return replace(
        encoder,
        preprocess=replace(encoder.preprocess, image_size=round(encoder.image_size * 256 / 224 / patch) * patch),
    )


def segment_images(
    encoder: Encoder,
    where: str,
    options: SpectralOptions,
    *,
    clusters: int | None = None,
    classes: int | None = None,
    void: int = 255,
    mapping: Path | None = None,
    listed: Path | None = None,
    samples: int | None = None,
    device: str = "auto",
) -> Segmented:
    if samples is not None and samples < 1:
        raise UserError(f"--samples counts images, at least 1, not {samples}.")
    if options.channels < 3:
        raise UserError(f"The maps are colored by three eigenvectors, so --channels cannot be {options.channels}.")
    pairs = find_pairs(where, listed=listed)[:samples]
    table = None if mapping is None else read_mapping(mapping, void=void)
    images, labels = read_all(pairs, image_size=encoder.image_size, channels=encoder.channels, mapping=table)
    known = labels[labels != void]
    if not len(known):
        raise UserError(f"Every pixel of the masks is void ({void}), so nothing can be scored; set --void.")
    classes = classes or int(known.max()) + 1
    clusters = clusters or classes
    cells = len(images) * 32 * 32
    if clusters > cells:
        raise UserError(f"{clusters} clusters are more than the {cells} cells there are; choose fewer --clusters.")
    if clusters > options.channels:
        raise UserError(f"{clusters} clusters need as many channels; raise --channels above {options.channels}.")
    place = pick_device(device)
    encoder.model.to(place)
    normalized = encoder.preprocess.apply(images)
    tokens = torch.cat([patch_maps(encoder.model, part.to(place)).float().clone() for part in normalized.split(64)])
    tables = spectral_tables(tokens, options)
    found = upsample(cluster(tables, clusters=clusters), images.shape[-1])
    result = score_maps(found, labels, clusters=clusters, classes=classes, void=void)
    scores = {**result, "images": len(images), "clusters": clusters, "classes": classes}
    colors = eigenvector_colors(soft_cells(tables[:SHOWN], side=64)).numpy(force=True)
    return Segmented(scores, images[:SHOWN].permute(0, 2, 3, 1).numpy() / 255, colors)
