"""A command of ours as a job of Slurm, by submitit: started on every task, saved and put in line again in time.

The command runs in a process of its own, so that a warning from Slurm reaches it as the signal it saves at.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anechoic.choices import Cluster
from anechoic.errors import UserError

# Seconds a training gets to save when its job is about to end; Slurm is asked to warn that long before.
PATIENCE = 300
# How often a job may run out of its time and be put in line again: as often as it takes.
TIMEOUTS = 10_000


@dataclass
class Job:
    """Runs `anechoic COMMAND` as one task of a job; the same command goes on where it stopped."""

    command: tuple[str, ...]
    tasks: int = 1
    process: subprocess.Popen | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process": None}

    def __call__(self) -> int:
        environment = dict(os.environ)
        if self.tasks > 1:
            import submitit

            # Each process finds its own among all of the node's devices, as it does under any other launcher.
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
            environment = dict(os.environ)
            environment.setdefault("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", str(self.tasks)))
        self.process = subprocess.Popen([sys.executable, "-m", "anechoic", *self.command], env=environment)
        code = self.wait() or 0
        if code == 128 + signal.SIGTERM:
            raise SystemExit(code)  # the first task's training was asked to save, and all of them did: no failure
        if code:
            raise RuntimeError(f"anechoic {' '.join(self.command)} ended with exit code {code}; its output says why.")
        return code

    def wait(self, deadline: float = math.inf) -> int | None:
        """Its exit code, negative for a signal; None once the deadline has passed.

        The system is asked, not Popen: a signal handler that interrupts this calls it too, and would wait for ever for
        Popen's lock, which the interrupted call holds.
        """
        assert self.process is not None
        while time.monotonic() < deadline:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            time.sleep(0.1)
        return None

    def checkpoint(self) -> Any:
        """What submitit calls before the job is stopped: the training saves, and the job is put in line again."""
        import submitit

        if self.process is not None and self.wait(time.monotonic() + 0.01) is None:
            os.kill(self.process.pid, signal.SIGTERM)
            self.wait(time.monotonic() + PATIENCE)
        return submitit.helpers.DelayedSubmission(Job(self.command, self.tasks))


def submit(
    command: Sequence[str],
    *,
    cluster: Cluster,
    folder: Path,
    nodes: int,
    tasks_per_node: int,
    gpus_per_node: int,
    cpus_per_task: int,
    hours: float,
    memory_gb: float | None,
    partition: str | None,
) -> Any:
    """submitit's job. Its standard output and error are kept in folder."""
    try:
        import submitit
    except ImportError as error:
        raise UserError('Jobs of Slurm need submitit: pip install "anechoic[slurm]".') from error
    if nodes < 1 or tasks_per_node < 1 or hours <= 0:
        raise UserError("A job needs at least one node, one task and some time.")
    if cluster == "local" and nodes > 1:
        raise UserError("--cluster local tries a job out on this machine, which is one node.")
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **{f"{cluster}_max_num_timeout": TIMEOUTS})
    except RuntimeError as error:
        raise UserError(f"There is no Slurm here ({error}); try the job out with --cluster local.") from error
    settings: dict[str, Any] = {
        "name": f"anechoic-{command[0]}",
        "nodes": nodes,
        "tasks_per_node": tasks_per_node,
        "cpus_per_task": cpus_per_task,
        "timeout_min": max(1, round(60 * hours)),
    }
    if gpus_per_node:
        settings["gpus_per_node"] = gpus_per_node
    if memory_gb:
        settings["mem_gb"] = memory_gb
    if partition and cluster == "slurm":
        settings["slurm_partition"] = partition
    if cluster == "slurm":
        settings["slurm_signal_delay_s"] = min(PATIENCE, 15 * settings["timeout_min"])
    executor.update_parameters(**settings)
    return executor.submit(Job(tuple(command), nodes * tasks_per_node))
