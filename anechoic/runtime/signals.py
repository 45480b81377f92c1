"""Signals that only ask a run to stop; the loop says when it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """Which signal asked to stop: `asked` in this process, `agreed` once all processes know (0: none)."""

    asked = 0
    agreed = 0


@contextmanager
def catch_signals() -> Iterator[Stop]:
    """While open, SIGTERM and Ctrl-C only ask to stop. Outside the main thread signals are not ours to catch."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        stop.asked = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
