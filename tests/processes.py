"""Commands of anechoic in subprocesses, and what the system knows about processes.

A command is a fork of a process that has imported everything, so it starts quickly. For the training, its workers and
signals it behaves like one that a shell started.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PATIENCE = 300  # seconds; the machine may be busy
WARM = ["anechoic.cli.train", "anechoic.cli.main", "anechoic.training.loop", "sklearn.datasets"]


class Command:
    """`anechoic ARGUMENTS`, running in a session of its own."""

    def __init__(self, arguments: Iterable[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(WARM)
        self._files = [Path(tempfile.mkstemp(suffix=f"-{name}")[1]) for name in ("stdout", "stderr")]
        self._process = context.Process(target=give, args=(list(arguments), self._files, dict(os.environ)))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> Command:
        """Wait for its end; `stdout` and `stderr` hold its output."""
        self._process.join(PATIENCE)
        assert self.returncode is not None, f"process {self.pid} did not end within {PATIENCE} seconds"
        self.stdout, self.stderr = (path.read_text() for path in self._files)
        for path in self._files:
            path.unlink()
        return self


def give(arguments: list[str], files: list[Path], environment: dict[str, str]) -> None:
    """Become the command, in the fork."""
    os.setsid()
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # the system's default
    os.environ.update(environment)
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    from anechoic.cli.main import main

    sys.argv = ["anechoic", *arguments]
    sys.exit(main())


def run_to_the_end(arguments: Iterable[str]) -> Command:
    done = Command(arguments).end()
    assert done.returncode == 0, done.stderr
    return done


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} seconds: {what}"
        time.sleep(0.002)


def parent_of(pid: int) -> int | None:
    """Return the parent of a running process; None for one that ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def alive(pid: int) -> bool:
    return parent_of(pid) is not None


def descendants(pid: int) -> set[int]:
    """Return the ids of all descendants of a process."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found: set[int] = set()
    todo = {pid}
    while todo:
        todo = {child for child, parent in parents.items() if parent in todo} - found
        found |= todo
    return found
