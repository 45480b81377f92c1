"""Images that are files on disk: a folder searched to any depth, a text list of paths, a single image.

Archives and tables are elsewhere; this file opens no image, it only finds them.
"""

from __future__ import annotations

import heapq
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anechoic.data.decoding import IGNORED_SUFFIXES
from anechoic.data.pixel_cache import cache_dir, read_cached, write_cached
from anechoic.data.source import (
    EncodedSource,
    Names,
    classes_from_folders,
    digest,
    is_image_name,
    note_ignored,
    number_classes,
)
from anechoic.errors import UserError
from anechoic.storage.safe_io import read_regular, reason

# Listing fewer files takes less than a tenth of a second and needs no cache.
REMEMBER_FROM = 20_000
# A remembered listing of up to this many files is checked file by file, a longer one at a thousand places.
CHECK_ALL_UP_TO = 100_000
MAX_LIST_BYTES = 1 << 30


@dataclass(frozen=True)
class Listing:
    """Every image below a folder in sorted order: relative names, sizes, times of change; and the folders passed.

    ignored: images of kinds that are not read here.
    """

    names: Names
    sizes: np.ndarray
    times: np.ndarray
    folders: Names
    folder_times: np.ndarray
    ignored: Names

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {
            "names": np.frombuffer(self.names.blob, np.uint8),
            "ends": self.names.ends,
            "sizes": self.sizes,
            "times": self.times,
            "folders": np.frombuffer(self.folders.blob, np.uint8),
            "folder_ends": self.folders.ends,
            "folder_times": self.folder_times,
            "ignored": np.frombuffer(self.ignored.blob, np.uint8),
            "ignored_ends": self.ignored.ends,
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Listing:
        return cls(
            Names(arrays["names"].tobytes(), arrays["ends"]),
            arrays["sizes"],
            arrays["times"],
            Names(arrays["folders"].tobytes(), arrays["folder_ends"]),
            arrays["folder_times"],
            Names(arrays["ignored"].tobytes(), arrays["ignored_ends"]),
        )

    def still_true(self, root: Path) -> bool:
        """No folder was changed, and no file looked at was written over."""
        count = len(self.names)
        looked_at = range(count) if count <= CHECK_ALL_UP_TO else np.linspace(0, count - 1, 1000).astype(int)
        try:
            same_folders = all(
                os.stat(os.path.join(root, folder)).st_mtime_ns == time
                for folder, time in zip(self.folders, self.folder_times, strict=True)
            )
            if not same_folders:
                return False
            now = ((k, os.stat(os.path.join(root, self.names[k]))) for k in looked_at)
            return all(file.st_size == self.sizes[k] and file.st_mtime_ns == self.times[k] for k, file in now)
        except OSError:
            return False


def scan(root: Path) -> Listing:
    """List a folder: names, sizes, times. Links are followed, but each real folder is entered once, so loops end."""
    found: list[tuple[str, int, int]] = []
    ignored: list[str] = []
    folders: list[tuple[str, int]] = []
    entered: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        # Depth first in sorted order, so that of two links to one folder the same one is entered every time.
        folder = heapq.heappop(waiting)
        status = os.stat(os.path.join(root, folder))
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        folders.append((folder, status.st_mtime_ns))
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if is_image_name(entry.name) and entry.is_file():
                    status = entry.stat()
                    found.append((name, status.st_size, status.st_mtime_ns))
                elif entry.is_dir() and not entry.name.startswith("."):
                    heapq.heappush(waiting, name)
                elif os.path.splitext(entry.name)[1].lower() in IGNORED_SUFFIXES:
                    ignored.append(name)
    found.sort()
    return Listing(
        names=Names.of(name for name, _, _ in found),
        sizes=np.array([size for _, size, _ in found], dtype=np.int64),
        times=np.array([time for _, _, time in found], dtype=np.int64),
        folders=Names.of(folder for folder, _ in folders),
        folder_times=np.array([time for _, time in folders], dtype=np.int64),
        ignored=Names.of(sorted(ignored)),
    )


def cached_scan(root: Path) -> Listing:
    """`scan`, or its result of an earlier time if it still holds."""
    memory = cache_dir() / "listings" / f"{digest(os.fsencode(root.resolve()))}.npz"
    if (arrays := read_cached(memory)) is not None:
        listing = Listing.from_arrays(arrays) if "ignored" in arrays else None  # an earlier version's has none
        new_kinds = listing is not None and any(map(is_image_name, listing.ignored))
        if listing is not None and not new_kinds and listing.still_true(root):
            return listing
    listing = scan(root)
    if len(listing.names) >= REMEMBER_FROM:
        write_cached(memory, listing.to_arrays())
    return listing


class Files(EncodedSource):
    """Image files below one root, by relative name."""

    def __init__(
        self,
        root: Path,
        names: Names,
        *,
        fingerprint: str,
        channels: int = 3,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] | None = None,
        versions: np.ndarray | None = None,
    ):
        super().__init__(channels=channels)
        self.root, self.names, self.fingerprint = root, names, fingerprint
        self.versions = versions  # (n, 2): size and time of change
        self.labels, self.classes = labels, classes

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def data(self, index: int) -> bytes:
        return read_regular(os.path.join(self.root, self.names[index]))

    def identities(self) -> np.ndarray | None:
        """Of the name, size and time of each file."""
        if self.versions is None:
            return None
        pairs = zip(self.names, self.versions, strict=True)
        return np.frombuffer(b"".join(bytes.fromhex(digest(name, version)) for name, version in pairs), "V16")


