"""Features of a source: what an encoder computes of its images in one pass, in memory or in the cache on disk.

The key is the content of weights, preprocessing and images, and the conditions that the last bits depend on. Features
are written as they are computed, so memory does not grow with the number of images; if the disk refuses, they are held
in memory. An interrupted pass resumes from its journal. Temporarily unreadable images are retried whenever an entry is
opened. Labels and metrics are elsewhere.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.choices import AllLayers
from anechoic.data import Augment, Loader, Source
from anechoic.data.decoding import decoders
from anechoic.data.source import digest, readable
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.features import Key, Pooling, choose_layers, extract_batches
from anechoic.models.packed import is_hooked
from anechoic.outcome import package_version
from anechoic.runtime.devices import pick_device
from anechoic.storage.cache import OpenEntry, open_entry
from anechoic.storage.files import read_json, release, remove, reserve, sealed, unsealed, write_aside, write_json

IDS, UNFINISHED, JOURNAL = "ids.npy", "unfinished", "journal.json"
# Seconds between entries of a pass in its journal, and the number of rows that are checked at once.
MARK_EVERY = 2.0
ROWS_AT_ONCE = 4096


class NoneReadableError(UserError):
    """No image of a source can be read."""

    def __init__(self) -> None:
        super().__init__("None of the images could be read, so there are no features; check the data.")


@dataclass(frozen=True)
class Features:
    """sets: (layer, pooling) -> float32 (n, D); ids (n,): which images of the source; skipped: (name, reason) of those
    that cannot be read."""

    sets: dict[Key, np.ndarray]
    ids: np.ndarray
    skipped: tuple[tuple[str, str], ...] = ()


def features_of(
    encoder: Encoder,
    source: Source,
    *,
    layers: Sequence[int] | AllLayers = (-1,),
    poolings: Sequence[Pooling] | None = None,
    device: str = "auto",
    workers: int = 0,
    cached: bool = True,
    keep_pixels: bool = True,
) -> Features:
    """Return deterministic, unmasked features of every readable image, in the source's order, of center crops.

    cached: in files of the cache, mapped into memory; otherwise in memory. keep_pixels: decode the images into the
    pixel cache first, which is faster if they are used again.
    """
    pick_device(device)  # an unknown device is an error even when nothing has to be computed
    chosen = choose_layers(layers, count=len(encoder.widths))
    wanted: list[Key] = [(layer, pooling) for layer in chosen for pooling in usable_poolings(encoder, poolings)]
    how = {"device": device, "workers": workers, "keep_pixels": keep_pixels}
    if not cached or is_hooked(encoder.model):
        return compute_in_memory(encoder, source, wanted, **how)
    about = f"{encoder.name} on {len(source):,} images of {source.where or 'a data set'}"
    key = digest(encoder.fingerprint, source.fingerprint, conditions(encoder, device))
    try:
        with open_entry("features", key, about=about) as entry:
            good = entry.intact([IDS, *map(file_name, wanted)])
            if IDS in good and has_become_readable(entry, source):
                good = set()
            missing = [key for key in wanted if not {IDS, file_name(key)} <= good]
            if missing:
                compute(encoder, source, missing, entry, **how)
            return read(entry, wanted, source)
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"Features cannot be cached ({reason}); they are held in memory.", stacklevel=2)
        return compute_in_memory(encoder, source, wanted, **how)


def conditions(encoder: Encoder, device: str) -> str:
    """Return the type of device, its instructions, and the versions of the libraries that decode and compute."""
    packages = {type(module).__module__.partition(".")[0] for module in encoder.model.modules()}
    found = {name: package_version(name) for name in sorted(packages | {"torch", "pillow"})}
    return f"{pick_device(device).type} {torch.backends.cpu.get_cpu_capability()} {found}"


def usable_poolings(encoder: Encoder, poolings: Sequence[Pooling] | None) -> Sequence[Pooling]:
    if poolings is None:
        return encoder.poolings
    if "class" in poolings and "class" not in encoder.poolings:
        raise UserError(f"{encoder.name} has no class token; use --pooling mean.")
    return poolings


def file_name(key: Key) -> str:
    return f"{key[0]:03d}-{key[1]}.npy"


def has_become_readable(entry: OpenEntry, source: Source) -> bool:
    """Return whether a skipped image can be read now; with the same decoders, damaged ones are not retried."""
    missing = skipped_ids(source, np.load(entry.path / IDS))
    card = entry.card()
    if not missing or card["decoders"] == decoders():
        return bool(missing and readable(source, card["temporary"]))
    if readable(source, missing):
        return True
    commit(entry, card["files"], source, missing)
    return False


def skipped_ids(source: Source, ids: np.ndarray) -> list[int]:
    return np.setdiff1d(np.arange(len(source)), ids).tolist()


def commit(entry: OpenEntry, files: Mapping[str, str], source: Source, missing: Sequence[int]) -> None:
    """Write the entry's card: these files, made without the missing images, and why those could not be read."""
    names = set(names_of(source, missing))
    reasons = {name: reason for name, reason in reasons_of(entry, source).items() if name in names}
    entry.commit(files, temporary=readable(source, missing, or_later=True), decoders=decoders(), reasons=reasons)


