"""Run a command as a Slurm job by submitit: started on every task, saved and requeued before its time ends.

The command runs in a subprocess, so that Slurm's warning reaches it as the signal at which it saves.
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

# Seconds before the end of a job at which Slurm warns, so that the training can save.
PATIENCE = 300
# How often a job may time out and be requeued: as often as needed.
TIMEOUTS = 10_000


@dataclass
class Job:
    """Run `anechoic COMMAND` as one task of a job; the same command resumes where it stopped."""

    command: tuple[str, ...]
    tasks: int = 1
    process: subprocess.Popen | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process": None}

    def __call__(self) -> int:
        environment = dict(os.environ)
        if self.tasks > 1:
            import submitit

            # Each rank picks its own of the node's GPUs, as under any other launcher.
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
            environment = dict(os.environ)
            environment.setdefault("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", str(self.tasks)))
        self.process = subprocess.Popen([sys.executable, "-m", "anechoic", *self.command], env=environment)
        code = self.wait() or 0
        if code in (128 + signal.SIGTERM, -signal.SIGTERM):
            raise SystemExit(128 + signal.SIGTERM)  # all ranks saved on request: no failure
        if code:
            raise RuntimeError(f"anechoic {' '.join(self.command)} failed with exit code {code}; see its output.")
        return code

    def wait(self, deadline: float = math.inf) -> int | None:
        """Return the exit code, negative for a signal; None after the deadline.

        It does not use Popen.wait: a signal handler that interrupts this also calls it, and would wait forever for
        Popen's lock.
        """
        assert self.process is not None
        while time.monotonic() < deadline:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            time.sleep(0.1)
        return None

    def checkpoint(self) -> Any:
        """Save and requeue; submitit calls it before the job is stopped."""
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
    """Submit and return submitit's job; its output and error streams are written to folder."""
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
