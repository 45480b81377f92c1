"""A run directory: config.json, metrics.jsonl, env.json, results.json, and a lock against a second process.

env.json holds its own checksum, a copy of the config, and the checksums of a finished run's files. No torch here, so
that pages can read a run without it; checkpoint.py has the tensors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from anechoic.errors import UserError
from anechoic.outcome import commit, counted, machine, printable
from anechoic.runtime.ownership import mark_of
from anechoic.storage.files import (
    checksum,
    digest_of,
    flush,
    read_json,
    sealed,
    sweep_leftovers,
    unsealed,
    write_aside,
    write_json,
)
from anechoic.storage.safe_io import read_regular, read_table, reason

log = logging.getLogger("anechoic")

# Fields of a metrics line that depend on the clock; all others are reproduced bit for bit.
CLOCK_FIELDS = ("seconds", "images_per_second")
# Kinds of a metrics line measured on held-out samples: of this version and of earlier ones.
VALIDATION = ("validation", "monitor", "watch")
MAX_METRICS_BYTES = 1 << 31
# Seconds to wait for a run directory's lock before it counts as taken.
PATIENCE = 5.0
# Folder with a picture per validation: samples of a denoiser, reconstructions for a tracker.
PICTURES = "pictures"
# Files that are not replaced as a whole when they are written.
LOG = "resumed.log"
WRITTEN_IN_PLACE = (".lock", ".owner", "metrics.jsonl", LOG)
# Files that a finished run must still have, unchanged.
RESULT_FILES = ("results.json", "metrics.jsonl", "model/config.json", "model/model.safetensors")


# Values of a record that are numbers; others may be lists with one number per layer.
SCALARS = (
    "seen",
    "loss",
    "held_out_loss",
    "labels_knn",
    "labels_probe",
    "seconds",
    "images_per_second",
    "gradient_norm",
)


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold, or None."""
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a run directory's metrics.jsonl; an incomplete last line is skipped."""
    return [record for record, _ in _records(path / "metrics.jsonl")]


def picture_files(path: Path) -> list[Path]:
    """Return the pictures of a run's validations, whose names are the samples seen."""
    return sorted(file for file in (path / PICTURES).glob("*.png") if file.stem.isdecimal())


