"""Inference with a run's network: embed, search, reconstruct, color patches, sample, report.

Requests hold bytes and numbers, never a path. A `Studio` computes, in a process of its own (engine.py); the `Gallery`,
in the server's, holds the images that are searched.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data import BadImage, Undecodable, decode, open_source
from anechoic.data.content_checksums import ChangedError
from anechoic.data.decoding import stated_size
from anechoic.data.loader import min_side_for
from anechoic.data.stored import decode_stored
from anechoic.diffusion.generate import Request, generate
from anechoic.errors import UserError
from anechoic.eval.denoisers import NoisyEncoder
from anechoic.eval.embedding import Pictures
from anechoic.eval.encoders import Encoder
from anechoic.eval.feature_cache import batches, features_of
from anechoic.eval.features import Pooling, patch_maps
from anechoic.eval.projections import eigenvector_colors
from anechoic.eval.reconstruction import filled_in, grid_of, reconstructs, to_pixels
from anechoic.eval.tensors import check_finite
from anechoic.index.index import SCALING, VECTOR, Index, Searchable, Vector, encoder_for, open_index
from anechoic.outcome import as_utf8
from anechoic.pages.run_page import as_bytes
from anechoic.pages.runs import encoder_of, is_own, open_run, own_source
from anechoic.pages.thumbnails import displayed, thumbnail
from anechoic.rng import SampleGenerator
from anechoic.runtime.checkpoint import model_directory
from anechoic.server.page import cached_verdict, report_of

PICTURE = 256
# Seconds after which the images are listed again, or embedded again after a failure; at least this multiple of
# the time that it took.
TRY_AGAIN_SECONDS, PAUSE = 30.0, 20.0


Stamp = tuple[tuple[str, int, int, int, int], ...]


def weights_stamp(run: Path) -> Stamp:
    """Return what identifies the run's current weights on disk without reading them."""
    files = sorted(path for path in model_directory(run).iterdir() if path.is_file())
    stats = [(str(path), path.stat()) for path in files]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)


