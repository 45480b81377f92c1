"""The command `tools slurm`: a training, or another command that resumes, as a job of a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from anechoic.choices import Cluster
from anechoic.cli import plugins
from anechoic.cli._command import command as as_command
from anechoic.cli.options import Out
from anechoic.errors import UserError
from anechoic.outcome import Outcome

# Commands that several ranks run together; the others have one task, which uses the cores of its node.
SHARED = ("pretrain", "train", "finetune", "embed")
# Commands that resume, so that a job may be interrupted and requeued. Those of other packages are trusted to.
RESUMABLE = (*SHARED, "sweep")


@as_command
def slurm(
    command: Sequence[str],
    /,
    *,
    nodes: int = 1,
    gpus_per_node: int = 0,
    tasks_per_node: int | None = None,
    cpus_per_task: int = 8,
    hours: float = 24.0,
    memory_gb: float | None = None,
    partition: str | None = None,
    out: Out = "runs/jobs",
    cluster: Cluster = "slurm",
    wait: bool = False,
) -> Outcome:
    """Run a training or an embedding as a job of Slurm: it saves before its time ends and is requeued until it is done.

    The jobs' output is written to the folder --out.

    Example: anechoic tools slurm --nodes 2 --gpus-per-node 8 --partition gpu -- train mae_in1k --data.source
        imagenet/train --out runs/in1k

    Args:
        command: after --, what to run with its options: pretrain, train, finetune, embed, sweep or another package's
            command.
        nodes: number of machines.
        gpus_per_node: GPUs of each.
        tasks_per_node: processes of each; default: one per GPU.
        cpus_per_task: cores for each process.
        hours: time limit of a job; the training is saved and resumes in the next job.
        memory_gb: memory of each node; default the cluster's.
        partition: of the cluster.
        cluster: local tries the job out on this machine.
        wait: wait until the job has ended.
    """
    from anechoic.runtime.slurm import submit

    started = time.perf_counter()
    if not command or command[0] not in (*RESUMABLE, *plugins()):
        known = ", ".join([*RESUMABLE, *plugins()])
        raise UserError(f"Give a command that can be resumed, after --: one of {known}.")
    tasks = tasks_per_node or max(1, gpus_per_node)
    if command[0] not in SHARED and (nodes > 1 or tasks > 1):
        raise UserError(f"{command[0]} uses the cores of one node: set --nodes and --tasks-per-node to 1.")
    job = submit(
        command,
        cluster=cluster,
        folder=Path(out),
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        hours=hours,
        memory_gb=memory_gb,
        partition=partition,
    )
    metrics = {"job": str(job.job_id), "output": str(job.paths.stdout), "state": "submitted"}
    text = f"Job {job.job_id} is queued; its output goes to {job.paths.stdout}."
    if wait:
        problem = job.exception()
        if problem is not None:
            raise UserError(f"Job {job.job_id} failed; {job.paths.stderr} has the reason.")
        metrics["state"] = "done"
        text = f"Job {job.job_id} is done; its output is in {job.paths.stdout}."
    return Outcome(
        config={"tasks_per_node": tasks},
        metrics=metrics,
        seconds=time.perf_counter() - started,
        text=text,
    )
