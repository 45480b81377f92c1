"""A small local sweep: trials in processes of their own, one to a core, finished ones skipped, failed ones retried.

It starts and watches processes and knows nothing of what they measure; a stopped sweep goes on by the same command,
because every trial's run does. A trial's process is pinned to its core and computes with one thread, which is
the fastest way to fill a processor with many small runs.
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
from anechoic.runtime.devices import accelerators
from anechoic.runtime.run import last_seen
from anechoic.runtime.subprocesses import Subprocesses
from anechoic.storage.files import make_folder, write_json
from anechoic.sweeps.trial import EvalPlan, Trial, clean, finished, read_record, trial_from_json

ATTEMPTS = 2
POLL = 0.2
REDRAW = 2.0
# Seconds between two lines where there is no terminal.
TELL_EVERY = 60.0


@dataclass(frozen=True)
class Folders:
    """records: one JSON file per finished trial; runs: checkpoints and logs, which may be deleted; data: its root."""

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
    """What a sweep has come to."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


# ---- which trials


def vary(base: Config, grid: Mapping[str, Sequence[Any]], *, seeds: Sequence[int], evaluation: EvalPlan) -> list[Trial]:
    """Every combination of the settings' values with every seed; a name says what was varied."""
    trials = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        config = with_settings(base, chosen)
        variant = "-".join(f"{name.rpartition('.')[2]}{word(value)}" for name, value in chosen.items()) or "base"
        trials += seeded(variant, config, evaluation, seeds)
    return trials


def word(value: Any) -> str:
    """A value as part of a file's name."""
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_").replace(" ", "")


