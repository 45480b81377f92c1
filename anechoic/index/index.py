"""The index of a collection: one vector per image, kept beside the feature cache, and the search in it.

It belongs to an encoder, a layer and a kind of vector on one place of images. Added images are embedded and removed
ones left out when it is opened again; other weights mean other vectors, so then all are. Search is exact.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anechoic.data import Source, Subset, cache_dir
from anechoic.data.decoding import decoders
from anechoic.data.pixel_cache import locked
from anechoic.data.source import digest, readable, unsettled
from anechoic.errors import NotFiniteError, UserError
from anechoic.eval.encoders import Encoder, flat
from anechoic.eval.feature_cache import features_of, file_crc
from anechoic.eval.feature_scaling import CHUNK, Affine, Scaling, fit_scaling, unit_vectors
from anechoic.eval.features import Pooling, choose_layers
from anechoic.eval.metrics.knn import Neighbors, nearest_units
from anechoic.storage.files import read_json, sealed, sweep_leftovers, unsealed, write_aside, write_json

log = logging.getLogger("anechoic")

# The vector an index is made of: pooled tokens, or all patches side by side (flat), summed into this many channels.
Vector = Literal["class", "mean", "all", "flat"]
FLAT_WIDTH = 512
# What searched best, measured with labels (results/search-vectors.json, docs/finding.md).
VECTOR: Vector = "flat"
SCALING: Scaling = "standardized"

VECTORS, KEYS, CARD = "vectors.npy", "keys.npy", "index.json"


@dataclass(frozen=True)
class Index:
    """vectors (n, D), a file; ids (n,): which images of the source. added, removed: since it was last opened."""

    source: Source
    vectors: np.ndarray
    ids: np.ndarray
    skipped: tuple[tuple[str, str], ...] = ()
    added: int = 0
    removed: int = 0
    reason: str = ""

    def names(self) -> list[str]:
        return [self.source.name(int(i)) for i in self.ids]


def open_index(
    encoder: Encoder,
    source: Source,
    *,
    encoder_name: str,
    place: str,
    vector: Vector = VECTOR,
    layer: int = -1,
    device: str = "auto",
    workers: int = 0,
) -> Index:
    """Read, extend or build the index of this place (a path or the name of a source) by this encoder."""
    what = digest("index", absolute(encoder_name), absolute(place), layer, vector, source.channels)
    encoder, pooled = encoder_for(encoder, vector, layer)
    (number,) = choose_layers((-1 if vector == "flat" else layer,), count=len(encoder.widths))
    folder = cache_dir() / "index" / what
    how: dict[str, Any] = {"layers": (number,), "poolings": (pooled,), "device": device, "workers": workers}
    keys = identities(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", working_on=folder):
            sweep_leftovers(folder)
            known, reason = read(folder, encoder.fingerprint)
            if reason:
                log.warning("The index of %s is made anew: %s.", place, reason)
            return update(folder, known, encoder, source, keys, how, reason=reason)
    except OSError as error:
        log.warning("The index cannot be kept in %s (%s); it lives for this command.", folder, error.strerror or error)
        found = features_of(encoder, source, cached=False, keep_pixels=False, **how)
        return Index(source, next(iter(found.sets.values())), found.ids, found.skipped, added=len(found.ids))


def encoder_for(encoder: Encoder, vector: Vector, layer: int) -> tuple[Encoder, Pooling]:
    """The encoder and the pooling of it that give this vector."""
    if vector != "flat":
        return encoder, vector
    if layer not in (-1, len(encoder.widths) - 1):
        raise UserError(
            "All patches side by side are taken of the encoder's output: leave --layer out, or --vector flat."
        )
    return replace(flat(encoder, width=FLAT_WIDTH), name=encoder.name), "mean"


def absolute(place: str) -> str:
    return str(Path(place).resolve()) if Path(place).exists() else place


def identities(source: Source) -> np.ndarray:
    """16 bytes per image, which change with the image; of a source that cannot tell, with any of its images."""
    own = source.identities()
    if own is not None:
        return own
    found = [bytes.fromhex(digest(source.fingerprint, i)) for i in range(len(source))]
    return np.frombuffer(b"".join(found), np.dtype("V16"))


@dataclass(frozen=True)
class Known:
    """What was kept: rows of vectors and the images they are of, and those that could not be read.

    again: those of the bad ones that may be readable by now.
    """

    vectors: np.ndarray
    keys: np.ndarray
    bad: dict[str, Any]
    again: frozenset[str]


def read(folder: Path, fingerprint: str) -> tuple[Known | None, str]:
    """What is kept, or None and why it cannot be used; no reason if there was nothing."""
    if not (folder / CARD).exists():
        return None, ""
    try:
        card = unsealed(read_json(folder / CARD))
        if card["encoder"] != fingerprint:
            return None, "the weights, or how images are prepared, have changed since"
        if any(file_crc(folder / name) != card["crc"][name] for name in (VECTORS, KEYS)):
            return None, "its file is damaged"
        vectors, keys = (np.load(folder / name, mmap_mode="r") for name in (VECTORS, KEYS))
        if (vectors.dtype, keys.dtype, keys.shape) != (np.float32, np.uint8, (len(vectors), 16)) or vectors.ndim != 2:
            return None, "its file is damaged"
        bad = {key: (str(name), str(why)) for key, (name, why) in card["bad"].items()}
        again = frozenset(card["passing"] if card.get("decoders") == decoders() else bad)
        return Known(vectors, np.array(keys).view("V16").ravel(), bad, again), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a UserError is a ValueError
        return None, "its file is damaged"


def update(
    folder: Path, known: Known | None, encoder: Encoder, source: Source, keys: np.ndarray, how: dict, *, reason: str
) -> Index:
    """The index of exactly the images that are there now."""
    mine = [key.tobytes() for key in keys]
    known = known or Known(np.empty((0, 0)), keys[:0], {}, frozenset())
    tried = [i for i, key in enumerate(mine) if key.hex() in known.again]
    lost = known.bad.keys() - {mine[i].hex() for i in readable(source, tried)}
    rows = {key.tobytes(): row for row, key in enumerate(known.keys)}
    kept = np.array([i for i, key in enumerate(mine) if key in rows], np.int64)
    old = Part(known.vectors, kept, np.array([rows[mine[i]] for i in kept], np.int64))
    missing = np.array([i for i, key in enumerate(mine) if key not in rows and key.hex() not in lost], np.int64)
    bad = {key.hex(): known.bad[key.hex()] for key in mine if key.hex() in lost}
    if len(missing) == 0 and np.array_equal(old.rows, np.arange(len(known.keys))):
        return Index(source, known.vectors, kept, tuple(bad.values()), reason=reason)
    parts = [old] if len(kept) else []
    if len(missing):
        found = features_of(
            encoder, source if len(missing) == len(source) else Subset(source, missing), keep_pixels=False, **how
        )
        parts.append(Part(next(iter(found.sets.values())), missing[found.ids], np.arange(len(found.ids))))
        reasons = dict(found.skipped)
        for i in np.setdiff1d(missing, missing[found.ids]):
            name = source.name(int(i))
            bad[mine[i].hex()] = (name, reasons.get(name, "it could not be read"))
    if not parts:
        raise UserError(f"None of the {len(mine):,} images can be read; the first is {next(iter(bad.values()))[0]}.")
    ids = np.sort(np.concatenate([part.ids for part in parts]))
    passing = [mine[i].hex() for i in unsettled(source, np.setdiff1d(np.arange(len(mine)), ids).tolist())]
    card = {"encoder": encoder.fingerprint, "bad": bad, "passing": passing, "decoders": decoders()}
    write(folder, ids, parts, [mine[i] for i in ids], card)
    added, removed = len(ids) - len(kept), len(known.keys) - len(kept)
    vectors = np.load(folder / VECTORS, mmap_mode="r")
    return Index(source, vectors, ids, tuple(bad.values()), added, removed, reason)


class Part(NamedTuple):
    """Rows of some vectors, and the images they are of."""

    vectors: np.ndarray
    ids: np.ndarray
    rows: np.ndarray


def write(folder: Path, ids: np.ndarray, parts: Sequence[Part], keys: Sequence[bytes], card: dict[str, Any]) -> None:
    """Old and new rows in the source's order. The card goes first and is written last: it makes the rest valid."""
    (folder / CARD).unlink(missing_ok=True)
    with write_aside(folder / VECTORS) as temporary:
        whole = parts[0].vectors
        if len(parts) == 1 and isinstance(whole, np.memmap) and np.array_equal(parts[0].rows, np.arange(len(whole))):
            share(Path(str(whole.filename)), temporary)
        else:
            merge(temporary, ids, parts)
    with write_aside(folder / KEYS) as temporary, open(temporary, "wb") as file:
        np.save(file, np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16))
    crc = {name: file_crc(folder / name) for name in (VECTORS, KEYS)}
    write_json(folder / CARD, sealed({**card, "crc": crc}))


