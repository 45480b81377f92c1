"""A local sweep: each trial in a subprocess, finished trials skipped, failed ones retried.

An interrupted sweep resumes by the same command. Without a GPU each trial is pinned to one core and one thread, the
fastest way to fill a CPU with many small runs. With GPUs each trial gets one GPU, and any core and number of threads.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from anechoic.config import Config, from_json, settings, to_json
from anechoic.errors import UserError
from anechoic.outcome import machine, rough_duration
from anechoic.runtime.devices import num_gpus
from anechoic.runtime.run import last_seen
from anechoic.runtime.subprocesses import Subprocesses
from anechoic.storage.files import make_folder, write_json
from anechoic.sweeps.trial import EvalPlan, Trial, clean, finished, read_record, trial_from_json

ATTEMPTS = 2
POLL = 0.2
REDRAW = 2.0
# Seconds between two lines where there is no terminal.
REPORT_EVERY = 60.0
# Estimated seconds of work that must be done before the pace of the sweep corrects the estimates.
MEASURED_SECONDS = 5.0


@dataclass(frozen=True)
class Folders:
    """records: one JSON file per finished trial; runs: checkpoints and logs, which may be deleted; data: the root."""

    records: Path
    runs: Path
    data: Path = Path()

    def record(self, trial: Trial) -> Path:
        return self.records / f"{trial.name}.json"

    def run(self, trial: Trial) -> Path:
        return self.runs / trial.name


@dataclass
class Job:
    trial: Trial
    process: subprocess.Popen
    core: int
    started: float


@dataclass
class Progress:
    """Trials done, skipped and failed, by name."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


# ---- which trials


def vary(base: Config, grid: Mapping[str, Sequence[Any]], *, seeds: Sequence[int], evaluation: EvalPlan) -> list[Trial]:
    """Return a trial for every combination of the settings' values and every seed, named after what varies."""
    trials = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        config = with_settings(base, chosen)
        variant = "-".join(f"{name.rpartition('.')[2]}{word(value)}" for name, value in chosen.items()) or "base"
        trials += seeded(variant, config, evaluation, seeds)
    return trials


def word(value: Any) -> str:
    """Return a value as part of a file name."""
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_").replace(" ", "")


def seeded(variant: str, config: Config, evaluation: EvalPlan, seeds: Sequence[int]) -> list[Trial]:
    return [Trial(f"{variant}-seed{seed}", variant, replace(config, seed=seed), evaluation) for seed in seeds]


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """Replace settings such as shortcut.alpha_min or model.options.depth; UserError for an unknown name.

    optim.samples replaces optim.epochs, and the other way around.
    """
    for name, other in (("optim.samples", "optim.epochs"), ("optim.epochs", "optim.samples")):
        if values.get(name) is not None:
            values = {other: None, **values}
    plain = copy.deepcopy(to_json(config))
    known = [name for name, _ in settings(config)]
    for name, value in values.items():
        longer = [full for full in known if full.endswith(f".{name}")]
        if name not in known and longer:
            raise UserError(f"There is no setting {name}; did you mean {' or '.join(longer)}?")
        *sections, last = name.split(".")
        target = plain
        for section in sections:
            if not isinstance(target.get(section), dict):
                raise UserError(f"There is no setting {name}: choose one of {', '.join(known)}.")
            target = target[section]
        target[last] = value
    return from_json(plain)


# ---- running them


