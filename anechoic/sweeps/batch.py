"""What every command that runs trials does: find the data, estimate the time, run, and report failures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from anechoic.data import split_limit
from anechoic.errors import UserError
from anechoic.outcome import Outcome, rough_duration
from anechoic.pages.tables import text_table
from anechoic.sweeps.sweep import Folders, Progress, cores_for, estimates
from anechoic.sweeps.sweep import sweep as run_sweep
from anechoic.sweeps.trial import Trial, finished, is_file
from anechoic.training.cost import training_flops


def find_data_root(folder: str | Path | None) -> Path:
    """Return the folder that relative names of data start from: this one, `ANECHOIC_DATA`, or the current one."""
    if folder is not None and not Path(folder).is_dir():
        raise UserError(
            f"There is no folder {folder}: name the one that has the data with --data-root, or set ANECHOIC_DATA."
        )
    return Path(folder or os.environ.get("ANECHOIC_DATA", "."))


def check_counts(seeds: int, jobs: int | None) -> None:
    if seeds < 1 or (jobs is not None and jobs < 1):
        raise UserError("There must be at least one seed and one job: give --seeds and --jobs of 1 or more.")


def plan_trials(trials: Sequence[Trial], folders: Folders, jobs: int | None, *, on_gpu: bool = False) -> Outcome:
    """Return the trials with their estimated time, and which are done."""
    seconds = estimates(trials, folders) if not on_gpu else {}
    rows, left = [], 0.0
    for trial in trials:
        done = finished(trial, folders.record(trial))
        if on_gpu:
            cost = f"{training_flops(trial.config) / 1e18:,.2f} exaFLOP"
        else:
            cost = rough_duration(seconds[trial.name])
            left += 0.0 if done else seconds[trial.name]
        rows.append([trial.name, f"{trial.config.optim.samples or 0:,}", cost, "done" if done else "to run"])
    table = text_table(["run", "samples", "exaFLOP" if on_gpu else "1 core", "state"], rows)
    cores = len(cores_for(jobs))
    total = (
        f"\nAbout {rough_duration(left / cores)} on {cores} core{'s' if cores > 1 else ''} for what is to run."
        if left
        else ""
    )
    metrics = {"trials": [trial.name for trial in trials], "seconds": seconds}
    return Outcome(config={}, metrics=metrics, text=table + total)


def run_trials(trials: Sequence[Trial], folders: Folders, jobs: int | None, *, pinned: bool = True) -> Progress:
    """Run the trials that have no record yet, once all their data is found."""
    named = ((t.config.data.source, t.evaluation.train, t.evaluation.test, t.evaluation.real) for t in trials)
    for source in sorted({source for sources in named for source in sources}):
        check_source(source, folders.data)
    return run_sweep(trials, folders, jobs=jobs, pinned=pinned)


def check_source(source: str, root: Path) -> None:
    """Refuse missing data before anything is started, instead of one failure for each trial."""
    if is_file(source) and not (root / split_limit(source)[1]).exists():
        raise UserError(
            f"There is no {source} in {root}: name the folder that has it with --data-root, or set ANECHOIC_DATA."
        )


def refuse_failures(failed: Mapping[str, str]) -> None:
    if failed:
        name, words = next(iter(failed.items()))
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(
            f"{name}{others} failed ({words}). The records of the others are complete, and the same command retries "
            "what failed."
        )
