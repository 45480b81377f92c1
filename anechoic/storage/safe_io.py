"""Reading untrusted files: regular files only, up to a size, and JSON with errors as one sentence.

A path may be an endless pipe, a device, or a file larger than memory; text may be anything. Standard library only.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from anechoic.errors import UserError

# Larger encoded images, or members of archives, are refused.
MAX_IMAGE_BYTES = 1 << 28
MAX_JSON_BYTES = 1 << 26
# An archive may unpack to this size, or to this multiple of its own size.
MAX_UNPACKED, MAX_RATIO = 1 << 26, 50
# Set to 1, tables may name files outside their folder. Processes that a command starts inherit it.
OUTSIDE = "ANECHOIC_ALLOW_OUTSIDE"
# Flags that open a file for reading. Without O_NONBLOCK, opening a pipe would wait for a writer.
READ_REGULAR = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def open_regular(path: str | Path) -> Iterator[BufferedReader]:
    """Open a file; OSError if it is not a regular file."""
    descriptor = os.open(path, READ_REGULAR)
    with open(descriptor, "rb") as file:
        _refuse_irregular(os.fstat(descriptor), path)
        yield file


def read_regular(path: str | Path, *, limit: int = MAX_IMAGE_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; OSError otherwise."""
    descriptor = os.open(path, READ_REGULAR)  # a file object would take longer than the reading of a small image
    try:
        status = os.fstat(descriptor)
        _refuse_irregular(status, path)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
        data = os.read(descriptor, status.st_size)
        while len(data) < status.st_size and (more := os.read(descriptor, status.st_size - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def _refuse_irregular(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: str | Path, *, limit: int = MAX_JSON_BYTES) -> str:
    """Return the content of a UTF-8 text file; UserError with the cause otherwise."""
    try:
        return read_regular(path, limit=limit).decode("utf-8")
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read as text ({reason(problem)}).") from problem


def read_table(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file; UserError with the cause otherwise."""
    return parse_table(read_text(path), where=str(path))


def parse_json(text: str | bytes, *, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as problem:
        raise UserError(f"{where} is not valid JSON (nested too deeply).") from problem
    except ValueError as problem:
        raise UserError(f"{where} is not valid JSON ({reason(problem)}).") from problem


def parse_table(text: str | bytes, *, where: str) -> dict[str, Any]:
    value = parse_json(text, where=where)
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a JSON {type(value).__name__}, not an object of names and values.")
    return value


def reason(problem: BaseException) -> str:
    """Return one line about an exception."""
    text = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
    return (text.strip().splitlines() or [type(problem).__name__])[0].rstrip(".")[:200]


def refuse_bomb(archive: ZipFile, path: str | Path) -> None:
    """Raise UserError for a zip file (also .npz, .pth) whose members unpack to far more than it is long."""
    unpacked, own = sum(info.file_size for info in archive.infolist()), os.path.getsize(path)
    if unpacked > MAX_UNPACKED and unpacked > MAX_RATIO * own:
        raise UserError(
            f"{path} would unpack to {unpacked:,} bytes, {unpacked // max(1, own)} times its size: it is refused as a "
            f"decompression bomb; store its content with less or no compression."
        )


@contextmanager
def outside_allowed() -> Iterator[None]:
    """Let tables name files outside their folder while open."""
    before = os.environ.get(OUTSIDE)
    os.environ[OUTSIDE] = "1"
    try:
        yield
    finally:
        os.environ.pop(OUTSIDE)
        if before is not None:
            os.environ[OUTSIDE] = before


def is_inside(folder: str | Path, name: str) -> bool:
    """Return whether a name that untrusted data give stays below the folder; links in the folder are the user's."""
    root = os.path.abspath(folder)
    return os.environ.get(OUTSIDE) == "1" or Path(os.path.abspath(os.path.join(root, name))).is_relative_to(root)


def refuse_odd_files(folder: Path) -> None:
    """Raise UserError if a folder that another library will read holds pipes, devices or links to nowhere."""
    odd = next((path for path in folder.rglob("*") if not path.is_file() and not path.is_dir()), None)
    if odd is not None:
        raise UserError(f"{odd} is neither a file nor a folder; remove it.")


# Larger numbers in a network's config are refused: building it would not end.
MAX_NUMBER, MAX_LAYERS = 1 << 20, 1000


def refuse_giants(settings: Mapping[str, Any], *, where: str) -> None:
    """Raise UserError if a foreign library's config asks for more layers, or wider ones, than any network has."""
    waiting: list[tuple[str, Any]] = list(settings.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(name, item) for item in value]
        elif isinstance(value, int | float):
            limit = MAX_LAYERS if "layers" in name or "depth" in name else MAX_NUMBER
            if not (math.isfinite(value) and abs(value) <= limit):
                raise UserError(f"{where}: {name[:60]} = {value!r:.40} is beyond any network ({limit:,}).")


def refuse_unbacked(parameters: int, folder: Path, *, where: str) -> None:
    """Raise UserError if a network has far more parameters than the files in its folder have bytes."""
    own = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if parameters > MAX_UNPACKED and parameters > 4 * own:
        raise UserError(f"{where} describes a network of {parameters:,} parameters, and its files have {own:,} bytes.")


def of_kind(values: Mapping[str, Any], name: str, kind: type | tuple[type, ...], *, where: str) -> Any:
    """Return values[name], which must be of this type; a bool is no number."""
    value = values.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: {name} = {value!r:.60} is not a valid value.")
    return value