def share(file: Path, path: Path) -> None:
    """The same bytes under another name: one copy on the disk where it can be."""
    try:
        os.link(file, path)
    except OSError:
        shutil.copyfile(file, path)


def merge(path: Path, ids: np.ndarray, parts: Sequence[Part]) -> None:
    """A chunk at a time."""
    width = parts[0][0].shape[1]
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(len(ids), width))
    for vectors, own, rows in parts:
        target = np.searchsorted(ids, own)
        for start in range(0, len(own), CHUNK):
            some = slice(start, start + CHUNK)
            table[target[some]] = vectors[rows[some]]
    table.flush()


# ---- search


@dataclass(frozen=True)
class Searchable:
    """Vectors of length 1 under a scaling fitted to the collection, and how a query gets there."""

    units: Tensor
    change: Affine | None

    @classmethod
    def of(cls, vectors: np.ndarray, scaling: Scaling) -> Searchable:
        change = fit_scaling(vectors, scaling)
        return cls(unit_vectors(vectors, change), change)

    def nearest(self, queries: np.ndarray, *, k: int, engine: str = "torch") -> Neighbors:
        """Of query vectors as the encoder makes them; both engines are exact."""
        if not np.isfinite(queries).all():
            raise NotFiniteError("A query's vector contains NaN or infinity: the weights are damaged, so use others.")
        asked, k = unit_vectors(queries, self.change), min(k, len(self.units))
        return nearest_by_faiss(self.units, asked, k=k) if engine == "faiss" else nearest_units(self.units, asked, k=k)


def nearest_by_faiss(units: Tensor, queries: Tensor, *, k: int) -> Neighbors:
    try:
        import faiss
    except ImportError as error:
        raise UserError('faiss is an extra package: pip install "anechoic[search]", or leave --engine out.') from error
    table = faiss.IndexFlatIP(units.shape[1])
    table.add(units.numpy())
    similarities, indices = table.search(queries.numpy(), k)
    return Neighbors(torch.from_numpy(similarities), torch.from_numpy(indices))


def nearest_others(units: Tensor, rows: np.ndarray | Tensor, *, k: int) -> Neighbors:
    """The k nearest of these rows among all the others; a row is never its own neighbor."""
    rows = torch.as_tensor(rows)
    found = nearest_units(units, units[rows], k=k + 1)
    itself = found.indices == rows[:, None]
    # Where k + 1 others are equal to it, it may not be among them.
    itself[~itself.any(dim=1), -1] = True
    shape = (len(rows), k)
    return Neighbors(found.similarities[~itself].view(shape), found.indices[~itself].view(shape))