def reasons_of(entry: OpenEntry, source: Source) -> dict[str, str]:
    """Return why images could not be read, by name, in this pass or in the one that made the entry."""
    return {**entry.card().get("reasons", {}), **dict(source.skipped)}


def names_of(source: Source, indices: Sequence[int]) -> list[str]:
    return [source.name(index) for index in indices]


def read(entry: OpenEntry, wanted: Sequence[Key], source: Source) -> Features:
    sets = {key: np.load(entry.path / file_name(key), mmap_mode="r") for key in wanted}
    ids = np.load(entry.path / IDS)
    known = reasons_of(entry, source)
    missing = names_of(source, skipped_ids(source, ids))
    return Features(sets, ids, tuple((name, known.get(name, "it could not be read")) for name in missing))


def compute(encoder: Encoder, source: Source, wanted: Sequence[Key], entry: OpenEntry, **how: Any) -> None:
    """Pass once over the source; files are renamed, and listed on the card, only when they are complete."""
    unfinished = Unfinished(entry.path / UNFINISHED, encoder, source, wanted, device=how["device"])
    try:
        with unfinished.resumed() as tables:
            fill(encoder, source, tables, unfinished=unfinished, **how)
    except OSError:
        shutil.rmtree(unfinished.folder, ignore_errors=True)  # frees what it took of a full disk
        raise
    unfinished.complete()
    before = entry.card().get("files", {})
    names = [path.name for path in unfinished.folder.glob("*.npy")]
    for name in names:
        os.replace(unfinished.folder / name, entry.path / name)
    made = entry.hashes(names)
    if before.get(IDS) != made[IDS]:
        before = {}  # rows of other images
    commit(entry, {**before, **made}, source, skipped_ids(source, np.load(entry.path / IDS)))
    remove(unfinished.folder)


class Unfinished:
    """A pass in progress: a table per set of features, allocated for all images, and a journal of the rows on disk and
    of skipped images.

    It starts again if the journal is of another pass, or the rows are not those of the journal.
    """

    def __init__(self, folder: Path, encoder: Encoder, source: Source, wanted: Sequence[Key], *, device: str) -> None:
        self.folder, self.source, self.total = folder, source, len(source)
        self.widths = {key: encoder.widths[key[0]] for key in wanted}
        # Another device computes other last bits, in batches of another size.
        self.device = pick_device(device).type
        self.about = {"files": sorted(map(file_name, wanted)), "device": self.device}
        self.batch_size = encoder.batch_size_on(self.device)
        self.position = self.rows = self.marked = 0
        self.crc: dict[str, int] = {}

    @contextmanager
    def resumed(self) -> Iterator[dict[Key, np.ndarray]]:
        if not self.restore():
            remove(self.folder)
            self.folder.mkdir()
            self.position = self.rows = 0
            for name, (width, kind) in self.shapes().items():
                create_table(self.folder / name, self.total, width, kind)
            self.crc = dict.fromkeys(self.shapes(), 0)
        self.marked, self.marked_at = self.rows, time.monotonic()
        self.tables = {name: np.lib.format.open_memmap(self.folder / name, mode="r+") for name in self.shapes()}
        yield {key: self.tables[file_name(key)] for key in self.widths}
        self.mark()

    def shapes(self) -> dict[str, tuple[int, type]]:
        return {IDS: (0, np.int64), **{file_name(key): (width, np.float32) for key, width in self.widths.items()}}

    def restore(self) -> bool:
        """Return whether the rows of the journal are there."""
        try:
            journal = unsealed(read_json(self.folder / JOURNAL))
            if journal["about"] != self.about or journal["total"] != self.total:
                return False
            self.position, self.rows, self.crc = journal["position"], journal["rows"], journal["crc"]
            skipped = [(str(name), str(why)) for name, why in journal["skipped"]]
            tables = {name: np.load(self.folder / name, mmap_mode="r") for name in self.shapes()}
            intact = all(rows_crc(table, 0, self.rows) == self.crc[name] for name, table in tables.items())
        except (OSError, ValueError, KeyError, TypeError):  # a UserError is a ValueError
            return False
        if intact:
            self.source.add_skipped(skipped)
        return intact

    def add(self, ids: np.ndarray) -> None:
        """Record that these images are in the tables."""
        self.tables[IDS][self.rows : self.rows + len(ids)] = ids
        self.rows += len(ids)
        # A batch begins at a multiple of its size, however many of its images could be read.
        self.position = (int(ids[-1]) // self.batch_size + 1) * self.batch_size
        os.utime(self.folder)  # a waiting process sees progress
        if time.monotonic() - self.marked_at >= MARK_EVERY:
            self.mark()

    def mark(self) -> None:
        """Flush the tables and write the journal."""
        for name, table in self.tables.items():
            table.flush()
            self.crc[name] = rows_crc(table, self.marked, self.rows, self.crc[name])
            release(table)
        self.marked, self.marked_at = self.rows, time.monotonic()
        state = {"about": self.about, "total": self.total, "position": self.position, "rows": self.rows}
        write_json(self.folder / JOURNAL, sealed({**state, "crc": self.crc, "skipped": list(self.source.skipped)}))

    def complete(self) -> None:
        """Cut the tables to the rows that are filled: unreadable images were skipped."""
        if self.rows == 0:
            remove(self.folder)
            raise NoneReadableError
        if self.rows < self.total:
            for name, table in self.tables.items():
                with write_aside(self.folder / name) as temporary, open(temporary, "wb") as file:
                    np.save(file, table[: self.rows])
        self.tables.clear()


def rows_crc(table: np.ndarray, start: int, stop: int, value: int = 0) -> int:
    """Return the CRC of these rows, after those whose CRC is `value`."""
    for first in range(start, stop, ROWS_AT_ONCE):
        value = zlib.crc32(np.ascontiguousarray(table[first : min(first + ROWS_AT_ONCE, stop)]).data, value)
    return value


def create_table(path: Path, rows: int, width: int, kind: type) -> None:
    """Create a file of (rows, width), or (rows,) for width 0, and reserve its space: a full disk is an error now."""
    shape = (rows, width) if width else (rows,)
    np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape).flush()
    with open(path, "r+b") as file:
        reserve(file.fileno(), path.stat().st_size)


