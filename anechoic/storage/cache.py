"""The cache on disk: entries are addressed by content, one limit bounds them all, the least recently used are evicted.

An entry is the folder CACHE/KIND/KEY. Its card, written last, lists its files with their hashes: what no card lists is
not believed, so a killed process leaves no wrong entry. The card's modification time is the entry's last use. A process
holds the entry's lock while it checks, makes or evicts it. Readers map files into memory without a lock. On Linux and
macOS a mapped file that is evicted stays valid until it is unmapped. Windows refuses to delete it, and it is skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from xxhash import xxh3_128

from anechoic.errors import UserError
from anechoic.storage.files import flush, read_json, remove, sealed, sweep_leftovers, unsealed, write_json
from anechoic.storage.safe_io import open_regular

log = logging.getLogger("anechoic")

KINDS = ("pixels", "features", "index", "listings", "hashes")
# "contents" holds checksums that earlier versions kept: listed and evicted, never read.
KNOWN_FOLDERS = (*KINDS, "contents")
# Only names of this form are entries: ANECHOIC_CACHE may be a folder that holds other files, too.
KEY = re.compile(r"[0-9a-f]{32}[0-9a-f-]*(\.tar)?(\.npz)?")
CARD = "entry.json"
DEFAULT_LIMIT = "8GB"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Seconds to wait for a process that holds a lock without progress, and until leftovers of a killed one are deleted.
PATIENCE, STALE = 60.0, 24 * 3600.0


class Entry(NamedTuple):
    """size: bytes on disk; last_used: seconds since the epoch; about: what it was made of."""

    kind: str
    key: str
    size: int
    last_used: float
    about: str
    path: Path


def cache_dir() -> Path:
    """Return `ANECHOIC_CACHE`, or `anechoic` in the platform's folder for caches."""
    if named := os.environ.get("ANECHOIC_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "anechoic"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "anechoic" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anechoic"


def limit() -> int:
    """Return the maximum size of the cache in bytes: `ANECHOIC_CACHE_LIMIT`, such as 500MB or 20GB, or 8 GB."""
    text = os.environ.get("ANECHOIC_CACHE_LIMIT") or DEFAULT_LIMIT
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise UserError(f"ANECHOIC_CACHE_LIMIT={text!r} is not a size; write a number of bytes, or 500MB or 20GB.")
    return int(float(match[1]) * UNITS[match[2]])


def entries() -> list[Entry]:
    """Return every entry of the cache, the most recently used first."""
    found = []
    for kind in KNOWN_FOLDERS:
        with contextlib.suppress(OSError):
            for path in (cache_dir() / kind).iterdir():
                if KEY.fullmatch(path.name):
                    with contextlib.suppress(OSError):  # another process evicts it
                        found.append(_entry(kind, path))
    return sorted(found, key=lambda entry: -entry.last_used)


def _entry(kind: str, path: Path) -> Entry:
    card = path / CARD
    files = [item.stat() for item in path.rglob("*") if item.is_file()] if path.is_dir() else [path.stat()]
    # A file with two names (an index and its features) counts half in each.
    size = sum(file.st_size // max(1, file.st_nlink) for file in files)
    used = (card if card.exists() else path).stat().st_mtime
    return Entry(kind, path.name, size, used, str(read_card(path).get("about", "made by an earlier version")), path)


def clear(kind: str | None = None) -> int:
    """Delete all entries, or those of one kind, except those that a process is making; return the bytes freed."""
    if kind is not None and kind not in KNOWN_FOLDERS:
        raise UserError(f"The cache has no kind {kind!r}; choose one of {', '.join(KINDS)}.")
    return sum(entry.size for entry in entries() if kind in (None, entry.kind) and _delete(entry.path))


def evict(*, keep: Path | None = None) -> None:
    """Delete the least recently used entries until the cache is within its limit, except `keep` and those in making."""
    found = entries()
    for folder in {entry.path.parent for entry in found}:
        sweep_leftovers(folder, older_than=STALE)
    excess = sum(entry.size for entry in found) - limit()
    for entry in reversed(found):
        if excess <= 0:
            return
        if entry.path != keep and _delete(entry.path):
            excess -= entry.size


def _delete(path: Path) -> bool:
    """Delete an entry unless a process holds its lock or the system refuses."""
    lock = FileLock(_lock_file(path))
    try:
        with lock.acquire(timeout=0):
            remove(path)
    except (Timeout, OSError):
        return False
    return True


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


@contextmanager
def open_entry(kind: str, key: str, *, about: str) -> Iterator[OpenEntry]:
    """Lock an entry and yield it; it is empty if there was none. OSError if the cache cannot be written.

    Afterwards it counts as just used, and other entries are evicted if it grew and the cache exceeds its limit.
    """
    path = cache_dir() / kind / key
    limit()  # a wrong setting is an error before the work, not after it
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        path.mkdir(exist_ok=True)
        sweep_leftovers(path)
        entry = OpenEntry(path, about)
        try:
            yield entry
        finally:
            if entry.grew:
                evict(keep=path)
            elif (path / CARD).exists():
                os.utime(path / CARD)
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the entry's lock; OSError if another process has it and makes no progress in the entry's folder."""
    lock = FileLock(_lock_file(path))
    while not lock.is_locked:
        before = _state_of(path)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            if _state_of(path) == before:
                raise OSError(f"another process holds {path} and made no progress for {PATIENCE:g} s") from None
    try:
        yield
    finally:
        lock.release()


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of all files in the folder: they change while a process works there."""
    with contextlib.suppress(OSError):
        stats = [(str(path), path.stat()) for path in sorted(folder.rglob("*"))]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return []


def has_entry(kind: str, key: str) -> bool:
    with contextlib.suppress(OSError):  # another user's cache
        return (cache_dir() / kind / key / CARD).is_file()
    return False


def read_card(path: Path) -> dict[str, Any]:
    """Return the card of an entry: `files` (name -> hash), `about` and the maker's notes; {} if missing or damaged."""
    try:
        return unsealed(read_json(path / CARD))
    except ValueError:  # a UserError is one
        return {}


class OpenEntry:
    """An entry whose lock this process holds."""

    def __init__(self, path: Path, about: str) -> None:
        self.path, self.about, self.grew = path, about, False

    def card(self) -> dict[str, Any]:
        return read_card(self.path)

    def intact(self, names: Iterable[str]) -> set[str]:
        """Return which of the files are those that were committed; warn about each that is damaged."""
        good, listed = set(), self.card().get("files", {})
        for name in names:
            if name in listed and (self.path / name).is_file():
                if hash_file(self.path / name).hex() == listed[name]:
                    good.add(name)
                else:
                    log.warning("%s is damaged; it is made again.", self.path / name)
        return good

    def hashes(self, names: Iterable[str]) -> dict[str, str]:
        return {name: hash_file(self.path / name).hex() for name in names}

    def commit(self, files: Mapping[str, str], **notes: Any) -> None:
        """Write the card: these complete files with their hashes, and notes of the maker."""
        for name in files:
            flush(self.path / name)
        write_json(self.path / CARD, self.new_card(files, **notes))
        self.grew = True

    def new_card(self, files: Mapping[str, str], **notes: Any) -> dict[str, Any]:
        return sealed({"about": self.about, "files": dict(files), **notes})

    def discard(self) -> None:
        """Delete all files of the entry; the lock stays."""
        remove(self.path)
        self.path.mkdir()


def hash_file(path: str | Path) -> bytes:
    """Return 16 bytes of XXH3 of a regular file's content: fast, and not meant to resist forgery."""
    with open_regular(path) as file:
        return hash_descriptor(file.fileno())


def hash_descriptor(descriptor: int) -> bytes:
    """Return 16 bytes of XXH3 of the rest of an open file."""
    block = min(os.fstat(descriptor).st_size + 1, 1 << 22)  # no more memory than a small file needs
    state = xxh3_128()
    while data := os.read(descriptor, block):
        state.update(data)
    return state.digest()
