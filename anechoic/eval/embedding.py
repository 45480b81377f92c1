"""Vectors of images in Python: `model.embed(...)`, and `load`, which returns such models.

Files, folders, archives, Pillow images, arrays and tensors are processed as by `anechoic embed`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from anechoic.choices import Weights
from anechoic.config import EIGHT_BIT, PixelConfig
from anechoic.data import Source, open_source, with_pixels
from anechoic.data.files import open_paths
from anechoic.data.pixels import as_pixels
from anechoic.data.source import IMAGE_SUFFIXES, digest
from anechoic.data.stored import as_stored
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder, encoder_of, open_encoder
from anechoic.eval.feature_cache import features_of
from anechoic.eval.features import Pooling
from anechoic.eval.tensors import warn_if_constant
from anechoic.models.network import Network
from anechoic.outcome import counted
from anechoic.runtime.checkpoint import load as load_network


class Vectors(np.ndarray):
    """A float32 array (n, D), a row per image. names: of the images, where they have any; skipped: (name, reason) of
    those that could not be read. Arrays computed from it carry neither."""

    names: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, array: np.ndarray, *, names: Sequence[str], skipped: Sequence[tuple[str, str]]) -> Vectors:
        found = np.array(array).view(cls)  # in memory, the caller's own
        found.names, found.skipped = tuple(names), tuple(skipped)
        return found


class Pictures(Source):
    """Images that are in memory already, (C, H, W) each."""

    in_memory = True

    def __init__(self, images: Sequence[Tensor], *, channels: int) -> None:
        super().__init__()
        self.images, self.channels = images, channels
        self.fingerprint = digest("pictures", *(image.numpy() for image in images))

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        return self.images[index]


def embed(
    encoder: Encoder,
    images: Any,
    *,
    layer: int = -1,
    pooling: Pooling | None = None,
    device: str = "auto",
    workers: int = 0,
) -> Vectors:
    """Vectors (n, D) of a path (an image, a folder, an archive, `digits`, ...), a Pillow image, an array (H, W, C) or
    (n, H, W, C), a tensor (C, H, W) or (n, C, H, W) of uint8, or a list of paths, images, arrays or tensors.

    Unreadable images of a folder or archive are skipped with a warning and listed in `.skipped`; an image that is
    named itself must be readable. pooling: class, mean or all; by default the class token if there is one.
    """
    source, named = as_source(images, channels=encoder.channels, pixels=encoder.pixels)
    chosen = pooling or encoder.poolings[0]
    found = features_of(
        encoder,
        source,
        layers=(layer,),
        poolings=(chosen,),
        device=device,
        workers=workers,
        cached=not named,
        keep_pixels=False,
    )
    names = [source.name(int(i)) for i in found.ids]
    if found.skipped:
        name, reason = found.skipped[0]
        if named:
            raise UserError(f"{name!r} cannot be read: {reason}.")
        count = counted(len(found.skipped), "image")
        warnings.warn(f"{count} could not be read; the first is {name} ({reason}).", stacklevel=3)
    vectors = next(iter(found.sets.values()))
    if not named:
        warn_if_constant(vectors, f"of layer {layer} ({chosen})")
    return Vectors.of(vectors, names=() if isinstance(source, Pictures) else names, skipped=found.skipped)


def as_source(images: Any, *, channels: int, pixels: PixelConfig = EIGHT_BIT) -> tuple[Source, bool]:
    """A source of these images, and whether each of them was named by the caller."""
    if isinstance(images, Source):
        return images, False
    if isinstance(images, str | Path):
        one_image = Path(images).suffix.lower() in IMAGE_SUFFIXES
        return open_source(images, channels=channels, pixels=pixels), one_image and not pixels.tile
    several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
    listed = list(images) if several else [images]
    if not listed:
        raise UserError("There is no image in the list to embed.")
    paths = [item for item in listed if isinstance(item, str | Path)]
    if len(paths) == len(listed):
        absolute = [str(Path(path).expanduser().resolve()) for path in paths]
        files = open_paths(Path.cwd(), absolute, channels=channels, where="The list")
        return with_pixels(files, pixels, channels=channels), True
    if paths:
        raise UserError("The list mixes paths with images: open them all, or give paths alone.")
    if pixels.stored:
        return Pictures([as_stored(item, pixels=pixels, channels=channels) for item in listed], channels=channels), True
    return Pictures([as_pixels(item, channels=channels) for item in listed], channels=channels), True


def load(path: str | Path, *, weights: Weights | None = None) -> Network | Encoder:
    """Return a model in eval mode with `.embed(images)` and `.preprocess`: of a run, model or checkpoint directory the
    network itself, with `.config`; of timm:NAME or transformers:FOLDER an encoder around it (`.model`).

    weights: raw or ema, of the newest checkpoint; by default the EMA if there is one.
    """
    if str(path).startswith(("timm:", "hf:", "transformers:")):
        return open_encoder(path, weights=weights)
    return load_network(path, weights=weights)


def embed_network(network: Network, images: Any, **options: Any) -> Vectors:
    if "preprocess" not in network.__dict__:
        raise UserError(
            "This network does not know how its images are prepared: open a saved one with anechoic.load, or set its "
            "`preprocess`."
        )
    return embed(encoder_of(network, name=type(network).__name__), images, **options)


Network.embedder = staticmethod(embed_network)
