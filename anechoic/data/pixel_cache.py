"""Pixels decoded once: a memory-mapped file per data set in the cache, addressed by the images' content.

It changes the time of reading and never the pixels. Processes share one copy through the page cache, and of two that
start together one decodes while the other waits.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.data.decoding import decoders
from anechoic.data.source import BadImage, Source, Subset, digest, refuse_too_many
from anechoic.storage.cache import OpenEntry, has_entry, limit, open_entry, read_card

FORMAT = 2
PIXELS, TABLE = "pixels.bin", "table.npz"
# Images that are decoded to estimate the size of all.
SAMPLE = 64
# What the table has for stored pixels, each aligned to the largest of these types.
DTYPES, ALIGNED = (torch.uint8, torch.uint16, torch.int16, torch.float16, torch.float32), 4
# Images of a task of a thread, and after how many of them it checks for an interruption.
CHUNK, CHECK_EVERY = 64, 8


class CachedPixels(Source):
    """The pixels of a source from the cache: a flat file of (H, W, C) images one after the other, uint8 or as stored.

    Damaged images are skipped; those that were temporarily unreadable are read from the source.
    """

    in_memory = True

    def __init__(self, source: Source, folder: Path):
        super().__init__()
        card = read_card(folder)
        with np.load(folder / TABLE, allow_pickle=False) as table:
            self._starts, self._shapes = table["starts"], table["shapes"]
            self._dtypes = table.get("dtypes")
        size = int(self._starts[-1])
        self._pixels = torch.from_file(str(folder / PIXELS), shared=False, size=size, dtype=torch.uint8)
        bad = {int(k): BadImage(name, reason) for k, (name, reason) in card["bad"].items()}
        self._from_source = set(card["temporary"] if card["decoders"] == decoders() else bad)
        self._bad = {k: image for k, image in bad.items() if k not in self._from_source}
        self._source, self._folder = source, folder
        self.channels, self.where, self.pixels = source.channels, source.where, source.pixels
        self.labels, self.classes, self.skipped = source.labels, source.classes, source.skipped
        self.add_skipped((image.name, image.reason) for image in self._bad.values())

    def compute_fingerprint(self) -> str:
        return self._source.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps the file again instead of receiving a copy of its content.
        return _reopen, (self._source, self._folder)

    def __len__(self) -> int:
        return len(self._shapes)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        if index in self._bad:
            raise self._bad[index]
        if index in self._from_source:
            return self._source.read(index, min_side=min_side)
        start, stop = self._starts[index : index + 2].tolist()
        shape = (*self._shapes[index].tolist(), self.channels)
        if self._dtypes is None:
            return self._pixels[start:stop].view(*shape).permute(2, 0, 1)
        dtype = DTYPES[self._dtypes[index]]
        length = math.prod(shape) * dtype.itemsize
        return self._pixels[start : start + length].view(dtype).view(*shape).permute(2, 0, 1)


def _reopen(source: Source, folder: Path) -> Source:
    """Return the cached pixels in a worker process, or the source if they were evicted since."""
    try:
        return CachedPixels(source, folder)
    except (OSError, KeyError):
        return source


def with_pixel_cache(source: Source, *, min_side: int, build: bool = True) -> Source:
    """Return the source or its cached pixels, whichever is faster; both have the same pixels for this min_side.

    build=False uses cached pixels but caches none: for a single pass, decoding is cheaper than writing.
    Raises UserError if more than a tenth of the images, or of a sample of them, cannot be read.
    """
    if source.in_memory:
        return source
    if isinstance(source, Subset):
        return Subset(with_pixel_cache(source.source, min_side=min_side, build=build), source.indices)
    how = (source.pixels.type, repr(source.pixels.select)) if source.pixels.stored else ()
    key = digest("pixels", FORMAT, source.fingerprint, source.channels, min_side, *how)
    if not has_entry("pixels", key) and not (build and is_cacheable(source, min_side=min_side)):
        return source
    try:
        about = f"{len(source):,} images of {source.where or 'a data set'}, sides of {min_side} or more"
        with open_entry("pixels", key, about=about) as entry:
            if entry.intact([PIXELS, TABLE]) != {PIXELS, TABLE}:
                entry.discard()
                try:
                    _write(source, entry, min_side=min_side)
                except BaseException:
                    entry.discard()
                    raise
            return CachedPixels(source, entry.path)
    except OSError as error:
        warnings.warn(
            f"Decoded images cannot be cached ({error.strerror or error}), so they are decoded at every visit; set "
            "ANECHOIC_CACHE to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=2,
        )
        return source


def is_cacheable(source: Source, *, min_side: int) -> bool:
    """Return whether all decoded pixels fit in half of the cache."""
    return expected_bytes(source, min_side=min_side) <= limit() // 2


def expected_bytes(source: Source, *, min_side: int) -> int:
    """Estimate the size of all decoded pixels from an even sample; UserError if too many of it are unreadable."""
    indices = np.unique(np.linspace(0, len(source) - 1, SAMPLE).astype(int)).tolist()
    results = source.read_many(indices, min_side=min_side)
    refuse_too_many([(bad.name, bad.reason) for bad in results if isinstance(bad, BadImage)], of=len(indices))
    sizes = [pixels.nbytes for pixels in results if isinstance(pixels, Tensor)]
    return int(np.mean(sizes) * len(source))


def _write(source: Source, entry: OpenEntry, *, min_side: int) -> None:
    starts, shapes, dtypes, bad, temporary = [0], [], [], {}, []
    # Closed at once on an interruption, so that no thread continues to decode.
    with contextlib.closing(_read_all(source, min_side=min_side)) as images, open(entry.path / PIXELS, "wb") as file:
        for index, result in enumerate(images):
            if isinstance(result, BadImage):
                bad[str(index)] = (result.name, result.reason)
                temporary += [] if result.permanent else [index]
                shapes.append((0, 0))
                dtypes.append(0)
            else:
                file.write(result.permute(1, 2, 0).contiguous().numpy().data)
                if source.pixels.stored:
                    file.write(bytes(-file.tell() % ALIGNED))
                shapes.append((result.shape[1], result.shape[2]))
                dtypes.append(DTYPES.index(result.dtype))
            starts.append(file.tell())
    refuse_too_many(list(bad.values()), of=len(source))
    stored: dict[str, Any] = {"dtypes": np.array(dtypes, np.uint8)} if source.pixels.stored else {}
    np.savez(entry.path / TABLE, starts=np.array(starts, np.int64), shapes=np.array(shapes, np.int32), **stored)
    entry.commit(entry.hashes([PIXELS, TABLE]), bad=bad, temporary=temporary, decoders=decoders())


def _read_all(source: Source, *, min_side: int) -> Generator[Tensor | BadImage]:
    """Yield every image in order, decoded by torch's number of threads: decoders release the interpreter's lock."""
    threads = torch.get_num_threads()
    chunks = [range(start, min(start + CHUNK, len(source))) for start in range(0, len(source), CHUNK)]
    interrupted = threading.Event()

    def read(chunk: Sequence[int]) -> list[Tensor | BadImage]:
        images: list[Tensor | BadImage] = []
        for k in range(0, len(chunk), CHECK_EVERY):
            if not interrupted.is_set():
                images += source.read_many(chunk[k : k + CHECK_EVERY], min_side=min_side)
        return images

    progress = tqdm(total=len(source), desc="decoding once", unit=" images", delay=2, leave=False, disable=None)
    with progress, ThreadPoolExecutor(threads) as pool:
        try:
            # A window at a time, so that memory stays small however slowly the disk writes.
            for first in range(0, len(chunks), 4 * threads):
                for results in pool.map(read, chunks[first : first + 4 * threads]):
                    yield from results
                    progress.update(len(results))
        except BaseException:
            interrupted.set()  # an interrupted run does not wait for the images in progress
            pool.shutdown(wait=False, cancel_futures=True)
            raise
