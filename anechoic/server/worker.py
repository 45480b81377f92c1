"""One thread that computes, a short queue in front of it: requests wait or are asked to retry.

Jobs of the same kind that wait together are computed together.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

TOGETHER = 16

# A kind's function: arguments of some jobs -> for each its result, or the exception it deserves.
Compute = Callable[[Sequence[Any]], Sequence[Any]]


class Busy(Exception):
    """The queue is full, or the job was not begun in time."""


@dataclass
class Job:
    kind: Hashable
    compute: Compute
    argument: Any
    done: Future = field(default_factory=Future)


class Worker:
    def __init__(self, *, waiting: int) -> None:
        self.jobs: queue.Queue[Job | None] = queue.Queue(maxsize=waiting)
        self.thread = threading.Thread(target=self._work, name="anechoic-serve", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Jobs that still wait are given up."""
        while True:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.done.cancel()
        self.jobs.put(None)
        self.thread.join(timeout=10)

    async def run(self, kind: Hashable, compute: Compute, argument: Any, *, seconds: float) -> Any:
        """The job's result. Busy if there is no place for it, or it is not begun in time."""
        job = Job(kind, compute, argument)
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            raise Busy from None
        result = asyncio.wrap_future(job.done)
        done, _ = await asyncio.wait([result], timeout=seconds)
        if not done and job.done.cancel():
            raise Busy
        return await result

    def _work(self) -> None:
        following: Job | None = None
        while True:
            job = following or self.jobs.get()
            if job is None:
                return
            group, following, ended = self._together(job)
            ready = [member for member in group if member.done.set_running_or_notify_cancel()]
            if ready:
                self._compute(ready)
            if ended:
                return

    def _together(self, first: Job) -> tuple[list[Job], Job | None, bool]:
        """Jobs of the first one's kind that wait already, the next of another kind, and whether this is the end."""
        group = [first]
        while len(group) < TOGETHER:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return group, None, True
            if job.kind != first.kind:
                return group, job, False
            group.append(job)
        return group, None, False

    def _compute(self, group: list[Job]) -> None:
        try:
            found = group[0].compute([job.argument for job in group])
        except BaseException as problem:  # the request gets it; the thread must not die
            found = [problem] * len(group)
        for job, result in zip(group, found, strict=True):
            if isinstance(result, BaseException):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)
