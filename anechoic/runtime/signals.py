"""Signals that only ask a run to stop; the loop says when it does. Before the loop there is nothing to save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class InterruptedRun(SystemExit):
    """A signal ended the run after it had saved; the exit code is 128 + the signal's number, as shells have it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


def leave(code: int) -> NoReturn:
    """End this process now. Taking torch apart in good order takes a second or more, and nobody needs that done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Stop:
    """Which signal asked to stop: `asked` in this process, `agreed` once all processes know (0: none).

    in_loop: whether there is something to save, so that the signal waits for the end of the update.
    """

    asked = 0
    agreed = 0
    in_loop = False


@contextmanager
def catch_signals(*, one_of_several: bool = False) -> Iterator[Stop]:
    """While open, SIGTERM and Ctrl-C only ask to stop: at the end of the update in the loop, at once before it.

    A second signal ends the process on the spot, except for one of several: its launcher passes signals on, so the same
    one may come twice, and decides itself when to be hard. Outside the main thread signals are not ours to catch.
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

    # A signal that whoever started us has switched off stays off.
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