def sweep(
    trials: Sequence[Trial],
    folders: Folders,
    *,
    jobs: int | None = None,
    out: TextIO | None = None,
    pinned: bool = True,
) -> Progress:
    """Run every trial that has no record yet. After SIGTERM or Ctrl-C each running trial saves a checkpoint and exits.

    pinned: one GPU, or one core and thread, for each trial; otherwise a trial may use every core and GPU.
    """
    from anechoic.training.build import check

    for trial in trials:
        check(trial.config)
    names = [trial.name for trial in trials]
    if len(set(names)) < len(names):
        raise UserError("Two trials of this sweep have the same name: vary a setting that distinguishes them.")
    progress = Progress(skipped=[trial.name for trial in trials if finished(trial, folders.record(trial))])
    waiting = [trial for trial in trials if trial.name not in progress.skipped]
    cores = cores_for(jobs)
    table = Table(
        trials, folders, progress, out or sys.stderr, estimates=estimates(trials, folders), jobs=max(1, len(cores))
    )
    if waiting:
        make_folder(folders.records)
        make_folder(folders.runs)
    attempts: dict[str, int] = {}
    running: list[Job] = []
    with Subprocesses() as subprocesses:
        while waiting or running:
            subprocesses.check()
            if subprocesses.asked.number:  # running trials are saving; none is started
                time.sleep(POLL)
                continue
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                conclude(job, folders, progress, attempts, waiting)
                table.event(job.trial.name)
            free = [core for core in cores if core not in {job.core for job in running}]
            for core in free:
                if waiting:
                    slot = cores.index(core) if pinned else None
                    running.append(start(waiting.pop(0), folders, core, subprocesses, slot=slot))
            table.draw(running)
            time.sleep(POLL)
    table.draw(running, last=True)
    return progress


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for(jobs: int | None) -> list[int]:
    """Return a core for each of the trials that run at the same time: as many as `jobs`, GPUs, or cores."""
    return available_cores()[: jobs or num_gpus() or None]


def slot_environment(slot: int) -> dict[str, str]:
    """Return environment variables of the trial in this slot: one GPU, or one thread where there is none."""
    if not num_gpus():
        return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(index) for index in range(num_gpus())]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]}


def start(trial: Trial, folders: Folders, core: int, subprocesses: Subprocesses, *, slot: int | None) -> Job:
    """Start a subprocess for one trial; in a slot, it gets its own GPU, or its own core where there is no GPU."""
    run_dir = folders.run(trial)
    run_dir.mkdir(parents=True, exist_ok=True)
    description = run_dir / "trial.json"
    if description.exists() and outdated(run_dir, trial):
        shutil.rmtree(run_dir / "run", ignore_errors=True)
    write_json(description, trial.to_json())
    arguments = [str(path) for path in (description, run_dir / "run", folders.record(trial), folders.data)]
    environment = {**os.environ, **({} if slot is None else slot_environment(slot))}
    with open(run_dir / "log.txt", "a") as log:
        process = subprocesses.start(
            [sys.executable, "-m", "anechoic.sweeps.trial", *arguments], stdout=log, stderr=log, env=environment
        )
    if slot is not None and not num_gpus() and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):  # it may have exited already
            os.sched_setaffinity(process.pid, {core})
    return Job(trial, process, core, time.perf_counter())


def outdated(run_dir: Path, trial: Trial) -> bool:
    """Return whether the run has another config, or no longer the checkpoints that are to be evaluated."""
    try:
        before = trial_from_json(read_record(run_dir / "trial.json"))
    except UserError:
        return False  # written by another version: never deleted, and the trial reports the problem
    evaluated_before = (run_dir / "run" / "results.json").exists() and not (run_dir / "run" / "checkpoints").exists()
    return before.config != trial.config or (trial.evaluation.checkpoints and evaluated_before)


def conclude(job: Job, folders: Folders, progress: Progress, attempts: dict[str, int], waiting: list[Trial]) -> None:
    """Note a finished subprocess as done, to be retried, or failed with the last line of its log."""
    trial = job.trial
    if job.process.returncode == 0:
        progress.done.append(trial.name)
        progress.failed.pop(trial.name, None)
        clean(folders.run(trial) / "run")
        return
    attempts[trial.name] = attempts.get(trial.name, 0) + 1
    lines = (folders.run(trial) / "log.txt").read_text().strip().splitlines()[-1:]
    progress.failed[trial.name] = (lines or [f"exit code {job.process.returncode}"])[0]
    if attempts[trial.name] < ATTEMPTS:
        waiting.append(trial)


# ---- how long it takes


