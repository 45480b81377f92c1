"""Subprocesses that exit with their parent, and parents that let subprocesses save before they exit.

A subprocess gets its parent's process id at the start, so that it cannot mistake the process that adopts it for its
parent. Standard library only: it is called before slow imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PARENT = "ANECHOIC_PARENT"
PR_SET_PDEATHSIG = 1


def end_with(parent: int, *, number: int = signal.SIGKILL, every: float = 0.2) -> None:
    """Send this process the signal when its parent exits; exit at once if the parent has exited already.

    Linux sends it immediately; elsewhere a thread polls.
    """
    if os.getppid() != parent:
        os._exit(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os.kill(os.getpid(), number)

    # The thread also covers a parent that exited just before prctl.
    threading.Thread(target=poll, daemon=True).start()


def exit_when_parent_exits() -> None:
    """Get SIGTERM, so that this process can save, when the parent that `Subprocesses` recorded exits."""
    parent = os.environ.pop(PARENT, "")
    if parent.isdecimal():
        end_with(int(parent), number=signal.SIGTERM)


class Asked:
    """The number of signals received, and the first one (0: none)."""

    times = 0
    number = 0


class Subprocesses:
    """Commands started by this process. SIGTERM and Ctrl-C are passed on so that each can save; a second one kills.

    Handlers only count; the caller's waiting loop calls `check`, which acts.
    """

    def __init__(self) -> None:
        self.running: list[subprocess.Popen] = []
        self.asked = Asked()
        self._passed_on = 0

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a command in its own process group, where the terminal's Ctrl-C does not reach it a second time."""
        environment = {**(options.pop("env", None) or os.environ), PARENT: str(os.getpid())}
        options = {"stdin": subprocess.DEVNULL, "process_group": 0, **options}
        process = subprocess.Popen(command, env=environment, **options)
        self.running.append(process)
        return process

    def check(self) -> None:
        """Pass on received signals; raise SystemExit once all subprocesses have exited after one."""
        self.running = [process for process in self.running if process.poll() is None]
        if self.asked.times > self._passed_on:
            first, self._passed_on = not self._passed_on, self.asked.times
            for process in self.running:
                process.send_signal(signal.SIGTERM if first else signal.SIGKILL)
        if self.asked.number and not self.running:
            raise SystemExit(128 + self.asked.number)

    def __enter__(self) -> Subprocesses:
        self._signals = noting_signals(self.asked)
        self._signals.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        """Let every subprocess save and exit, whatever went wrong here."""
        try:
            for process in self.running:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            while any(process.poll() is None for process in self.running):
                time.sleep(0.05)
                if self.asked.times > max(1, self._passed_on):
                    for process in self.running:
                        process.kill()
        finally:
            self._signals.__exit__(None, None, None)


@contextmanager
def noting_signals(asked: Asked) -> Iterator[None]:
    """Count SIGTERM and SIGINT while open; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: object) -> None:
        asked.times += 1
        asked.number = asked.number or number

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
