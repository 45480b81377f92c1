"""Identity of files by content: a hash of the bytes of each, computed once and then found by the file's status.

The cache holds a table from (device, inode, size, modification time, change time) to hash, so a second pass costs one
stat per file. No program can set the change time: a file overwritten at equal size and modification time is hashed
again. (Windows has no change time, so such a file goes unnoticed there.) Three kinds of files are hashed every time:
those changed in the last seconds, since they may change again within the resolution of their times; those that a
program holds open for writing, since writing to mapped memory changes no time until the pages are written back; and
those in memory (tmpfs), where it never does.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import numpy as np
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from anechoic.errors import UserError
from anechoic.storage.cache import hash_descriptor, open_entry
from anechoic.storage.files import write_aside
from anechoic.storage.safe_io import READ_REGULAR, open_regular

# The table: its key in the cache, its file, and the largest number of files in it.
TABLE_KEY, TABLE, MAX_ROWS = "0" * 31 + "1", "rows.npy", 2_000_000
ABOUT = "hashes of files, by their status"
ROW = np.dtype([("stamp", "S40"), ("hash", "V16"), ("used", "<u4")])
# Seconds without a change after which times of change tell two versions of a file apart.
SETTLED = 2.0
FILES_PER_TASK, THREADS = 64, 8
SLOW = 2e-4  # seconds a file, ten times what a small one takes that is in memory
MAX_AT_ONCE = 1 << 22  # larger files are hashed in parts
# Seconds after which pages that were written are on the disk, so that the next write to them changes the file's times.
WRITTEN_BACK = 3600.0


class ChangedError(UserError):
    """A file is not the one that was hashed."""


def stamp_of(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Return (device, inode, size, modification time, change time), which change when the file does."""
    mask = (1 << 63) - 1
    return (status.st_dev & mask, status.st_ino & mask, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def stamp_at(path: str) -> tuple[int, int, int, int, int]:
    """Return the stamp of a file, or of a folder that is one image: its files' number, size, stamps and last change."""
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return stamp_of(status)
    stamps = [stamp_of(os.stat(file)) for file in files_below(path)]
    content = xxh3_64_intdigest(np.array(stamps, np.int64).tobytes()) >> 1
    last = max((found[4] for found in stamps), default=status.st_ctime_ns)
    return (*stamp_of(status)[:2], sum(found[2] for found in stamps), content, max(last, status.st_ctime_ns))


def files_below(folder: str) -> Iterator[str]:
    """Yield the files of a folder in sorted order; OSError for what is none (a pipe, a link to a folder)."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *(entry for entry in folders if os.path.islink(os.path.join(root, entry)))]):
            path = os.path.join(root, name)
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            yield path


def is_settled(stamps: np.ndarray, now: float) -> np.ndarray:
    """Return whether a change from `now` on would be seen in each stamp (..., 5): the last change is old enough, and
    the file is not in memory. Modification times may be set to any date, change times not.
    """
    old = stamps[..., 3 if os.name == "nt" else 4] < (now - SETTLED) * 1e9
    return old & ~np.isin(stamps[..., 0], list(devices_in_memory()))


@cache
def devices_in_memory() -> frozenset[int]:
    """Return the devices of file systems that are kept in memory; empty where the system does not list them."""
    with suppress(OSError), open("/proc/self/mountinfo") as file:
        mounts = [line.partition(" - ") for line in file]
        numbers = [
            before.split()[2].split(":") for before, _, after in mounts if after.startswith(("tmpfs ", "ramfs "))
        ]
        return frozenset(os.makedev(int(major), int(minor)) for major, minor in numbers)
    return frozenset()


def is_held_for_writing(descriptor: int) -> bool:
    """Return whether a program has the file open for writing; False where the system does not tell.

    The lease that is asked for ends when the descriptor is closed.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # a program that opens it meanwhile: harmless by default
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False


def hash_unchanged(path: str, stamp: Sequence[int]) -> bytes | None:
    """Return the hash of a small regular file that has this stamp before and after it is read; None for any other.

    This is the usual case, at a third of the cost of `hash_path`.
    """
    if stamp[2] > MAX_AT_ONCE:
        return None
    try:
        descriptor = os.open(path, READ_REGULAR)
    except (OSError, ValueError):
        return None
    try:
        data = os.read(descriptor, stamp[2] + 1)
        status = os.fstat(descriptor)
        if stamp_of(status) != tuple(stamp) or len(data) != stamp[2] or not stat.S_ISREG(status.st_mode):
            return None
        return None if _may_be_mapped(descriptor, stamp) else xxh3_128_digest(data)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def hash_path(path: str) -> tuple[tuple[int, int, int, int, int], bytes]:
    """Return the stamp and the hash of a file; of an unreadable one no stamp, and a hash of the reason."""
    try:
        if os.path.isdir(path):
            return _hash_folder(path)
        with open_regular(path) as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            found = hash_descriptor(file.fileno())
            changed = stamp_of(os.fstat(file.fileno())) != stamp or _may_be_mapped(file.fileno(), stamp)
    except (OSError, ValueError) as error:
        return (0, 0, 0, 0, 0), xxh3_128_digest(f"unreadable: {type(error).__name__}".encode())
    return ((0, 0, 0, 0, 0) if changed else stamp), found


def _may_be_mapped(descriptor: int, stamp: Sequence[int]) -> bool:
    return stamp[4] > (time.time() - WRITTEN_BACK) * 1e9 and is_held_for_writing(descriptor)


def _hash_folder(folder: str) -> tuple[tuple[int, int, int, int, int], bytes]:
    """Return the stamp of a folder and a hash of the names and content of its files."""
    stamp, state = stamp_at(folder), xxh3_128()
    for path in files_below(folder):
        with open_regular(path) as file:
            state.update(os.fsencode(os.path.relpath(path, folder)) + b"\0" + hash_descriptor(file.fileno()))
    return ((0, 0, 0, 0, 0) if stamp_at(folder) != stamp else stamp), state.digest()


class FileHashes:
    """Hashes of files below a root, computed when first asked for; afterwards `check` refuses a file that changed."""

    def __init__(self, root: str | Path, names: Sequence[str], stamps: np.ndarray | None = None) -> None:
        self.root, self.names = str(root), names
        self._stamps = stamps  # int64 (n, 5) of a listing just made

    def path(self, number: int) -> str:
        return os.path.join(self.root, self.names[number])

    @cached_property
    def rows(self) -> np.ndarray:
        """Stamp and hash of every file; the stamp is empty if the file may have changed while it was hashed."""
        started, rows = time.time(), np.zeros(len(self.names), ROW)
        stamps = self._stamps
        if stamps is None:
            stamps = np.array([stamp_or_none(self.path(k)) for k in range(len(rows))], np.int64).reshape(-1, 5)
        rows["stamp"] = _packed(stamps)
        missing = np.flatnonzero(~_look_up(rows))
        tasks = [missing[k : k + FILES_PER_TASK] for k in range(0, len(missing), FILES_PER_TASK)]
        with tqdm(total=len(missing), desc="hashing", unit=" files", delay=2, leave=False, disable=None) as bar:
            for task, (found, hashes) in zip(tasks, self._hash_all(tasks, stamps), strict=True):
                rows["stamp"][task] = _packed(found * is_settled(found, started)[:, None])
                rows["hash"][task] = np.frombuffer(hashes, "V16")
                bar.update(len(task))
        _enter(rows[missing])
        return rows

    def _hash_all(self, tasks: list[np.ndarray], stamps: np.ndarray) -> Iterator[tuple[np.ndarray, bytes]]:
        """Yield the results of `_hash`. Threads hide the time that files wait for storage, but where none waits they
        take twice as long as one, so they start with the first slow task.
        """
        waiting = iter([(task, stamps[task]) for task in tasks])
        for task, found in waiting:
            started = time.perf_counter()
            yield self._hash(task, found)
            if time.perf_counter() - started > SLOW * len(task):
                break
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(self._hash, *zip(*waiting, strict=True))

    def _hash(self, numbers: np.ndarray, stamps: np.ndarray) -> tuple[np.ndarray, bytes]:
        """Return the stamps of files when they were hashed, and their hashes, one after the other."""
        hashes = []
        for place, (number, stamp) in enumerate(zip(numbers.tolist(), stamps.tolist(), strict=True)):
            path = self.path(number)
            found = hash_unchanged(path, stamp)
            if found is None:
                stamps[place], found = hash_path(path)
            hashes.append(found)
        return stamps, b"".join(hashes)

    @property
    def all(self) -> np.ndarray:
        """Return the hashes, V16 (n,)."""
        return np.ascontiguousarray(self.rows["hash"])

    @cached_property
    def _digests(self) -> bytes:
        return self.all.tobytes()  # a slice of it takes less time than an item of an array

    def check_data(self, number: int, data: bytes) -> None:
        """Raise UserError if the bytes of a file, as just read, are not those that were hashed."""
        if "rows" in self.__dict__ and xxh3_128_digest(data) != self._digests[16 * number : 16 * number + 16]:
            raise self._changed(number)

    def check_file(self, number: int) -> None:
        """Raise UserError if a file is not the one that was hashed; it is hashed again only if its status changed."""
        if "rows" not in self.__dict__:
            return
        path, row = self.path(number), self.rows[number]
        stamp = np.array(stamp_or_none(path), np.int64).tobytes()
        if stamp.rstrip(b"\0") != row["stamp"]:
            found_stamp, found = hash_path(path)
            if any(found_stamp) and found != row["hash"].tobytes():
                raise self._changed(number)
            self.rows["stamp"][number] = stamp

    def _changed(self, number: int) -> ChangedError:
        return ChangedError(
            f"The content of {self.names[number]!r} has changed since this command first read it: give the command "
            "again when no program writes to the data."
        )


def stamp_or_none(path: str) -> tuple[int, int, int, int, int]:
    """Return the stamp of a file or folder; zeros if it cannot be read."""
    try:
        return stamp_at(path)
    except (OSError, ValueError):
        return (0, 0, 0, 0, 0)


def _packed(stamps: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stamps).view("S40").ravel()


def _look_up(rows: np.ndarray) -> np.ndarray:
    """Fill in the hashes that the table has; return bool (n,), which ones."""
    table = np.empty(0, ROW)
    # Without a cache every file is hashed.
    with suppress(OSError, ValueError), open_entry("hashes", TABLE_KEY, about=ABOUT) as entry:
        if entry.intact([TABLE]):
            table = np.load(entry.path / TABLE)
    if table.dtype != ROW or not len(table):
        return np.zeros(len(rows), bool)
    place = np.searchsorted(table["stamp"], rows["stamp"]).clip(max=len(table) - 1)
    known = (table["stamp"][place] == rows["stamp"]) & (rows["stamp"] != b"")
    rows["hash"][known] = table["hash"][place[known]]
    return known


def _enter(rows: np.ndarray) -> None:
    """Add rows to the table, sorted by stamp; beyond MAX_ROWS the oldest are dropped."""
    rows = rows[rows["stamp"] != b""]
    if not len(rows):
        return
    rows["used"] = int(time.time()) >> 12
    with suppress(OSError, ValueError), open_entry("hashes", TABLE_KEY, about=ABOUT) as entry:
        table = np.load(entry.path / TABLE) if entry.intact([TABLE]) else rows[:0]
        merged = np.concatenate([rows, table])
        merged = merged[np.argsort(merged["used"], kind="stable")[-MAX_ROWS:]][::-1]
        merged = merged[np.unique(merged["stamp"], return_index=True)[1]]
        with write_aside(entry.path / TABLE) as temporary, open(temporary, "wb") as file:
            np.save(file, merged)
        entry.commit(entry.hashes([TABLE]))
