"""Files with stored pixels as a source: every frame of a file is a sample, or every tile of a frame.

Names of samples say where they are: `slide.tif#frame=2&xywh=448,224,224,224`, in the syntax of media fragments.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.config import PixelConfig
from anechoic.data.content_checksums import THREADS
from anechoic.data.files import Files
from anechoic.data.pixels import Undecodable
from anechoic.data.source import BadImage, Source, digest, log, refuse_exhaustion
from anechoic.data.stored import Box, StoredImage, damage_as_undecodable, open_stored, read_region, selected_channels
from anechoic.errors import UserError
from anechoic.storage.cache import has_entry, open_entry
from anechoic.storage.files import write_aside
from anechoic.storage.safe_io import reason

# A row per sample: the file, the frame in it and the region. An unreadable file has one row without a region.
SAMPLE = np.dtype([("file", "<i4"), ("frame", "<i4"), ("box", "<i4", (4,))])
MAX_SAMPLES_PER_FILE = 4_000_000
TABLE = "samples.npy"


class StoredFiles(Source):
    """Frames or tiles of the files of a folder or list."""

    root: Path

    def __init__(self, files: Files, *, pixels: PixelConfig, channels: int) -> None:
        super().__init__()
        self.files, self.pixels, self.channels = files, pixels, channels
        self.root, self.classes, self.where = files.root, files.classes, files.where
        self.labels_apart = files.labels_apart
        self.in_memory = pixels.tile > 0  # regions are cheap to read, and all of them may not fit the cache
        self.bad: dict[int, BadImage] = {}
        self.samples = self._list()
        if not len(self.samples):
            raise UserError(
                f"No tile of {str(files.root)!r} has a deviation of {pixels.empty:g} or more; give images that are "
                "not empty."
            )
        self.labels = None if files.labels is None else files.labels[self.samples["file"]]

    def compute_fingerprint(self) -> str:
        how = self.pixels
        return digest(
            "stored", self.files.fingerprint, how.type, repr(how.select), how.tile, how.overlap, str(how.empty)
        )

    def identities(self) -> np.ndarray:
        hashes = self.files.hashes.all
        made = (digest(self.name(k), hashes[row["file"]].tobytes()) for k, row in enumerate(self.samples))
        return np.frombuffer(b"".join(map(bytes.fromhex, made)), "V16")

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        row = self.samples[index]
        place = [f"frame={row['frame']}"] * bool(row["frame"] or self._has_frames(index))
        top, left, height, width = row["box"].tolist()
        place += [f"xywh={left},{top},{width},{height}"] * bool(self.pixels.tile)
        return self.files.names[row["file"]] + ("#" + "&".join(place) if place else "")

    def file(self, index: int) -> str:
        return self.files.names[self.samples["file"][index]]

    def stored_size(self, index: int) -> tuple[int, int]:
        _, _, height, width = self.samples["box"][index].tolist()
        return width, height

    def _has_frames(self, index: int) -> bool:
        after = np.searchsorted(self.samples["file"], self.samples["file"][index], side="right") - 1
        return bool(self.samples["frame"][after] > 0)

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        (result,) = self.read_many([index], min_side=min_side)
        if isinstance(result, BadImage):
            raise result
        return result

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        found: dict[int, Tensor | BadImage] = {}
        by_file: dict[int, list[int]] = {}
        for index in indices:
            by_file.setdefault(int(self.samples["file"][index]), []).append(index)
        for file, members in by_file.items():
            found.update(self._read_file(file, members, min_side))
        return [found[index] for index in indices]

    def _read_file(self, file: int, members: Sequence[int], min_side: int | None) -> dict[int, Tensor | BadImage]:
        if file in self.bad:
            return dict.fromkeys(members, self.bad[file])
        out: dict[int, Tensor | BadImage] = {}
        try:
            self.files.hashes.check_file(file)
            with open_stored(self._path(file)) as image:
                for index in members:
                    out[index] = self._region(image, index, min_side)
        except Undecodable as problem:
            bad = BadImage(self.files.names[file], str(problem))
            return {**dict.fromkeys(members, bad), **out}
        except OSError as problem:
            refuse_exhaustion(problem)
            bad = BadImage(self.files.names[file], reason(problem), permanent=False)
            return {**dict.fromkeys(members, bad), **out}
        return out

    def _region(self, image: StoredImage, index: int, min_side: int | None) -> Tensor | BadImage:
        row = self.samples[index]
        box = Box(*row["box"].tolist())
        try:
            with damage_as_undecodable():
                return read_region(
                    image, int(row["frame"]), box, pixels=self.pixels, channels=self.channels, min_side=min_side
                )
        except Undecodable as problem:
            return BadImage(self.name(index), str(problem))

    def _path(self, file: int) -> str:
        return os.path.join(self.files.root, self.files.names[file])

    # ---- the list of samples

    def _list(self) -> np.ndarray:
        """Return the samples; of tiles only those that are not empty, which takes one pass and is cached."""
        listed = self._list_all()
        if not (self.pixels.tile and self.pixels.empty):
            return listed
        key, about = digest("tiles", self.compute_fingerprint()), f"tiles of {self.files.root}"
        if has_entry("listings", key):
            with suppress(OSError, ValueError), open_entry("listings", key, about=about) as entry:
                if entry.intact([TABLE]):
                    return np.load(entry.path / TABLE, allow_pickle=False)
        self.samples = listed
        bar = tqdm(total=len(listed), desc="finding tiles", unit=" tiles", delay=2, leave=False, disable=None)
        kept = np.ones(len(listed), bool)
        unreadable: list[BadImage] = []
        with bar:
            for first in range(0, len(listed), 64):
                rows = range(first, min(first + 64, len(listed)))
                for index, tile in zip(rows, self.read_many(rows), strict=True):
                    if isinstance(tile, Tensor):
                        kept[index] = deviation(tile) >= self.pixels.empty
                    elif listed["file"][index] not in self.bad:  # a bad file is one sample, which the loader skips
                        kept[index] = False
                        unreadable.append(tile)
                bar.update(len(rows))
        if unreadable:
            log.warning(
                "%d tiles are skipped; the first is %s: %s.", len(unreadable), unreadable[0].name, unreadable[0].reason
            )
        listed = listed[kept]
        with suppress(OSError), open_entry("listings", key, about=about) as entry:
            with write_aside(entry.path / TABLE) as temporary, open(temporary, "wb") as file:
                np.save(file, listed)
            entry.commit(entry.hashes([TABLE]))
        return listed

    def _list_all(self) -> np.ndarray:
        count = len(self.files)
        bar = tqdm(total=count, desc="reading headers", unit=" files", delay=2, leave=False, disable=None)
        parts = []
        with bar, ThreadPoolExecutor(THREADS) as pool:
            for file, found in enumerate(pool.map(self._list_file, range(count))):
                if isinstance(found, BadImage):
                    self.bad[file] = found
                    found = np.zeros(1, SAMPLE)
                found["file"] = file
                parts.append(found)
                bar.update()
        return np.concatenate(parts)

    def _list_file(self, file: int) -> np.ndarray | BadImage:
        try:
            with open_stored(self._path(file)) as image:
                return samples_of(image, self.pixels, channels=self.channels)
        except Undecodable as problem:
            return BadImage(self.files.names[file], str(problem))
        except OSError as problem:
            refuse_exhaustion(problem)
            return BadImage(self.files.names[file], reason(problem), permanent=False)


def samples_of(image: StoredImage, pixels: PixelConfig, *, channels: int) -> np.ndarray:
    """Return the rows of a file: its frames, or their tiles. The last tile of a row or column is moved inside."""
    selected_channels(image, pixels, channels=channels)
    tops, heights = steps(image.height, pixels)
    lefts, widths = steps(image.width, pixels)
    count = image.frames * len(tops) * len(lefts)
    if count > MAX_SAMPLES_PER_FILE:
        raise Undecodable(f"it declares {count:,} samples; up to {MAX_SAMPLES_PER_FILE:,} are read")
    rows = np.zeros((image.frames, len(tops), len(lefts)), SAMPLE)
    rows["frame"] = np.arange(image.frames)[:, None, None]
    for column, values in enumerate((tops[:, None], lefts, heights, widths)):
        rows["box"][..., column] = values
    return rows.reshape(-1)


def steps(side: int, pixels: PixelConfig) -> tuple[np.ndarray, int]:
    """Return where tiles begin along a side, and their length."""
    if not pixels.tile or side <= pixels.tile:
        return np.zeros(1, np.int64), side
    starts = np.arange(0, side - pixels.tile, pixels.tile - pixels.overlap)
    return np.append(starts, side - pixels.tile), pixels.tile


def deviation(tile: Tensor) -> float:
    """Return the standard deviation of the values, mean over the channels."""
    return float(tile.float().flatten(1).std(dim=1, correction=0).mean())
