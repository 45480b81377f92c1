"""Process settings of a training: deterministic kernels, number of threads, freed memory kept; restored afterwards."""

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
    """Ask the C library (glibc) to keep freed memory: a step frees and allocates the same large tensors again."""
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
    """Exempt all current objects from garbage collection until `reproducible` exits, unless the caller froze some.

    Called after the first step. Scanning all modules took a twentieth of a small network's step.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@contextmanager
def reproducible(*, threads: int, compiled: bool = False) -> Iterator[None]:
    """Use deterministic kernels, this number of threads (sums depend on both), and a forked random state.

    compiled: set it for torch's compiler too, whose import takes two seconds.
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
    deterministic.fill_uninitialized_memory = False  # slow, and no code here reads such memory
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        deterministic.fill_uninitialized_memory = filled
        if not frozen:
            gc.unfreeze()
