"""Atomic writes and files that carry their checksum.

Everything is written under a hidden name, flushed to disk and renamed, and the rename is flushed, too. After a crash at
any point the old content or the new one is there. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anechoic.errors import UserError
from anechoic.storage.safe_io import open_regular, parse_json, read_text

# Prefixes of what is being written, deleted, and kept until its successor has its name; left only by killed processes.
NEW, OLD, WAS = ".new-", ".old-", ".was-"
SEAL = "checksum"


# ---- writing


def flush(path: Path) -> None:
    """Flush a file's content or a directory's entries to disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_aside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a path to write to (folder: an empty directory); it is renamed to `path` when the block succeeds."""
    temporary, before = _beside(path, NEW), None
    try:
        if folder:
            temporary.mkdir(parents=True)
        yield temporary
        for item in sorted(temporary.iterdir()) if folder else []:
            flush(item)
        flush(temporary)
        if path.is_dir():  # a directory cannot replace another
            before = _beside(path, WAS)
            os.rename(path, before)
        os.replace(temporary, path)
        flush(path.parent)
        if before is not None:
            _delete(before)
    except BaseException:
        if before is not None and not path.exists():
            os.rename(before, path)
        _delete(temporary)
        raise


@contextmanager
def write_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield a path to write to for each of several files; all are on disk before the first of them is renamed."""
    temporaries = [_beside(path, NEW) for path in paths]
    try:
        yield temporaries
        for temporary in temporaries:
            flush(temporary)
        for temporary, path in zip(temporaries, paths, strict=True):
            os.replace(temporary, path)
        flush(paths[0].parent)
    except BaseException:
        for temporary in temporaries:
            _delete(temporary)
        raise


@contextmanager
def write_into(folder: Path) -> Iterator[Path]:
    """Yield an empty directory; all its files are moved to `folder`, beside what is there, when the block succeeds."""
    temporary = _beside(folder, NEW)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        made = sorted(temporary.iterdir())
        for file in made:
            flush(file)
        make_folder(folder)
        for file in made:
            os.replace(file, folder / file.name)
        flush(folder)
    finally:
        _delete(temporary)


def _beside(path: Path, prefix: str) -> Path:
    return path.with_name(f"{prefix}{uuid.uuid4().hex[:8]}-{path.name}")


def permit(path: Path) -> None:
    """Give a file the permissions of any new file: safetensors lets nobody else read what it writes."""
    example = _beside(path, NEW)
    example.touch()
    path.chmod(stat.S_IMODE(example.stat().st_mode))
    example.unlink()


def reserve(descriptor: int, size: int) -> None:
    """Extend a file to this length and allocate its space; OSError if the disk is full.

    Writing through a memory map to space that is not allocated would kill the process instead.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, max(1, size))
        return
    for start in range(0, size, 1 << 20):
        os.write(descriptor, bytes(min(1 << 20, size - start)))


def make_folder(path: Path) -> None:
    """Create a folder with its parents; UserError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"The folder {path} cannot be made ({problem.strerror}): choose another.") from problem


def write_json(path: Path, value: Any) -> None:
    with write_aside(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")


def remove(path: Path) -> None:
    """Delete a file or directory; it is renamed first, so that a crash leaves no part of it under its name."""
    if path.exists():
        doomed = _beside(path, OLD)
        os.rename(path, doomed)
        flush(path.parent)
        _delete(doomed)


def sweep_leftovers(folder: Path, *, older_than: float = 0.0) -> None:
    """Delete what killed processes left half written or half deleted here, if it is older than this in seconds.

    A directory that was about to be replaced, and was not, gets its name back. Without a lock on the folder, older_than
    must be longer than any write.
    """
    for path in folder.glob(".*") if folder.is_dir() else []:
        if path.name.startswith((NEW, OLD, WAS)):
            try:
                if time.time() - path.lstat().st_mtime < older_than:
                    continue
                own = folder / path.name[len(WAS) + len("12345678-") :]
                if path.name.startswith(WAS) and not own.exists():
                    os.rename(path, own)
                else:
                    _delete(path)
            except FileNotFoundError:
                continue  # its owner deleted it


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def release(array: Any) -> None:
    """Let the system take back the resident pages of a memory-mapped array; they are read again when used.

    They would count as this process's memory until the system needs it. Other arrays stay as they are, and so do
    copies on write, whose changes would be lost.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and array.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


# ---- checking


def checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of its layout."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with its own checksum as its last field."""
    return {**value, SEAL: digest_of(value)}


def unsealed(value: Any) -> dict[str, Any]:
    """Return the argument of `sealed`; ValueError if a field was changed, added or lost since."""
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    content = {name: item for name, item in value.items() if name != SEAL}
    if value.get(SEAL) != digest_of(content):
        raise ValueError("its content does not fit its checksum")
    return content


# ---- reading


def read_json(path: Path) -> Any:
    """Return any JSON value; a file that must hold an object is read by `safe_io.read_table`."""
    return parse_json(read_text(path), where=str(path))
