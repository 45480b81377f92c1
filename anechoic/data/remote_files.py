"""Where an archive lies: a path here, or a URL that fsspec reads (s3://, https://, memory://, ...)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from anechoic.errors import UserError
from anechoic.storage.safe_io import open_regular, reason

Place = Path | str


def is_url(place: Place) -> bool:
    return isinstance(place, str) and "://" in place


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Asked for anew in each process: connections do not survive
    a fork, and fsspec keeps one for each process itself."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"{url!r} cannot be reached ({reason(error)}).") from error


def name_of(place: Place) -> str:
    return str(place).rpartition("/")[2]


@contextmanager
def open_place(place: Place) -> Iterator[BinaryIO]:
    """The file for reading in any order; OSError if it cannot be had."""
    if not is_url(place):
        with open_regular(place) as file:
            yield file
        return
    system, path = filesystem(str(place))
    with system.open(path, "rb") as file:
        yield file


def size_of(place: Place) -> int:
    if not is_url(place):
        return Path(place).stat().st_size
    system, path = filesystem(str(place))
    return int(system.size(path))


def stamp_of(place: Place) -> np.ndarray:
    """Two numbers that change when the file does: size and time, or size and what its server knows of its version."""
    if not is_url(place):
        stat = Path(place).stat()
        return np.array([stat.st_size, stat.st_mtime_ns], dtype=np.int64)
    system, path = filesystem(str(place))
    details = system.info(path)
    version = [str(details.get(name)) for name in ("ETag", "etag", "LastModified", "mtime", "created", "mime")]
    return np.array([int(details.get("size") or 0), zlib.crc32(repr(version).encode())], dtype=np.int64)