def read_pictures(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the samples seen and the picture (of Pillow) of each validation that has one."""
    from PIL import Image

    for file in picture_files(path):
        with Image.open(file) as image:
            image.load()
        yield int(file.stem), image


def last_seen(path: Path) -> int:
    """Return the samples seen by a run directory's last record."""
    records = read_metrics(path)
    return int(records[-1]["seen"]) if records else 0


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each complete record and the length of the file up to its end."""
    length = 0
    try:
        lines = read_regular(path, limit=MAX_METRICS_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise UserError(f"{path} cannot be read ({reason(problem)}): restore the file from a copy.") from problem
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        length += len(line)
        yield _record(line, number, path), length


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
        numbers = {name: value for name, value in record.items() if name != "kind"}
        if (
            isinstance(record["kind"], str)
            and type(record["seen"]) is int
            and 0 <= record["seen"] < 2**63
            and all(_is_number(value) or (name not in SCALARS and _is_list(value)) for name, value in numbers.items())
        ):
            return record
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"Line {number} of {path} is damaged: restore the file from a copy, or delete that line.")


def read_frozen_config(path: Path) -> dict[str, Any] | None:
    """Return the frozen config of a run directory, or None if it has no run yet.

    A missing or unreadable config.json is replaced by its copy in env.json; a different one is refused.
    """
    copy = read_environment(path).get("config")
    file = path / "config.json"
    if not file.exists() and copy is None:
        if any((path / "checkpoints").glob("[0-9]*")):
            raise UserError(f"{file} is missing and has no copy in env.json: restore it, or choose another directory.")
        return None
    try:
        config = read_table(file)
    except UserError:
        if copy is None:
            raise
        return copy
    if copy is not None and config != copy:
        raise UserError(
            f"{file} is not what the run was started with: put back the config that env.json beside it holds, or "
            "delete config.json to have that done."
        )
    return config


def read_environment(path: Path) -> dict[str, Any]:
    """Return env.json; empty if it is missing or damaged, because no result depends on it."""
    file = path / "env.json"
    if not file.exists():
        return {}
    try:
        found = unsealed(read_json(file))
    except ValueError:  # as a UserError is one
        return {}
    starts = found.get("starts", [])
    return found if isinstance(starts, list) and all(isinstance(start, dict) for start in starts) else {}


def holder(path: Path) -> int | None:
    """Return the process of this machine that owns the run directory; None if there is none here."""
    if not (path / ".lock").exists():  # locking would create it, and a deleted directory
        return None
    lock = FileLock(path / ".lock", timeout=0, thread_local=False)
    try:
        with lock:
            return None
    except Timeout:
        pass
    except OSError:  # a directory that cannot be written has no lock to hold
        return None
    try:
        words = _owner(path).split()
    except OSError:
        return None
    match words:
        case ["process", number, "on", host] if number.isdecimal() and host == socket.gethostname():
            return int(number)
    return None


def _owner(path: Path) -> str:
    return read_regular(path / ".owner", limit=1 << 16).decode(errors="replace")


def refuse_links(path: Path) -> None:
    """Raise UserError if a file that is written in place is a link: writing would change a file elsewhere."""
    for name in WRITTEN_IN_PLACE:
        if (path / name).is_symlink():
            raise UserError(f"{path / name} is a link, and writing to it would change another file: remove it.")


class Run:
    """A run directory that this process owns while the object is open; a dead process's lock is free."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = FileLock(self.path / ".lock", timeout=PATIENCE, poll_interval=0.1, thread_local=False)
        owner = self.path / ".owner"
        refuse_links(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            holder = _owner(self.path) if owner.exists() else "another process"
            raise UserError(f"The run directory {path} is in use by {holder}: wait for it or choose another.") from None
        except OSError as problem:
            self._lock.release()
            raise UserError(f"The run directory {path} cannot be written ({problem}): choose another.") from problem
        self._sweep()
        self._pending = b""
        self._skipped = 0
        self._digests: list[str] = []
        self._length = (self.path / "metrics.jsonl").stat().st_size if (self.path / "metrics.jsonl").exists() else 0

    def close(self) -> None:
        if self._lock.is_locked:
            self._sweep()
            with contextlib.suppress(OSError):  # the disk may be full or read-only by now
                (self.path / ".owner").unlink()
        self._lock.release()

    def _sweep(self) -> None:
        """Delete half-written files: no other process writes here while this one has the lock."""
        for folder in (self.path, self.checkpoints):
            with contextlib.suppress(OSError):  # a read-only disk: next time
                sweep_leftovers(folder)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def read_config(self) -> dict[str, Any] | None:
        return read_frozen_config(self.path)

    def start(self, config: dict[str, Any]) -> None:
        """Freeze the config (once) and record when, where and how this process started."""
        before = read_environment(self.path)
        if not before and (self.path / "env.json").exists():
            log.warning("%s is damaged; a new one is started.", self.path / "env.json")
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname(), "command": sys.argv}
        if mark := mark_of(str(config.get("data", {}).get("source"))):
            now["mark"] = mark
        try:
            frozen = read_frozen_config(self.path) or config
            if not _readable(self.path / "config.json"):
                if "config" in before:
                    log.warning("%s was missing or damaged; it is written again.", self.path / "config.json")
                write_json(self.path / "config.json", frozen)
            self._note(starts=[*before.get("starts", []), now], config=frozen)
        except OSError as problem:
            raise UserError(
                f"The run directory {self.path} cannot be written ({problem}): choose another."
            ) from problem

    def _note(self, **fields: Any) -> None:
        """Write env.json with these fields replaced."""
        environment = {"machine": machine(), "commit": commit(), **read_environment(self.path), **fields}
        write_json(self.path / "env.json", sealed(environment))

    # ---- metrics

    def append(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl; if the disk refuses, keep it in memory for the next flush."""
        self._pending += json.dumps(record).encode() + b"\n"
        self._digests.append(_digest(record))
        try:
            self.flush()
        except OSError as problem:
            log.warning("metrics.jsonl cannot be written now (%s); the run continues and will try again.", problem)

    def flush(self) -> None:
        """Write pending lines and sync them to the disk; OSError if it refuses."""
        path = self.path / "metrics.jsonl"
        new = not path.exists()
        with open(path, "ab") as file:
            file.truncate(self._length)  # a write that failed may have left half a line
            file.write(self._pending)
            file.flush()
            os.fsync(file.fileno())
        if new:
            flush(self.path)
        self._length += len(self._pending)
        self._pending = b""

    @property
    def metrics_digest(self) -> str:
        """Return a digest of every record so far, without times: equal for runs that computed the same."""
        return digest_of(self._digests)

    def rewind(self, seen: int | None, *, digest: str | None = None) -> None:
        """Delete the records after `seen` (None: all): a run that resumes from a checkpoint writes them again.

        digest: `metrics_digest` at that point; other records mean that the file is damaged.
        """
        path = self.path / "metrics.jsonl"
        kept: list[tuple[dict[str, Any], int]] = []
        try:
            for record, length in _records(path) if seen is not None else []:
                if record["seen"] > seen:
                    break
                kept.append((record, length))
        except UserError:
            if digest is None or digest_of([_digest(record) for record, _ in kept]) != digest:
                raise
            # The damaged records come after `seen` and are written again.
        self._digests = [_digest(record) for record, _ in kept]
        if digest is not None and self.metrics_digest != digest:
            raise UserError(
                f"{path} is not what this run wrote up to {seen} samples: restore it from a copy, or start again in "
                "another directory."
            )
        self._length = kept[-1][1] if kept else 0
        if path.exists():
            os.truncate(path, self._length)
        for picture in picture_files(self.path):
            if seen is None or int(picture.stem) > seen:
                picture.unlink()

    def store_picture(self, image: Any, seen: int) -> None:
        """Write a validation's picture (of Pillow) as a PNG file."""
        try:
            (self.path / PICTURES).mkdir(exist_ok=True)
            with write_aside(self.path / PICTURES / f"{seen:012d}.png") as new:
                image.save(new, format="PNG")
        except OSError as problem:
            log.warning("A picture cannot be written now (%s); the run continues.", problem)

    def list_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        """Add new unreadable images, with their reasons, to skipped.json."""
        if len(skipped) > self._skipped:
            listed = dict.fromkeys([*self._listed_before(), *skipped])
            count, (name, reason) = counted(len(listed), "image"), next(iter(listed))
            more = "skipped.json in the run lists all"
            log.warning("%s could not be read; the first is %s (%s). %s.", count, printable(name), reason, more)
            self._skipped = len(skipped)
            try:
                write_json(self.path / "skipped.json", [{"name": name, "reason": reason} for name, reason in listed])
            except OSError as problem:
                log.warning("skipped.json cannot be written now (%s); the run continues.", problem)

    def _listed_before(self) -> list[tuple[str, str]]:
        path = self.path / "skipped.json"
        if not path.exists():
            return []
        try:
            return [(str(item["name"]), str(item["reason"])) for item in read_json(path)]
        except (UserError, TypeError, KeyError):
            log.warning("%s is damaged; a new one is started.", path)
            return []

    # ---- the end

    def finish(self, results: dict[str, Any]) -> None:
        """Write results.json, and the checksums of a finished run's files to env.json."""
        write_json(self.path / "results.json", results)
        present = [name for name in RESULT_FILES if (self.path / name).is_file()]
        self._note(files={name: checksum(self.path / name) for name in present})

    @property
    def results(self) -> dict[str, Any] | None:
        """results.json, or None if the run is not finished."""
        path = self.path / "results.json"
        return read_table(path) if path.exists() else None

    def damage(self) -> str | None:
        """Return how a finished run is damaged; None if it is intact."""
        if not _readable(self.path / "results.json"):
            return "results.json cannot be read"
        files = read_environment(self.path).get("files") or dict.fromkeys(RESULT_FILES)
        for name, expected in files.items():
            path = self.path / name
            if not path.is_file():
                return f"{name} is missing"
            if expected is not None and checksum(path) != expected:
                return f"{name} is not what was written"
        return None


def _readable(path: Path) -> bool:
    try:
        read_table(path)
    except UserError:
        return False
    return True


def _digest(record: dict[str, Any]) -> str:
    return digest_of({name: value for name, value in record.items() if name not in CLOCK_FIELDS})
