"""SIGTERM and Ctrl-C as requests to stop: the training loop saves at the end of the update, then exits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class InterruptedRun(SystemExit):
    """A signal interrupted the run, which has saved; the exit code is 128 + the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


def leave(code: int) -> NoReturn:
    """Exit this process now, without the second or more that unloading torch takes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Stop:
    """The signal that requested a stop: `asked` on this rank, `agreed` once all ranks know (0: none).

    in_loop: there is something to save, so that the signal waits for the end of the update.
    """

    asked = 0
    agreed = 0
    in_loop = False


@contextmanager
def catch_signals(*, one_of_several: bool = False) -> Iterator[Stop]:
    """While open, SIGTERM and Ctrl-C request a stop: at the end of the update in the loop, immediately before it.

    A second signal exits immediately, except on a rank (one_of_several), which may get a signal twice and which its
    launcher kills if needed. Does nothing outside the main thread, where Python handles no signals.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.asked and not one_of_several:
            os._exit(128 + number)
        again, stop.asked = bool(stop.asked), number
        if not stop.in_loop and not again:
            raise InterruptedRun(number)

    # A signal that the parent process ignores stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
