"""The verb that hands a training to a cluster: slurm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from anechoic.errors import UserError
from anechoic.outcome import Outcome

# Verbs that go on where they stopped, so that a job may be stopped and put in line again.
RESUMABLE = ("pretrain", "train", "finetune", "sweep", "reproduce")
# Those whose processes share a batch; the others keep to one task, which uses the cores of its node.
SHARED = ("pretrain", "train", "finetune")


def slurm(
    command: tuple[str, ...],
    /,
    *,
    nodes: int = 1,
    gpus_per_node: int = 0,
    tasks_per_node: int | None = None,
    cpus_per_task: int = 8,
    hours: float = 24.0,
    memory_gb: float | None = None,
    partition: str | None = None,
    folder: Path = Path("runs/jobs"),
    cluster: Literal["slurm", "local"] = "slurm",
    wait: bool = False,
) -> Outcome:
    """Run a training as a job of Slurm: it saves before its time ends and is put in line again until it is done.

    Example: anechoic slurm --nodes 2 --gpus-per-node 8 --partition gpu -- train mae_in1k --data.source imagenet/train
        --out runs/in1k

    Args:
        command: after --, what to run: pretrain, train, finetune, sweep or reproduce, with its options.
        nodes: machines.
        gpus_per_node: accelerators of each.
        tasks_per_node: processes of each; default one for each accelerator.
        cpus_per_task: cores for each process.
        hours: after which Slurm stops the job; it saves, and goes on in the next.
        memory_gb: memory of each node; default the cluster's.
        partition: of the cluster.
        folder: where the jobs' output is kept.
        cluster: local tries the job out on this machine.
        wait: wait until it has ended.
    """
    from anechoic.runtime.slurm import submit

    started = time.perf_counter()
    if not command or command[0] not in RESUMABLE:
        raise UserError(f"Give a command that goes on where it stopped, after --: one of {', '.join(RESUMABLE)}.")
    tasks = tasks_per_node or max(1, gpus_per_node)
    if command[0] not in SHARED and (nodes > 1 or tasks > 1):
        raise UserError(f"{command[0]} uses the cores of one node: leave --nodes and --tasks-per-node at 1.")
    job = submit(
        command,
        cluster=cluster,
        folder=folder,
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        hours=hours,
        memory_gb=memory_gb,
        partition=partition,
    )
    metrics = {"job": str(job.job_id), "output": str(job.paths.stdout), "state": "submitted"}
    text = f"Job {job.job_id} is in line; its output goes to {job.paths.stdout}."
    if wait:
        problem = job.exception()
        if problem is not None:
            raise UserError(f"Job {job.job_id} failed; {job.paths.stderr} says why.")
        metrics["state"] = "done"
        text = f"Job {job.job_id} is done; its output is in {job.paths.stdout}."
    return Outcome(
        config={"tasks_per_node": tasks},
        metrics=metrics,
        seconds=time.perf_counter() - started,
        text=text,
    )
