"""Contestants in subprocesses, so that they share neither threads nor memory.

Each waits until the parent process asks for steps; the parent process measures the time.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from anechoic_lab.bench.timing import Timing

Step = Callable[[], object]


@dataclass(frozen=True)
class Entry:
    """make(world, *arguments) -> step, called in each of `processes` processes of `threads` threads.

    Several processes find each other as those of a run do; the world has its rank."""

    make: Callable[..., Step]
    arguments: tuple[Any, ...] = ()
    processes: int = 1
    threads: int = 1


class Contestant:
    """The processes of one entry. Use it in a `with` statement, which ends them."""

    def __init__(self, entry: Entry) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(entry.processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, entry, rank, port))
            process.start()
            theirs.close()  # else the exit of a process would not close the pipe
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, steps: int) -> float:
        """Return the seconds per step, until the last process has answered."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(steps)
        self.gather()
        return (time.perf_counter() - start) / steps

    def memory_mb(self) -> float:
        """Return the peak resident memory, summed over processes."""
        for pipe in self.pipes:
            pipe.send(0)
        return sum(self.gather())

    def gather(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=10)
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def serve(pipe: Connection, entry: Entry, rank: int, port: int) -> None:
    """Make the step, then take as many as requested (0: send the peak memory)."""
    import torch

    from anechoic.runtime.distributed import join

    torch.set_num_threads(entry.threads)
    if entry.processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(entry.processes)}
        os.environ["LOCAL_WORLD_SIZE"] = str(entry.processes)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    try:
        with join() as world:
            step = entry.make(world, *entry.arguments)
            step()
            pipe.send(None)
            while True:
                count = pipe.recv()
                for _ in range(count):
                    step()
                pipe.send(None if count else resident_peak_mb())
    except EOFError:
        return
    except Exception as problem:
        pipe.send(problem)


def resident_peak_mb() -> float:
    """Return the peak resident memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def contest(entries: Mapping[str, Entry], *, rounds: int, turn: float = 0.5) -> tuple[Timing, dict[str, float]]:
    """Return the seconds per step of every entry, in turns of at least `turn` seconds, and its memory in MB."""
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(Contestant(entry)) for name, entry in entries.items()}
        for one in contestants.values():
            one.gather()  # all start at the same time, and have taken one step
        steps = {name: max(1, round(turn / one.run(1))) for name, one in contestants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in entries}
        for _ in range(rounds):
            for name, one in contestants.items():
                seconds[name].append(one.run(steps[name]))
        return Timing(seconds), {name: one.memory_mb() for name, one in contestants.items()}


def fastest(timing: Timing, names: list[str]) -> str:
    return min(names, key=lambda name: statistics.median(timing.seconds[name]))
