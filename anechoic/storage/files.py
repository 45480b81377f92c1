"""Files written whole or not at all, and files that say whether they are what was written.

Everything is written aside under a hidden name, forced onto the disk, renamed, and the rename forced onto the disk too.
After a crash at any point the old content or the new one is there. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anechoic.errors import UserError
from anechoic.storage.safe_io import open_regular, parse_json, read_text

# What is being written, deleted, and kept until another has its name. Only a killed process leaves such names behind.
NEW, OLD, WAS = ".new-", ".old-", ".was-"
SEAL = "checksum"


# ---- writing


def flush(path: Path) -> None:
    """Force a file's content or a directory's entries onto the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_aside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A path to write to (folder: an empty directory). When the block ends well it takes the name `path` at once."""
    temporary, before = _beside(path, NEW), None
    try:
        if folder:
            temporary.mkdir(parents=True)
        yield temporary
        for item in sorted(temporary.iterdir()) if folder else []:
            flush(item)
        flush(temporary)
        if path.is_dir():  # a directory cannot take the name of another
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


def _beside(path: Path, prefix: str) -> Path:
    return path.with_name(f"{prefix}{uuid.uuid4().hex[:8]}-{path.name}")


def reserve(descriptor: int, size: int) -> None:
    """Give a file at least this length and room for all of it now; OSError if there is none.

    Writing through a memory map to room that does not exist would end the process instead.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, max(1, size))
        return
    for start in range(0, size, 1 << 20):
        os.write(descriptor, bytes(min(1 << 20, size - start)))


def make_folder(path: Path) -> None:
    """With its parents; one that cannot be made is refused in a sentence."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"The folder {path} cannot be made ({problem.strerror}): choose another.") from problem


def write_json(path: Path, value: Any) -> None:
    with write_aside(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")


def remove(path: Path) -> None:
    """Delete a file or directory; its name goes first, so that a crash leaves no half of it under that name."""
    if path.exists():
        doomed = _beside(path, OLD)
        os.rename(path, doomed)
        flush(path.parent)
        _delete(doomed)


def sweep_leftovers(folder: Path, *, older_than: float = 0.0) -> None:
    """Delete what killed processes left half written or half deleted here, if it is so many seconds old.

    A directory that was about to be replaced, and was not, gets its name back. Without a lock on the folder, older_than
    must be longer than anybody writes.
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
                continue  # its owner was quicker


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---- checking


def checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Of a JSON value, however it is laid out."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its own checksum as its last field."""
    return {**value, SEAL: digest_of(value)}


def unsealed(value: Any) -> dict[str, Any]:
    """What `sealed` was given; ValueError if a field was changed, added or lost since."""
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    content = {name: item for name, item in value.items() if name != SEAL}
    if value.get(SEAL) != digest_of(content):
        raise ValueError("its content does not fit its checksum")
    return content


# ---- reading


def read_json(path: Path) -> Any:
    """Any JSON value; a file that must hold an object is read by `untrusted.read_table`."""
    return parse_json(read_text(path), where=str(path))
