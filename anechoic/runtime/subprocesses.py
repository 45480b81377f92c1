"""Processes that end with their parent, and parents that let their children save before they end.

A child is told its parent's process id when it is started, so it cannot mistake whoever adopted it for its parent.
Standard library only: it is called before anything slow is imported.
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
    """From now on this process gets the signal soon after its parent ended, however that ended.

    It ends at once if the parent is gone already. Linux tells it immediately, elsewhere a thread looks now and then.
    """
    if os.getppid() != parent:
        os._exit(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os.kill(os.getpid(), number)

    # The thread also covers a parent that ended just before the system was asked.
    threading.Thread(target=look, daemon=True).start()


def exit_when_parent_exits() -> None:
    """For a command that `Subprocesses` may have started: SIGTERM, so that it can save, once that process is gone."""
    parent = os.environ.pop(PARENT, "")
    if parent.isdecimal():
        end_with(int(parent), number=signal.SIGTERM)


class Asked:
    """How often a signal asked to stop, and which one came first (0: none)."""

    times = 0
    number = 0


class Subprocesses:
    """Commands started by this process. SIGTERM and Ctrl-C are passed on so that each can save; a second one kills.

    Handlers only take note: `check` acts, from the loop of whoever waits for the children.
    """

    def __init__(self) -> None:
        self.running: list[subprocess.Popen] = []
        self.asked = Asked()
        self._passed_on = 0

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """In a group of its own, where the terminal's Ctrl-C does not reach it a second time."""
        environment = {**(options.pop("env", None) or os.environ), PARENT: str(os.getpid())}
        options = {"stdin": subprocess.DEVNULL, "process_group": 0, **options}
        process = subprocess.Popen(command, env=environment, **options)
        self.running.append(process)
        return process

    def check(self) -> None:
        """To be called often: passes on what came in, and raises SystemExit once all children have ended after it."""
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
        """Whatever went wrong here, no child outlives the block; each gets the time to save."""
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
    """While open, SIGTERM and SIGINT are only counted. Outside the main thread signals are not ours to catch."""
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
