"""Peak memory: the largest resident size of a fresh process that does the work once, with the interpreter and torch.

A fresh process, because memory that one piece of work has touched stays with the process and would hide the next one's.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from anechoic_lab.bench.contest import resident_peak_mb


def peak_memory_mb(work: Callable[..., object], *arguments: Any) -> float:
    """Of work(*arguments), a function of a module, in a process of its own with as many threads as this one."""
    import torch

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_work_and_measure, torch.get_num_threads(), work, arguments).result()


def _work_and_measure(threads: int, work: Callable[..., object], arguments: tuple[Any, ...]) -> float:
    import torch

    torch.set_num_threads(threads)
    work(*arguments)
    return resident_peak_mb()