def compute_in_memory(encoder: Encoder, source: Source, wanted: Sequence[Key], **how: Any) -> Features:
    tables = {key: np.empty((len(source), encoder.widths[key[0]]), np.float32) for key in wanted}
    ids = np.concatenate(fill(encoder, source, tables, **how) or [np.empty(0, np.int64)])
    if len(ids) == 0:
        raise NoneReadableError
    return Features({key: table[: len(ids)] for key, table in tables.items()}, ids, tuple(source.skipped))


def fill(
    encoder: Encoder,
    source: Source,
    tables: Mapping[Key, np.ndarray],
    *,
    unfinished: Unfinished | None = None,
    device: str,
    workers: int,
    keep_pixels: bool,
) -> list[np.ndarray]:
    """Write features into the next rows of each table; return the ids of the images that could be read, by batch."""
    ids: list[np.ndarray] = []
    start, done = (0, 0) if unfinished is None else (unfinished.position, unfinished.rows)
    how = {"device": device, "workers": workers, "keep_pixels": keep_pixels}
    for own, found in feature_batches(encoder, source, list(tables), start=start, **how):
        for key, table in tables.items():
            table[done : done + len(own)] = found[key]
        done += len(own)
        ids.append(own)
        if unfinished is not None:
            unfinished.add(own)
    return ids


def feature_batches(
    encoder: Encoder, source: Source, wanted: Sequence[Key], *, start: int = 0, **how: Any
) -> Iterator[tuple[np.ndarray, dict[Key, np.ndarray]]]:
    """Yield the ids of the readable images of each batch, in order, and their features, from image `start` on.

    Bits of a row depend on the images of its batch. how: device, workers, keep_pixels and pixel_cache of `batches`.
    """
    if start >= len(source):
        return
    layers, poolings = sorted({layer for layer, _ in wanted}), list(dict.fromkeys(pooling for _, pooling in wanted))
    ids: deque[np.ndarray] = deque()
    stream = batches(encoder, source, ids=ids, start=start, **how)
    # Batches may be fetched ahead, but their features come in order.
    for found in extract_batches(encoder.model, stream, layers=layers, poolings=poolings, forward=encoder.forward):
        yield ids.popleft(), {key: found[key].numpy(force=True) for key in wanted}


def batches(
    encoder: Encoder,
    source: Source,
    *,
    device: str,
    workers: int = 0,
    ids: MutableSequence[np.ndarray] | None = None,
    keep_pixels: bool = True,
    pixel_cache: bool = True,
    start: int = 0,
    augment: Augment | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield preprocessed images on the device and move the model there; append the ids of each batch to `ids`.

    augment: instead of the center crop, with random numbers of the seed. pixel_cache: False hashes no files.
    """
    where = pick_device(device)
    encoder.model.to(where)
    loader = Loader(
        source,
        image_size=encoder.image_size,
        batch_size=encoder.batch_size_on(where.type),
        augment=augment or Augment(kind="center"),
        seed=seed,
        workers=workers,
        cache=pixel_cache,
        build_cache=keep_pixels,
        start=start,
        device=where,
    )
    bar = tqdm(loader, total=loader.num_batches, desc=encoder.name, leave=False, disable=None)
    with bar:
        for batch in bar:
            if ids is not None:
                ids.append(batch.ids.numpy())
            yield encoder.prepare(batch.images.to(where, non_blocking=True), batch.ids)