def estimates(trials: Sequence[Trial], folders: Folders) -> dict[str, float]:
    """Return the seconds on one core for every trial.

    The scale is what finished trials of the same folder took on this machine, else that of a few updates timed now.
    """
    from anechoic.training.timing import OVERHEAD_SECONDS, cpu_seconds, seconds_per_image

    rough = {trial.name: cpu_seconds(trial.config) for trial in trials}
    here = machine()
    done = {trial.name for trial in trials if finished(trial, folders.record(trial))}
    records = {name: read_record(folders.records / f"{name}.json") for name in done}
    known = sorted(record["seconds"] / rough[name] for name, record in records.items() if record.get("machine") == here)
    if known:
        return {name: seconds * known[len(known) // 2] for name, seconds in rough.items()}
    config = next((trial.config for trial in trials if trial.name not in done and trial.config.optim.samples), None)
    if config is None:
        return rough
    timed = seconds_per_image(replace(config, threads=config.threads or 1)) * (config.optim.samples or 0)
    scale = timed / (cpu_seconds(config) - OVERHEAD_SECONDS)
    return {name: OVERHEAD_SECONDS + (seconds - OVERHEAD_SECONDS) * scale for name, seconds in rough.items()}


class Table:
    """Progress of a sweep: a live table on a terminal; elsewhere a line per minute and per finished trial."""

    def __init__(
        self,
        trials: Sequence[Trial],
        folders: Folders,
        progress: Progress,
        out: TextIO,
        *,
        estimates: dict[str, float],
        jobs: int,
    ) -> None:
        self.trials, self.folders, self.progress, self.out = trials, folders, progress, out
        self.estimates, self.jobs = estimates, jobs
        self.lines = 0
        self.drawn = 0.0
        self.began = time.perf_counter()
        # Trial -> (time, share done) when it was first seen running, and the seconds that a finished one took.
        self.started: dict[str, tuple[float, float]] = {}
        self.took: dict[str, float] = {}

    def pace(self, now: float) -> float:
        """Return the seconds that an estimated second took so far: other users of the machine change it."""
        spent, expected = 0.0, 0.0
        for trial in self.trials:
            if trial.name not in self.started:
                continue
            at, before = self.started[trial.name]
            done = trial.name in self.took
            share = 1.0 if done else self.share(trial)
            spent += self.took[trial.name] if done else now - at
            expected += self.estimates[trial.name] * (share - before)
        return spent / expected if expected > MEASURED_SECONDS else 1.0

    def left(self) -> str:
        over = {*self.progress.done, *self.progress.skipped}
        to_come = [trial for trial in self.trials if trial.name not in over]
        seconds = sum(self.estimates[trial.name] * (1 - self.share(trial)) for trial in to_come)
        return rough_duration(seconds * self.pace(time.perf_counter()) / max(1, min(self.jobs, len(to_come))))

    def share(self, trial: Trial) -> float:
        samples = trial.config.optim.samples
        return min(1.0, last_seen(self.folders.run(trial) / "run") / samples) if samples else 0.0

    def event(self, name: str) -> None:
        if name in self.started and name in self.progress.done:
            self.took[name] = time.perf_counter() - self.started[name][0]
        if self.out.isatty():
            return
        state = f"failed: {self.progress.failed[name]}" if name in self.progress.failed else "done"
        over = len(self.progress.done) + len(self.progress.skipped)
        print(f"{over} of {len(self.trials)}  {name} {state}; about {self.left()} left", file=self.out, flush=True)

    def report(self, running: Sequence[Job], now: float) -> None:
        if now - max(self.drawn, self.began) < REPORT_EVERY or not running:
            return
        self.drawn = now
        over = len(self.progress.done) + len(self.progress.skipped)
        parts = ", ".join(f"{job.trial.name} {100 * self.share(job.trial):.0f} %" for job in running)
        print(f"{over} of {len(self.trials)}  running {parts}; about {self.left()} left", file=self.out, flush=True)

    def draw(self, running: Sequence[Job], *, last: bool = False) -> None:
        now = time.perf_counter()
        for job in running:
            self.started.setdefault(job.trial.name, (job.started, self.share(job.trial)))
        if not self.out.isatty():
            self.report(running, now)
            return
        if now - self.drawn < REDRAW and not last:
            return
        self.drawn = now
        lines = [
            f"  {job.trial.name:<40} core {job.core}  {100 * self.share(job.trial):3.0f} %  "
            f"{rough_duration(now - job.started)}"
            for job in running
        ]
        over, failed = len(self.progress.done) + len(self.progress.skipped), len(self.progress.failed)
        lines.append(f"{over} of {len(self.trials)} trials done, {failed} failed, about {self.left()} left")
        back = f"\x1b[{self.lines}F" if self.lines else ""
        self.out.write(back + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[0J")
        self.out.flush()
        self.lines = len(lines)
