"""Trainings as jobs: submitit's local executor starts them, stops them at their time limit and starts them again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechoic.cli.main import main

TRAIN = ("train", "pocket_mae_digits", "--data.source", "digits:train", "--optim.batch-size", "64")
TINY = ("--model.options", "dim=16", "depth=2", "num_heads=2", "--optim.epochs", "None", "--optim.samples", "512")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_job_trains_like_the_command(tmp_path: Path, capsys) -> None:
    pytest.importorskip("submitit", reason="jobs are submitit's")
    out, jobs = tmp_path / "run", tmp_path / "jobs"
    options = ("--cluster", "local", "--wait", "--out", str(jobs), "--hours", "1", "--cpus-per-task", "1", "--json")
    assert main(["tools", "slurm", *options, "--", *TRAIN, "--out", str(out), *TINY]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["state"] == "done"
    assert (out / "results.json").exists()
    assert main([*TRAIN, "--out", str(tmp_path / "plain"), *TINY]) == 0
    ours, plain = ((folder / "model" / "model.safetensors").read_bytes() for folder in (out, tmp_path / "plain"))
    assert ours == plain
    assert main(["tools", "slurm", *options[:-1], "--", *TRAIN, "--out", str(tmp_path / "bad"), "--seed", "-1"]) == 2
    assert "has the reason" in capsys.readouterr().err


def submitted(folder: Path, command: tuple[str, ...], started: Callable[[], bool]) -> Any:
    """A job of submitit's local executor that is warned, once it has started, that its time is nearly over."""
    pytest.importorskip("submitit", reason="jobs are submitit's")
    from anechoic.runtime.slurm import submit

    how = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "hours": 1.0}
    job = submit(command, cluster="local", folder=folder, memory_gb=None, partition=None, **how)
    deadline = time.monotonic() + 900
    while not started():
        assert time.monotonic() < deadline, job.stderr()
        time.sleep(0.02)
    (task,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)
    return job


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_job_at_its_time_limit_saves_and_is_put_in_line_again(tmp_path: Path) -> None:
    """By the signal Slurm sends, through submitit, which then starts the same job again."""
    out = tmp_path / "run"
    command = (*TRAIN, "--out", str(out), *TINY[:-1], "12800", "--save.every", "640", "--validation.knn", "0")
    job = submitted(tmp_path / "jobs", command, lambda: any((out / "checkpoints").glob("[0-9]*")))
    assert job.exception() is None, job.stderr()
    starts = json.loads((out / "env.json").read_text())["starts"]
    assert len(starts) == 2
    assert json.loads((out / "results.json").read_text())["metrics"]["seen"] == 12800
    assert "Requeued job" in job.stderr() + job.stdout()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_at_its_time_limit_goes_on_with_the_trials_it_had(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    settings = ("--vary", "optim.samples", "12800", "--vary", "model.options.dim", "16")
    command = ("sweep", "pocket_mae_digits", *settings, "--jobs", "1", "--out", str(out))
    job = submitted(tmp_path / "jobs", command, lambda: any(out.glob("runs/*/run/checkpoints/[0-9]*")))
    assert job.exception() is None, job.stderr()
    (environment,) = out.glob("runs/*/run/env.json")
    assert len(json.loads(environment.read_text())["starts"]) == 2
    assert len(list((out / "records").glob("*.json"))) == 1


@pytest.mark.slow
def test_mistakes_of_jobs_are_one_sentence(tmp_path: Path, capsys) -> None:
    assert main(["tools", "slurm", "--", "models"]) == 2
    assert "can be resumed" in capsys.readouterr().err
    assert main(["tools", "slurm", "--nodes", "2", "--", "sweep", "pocket_mae_digits"]) == 2
    assert "one node" in capsys.readouterr().err
    pytest.importorskip("submitit", reason="jobs are submitit's")
    assert main(["tools", "slurm", "--cluster", "local", "--nodes", "2", "--", *TRAIN]) == 2
    assert "one node" in capsys.readouterr().err
    assert main(["tools", "slurm", "--out", str(tmp_path / "jobs"), "--", *TRAIN]) == 2
    assert "--cluster local" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_of_several_keeps_all_devices_of_its_node_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number on the node chooses among them; of a single one in sight there would be no second."""
    submitit = pytest.importorskip("submitit", reason="jobs are submitit's")
    from anechoic.runtime import slurm

    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    task_fields = {
        "hostnames": ["here"],
        "global_rank": 3,
        "num_tasks": 4,
        "local_rank": 3,
        "num_nodes": 1,
        "node": 0,
    }
    task = type("Task", (), {**task_fields, "job_id": "1"})()
    monkeypatch.setattr(submitit.helpers, "JobEnvironment", lambda: task)
    given: list[dict[str, str]] = []
    monkeypatch.setattr(slurm.subprocess, "Popen", lambda command, env: given.append(env))
    monkeypatch.setattr(slurm.Job, "wait", lambda self: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    slurm.Job(("models",), tasks=4)()
    assert (given[0]["LOCAL_RANK"], given[0]["CUDA_VISIBLE_DEVICES"]) == ("3", "0,1,2,3")