def open_folder(root: Path, *, labels: bool, channels: int) -> Files:
    """A folder, searched to any depth; labels are the names of its sub-folders."""
    listing = cached_scan(root)
    note_ignored(listing.ignored, where=str(root))
    if not len(listing.names):
        raise UserError(
            f"There is no image that is read here (JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF) in or below {str(root)!r}; "
            "give a folder with images."
        )
    numbers, classes = classes_from_folders(listing.names, where=str(root)) if labels else (None, None)
    fingerprint = digest("files", listing.names.blob, listing.names.ends, listing.sizes, listing.times)
    versions = np.stack([listing.sizes, listing.times], axis=1)
    return Files(
        root,
        listing.names,
        fingerprint=fingerprint,
        channels=channels,
        labels=numbers,
        classes=classes,
        versions=versions,
    )


def open_paths(root: Path, paths: list[str], *, channels: int, kinds: list[str] | None = None, where: str) -> Files:
    """Files named one by one, relative to root or absolute; kinds: a class name for each."""
    stats = []
    for path in paths:
        try:
            stats.append(os.stat(os.path.join(root, path)))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{where} names {path[:200]!r}, which cannot be opened ({reason(error)}); correct or remove it."
            ) from error
        if not stat.S_ISREG(stats[-1].st_mode):
            raise UserError(f"{where} names {path[:200]!r}, which is not a file; correct or remove it.")
    names = Names.of(paths)
    sizes = np.array([(file.st_size, file.st_mtime_ns) for file in stats], dtype=np.int64)
    labels, classes = number_classes(kinds) if kinds is not None else (None, None)
    fingerprint = digest("files", names.blob, names.ends, sizes)
    return Files(
        root, names, fingerprint=fingerprint, channels=channels, labels=labels, classes=classes, versions=sizes
    )


def open_list(path: Path, *, labels: bool, channels: int) -> Files:
    """A text file; a line is an image path, relative to the list's folder, and optionally a tab and a class name."""
    try:
        text = read_regular(path, limit=MAX_LIST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason(error)
        raise UserError(f"{str(path)!r} is not a text list of image paths ({cause}); write one path a line.") from error
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise UserError(f"The list {str(path)!r} is empty; write one image path a line.")
    paths, _, kinds = zip(*(line.partition("\t") for line in lines), strict=True)
    if labels and not all(kinds):
        number = next(k for k, kind in enumerate(kinds, 1) if not kind)
        raise UserError(
            f"Line {number} of {str(path)!r} has no label; write the path, a tab and the class name on each line."
        )
    return open_paths(
        path.parent,
        list(paths),
        channels=channels,
        kinds=list(kinds) if labels else None,
        where=f"The list {str(path)!r}",
    )
