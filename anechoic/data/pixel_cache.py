"""Pixels decoded once and kept: a memory-mapped uint8 file per data set, checked when opened, rebuilt when stale.

It never changes what is read, only how fast: `stored` gives the same pixels with and without a cache. Processes share
one copy through the page cache, and of two that start together one builds while the other waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.data.decoding import decoders
from anechoic.data.source import BadImage, EncodedSource, Source, Subset, digest, refuse_too_many
from anechoic.errors import UserError
from anechoic.storage.files import flush, sweep_leftovers, write_aside

FORMAT = 1
# A data set whose decoded pixels exceed this is read from its files every time.
LIMIT_BYTES = 4 << 30
# Images looked at before all of them are, and the seconds that may take.
SPOT_CHECKS, SPOT_SECONDS = 64, 0.5
CHUNK = 64
# Images that a thread reads before it looks whether the run was stopped.
STOP_EVERY = 8
# Seconds after which a half-written file in the cache cannot be anybody's work any more.
STALE = 24 * 3600.0
# Seconds to wait for another process that holds a part of the cache but does not get on.
PATIENCE = 60.0


def cache_dir() -> Path:
    """`ANECHOIC_CACHE`, or `anechoic` in the platform's folder for caches."""
    if named := os.environ.get("ANECHOIC_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "anechoic"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "anechoic" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anechoic"


def write_cached(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Keep arrays in the cache if it can be written to; written aside, then renamed, so no reader sees half a file."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_leftovers(path.parent, older_than=STALE)
        with write_aside(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def read_cached(path: Path) -> dict[str, np.ndarray] | None:
    """What `write_cached` kept, or None if there is nothing or it is damaged."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error):
        return None


class Stored(Source):
    """The pixels of a source from its cache: a flat file of (H, W, C) images one after the other.

    Images that were found undecodable stay out; those that could not be fetched are looked for in the source again.
    """

    resident = True

    def __init__(self, source: Source, folder: Path, *, verify: bool = True):
        super().__init__()
        index = json.loads((folder / "index.json").read_text())
        places = read_cached(folder / "places.npz")
        if places is None:
            raise ValueError("the index of cached pixels is damaged")
        self._starts, self._shapes = places["starts"], places["shapes"]
        size = (folder / "pixels.bin").stat().st_size
        if size != int(self._starts[-1]) or index["format"] != FORMAT:
            raise ValueError("cached pixels are incomplete")
        self._pixels = torch.from_file(str(folder / "pixels.bin"), shared=False, size=size, dtype=torch.uint8)
        if verify and zlib.crc32(self._pixels.numpy().data) != index["crc"]:
            raise ValueError("cached pixels are damaged")
        lost = {int(k): BadImage(name, reason) for k, (name, reason) in index["bad"].items()}
        self._again = set(index["passing"] if index.get("decoders") == decoders() else lost)
        self._bad = {k: bad for k, bad in lost.items() if k not in self._again}
        self._source, self._folder = source, folder
        self.fingerprint, self.channels = source.fingerprint, source.channels
        self.labels, self.classes = source.labels, source.classes
        self.skipped = source.skipped
        self.note_skipped((bad.name, bad.reason) for bad in self._bad.values())

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps the file again instead of receiving a copy of its content.
        return partial(Stored, verify=False), (self._source, self._folder)

    def __len__(self) -> int:
        return len(self._shapes)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        if index in self._bad:
            raise self._bad[index]
        if index in self._again:
            return self._source.read(index, min_side=min_side)
        start, stop = self._starts[index : index + 2].tolist()
        return self._pixels[start:stop].view(*self._shapes[index].tolist(), self.channels).permute(2, 0, 1)


def stored(source: Source, *, min_side: int, build: bool = True) -> Source:
    """The source itself or its cache, whichever reads faster; both give the same pixels for this min_side.

    build=False takes a cache that is there but makes none: for a single pass, decoding is cheaper than keeping.
    Raises UserError if more than a tenth of the images, or of a sample of them, cannot be read.
    """
    if source.resident:
        return source
    if isinstance(source, Subset):
        return Subset(stored(source.source, min_side=min_side, build=build), source.indices)
    key = digest("pixels", FORMAT, source.fingerprint, source.channels, min_side)
    folder = cache_dir() / "pixels" / key
    if not folder.is_dir() and (not build or expected_bytes(source, min_side=min_side) > LIMIT_BYTES):
        return source
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock"), working_on=folder.with_suffix(".unfinished")):
            return _open_or_build(source, folder, min_side=min_side)
    except OSError as error:
        warnings.warn(
            f"Decoded images cannot be kept in {str(cache_dir())!r} ({error.strerror or error}), so they are "
            "decoded at every visit; set ANECHOIC_CACHE to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=2,
        )
        return source


@contextlib.contextmanager
def locked(file: Path, *, working_on: Path) -> Iterator[None]:
    """Hold the lock of this part of the cache; OSError if another process has it and does not get on.

    working_on: the folder where the other one writes. While that changes, waiting is worth it.
    """
    lock = FileLock(file)
    while not lock.is_locked:
        before = _state_of(working_on)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            if _state_of(working_on) == before:
                raise OSError(f"another process holds {file} and has not got on for {PATIENCE:g} s") from None
    try:
        yield
    finally:
        lock.release()


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of everything in the folder: another result later means that somebody works there."""
    with contextlib.suppress(OSError):
        stats = [(str(path), path.stat()) for path in sorted(folder.rglob("*"))]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return []


def expected_bytes(source: Source, *, min_side: int) -> int:
    """The size of all decoded pixels, estimated from an even sample, which also finds a hopeless source early."""
    indices = np.unique(np.linspace(0, len(source) - 1, SPOT_CHECKS).astype(int)).tolist()
    results = source.read_many(indices, min_side=min_side)
    refuse_too_many([(bad.name, bad.reason) for bad in results if isinstance(bad, BadImage)], of=len(indices))
    sizes = [pixels.numel() for pixels in results if isinstance(pixels, Tensor)]
    return int(np.mean(sizes) * len(source))


def _open_or_build(source: Source, folder: Path, *, min_side: int) -> Stored:
    if folder.is_dir():
        try:
            kept = Stored(source, folder)
            if isinstance(source, EncodedSource):
                compare_some(source)
            return kept
        except UserError:
            raise
        except (ValueError, KeyError, EOFError, FileNotFoundError) as error:
            warnings.warn(
                f"{str(error).capitalize()} in {str(folder)!r}, so they are made anew.", RuntimeWarning, stacklevel=3
            )
            shutil.rmtree(folder)
    # Only the holder of the lock writes here, so an unfinished folder was left by a process that was killed.
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        _write(source, unfinished, min_side=min_side)
        for file in unfinished.iterdir():
            flush(file)
        os.rename(unfinished, folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Stored(source, folder, verify=False)


def compare_some(source: EncodedSource) -> None:
    """UserError if an image whose pixels are kept has other bytes now; the same images every time, in no order."""
    started = time.monotonic()
    for index in np.random.default_rng(0).permutation(len(source))[:SPOT_CHECKS].tolist():
        source.compare_content(index)
        if time.monotonic() - started > SPOT_SECONDS:
            return


def _write(source: Source, folder: Path, *, min_side: int) -> None:
    crc = 0
    starts, shapes, bad, passing = [0], [], {}, []
    # Closed at once when the run is stopped, so that nobody goes on decoding.
    with contextlib.closing(_read_all(source, min_side=min_side)) as images, open(folder / "pixels.bin", "wb") as file:
        for index, result in enumerate(images):
            if isinstance(result, BadImage):
                bad[index] = (result.name, result.reason)
                passing += [] if result.lasting else [index]
                shapes.append((0, 0))
            else:
                data = result.permute(1, 2, 0).contiguous().numpy().data
                file.write(data)
                crc = zlib.crc32(data, crc)
                shapes.append((result.shape[1], result.shape[2]))
            starts.append(file.tell())
    refuse_too_many(list(bad.values()), of=len(source))
    np.savez(folder / "places.npz", starts=np.array(starts, np.int64), shapes=np.array(shapes, np.int32))
    about = {"format": FORMAT, "crc": crc, "bad": bad, "passing": passing, "decoders": decoders()}
    (folder / "index.json").write_text(json.dumps(about))


def _read_all(source: Source, *, min_side: int) -> Generator[Tensor | BadImage]:
    """Every image in order, decoded by as many threads as torch may use: decoders release the interpreter's lock."""
    threads = torch.get_num_threads()
    chunks = [range(start, min(start + CHUNK, len(source))) for start in range(0, len(source), CHUNK)]

    stopped = threading.Event()

    def read(chunk: Sequence[int]) -> list[Tensor | BadImage]:
        parts = [chunk[k : k + STOP_EVERY] for k in range(0, len(chunk), STOP_EVERY)]
        return [image for part in parts if not stopped.is_set() for image in source.read_many(part, min_side=min_side)]

    progress = tqdm(total=len(source), desc="decoding once", unit=" images", delay=2, leave=False, disable=None)
    with progress, ThreadPoolExecutor(threads) as pool:
        try:
            # A window at a time, so that memory stays small however slowly the disk writes.
            for first in range(0, len(chunks), 4 * threads):
                for results in pool.map(read, chunks[first : first + 4 * threads]):
                    yield from results
                    progress.update(len(results))
        except BaseException:
            # Whoever stops the run does not wait for images that nobody will use.
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
