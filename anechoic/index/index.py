"""The index of a collection: one vector per image in the cache, and the search in it.

It belongs to an encoder, a layer, a kind of vector and the path of a collection. When it is opened again, added or
changed images are embedded and removed ones deleted; with other weights all are embedded again. Search is exact, or
approximate in large collections (neighbors.py).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anechoic.choices import SearchEngine, Vector
from anechoic.data import Source, Subset
from anechoic.data.decoding import decoders
from anechoic.data.source import digest, readable
from anechoic.errors import NotFiniteError, UserError
from anechoic.eval.encoders import Encoder, flat
from anechoic.eval.feature_cache import NoneReadableError, conditions, create_table, features_of
from anechoic.eval.feature_scaling import CHUNK, Affine, Scaling, fit_scaling, is_constant, unit_vectors
from anechoic.eval.features import Pooling, choose_layers
from anechoic.eval.metrics.knn import Neighbors, nearest_units
from anechoic.eval.tensors import as_tensor, warn_if_constant
from anechoic.index.neighbors import Approximate, load_faiss, nearest_others, open_approximate
from anechoic.outcome import counted
from anechoic.storage.cache import CARD, OpenEntry, hash_file, open_entry
from anechoic.storage.files import release, write_aside, write_json

log = logging.getLogger("anechoic")

# The vector of an image: pooled tokens, or all patches concatenated (flat) and summed into this number of channels.
FLAT_WIDTH = 512
# The best search results by labels (results/search-vectors.json, docs/finding.md).
VECTOR: Vector = "flat"
SCALING: Scaling = "standardized"

# Number of vectors up to which search compares with all of them, unless another engine is chosen.
EXACT = 100_000

VECTORS, KEYS = "vectors.npy", "keys.npy"


@dataclass(frozen=True)
class Index:
    """vectors (n, D), mapped from a file; ids (n,) in the source; added, removed: since it was last opened."""

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
    key = digest("index", absolute(encoder_name), absolute(place), layer, vector, source.channels)
    encoder, pooled = encoder_for(encoder, vector, layer)
    (number,) = choose_layers((-1 if vector == "flat" else layer,), count=len(encoder.widths))
    how: dict[str, Any] = {"layers": (number,), "poolings": (pooled,), "device": device, "workers": workers}
    keys = identities(source)
    try:
        with open_entry("index", key, about=f"{encoder.name} on {len(source):,} images of {place}") as entry:
            known, reason = read(entry, maker_of(encoder, device))
            if reason:
                log.warning("The index of %s is made again: %s.", place, reason)
            return update(entry, known, encoder, source, keys, how, reason=reason)
    except OSError as error:
        log.warning("The index cannot be cached (%s); it is held in memory.", error.strerror or error)
        found = features_of(encoder, source, cached=False, keep_pixels=False, **how)
        return Index(source, next(iter(found.sets.values())), found.ids, found.skipped, added=len(found.ids))


def encoder_for(encoder: Encoder, vector: Vector, layer: int) -> tuple[Encoder, Pooling]:
    """Return the encoder and its pooling for this vector."""
    if vector != "flat":
        return encoder, vector
    if layer not in (-1, len(encoder.widths) - 1):
        raise UserError(
            "All patches (--vector flat) are taken of the encoder's output: omit --layer, or choose another --vector."
        )
    return replace(flat(encoder, width=FLAT_WIDTH), name=encoder.name), "mean"


def absolute(place: str) -> str:
    return str(Path(place).resolve()) if Path(place).exists() else place


def identities(source: Source) -> np.ndarray:
    """Return 16 bytes per image, which change with the image, or with any image of the source."""
    own = source.identities()
    if own is not None:
        return own
    found = [bytes.fromhex(digest(source.fingerprint, i)) for i in range(len(source))]
    return np.frombuffer(b"".join(found), np.dtype("V16"))


@dataclass(frozen=True)
class Known:
    """The rows of an index and the images they are of, and the unreadable images; retry: those to read again."""

    vectors: np.ndarray
    keys: np.ndarray
    bad: dict[str, Any]
    retry: frozenset[str]


def maker_of(encoder: Encoder, device: str) -> str:
    """Return what identifies the network and the conditions that vectors are computed under."""
    return digest(encoder.fingerprint, conditions(encoder, device))


def read(entry: OpenEntry, maker: str) -> tuple[Known | None, str]:
    """Return the index, or None and the reason why it cannot be used; an empty reason if there was none."""
    card = entry.card()
    if not any(entry.path.iterdir()):
        return None, ""
    if card.get("encoder", maker) != maker:
        return None, "the weights, how images are prepared, or the libraries have changed since"
    try:
        if entry.intact([VECTORS, KEYS]) != {VECTORS, KEYS}:
            return None, "its file is damaged"
        vectors, keys = (np.load(entry.path / name, mmap_mode="r") for name in (VECTORS, KEYS))
        if (vectors.dtype, keys.dtype, keys.shape) != (np.float32, np.uint8, (len(vectors), 16)) or vectors.ndim != 2:
            return None, "its file is damaged"
        bad = {key: (str(name), str(why)) for key, (name, why) in card["bad"].items()}
        retry = frozenset(card["temporary"] if card["decoders"] == decoders() else bad)
        return Known(vectors, np.array(keys).view("V16").ravel(), bad, retry), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, "its file is damaged"


def update(
    entry: OpenEntry, known: Known | None, encoder: Encoder, source: Source, keys: np.ndarray, how: dict, *, reason: str
) -> Index:
    """Return the index of exactly the images of the source."""
    mine = [key.tobytes() for key in keys]
    known = known or Known(np.empty((0, 0)), keys[:0], {}, frozenset())
    tried = [i for i, key in enumerate(mine) if key.hex() in known.retry]
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
        some, embedded = source if len(missing) == len(source) else Subset(source, missing), missing[:0]
        try:
            found = features_of(encoder, some, keep_pixels=False, **how)
        except NoneReadableError:  # of the missing ones; there may be others
            reasons = dict(source.skipped)
        else:
            reasons, embedded = dict(found.skipped), missing[found.ids]
            parts.append(Part(next(iter(found.sets.values())), embedded, np.arange(len(embedded))))
        for i in np.setdiff1d(missing, embedded):
            name = source.name(int(i))
            bad[mine[i].hex()] = (name, reasons.get(name, "it could not be read"))
    if not parts:
        raise UserError(
            f"None of {counted(len(mine), 'image')} can be read; the first is {next(iter(bad.values()))[0]}."
        )
    ids = np.sort(np.concatenate([part.ids for part in parts]))
    retry = readable(source, np.setdiff1d(np.arange(len(mine)), ids).tolist(), or_later=True)
    notes = {"encoder": maker_of(encoder, how["device"]), "bad": bad, "decoders": decoders()}
    write(entry, ids, parts, [mine[i] for i in ids], temporary=[mine[i].hex() for i in retry], **notes)
    added, removed = len(ids) - len(kept), len(known.keys) - len(kept)
    vectors = np.load(entry.path / VECTORS, mmap_mode="r")
    return Index(source, vectors, ids, tuple(bad.values()), added, removed, reason)


class Part(NamedTuple):
    """Rows of some vectors, and the images they are of."""

    vectors: np.ndarray
    ids: np.ndarray
    rows: np.ndarray


def write(entry: OpenEntry, ids: np.ndarray, parts: Sequence[Part], keys: Sequence[bytes], **notes: Any) -> None:
    """Write old and new rows in the source's order. On a full disk the index stays as it was.

    All is written before the first file is replaced, and the card is replaced last.
    """
    vectors, table, card = (entry.path / name for name in (VECTORS, KEYS, CARD))
    with write_aside(card) as new_card, write_aside(table) as new_keys, write_aside(vectors) as new_vectors:
        with open(new_keys, "wb") as file:
            np.save(file, np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16))
        merge(new_vectors, ids, parts)
        files = {VECTORS: hash_file(new_vectors).hex(), KEYS: hash_file(new_keys).hex()}
        write_json(new_card, entry.new_card(files, **notes))
    entry.grew = True


def merge(path: Path, ids: np.ndarray, parts: Sequence[Part]) -> None:
    """Write the rows a chunk at a time, or link to the file of the feature cache if it has exactly them."""
    whole = parts[0].vectors
    if len(parts) == 1 and isinstance(whole, np.memmap) and np.array_equal(parts[0].rows, np.arange(len(whole))):
        try:
            os.link(str(whole.filename), path)
        except OSError:
            shutil.copyfile(str(whole.filename), path)
        return
    create_table(path, len(ids), whole.shape[1], np.float32)
    table = np.lib.format.open_memmap(path, mode="r+")
    for vectors, own, rows in parts:
        target = np.searchsorted(ids, own)
        for start in range(0, len(own), CHUNK):
            some = slice(start, start + CHUNK)
            table[target[some]] = vectors[rows[some]]
            release(vectors)
            release(table)
    table.flush()


# ---- search


@dataclass(frozen=True)
class Searchable:
    """Vectors of length 1 under a scaling fitted to the collection, a tensor or a mapped file; change: the scaling, for
    queries; approximate: what searches instead of comparing with all of them."""

    units: Tensor | np.ndarray
    change: Affine | None
    engine: SearchEngine = "torch"
    approximate: Approximate | None = None

    @classmethod
    def of(cls, vectors: np.ndarray, scaling: Scaling, *, engine: SearchEngine = "auto") -> Searchable:
        """engine auto: exact up to EXACT vectors, approximate beyond if faiss is installed."""
        if is_constant(vectors):  # without their mean, no direction would be left
            warn_if_constant(vectors, "of the collection")
            scaling = "raw"
        change = fit_scaling(vectors, scaling)
        if engine == "auto":
            engine = "approximate" if len(vectors) > EXACT and find_spec("faiss") else "torch"
        if engine == "approximate":
            try:
                found = open_approximate(vectors, change)
                return cls(found.mapped, change, engine, found)
            except OSError as error:
                log.warning("The approximate index cannot be cached (%s): search is exact.", error.strerror or error)
                engine = "torch"
        return cls(unit_vectors(vectors, change), change, engine)

    def nearest(self, queries: np.ndarray, *, k: int) -> Neighbors:
        """Return the k nearest of each query vector of the encoder."""
        if not np.isfinite(queries).all():
            raise NotFiniteError("A query's vector contains NaN or infinity: the weights are damaged, so use others.")
        asked, k = unit_vectors(queries, self.change), min(k, len(self.units))
        if self.approximate is not None:
            return self.approximate.nearest(asked, k=k)
        units = as_tensor(self.units)
        return nearest_by_faiss(units, asked, k=k) if self.engine == "faiss" else nearest_units(units, asked, k=k)

    def nearest_others(self, rows: np.ndarray | Tensor, *, k: int) -> Neighbors:
        """Return the k nearest of these rows of the collection among all others."""
        if self.approximate is not None:
            return self.approximate.nearest_others(rows, k=k)
        return nearest_others(as_tensor(self.units), rows, k=k)

    def described(self) -> dict[str, Any]:
        """Return how it searches, for the JSON; recall: at 10, against exact search."""
        found = self.approximate
        exact: dict[str, Any] = {"engine": self.engine, "exact": found is None}
        return exact if found is None else {**exact, "recall": found.recall, "lists": found.lists, "read": found.probes}


def nearest_by_faiss(units: Tensor, queries: Tensor, *, k: int) -> Neighbors:
    table = load_faiss().IndexFlatIP(units.shape[1])
    table.add(units.numpy())
    similarities, indices = table.search(queries.numpy(), k)
    return Neighbors(torch.from_numpy(similarities), torch.from_numpy(indices))
