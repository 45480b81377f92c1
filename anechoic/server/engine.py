"""A subprocess that computes: killing it ends a job that takes too long, and the next job starts another one.

Decoders and networks cannot be interrupted from inside. They cannot end the server either: it only waits for them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from tqdm.std import tqdm

from anechoic.errors import UserError

# Seconds until a new process has imported its packages.
START_SECONDS = 300.0


class TooLong(Exception):
    """The job was not done in time; its process was killed."""


class Ended(Exception):
    """The process ended by itself: it crashed, or the system needed its memory."""


class Engine:
    """Calls functions of a state that lives in the subprocess: make() returns it there, before the first call.

    Both must be importable by name. One thread may call at a time; `close` may be called by another.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.closed = False
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None
        # The first start imports packages, for which the server does not wait.
        threading.Thread(target=self._start, name="anechoic-engine", daemon=True).start()

    def _start(self) -> None:
        """Start the process if there is none."""
        methods = multiprocessing.get_all_start_methods()
        # A fork of this process would copy its threads' locks; a fork server has no threads, and starts in no time.
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload([self.make_module])
        with self._lock:
            if self._process is not None or self.closed:
                return
            self._pipe, other = context.Pipe()
            arguments = (other, self.make, dict(os.environ), torch.get_num_threads())
            self._process = context.Process(target=compute, args=arguments, name="anechoic-serve", daemon=True)
            self._process.start()
            other.close()

    @property
    def make_module(self) -> str:
        return getattr(self.make, "func", self.make).__module__

    def call(self, function: Callable[..., Any], /, *arguments: Any, seconds: float, **options: Any) -> Any:
        """Return function(state, *arguments, **options); TooLong after this many seconds, or what it raises."""
        self._start()
        if self.closed:
            raise Ended("the server is being closed")
        try:
            self._wait(START_SECONDS)  # until it is ready
            self._pipe.send((function, arguments, options))
            succeeded, result = self._wait(seconds)
        except (TooLong, EOFError, OSError) as problem:
            code = self._kill()
            if isinstance(problem, TooLong):
                raise
            raise Ended(f"exit code {code}") from problem
        if not succeeded:
            raise result
        return result

    def _wait(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TooLong
        return self._pipe.recv()

    def _kill(self) -> int | None:
        """Kill the process and return its exit code, negative if a signal ended it before."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return None
            process.join(0.5)
            code = process.exitcode
            process.kill()
            process.join()
            self._pipe.close()
            return code

    def close(self) -> None:
        self.closed = True
        with self._lock:
            if self._process is not None:
                self._process.kill()  # a job that runs gets the end of its pipe


def compute(pipe: Connection, make: Callable[[], Any], environment: Mapping[str, str], threads: int) -> None:
    """Answer calls until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a killed process leaves behind
    state: Any = None
    try:
        while True:
            pipe.send("ready")
            function, arguments, options = pipe.recv()
            try:
                state = make() if state is None else state
                answer = True, function(state, *arguments, **options)
            except Exception as problem:  # the request gets it
                answer = False, portable(problem)
            pipe.send(answer)
    except (EOFError, OSError):
        return


def portable(problem: Exception) -> Exception:
    """Return the exception, or one of the same words if it cannot be sent to another process."""
    try:
        return problem if type(pickle.loads(pickle.dumps(problem))) is type(problem) else UserError(str(problem))
    except Exception:
        return RuntimeError(f"{type(problem).__name__}: {problem}")
