"""The features of a source: what an encoder makes of its images in one pass, in memory or in a cache on disk.

The cache's key is the encoder's weights and preparation and the source's images, so a stale entry cannot be met; a
checksum tells a damaged one. Files are written as features come, so memory does not grow with the number of images,
unless the disk refuses: then they are held in memory. A pass that was ended goes on where its journal says. Images that
could not be fetched are tried again whenever it is opened. It knows neither labels nor metrics.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.data import Augment, Loader, Source, cache_dir
from anechoic.data.decoding import decoders
from anechoic.data.pixel_cache import locked
from anechoic.data.source import readable, unsettled
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.features import Key, Pooling, choose_layers, extract_batches
from anechoic.runtime.devices import pick_device
from anechoic.storage.files import (
    read_json,
    remove,
    reserve,
    sealed,
    sweep_leftovers,
    unsealed,
    write_aside,
    write_json,
)

IDS, INDEX, UNFINISHED, JOURNAL = "ids.npy", "index.json", "unfinished", "journal.json"
# Seconds after which a pass writes down how far it is, and the rows that are checked at once.
MARK_EVERY = 2.0
ROWS_AT_ONCE = 4096


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
    layers: Sequence[int] | Literal["all"] = (-1,),
    poolings: Sequence[Pooling] | None = None,
    device: str = "auto",
    workers: int = 0,
    cached: bool = True,
    keep_pixels: bool = True,
) -> Features:
    """Deterministic, unmasked features of every readable image, in the source's order. Center crop, no augmentation.

    cached: kept on disk and read from there as used; otherwise in memory. keep_pixels: decode the images into the pixel
    cache first, which pays when they are passed over again.
    """
    pick_device(device)  # a mistake is told even when nothing has to be computed
    chosen = choose_layers(layers, count=len(encoder.widths))
    wanted: list[Key] = [(layer, pooling) for layer in chosen for pooling in usable_poolings(encoder, poolings)]
    how = {"device": device, "workers": workers, "keep_pixels": keep_pixels}
    if not cached:
        return compute_in_memory(encoder, source, wanted, **how)
    folder = cache_dir() / "features" / f"{encoder.fingerprint}-{source.fingerprint}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", working_on=folder):
            sweep_leftovers(folder)
            good = intact(folder, [IDS, *map(file_name, wanted)])
            if IDS in good and has_become_readable(folder, source):
                good = set()
            missing = [key for key in wanted if not {IDS, file_name(key)} <= good]
            if missing:
                compute(encoder, source, missing, folder, **how)
            return read(folder, wanted, source)
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"Features cannot be kept in {folder} ({reason}); they are held in memory.", stacklevel=2)
        return compute_in_memory(encoder, source, wanted, **how)


def usable_poolings(encoder: Encoder, poolings: Sequence[Pooling] | None) -> Sequence[Pooling]:
    if poolings is None:
        return encoder.poolings
    if "class" in poolings and "class" not in encoder.poolings:
        raise UserError(f"{encoder.name} has no class token; use --pooling mean.")
    return poolings


def file_name(key: Key) -> str:
    return f"{key[0]:03d}-{key[1]}.npy"


def intact(folder: Path, names: Sequence[str]) -> set[str]:
    """Those of the files that are what was written; a warning names one that is there but damaged."""
    good = set()
    for name, expected in read_index(folder).items():
        if name in names and (folder / name).is_file():
            if file_crc(folder / name) == expected:
                good.add(name)
            else:
                warnings.warn(f"Features in {folder / name} are damaged; they are computed anew.", stacklevel=3)
    return good


def read_index(folder: Path) -> dict[str, int]:
    """File name -> checksum of everything kept here; nothing if the index is missing or damaged."""
    return read_notes(folder).get("files", {})


def read_notes(folder: Path) -> dict[str, Any]:
    """The index with what else it says: `passing`, images that could not be fetched, and with which `decoders`."""
    try:
        return unsealed(read_json(folder / INDEX))
    except ValueError:  # a UserError is one
        return {}


def has_become_readable(folder: Path, source: Source) -> bool:
    """Whether an image that was left out can be read now; with the same decoders only those whose bytes were not seen
    are tried."""
    missing = left_out(source, np.load(folder / IDS))
    notes = read_notes(folder)
    if not missing:
        return False
    if notes.get("decoders") == decoders():
        return bool(readable(source, notes["passing"]))
    if readable(source, missing):
        return True
    note(folder, notes["files"], source, missing)
    return False


def left_out(source: Source, ids: np.ndarray) -> list[int]:
    return np.setdiff1d(np.arange(len(source)), ids).tolist()


def note(folder: Path, files: Mapping[str, int], source: Source, missing: Sequence[int]) -> None:
    """The index: these files, made without the missing images."""
    passing = unsettled(source, missing)
    write_json(folder / INDEX, sealed({"files": dict(files), "passing": passing, "decoders": decoders()}))


def file_crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def read(folder: Path, wanted: Sequence[Key], source: Source) -> Features:
    sets = {key: np.load(folder / file_name(key), mmap_mode="r") for key in wanted}
    ids = np.load(folder / IDS)
    # The cache knows which images are missing, but only a pass over the images knows why.
    known = dict(source.skipped)
    missing = map(source.name, left_out(source, ids))
    return Features(sets, ids, tuple((name, known.get(name, "it could not be read")) for name in missing))


def compute(encoder: Encoder, source: Source, wanted: Sequence[Key], folder: Path, **how: Any) -> None:
    """One pass over the source; files take their names, and are listed, only when they are complete."""
    unfinished = Unfinished(folder / UNFINISHED, encoder, source, wanted, device=how["device"])
    try:
        with unfinished.going_on() as tables:
            fill(encoder, source, tables, unfinished=unfinished, **how)
    except OSError:
        shutil.rmtree(unfinished.folder, ignore_errors=True)  # a full disk gets back what room it had
        raise
    unfinished.complete()
    # Nobody reads before the index lists the files, and only the holder of the lock writes.
    made = {path.name: file_crc(path) for path in unfinished.folder.glob("*.npy")}
    before = read_index(folder)
    if before.get(IDS) != made[IDS]:
        before = {}  # rows of other images
    for name in made:
        os.replace(unfinished.folder / name, folder / name)
    note(folder, {**before, **made}, source, left_out(source, np.load(folder / IDS)))
    remove(unfinished.folder)


class Unfinished:
    """A pass on its way: a table per set of features with room for all, and a journal of how many rows are safe.

    A journal that does not fit what is wanted, or rows that are not those it tells of, are thrown away.
    """

    def __init__(self, folder: Path, encoder: Encoder, source: Source, wanted: Sequence[Key], *, device: str) -> None:
        self.folder, self.total = folder, len(source)
        self.widths = {key: encoder.widths[key[0]] for key in wanted}
        # Another device computes other last digits, in batches of another size.
        self.device = pick_device(device).type
        self.about = {"files": sorted(map(file_name, wanted)), "device": self.device}
        self.batch_size = encoder.batch_size_on(self.device)
        self.position = self.rows = self.marked = 0
        self.crc: dict[str, int] = {}

    @contextmanager
    def going_on(self) -> Iterator[dict[Key, np.ndarray]]:
        if not self.restore():
            remove(self.folder)
            self.folder.mkdir()
            self.position = self.rows = 0
            for name, (width, kind) in self.shapes().items():
                new_table(self.folder / name, self.total, width, kind)
            self.crc = dict.fromkeys(self.shapes(), 0)
        self.marked, self.marked_at = self.rows, time.monotonic()
        self.tables = {name: np.lib.format.open_memmap(self.folder / name, mode="r+") for name in self.shapes()}
        yield {key: self.tables[file_name(key)] for key in self.widths}
        self.mark()

    def shapes(self) -> dict[str, tuple[int, type]]:
        return {IDS: (0, np.int64), **{file_name(key): (width, np.float32) for key, width in self.widths.items()}}

    def restore(self) -> bool:
        """Whether the rows that the journal tells of are there."""
        try:
            journal = unsealed(read_json(self.folder / JOURNAL))
            if journal["about"] != self.about or journal["total"] != self.total:
                return False
            self.position, self.rows, self.crc = journal["position"], journal["rows"], journal["crc"]
            tables = {name: np.load(self.folder / name, mmap_mode="r") for name in self.shapes()}
            return all(rows_crc(table, 0, self.rows) == self.crc[name] for name, table in tables.items())
        except (OSError, ValueError, KeyError, TypeError):  # a UserError is a ValueError
            return False

    def add(self, ids: np.ndarray) -> None:
        """These images are in the tables now."""
        self.tables[IDS][self.rows : self.rows + len(ids)] = ids
        self.rows += len(ids)
        # A batch begins at a multiple of its size, however many of its images could be read.
        self.position = (int(ids[-1]) // self.batch_size + 1) * self.batch_size
        os.utime(self.folder)  # processes that wait for this one see that it gets on
        if time.monotonic() - self.marked_at >= MARK_EVERY:
            self.mark()

    def mark(self) -> None:
        """What is in the tables is on the disk, and the journal says so."""
        for name, table in self.tables.items():
            table.flush()
            self.crc[name] = rows_crc(table, self.marked, self.rows, self.crc[name])
        self.marked, self.marked_at = self.rows, time.monotonic()
        told = {"about": self.about, "total": self.total, "position": self.position, "rows": self.rows}
        write_json(self.folder / JOURNAL, sealed({**told, "crc": self.crc}))

    def complete(self) -> None:
        """Tables as long as they are full: unreadable images were left out."""
        if self.rows == 0:
            remove(self.folder)
            raise UserError("None of the images could be read, so there are no features; check the data.")
        if self.rows < self.total:
            for name, table in self.tables.items():
                with write_aside(self.folder / name) as temporary, open(temporary, "wb") as file:
                    np.save(file, table[: self.rows])
        self.tables.clear()


def rows_crc(table: np.ndarray, start: int, stop: int, value: int = 0) -> int:
    """Of these rows, after those whose checksum is `value`."""
    for first in range(start, stop, ROWS_AT_ONCE):
        value = zlib.crc32(np.ascontiguousarray(table[first : min(first + ROWS_AT_ONCE, stop)]).data, value)
    return value


def new_table(path: Path, rows: int, width: int, kind: type) -> None:
    """(rows, width), or (rows,) for width 0, in a file whose room is taken now: later a full disk could not be told."""
    shape = (rows, width) if width else (rows,)
    np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape).flush()
    with open(path, "r+b") as file:
        reserve(file.fileno(), path.stat().st_size)


def compute_in_memory(encoder: Encoder, source: Source, wanted: Sequence[Key], **how: Any) -> Features:
    tables = {key: np.empty((len(source), encoder.widths[key[0]]), np.float32) for key in wanted}
    ids = np.concatenate(fill(encoder, source, tables, **how) or [np.empty(0, np.int64)])
    if len(ids) == 0:
        raise UserError("None of the images could be read, so there are no features; check the data.")
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
    """Write features into the next rows of each table; returns the ids of the images that could be read, by batch."""
    layers = sorted({layer for layer, _ in tables})
    poolings = list(dict.fromkeys(pooling for _, pooling in tables))
    ids: list[np.ndarray] = []
    start, done = (0, 0) if unfinished is None else (unfinished.position, unfinished.rows)
    if start >= len(source):
        return ids
    stream = batches(encoder, source, device=device, workers=workers, ids=ids, keep_pixels=keep_pixels, start=start)
    extracted = extract_batches(encoder.model, stream, layers=layers, poolings=poolings, forward=encoder.forward)
    for number, found in enumerate(extracted):  # batches may be fetched ahead, but their features come in order
        rows = len(ids[number])
        for key, table in tables.items():
            table[done : done + rows] = found[key].numpy(force=True)
        done += rows
        if unfinished is not None:
            unfinished.add(ids[number])
    return ids


def batches(
    encoder: Encoder,
    source: Source,
    *,
    device: str,
    workers: int = 0,
    ids: list[np.ndarray] | None = None,
    keep_pixels: bool = True,
    start: int = 0,
    augment: Augment | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Prepared images on the device, with the model there too; the ids of each batch are appended to `ids`.

    augment: instead of the center crop, drawn from the seed.
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
        build_cache=keep_pixels,
        start=start,
    )
    bar = tqdm(loader, total=loader.num_batches, desc=encoder.name, leave=False, disable=None)
    with bar:
        for batch in bar:
            if ids is not None:
                ids.append(batch.ids.numpy())
            yield encoder.prepare(batch.images.to(where), batch.ids)
