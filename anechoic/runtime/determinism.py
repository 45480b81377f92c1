"""What a run asks of its process while it trains: deterministic kernels, threads of its own, memory that is kept.

Everything is put back afterwards, but for memory kept. It knows nothing of training.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def keep_freed_memory() -> None:
    """Ask the C library not to give memory back between two steps, where it can be asked (glibc).

    A step frees and takes the same large tensors again; each time the kernel would have to clear and map their pages.
    """
    if sys.platform != "linux":
        return
    mmap_threshold, trim_threshold, top_pad, never = -3, -1, -2, 2**31 - 1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if mallopt(mmap_threshold, never) or mallopt(mmap_threshold, 2**25):
        mallopt(trim_threshold, never)
        mallopt(top_pad, 2**26)


def freeze_garbage() -> None:
    """Have the garbage collector pass over all objects there are by now, until `reproducible` is left.

    If somebody has frozen objects already, it is theirs to say what is looked through.

    Called after the first step: a step leaves few objects behind, and going through all the modules of the interpreter
    for them took a twentieth of a small network's step.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@contextmanager
def reproducible(*, threads: int, compiled: bool = False) -> Iterator[None]:
    """Deterministic kernels, the run's number of threads (sums depend on both), random numbers of its own.

    compiled: tell torch's compiler too, which has to be imported for that (two seconds).
    Afterwards all is as it was before, except that freed memory is kept.
    """
    frozen = gc.get_freeze_count()
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keep_freed_memory()
    torch.set_num_threads(threads)
    if compiled:
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_deterministic_debug_mode("warn")
    deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        deterministic.fill_uninitialized_memory = filled
        if not frozen:
            gc.unfreeze()
