"""Whether this user started a run: each start leaves a mark that only the user's own key can make.

A run directory may come from another person, and its config may name any path or server as its data. Unasked, only the
data of runs that bear such a mark are opened. The key is a file of the cache: without it, runs count as another's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from anechoic.storage.cache import cache_dir
from anechoic.storage.safe_io import read_regular

KEY_BYTES = 32


def mark_of(source: str) -> str | None:
    """Return this user's mark on a data source; None if the cache cannot hold a key."""
    try:
        key = _key() or _new_key()
    except OSError:
        return None
    return _mark(key, source)


def started_by_this_user(environment: Mapping[str, Any], source: str) -> bool:
    """Return whether env.json bears this user's mark on the data source."""
    try:
        key = _key()
    except OSError:
        return False
    starts = environment.get("starts")
    marks = [start.get("mark") for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    return key is not None and any(
        isinstance(mark, str) and mark.isascii() and hmac.compare_digest(mark, _mark(key, source)) for mark in marks
    )


def _mark(key: bytes, source: str) -> str:
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), key=key, digest_size=16).hexdigest()


def _place() -> Path:
    """Return the key's file, one per user: a cache may be shared."""
    return cache_dir() / f"user-{os.getuid() if hasattr(os, 'getuid') else 'own'}.key"


def _key() -> bytes | None:
    """Return the key, or None if there is none or it is damaged."""
    try:
        key = read_regular(_place(), limit=1 << 10)
    except FileNotFoundError:
        return None
    return key if len(key) == KEY_BYTES else None


def _new_key() -> bytes:
    """Make a key; of processes that do so at once, all return the first one's."""
    place = _place()
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and _key() is None:  # damaged; a key that another process has just made stays
        place.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent) as file:  # only its owner can read it
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, place)
    key = _key()
    if key is None:
        raise OSError(f"{place} cannot be written")
    return key
