"""A run directory: config.json, metrics.jsonl, env.json, results.json, and the lock that keeps a second process out.

Standard library only, so that pages can read a run without torch; tensors are checkpoint.py's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from anechoic.errors import UserError
from anechoic.outcome import commit, machine

log = logging.getLogger("anechoic")

# Fields of a metrics line that depend on the clock; everything else is reproduced bit for bit.
CLOCK_FIELDS = ("seconds", "images_per_second")
# The kind of a metrics line measured on held-out samples; runs of earlier versions call it "watch".
VALIDATION = ("validation", "watch")
# Seconds to wait for a run directory's lock before it counts as taken.
PATIENCE = 2.0


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a temporary file, flushed to the disk, takes the name."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as problem:
        raise UserError(f"{path} cannot be read ({problem}): it is no run or model directory of anechoic.") from problem


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete records of a run directory's metrics.jsonl; a last line that was cut off is left out."""
    return [record for record, _ in _records(path / "metrics.jsonl")]


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each complete record and the length of the file up to its end."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith(b"\n"):
            return
        length += len(line)
        yield json.loads(line), length


class Run:
    """A run directory that this process owns while the object is open; the system frees the lock of a dead process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+b")  # noqa: SIM115
        except OSError as problem:
            raise UserError(f"The run directory {path} cannot be written ({problem}): choose another.") from problem
        _take(self._lock, self.path)
        self._pending = b""
        self._skipped = 0
        self._length = (self.path / "metrics.jsonl").stat().st_size if (self.path / "metrics.jsonl").exists() else 0

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def read_config(self) -> dict[str, Any] | None:
        """The frozen config, or None if this directory has no run yet."""
        path = self.path / "config.json"
        return read_json(path) if path.exists() else None

    def start(self, config: dict[str, Any]) -> None:
        """Freeze the config (once) and note when, where and how this process started."""
        environment = self.path / "env.json"
        starts = read_json(environment)["starts"] if environment.exists() else []
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname(), "command": sys.argv}
        try:
            if not (self.path / "config.json").exists():
                write_json(self.path / "config.json", config)
            write_json(environment, {"machine": machine(), "commit": commit(), "starts": [*starts, now]})
        except OSError as problem:
            raise UserError(
                f"The run directory {self.path} cannot be written ({problem}): choose another."
            ) from problem

    def append(self, record: dict[str, Any]) -> None:
        """One more line of metrics.jsonl; if the disk refuses, it waits in memory for the next one."""
        self._pending += json.dumps(record).encode() + b"\n"
        try:
            self.flush()
        except OSError as problem:
            log.warning("metrics.jsonl cannot be written now (%s); the run goes on and will try again.", problem)

    def flush(self) -> None:
        """Write the lines that wait, and force them onto the disk; OSError if it refuses."""
        with open(self.path / "metrics.jsonl", "ab") as file:
            file.truncate(self._length)  # a write that failed may have left half a line
            file.write(self._pending)
            file.flush()
            os.fsync(file.fileno())
        self._length += len(self._pending)
        self._pending = b""

    def rewind(self, seen: int) -> None:
        """Forget the records after `seen`: a run that goes on from a checkpoint writes them again."""
        path = self.path / "metrics.jsonl"
        self._length = max((length for record, length in _records(path) if record["seen"] <= seen), default=0)
        if path.exists():
            os.truncate(path, self._length)

    def list_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        """skipped.json: the name and the reason of every image that could not be read, if there are new ones."""
        if len(skipped) > self._skipped:
            log.warning(
                "%d images could not be read and are left out; skipped.json in the run lists them.", len(skipped)
            )
            self._skipped = len(skipped)
            try:
                write_json(self.path / "skipped.json", [{"name": name, "reason": reason} for name, reason in skipped])
            except OSError as problem:
                log.warning("skipped.json cannot be written now (%s); the run goes on.", problem)

    def finish(self, results: dict[str, Any]) -> None:
        write_json(self.path / "results.json", results)

    @property
    def results(self) -> dict[str, Any] | None:
        """What the run ended with, or None if it has not ended."""
        path = self.path / "results.json"
        return read_json(path) if path.exists() else None


def _take(lock: BinaryIO, path: Path) -> None:
    """Lock the open file or say who holds it; processes of a launcher that was just killed get a moment to go."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            lock.seek(0)
            owner = lock.read().decode() or "another process"
            lock.close()
            raise UserError(f"The run directory {path} is in use by {owner}: wait for it or choose another.") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    lock.flush()