class Studio:
    """Computes with the run's network as it is now."""

    def __init__(self, path: Path, *, data: str | None, device: str, pixels: int) -> None:
        self.path, self.data, self.device, self.pixels = path, data, device, pixels
        self._weights: Stamp | None = None
        self._encoder: Encoder | None = None

    def encoder(self) -> Encoder:
        """Return the encoder, loaded again when the files of its weights change."""
        weights = weights_stamp(self.path)
        if self._encoder is None or weights != self._weights:
            self._encoder, self._weights = encoder_of(open_run(self.path), device=self.device), weights
        return self._encoder

    # ---- images that come in

    def decoded(self, data: bytes) -> Tensor:
        """(C, H, W) as the network's images are read; UserError for what is no image or has too many pixels."""
        encoder = self.encoder()
        try:
            if encoder.pixels.stored:
                min_side = min_side_for(encoder.image_size)
                return decode_stored(
                    data,
                    pixels=encoder.pixels,
                    channels=encoder.channels,
                    min_side=min_side,
                    max_pixels=self.pixels,
                )
            width, height = stated_size(data)
            if width * height > self.pixels:
                raise UserError(f"{width} x {height} is too many pixels (up to {self.pixels:,} are read).")
            return decode(data, channels=encoder.channels, min_side=min_side_for(encoder.image_size))
        except Undecodable as problem:
            raise UserError(f"This is no image that can be read: {problem}.") from problem

    def prepared(self, data: bytes) -> Tensor:
        """(1, C, H, W) as the network sees it."""
        encoder = self.encoder()
        return next(batches(encoder, Pictures([self.decoded(data)], channels=encoder.channels), device=self.device))

    def embed(self, uploads: Sequence[bytes], *, layer: int, pooling: Pooling | None) -> list[Any]:
        """A vector for each upload, or the UserError it deserves."""
        encoder = self.encoder()
        found: list[Any] = []
        images = []
        for data in uploads:
            try:
                images.append(self.decoded(data))
                found.append(len(images) - 1)
            except UserError as problem:
                found.append(problem)
        if not images:
            return found
        features = features_of(
            encoder,
            Pictures(images, channels=encoder.channels),
            layers=(layer,),
            poolings=(pooling or encoder.poolings[0],),
            device=self.device,
            cached=False,
        )
        (((number, pooled), vectors),) = features.sets.items()
        about = {"layer": number, "pooling": pooled, "dim": vectors.shape[1], "weights": encoder.fingerprint}
        return [row if isinstance(row, UserError) else {"vector": vectors[row].tolist(), **about} for row in found]

    def query(self, data: bytes, *, vector: Vector) -> tuple[np.ndarray, str]:
        """Return the vector (1, D) that an image is searched by, and the weights that it is of."""
        seeker, pooling = encoder_for(self.encoder(), vector, -1)
        given = Pictures([self.decoded(data)], channels=seeker.channels)
        found = features_of(seeker, given, poolings=(pooling,), device=self.device, cached=False)
        return next(iter(found.sets.values())), self.encoder().fingerprint

    # ---- inside

    def reconstruct(self, data: bytes, *, hidden: Sequence[int] | None, ratio: float, seed: int) -> dict[str, Any]:
        """hidden: numbers of patches, row by row; None draws a share of them from the seed."""
        encoder = self.encoder()
        if not reconstructs(encoder):
            raise UserError("This run is no masked autoencoder, so it cannot fill in what is hidden.")
        images = self.prepared(data)
        rows, columns = grid_of(encoder, images)
        mask = hidden_patches(rows * columns, hidden, ratio=ratio, seed=seed).to(images.device)
        image, places, predicted = (found[0] for found in filled_in(encoder, images, mask[None]))
        check_finite(predicted, "of the decoder")
        filled = np.where(places[..., None], predicted, image)
        error = np.square(predicted - image)[places].mean().item() if places.any() else 0.0
        return {
            "rows": rows,
            "columns": columns,
            "hidden": mask.nonzero()[:, 0].tolist(),
            "error": error,
            "image": thumbnail(as_bytes(image), side=PICTURE),
            "reconstruction": thumbnail(as_bytes(filled), side=PICTURE),
        }

    def patches(self, data: bytes) -> dict[str, Any]:
        """The image and its patch tokens in colors."""
        encoder = self.encoder()
        images = self.prepared(data)
        colors = eigenvector_colors(patch_maps(encoder.model, images)).numpy(force=True)[0]
        return {
            "image": thumbnail(as_bytes(to_pixels(encoder, images)[0]), side=PICTURE),
            "patches": thumbnail(as_bytes(colors), side=PICTURE),
        }

    def sample(self, **choices: Any) -> dict[str, Any]:
        """Images that a denoiser makes."""
        own = is_own(open_run(self.path))
        images = generate(Request(run=str(self.path), own=own, **choices), progress=False)
        labels = [None] * len(images.pixels) if images.labels is None else images.labels.tolist()
        pictures = [thumbnail(pixels.permute(1, 2, 0).numpy(), side=PICTURE // 2) for pixels in images.pixels]
        found = [{"picture": picture, "label": label} for picture, label in zip(pictures, labels, strict=True)]
        return {"images": found, "evaluations": images.receipt["evaluations"]}

    # ---- the run

    def verdict(self) -> dict[str, Any]:
        return cached_verdict(self.path, weights_stamp(self.path), device=self.device)

    def report(self) -> str:
        return report_of(self.path, data=self.data, device=self.device)


class Gallery:
    """The images that are searched, embedded in the background. data: which; None: the run's own.

    While it is searched they are listed again from time to time, so that images that were added or changed are found.
    """

    def __init__(self, path: Path, *, data: str | None, device: str) -> None:
        self.path, self.device = path, device
        self.data = data
        self._collection: Collection | None = None
        self._building: threading.Thread | None = None
        self._build_problem = ""
        # When it was made, or failed to be, and the seconds that it took.
        self._built, self._took = -math.inf, 0.0

    @property
    def collection(self) -> Collection | None:
        """None while it is first made, which begins when it is first asked for and may take long."""
        due = time.monotonic() >= self._built + max(TRY_AGAIN_SECONDS, PAUSE * self._took)
        if due and self._building is None:
            self._build_problem = ""
            self._building = threading.Thread(target=self._build, name="anechoic-index", daemon=True)
            self._building.start()
        if self._build_problem:
            raise UserError(self._build_problem)
        return self._collection

    def _build(self) -> None:
        started = time.monotonic()
        try:
            run = open_run(self.path)
            where = self.data or own_source(run)
            self._collection = Collection.of(self.path, where, encoder_of(run, device=self.device), self.device)
        except Exception as problem:  # reported by the next request; a thread's exception is invisible
            known = isinstance(problem, UserError)
            self._collection = None
            self._build_problem = str(problem) if known else f"The images cannot be searched ({problem!r:.200})."
        finally:
            self._built = time.monotonic()
            self._took, self._building = self._built - started, None

    def nearest(self, vectors: np.ndarray, weights: str, *, k: int) -> list[dict[str, Any]]:
        """Return the neighbors of a query by these weights; an index of others is made again."""
        collection, changed = self._collection, "The weights have"
        if collection is not None and collection.weights == weights:
            try:
                return collection.nearest(vectors, k=k)
            except (BadImage, ChangedError):
                changed = "An image that was found has"
        self._collection, self._built = None, -math.inf
        raise UserError(f"{changed} changed and the images are being embedded again: retry in a moment.")


def hidden_patches(count: int, hidden: Sequence[int] | None, *, ratio: float, seed: int) -> Tensor:
    """bool (count,); at least one patch stays visible."""
    mask = torch.zeros(count, dtype=torch.bool)
    if hidden is None:
        number = torch.zeros(1, dtype=torch.int64)
        order = SampleGenerator(seed, number, number).uniform("mask", count)[0].argsort()
        mask[order[: min(count - 1, round(ratio * count))]] = True
        return mask
    if any(not 0 <= place < count for place in hidden):
        raise UserError(f"Patches are numbered 0 to {count - 1}, row by row.")
    mask[list(hidden)] = True
    if mask.all():
        raise UserError("At least one patch must stay visible.")
    return mask


class Collection:
    """The images that are searched: an index of vectors, and their pictures by number."""

    def __init__(self, index: Index, vector: Vector, weights: str) -> None:
        self.index, self.vector, self.weights = index, vector, weights

    @classmethod
    def of(cls, path: Path, where: str, encoder: Encoder, device: str) -> Collection:
        source = open_source(where, channels=encoder.channels, pixels=encoder.pixels)
        # Of a denoiser's patches only the mean is available.
        vector: Vector = "mean" if isinstance(encoder, NoisyEncoder) else VECTOR
        index = open_index(encoder, source, encoder_name=str(path), place=where, vector=vector, device=device)
        return cls(index, vector, encoder.fingerprint)

    @cached_property
    def searchable(self) -> Searchable:
        return Searchable.of(self.index.vectors, SCALING)

    def __len__(self) -> int:
        return len(self.index.ids)

    def nearest(self, vectors: np.ndarray, *, k: int) -> list[dict[str, Any]]:
        found = self.searchable.nearest(vectors, k=min(k, len(self)))
        rows, similarities = found.indices[0].tolist(), found.similarities[0].tolist()
        return [
            {"name": self.name(row), "similarity": similarity, "picture": self.picture(row)}
            for row, similarity in zip(rows, similarities, strict=True)
        ]

    def name(self, row: int) -> str:
        return as_utf8(self.index.source.name(int(self.index.ids[row])))

    def picture(self, row: int) -> str:
        pixels = self.index.source.read(int(self.index.ids[row]), min_side=2 * PICTURE)
        return thumbnail(displayed(pixels))
