"""Files by path or by a URL that fsspec reads (s3://, https://, memory://, ...)."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from xxhash import xxh3_128

from anechoic.errors import UserError
from anechoic.storage.safe_io import open_regular, reason

log = logging.getLogger("anechoic")

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


VERSION_FIELDS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "created", "version_id", "md5", "sha256")


def identity_of(url: str) -> str:
    """Return what changes with the file behind a URL: the URL, its size and its version, or the hash of its bytes.

    Only files of which the server knows no version are downloaded for that.
    """
    system, path = filesystem(url)
    details = system.info(path)
    version = [str(details.get(name) or "") for name in VERSION_FIELDS]
    if not any(version):
        log.warning("The server knows no version of %s: the file is read to identify it.", url)
        state = xxh3_128()
        with system.open(path, "rb") as file:
            while block := file.read(1 << 22):
                state.update(block)
        version = [state.hexdigest()]
    return repr((url, int(details.get("size") or 0), version))


def version_of(location: Location) -> np.ndarray:
    """Return two numbers from which earlier versions made fingerprints: size, and time or the server's version."""
    if not is_url(location):
        status = Path(location).stat()
        return np.array([status.st_size, status.st_mtime_ns], dtype=np.int64)
    system, path = filesystem(str(location))
    details = system.info(path)
    version = [str(details.get(name)) for name in ("ETag", "etag", "LastModified", "mtime", "created", "mime")]
    return np.array([int(details.get("size") or 0), zlib.crc32(repr(version).encode())], dtype=np.int64)