def seeded(variant: str, config: Config, evaluation: EvalPlan, seeds: Sequence[int]) -> list[Trial]:
    return [Trial(f"{variant}-seed{seed}", variant, replace(config, seed=seed), evaluation) for seed in seeds]


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with settings such as shortcut.alpha_min or model.options.depth replaced; a wrong name is refused."""
    plain = copy.deepcopy(to_json(config))
    known = [name for name, _ in settings(config)]
    for name, value in values.items():
        *sections, last = name.split(".")
        place = plain
        for section in sections:
            if not isinstance(place.get(section), dict):
                raise UserError(f"There is no setting {name}: choose one of {', '.join(known)}.")
            place = place[section]
        place[last] = value
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
    """Run every trial that has no record yet. SIGTERM and Ctrl-C let each running trial save itself, then end.

    pinned: a core and a thread for each; otherwise a trial may use every core and accelerator.
    """
    from anechoic.training.build import check

    for trial in trials:
        check(trial.config)
    names = [trial.name for trial in trials]
    if len(set(names)) < len(names):
        raise UserError("Two trials of this sweep have the same name: vary something that tells them apart.")
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
    with Subprocesses() as children:
        while waiting or running:
            children.check()
            if children.asked.number:  # those that still run are saving; nothing new is started
                time.sleep(POLL)
                continue
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                conclude(job, folders, progress, attempts, waiting)
                table.event(job.trial.name)
            free = [core for core in cores if core not in {job.core for job in running}]
            for core in free:
                if waiting:
                    place = cores.index(core) if pinned else None
                    running.append(start(waiting.pop(0), folders, core, children, place=place))
            table.draw(running)
            time.sleep(POLL)
    table.draw(running, last=True)
    return progress


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for(jobs: int | None) -> list[int]:
    """One for each of the trials that run side by side: as many as cores, or as accelerators where there are some."""
    return available_cores()[: jobs or accelerators() or None]


def surroundings(place: int) -> dict[str, str]:
    """Environment of the trial at this place among those that run: one thread, and one of CUDA's accelerators."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(index) for index in range(accelerators())]
    return threads | ({"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if devices else {})


def start(trial: Trial, folders: Folders, core: int, children: Subprocesses, *, place: int | None) -> Job:
    """A process for one trial; one with a place among others is pinned to its core where the system can."""
    run_dir = folders.run(trial)
    run_dir.mkdir(parents=True, exist_ok=True)
    description = run_dir / "trial.json"
    if description.exists() and outdated(run_dir, trial):
        shutil.rmtree(run_dir / "run", ignore_errors=True)
    write_json(description, trial.to_json())
    arguments = [str(path) for path in (description, run_dir / "run", folders.record(trial), folders.data)]
    environment = {**os.environ, **({} if place is None else surroundings(place))}
    with open(run_dir / "log.txt", "a") as log:
        process = children.start(
            [sys.executable, "-m", "anechoic.sweeps.trial", *arguments], stdout=log, stderr=log, env=environment
        )
    if place is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):  # it may have failed already
            os.sched_setaffinity(process.pid, {core})
    return Job(trial, process, core, time.perf_counter())


def outdated(run_dir: Path, trial: Trial) -> bool:
    """Whether the run there is of another config, or has no longer the checkpoints that are to be evaluated."""
    try:
        before = trial_from_json(read_record(run_dir / "trial.json"))
    except UserError:
        return False  # another version's: what cannot be read is not deleted, and the engine says what it misses
    evaluated_before = (run_dir / "run" / "results.json").exists() and not (run_dir / "run" / "checkpoints").exists()
    return before.config != trial.config or (trial.evaluation.checkpoints and evaluated_before)


def conclude(job: Job, folders: Folders, progress: Progress, attempts: dict[str, int], waiting: list[Trial]) -> None:
    """A finished process is a record, another attempt, or a failure with its last words."""
    trial = job.trial
    if job.process.returncode == 0:
        progress.done.append(trial.name)
        progress.failed.pop(trial.name, None)
        clean(folders.run(trial) / "run")
        return
    attempts[trial.name] = attempts.get(trial.name, 0) + 1
    words = (folders.run(trial) / "log.txt").read_text().strip().splitlines()[-1:]
    progress.failed[trial.name] = (words or [f"exit code {job.process.returncode}"])[0]
    if attempts[trial.name] < ATTEMPTS:
        waiting.append(trial)


# ---- how long it takes


def training_flops(config: Config) -> float:
    """Floating-point operations of the whole training: three times the forward pass of every sample."""
    from anechoic.models import model_config
    from anechoic.training.build import model_options
    from anechoic.training.flops import forward_flops

    return 3.0 * forward_flops(model_config(config.model.name, **model_options(config))) * (config.optim.samples or 0)


# Of one core in one-thread runs of this size, evaluation included; replaced by what finished trials here really took.
FLOPS_PER_SECOND = 25e9
OVERHEAD_SECONDS = 40.0


def estimates(trials: Sequence[Trial], folders: Folders) -> dict[str, float]:
    """Seconds of one core for every trial, scaled by how long the finished ones of the same folder took."""
    rough = {trial.name: OVERHEAD_SECONDS + training_flops(trial.config) / FLOPS_PER_SECOND for trial in trials}
    known = [
        read_record(folders.record(trial))["cpu_seconds"] / rough[trial.name]
        for trial in trials
        if finished(trial, folders.record(trial))
    ]
    scale = sorted(known)[len(known) // 2] if known else 1.0
    return {name: seconds * scale for name, seconds in rough.items()}


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{max(1, minutes)} min"


class Table:
    """The sweep as it goes: on a terminal a table drawn over itself, elsewhere a line now and then and at each end."""

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

    def left(self) -> str:
        """How long what is still to come will take."""
        over = {*self.progress.done, *self.progress.skipped}
        to_come = [trial for trial in self.trials if trial.name not in over]
        seconds = sum(self.estimates[trial.name] * (1 - self.share(trial)) for trial in to_come)
        return duration(seconds / max(1, min(self.jobs, len(to_come))))

    def share(self, trial: Trial) -> float:
        samples = trial.config.optim.samples
        return min(1.0, last_seen(self.folders.run(trial) / "run") / samples) if samples else 0.0

    def event(self, name: str) -> None:
        if self.out.isatty():
            return
        state = f"failed: {self.progress.failed[name]}" if name in self.progress.failed else "done"
        over = len(self.progress.done) + len(self.progress.skipped)
        print(f"{over} of {len(self.trials)}  {name} {state}; about {self.left()} left", file=self.out, flush=True)

    def tell(self, running: Sequence[Job], now: float) -> None:
        """Now and then a line of what runs, where nothing can be drawn over."""
        if now - max(self.drawn, self.began) < TELL_EVERY or not running:
            return
        self.drawn = now
        over = len(self.progress.done) + len(self.progress.skipped)
        parts = ", ".join(f"{job.trial.name} {100 * self.share(job.trial):.0f} %" for job in running)
        print(f"{over} of {len(self.trials)}  running {parts}; about {self.left()} left", file=self.out, flush=True)

    def draw(self, running: Sequence[Job], *, last: bool = False) -> None:
        now = time.perf_counter()
        if not self.out.isatty():
            self.tell(running, now)
            return
        if now - self.drawn < REDRAW and not last:
            return
        self.drawn = now
        lines = [
            f"  {job.trial.name:<40} core {job.core}  {100 * self.share(job.trial):3.0f} %  "
            f"{duration(now - job.started)}"
            for job in running
        ]
        over, failed = len(self.progress.done) + len(self.progress.skipped), len(self.progress.failed)
        lines.append(f"{over} of {len(self.trials)} trials done, {failed} failed, about {self.left()} left")
        back = f"\x1b[{self.lines}F" if self.lines else ""
        self.out.write(back + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[0J")
        self.out.flush()
        self.lines = len(lines)
