"""Images that are files on disk: a folder searched to any depth, a text list of paths, a single image.

It finds images and opens none. Archives and tables have their own modules.
"""

from __future__ import annotations

import heapq
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anechoic.data.content_checksums import FileHashes, stamp_of, stamp_or_none
from anechoic.data.source import (
    EncodedSource,
    Names,
    classes_from_folders,
    digest,
    is_image_name,
    log,
    number_classes,
    warn_ignored,
    why_ignored,
)
from anechoic.data.stored import format_of, has_reader, is_zarr, may_be_dicom, reads_stored
from anechoic.errors import UserError
from anechoic.storage.safe_io import read_regular, reason

MAX_LIST_BYTES = 1 << 30
SIZE, MODIFIED = 2, 3  # columns of stamps


@dataclass(frozen=True)
class Listing:
    """Images below a folder in sorted order: relative names and stamps (n, 5).

    Files of formats for stored pixels are listed only where there is no picture; a zarr folder is one of them.
    folders: those entered, in order; ignored: images of formats that are not read; broken: links that lead nowhere.
    """

    names: Names
    stamps: np.ndarray
    folders: list[str]
    ignored: list[str]
    broken: list[str]


def scan(root: Path) -> Listing:
    """List a folder. Links are followed, but each real folder is entered once, so loops end."""
    found: list[tuple[str, tuple[int, ...]]] = []
    stored: list[tuple[str, tuple[int, ...]]] = []
    nameless: list[tuple[str, tuple[int, ...]]] = []
    ignored: list[str] = []
    broken: list[str] = []
    folders: list[str] = []
    entered: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        # Depth first in sorted order, so that of two links to one folder the same one is entered every time.
        folder = heapq.heappop(waiting)
        status = os.stat(os.path.join(root, folder))
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        folders.append(folder)
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                is_picture = is_image_name(entry.name)
                if entry.is_symlink() and not os.path.exists(entry.path):
                    if is_picture:
                        broken.append(name)
                elif entry.is_file() and (is_picture or reads_stored(entry.name) or may_be_dicom(entry.name)):
                    # On Windows only os.stat returns device and inode.
                    stamp = stamp_of(os.stat(entry.path) if os.name == "nt" else entry.stat())
                    kind = found if is_picture else stored if reads_stored(entry.name) else nameless
                    kind.append((name, stamp))
                elif entry.is_dir() and not entry.name.startswith("."):
                    if not is_zarr(entry.path):
                        heapq.heappush(waiting, name)
                    elif has_reader(".zarr"):
                        stored.append((name, stamp_or_none(entry.path)))
                    else:
                        ignored.append(name)
                elif why_ignored(entry.name):
                    ignored.append(name)
    if not found and has_reader(".dcm"):
        stored += [item for item in nameless if is_dicom(os.path.join(root, item[0]))]
    found = sorted(found or stored)
    stamps = np.array([stamp for _, stamp in found], np.int64).reshape(-1, 5)
    return Listing(Names.of(name for name, _ in found), stamps, folders, sorted(ignored), sorted(broken))


def is_dicom(path: str) -> bool:
    """Return whether a file begins as DICOM does; one that cannot be read now does not."""
    try:
        return format_of(path) == ".dcm"
    except OSError:
        return False


class Files(EncodedSource):
    """Image files below one root, by relative name; an absolute name stands for itself."""

    root: Path

    def __init__(
        self,
        root: Path,
        names: Names,
        stamps: np.ndarray,
        *,
        channels: int = 3,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] | None = None,
    ):
        super().__init__(channels=channels)
        self.root, self.names = root, names
        self.labels, self.classes = labels, classes
        self.hashes = FileHashes(root, names, stamps)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def file(self, index: int) -> str:
        return self.names[index]

    def data(self, index: int) -> bytes:
        data = read_regular(os.path.join(self.root, self.names[index]))
        self.hashes.check_data(index, data)
        return data

    def compute_fingerprint(self) -> str:
        return digest("files", self.names.blob, self.names.ends, self.hashes.all)

    def fingerprint_of(self, indices: np.ndarray) -> str:
        names = [self.names[i] for i in indices.tolist()]
        return digest("files", *names, FileHashes(self.root, names).all)

    def identities(self) -> np.ndarray:
        pairs = zip(self.names, self.hashes.all, strict=True)
        return np.frombuffer(b"".join(bytes.fromhex(digest(name, found.tobytes())) for name, found in pairs), "V16")


def open_folder(root: Path, *, labels: bool, channels: int) -> Files:
    """Open a folder, searched to any depth; labels are the names of its sub-folders."""
    listing = scan(root)
    names, stamps = listing.names, listing.stamps
    warn_ignored(listing.ignored, where=str(root))
    if listing.broken:
        log.warning(
            "%d links in %s lead nowhere and are skipped, such as %s.", len(listing.broken), root, listing.broken[0]
        )
    if not len(names):
        raise UserError(
            "There is no image that is read here (JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF, DICOM, NIfTI, zarr, npy) in "
            f"or below {str(root)!r}; give a folder with images."
        )
    numbers, classes = classes_from_folders(names, where=str(root)) if labels else (None, None)
    source = Files(root, names, stamps, channels=channels, labels=numbers, classes=classes)
    source.earlier_fingerprint = digest("files", names.blob, names.ends, stamps[:, SIZE], stamps[:, MODIFIED])
    return source


def open_paths(root: Path, paths: list[str], *, channels: int, kinds: list[str] | None = None, where: str) -> Files:
    """Open files named one by one, relative to root or absolute; kinds: a class name for each."""
    stamps = []
    for path in paths:
        try:
            status = os.stat(os.path.join(root, path))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{where} names {path[:200]!r}, which cannot be opened ({reason(error)}); correct or remove it."
            ) from error
        full = os.path.join(root, path)
        folder = stat.S_ISDIR(status.st_mode) and is_zarr(full)
        if not (folder or stat.S_ISREG(status.st_mode)):
            raise UserError(f"{where} names {path[:200]!r}, which is not a file; correct or remove it.")
        stamps.append(stamp_or_none(full) if folder else stamp_of(status))
    names, table = Names.of(paths), np.array(stamps, np.int64)
    labels, classes = number_classes(kinds) if kinds is not None else (None, None)
    source = Files(root, names, table, channels=channels, labels=labels, classes=classes)
    source.labels_apart = True
    source.earlier_fingerprint = digest("files", names.blob, names.ends, table[:, [SIZE, MODIFIED]])
    return source


def open_list(path: Path, *, labels: bool, channels: int) -> Files:
    """Open a text list; a line is an image path, relative to the list's folder, and optionally a tab and a class."""
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
