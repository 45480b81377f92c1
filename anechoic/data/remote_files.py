"""Files by path or by a URL that fsspec reads (s3://, https://, memory://, ...)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from anechoic.errors import UserError
from anechoic.storage.safe_io import open_regular, reason

Location = Path | str


def is_url(location: Location) -> bool:
    return isinstance(location, str) and "://" in location


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL and the path in it.

    Called in each process: connections do not survive a fork, and fsspec keeps one per process.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"{url!r} cannot be reached ({reason(error)}).") from error


@contextmanager
def open_location(location: Location) -> Iterator[BinaryIO]:
    """Open the file for random access; OSError if it is not available."""
    if not is_url(location):
        with open_regular(location) as file:
            yield file
        return
    system, path = filesystem(str(location))
    with system.open(path, "rb") as file:
        yield file


def size_of(location: Location) -> int:
    if not is_url(location):
        return Path(location).stat().st_size
    system, path = filesystem(str(location))
    return int(system.size(path))


def version_of(location: Location) -> np.ndarray:
    """Return two numbers that change with the file: its size, and its time or what the server knows of its version.

    The bytes of remote files are not hashed: that would download all of them.
    """
    if not is_url(location):
        status = Path(location).stat()
        return np.array([status.st_size, status.st_mtime_ns], dtype=np.int64)
    system, path = filesystem(str(location))
    details = system.info(path)
    version = [str(details.get(name)) for name in ("ETag", "etag", "LastModified", "mtime", "created", "mime")]
    return np.array([int(details.get("size") or 0), zlib.crc32(repr(version).encode())], dtype=np.int64)
