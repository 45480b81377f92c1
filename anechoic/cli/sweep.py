"""The command `sweep`: a recipe over settings and seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from anechoic.cli._command import command
from anechoic.cli.options import Data, DryRun, Out, PathLike, Test
from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.config import Config
    from anechoic.sweeps.sweep import Folders
    from anechoic.sweeps.trial import EvalPlan, Trial

Varied = Annotated[Sequence[Sequence[str]], tyro.conf.UseAppendAction]
Fixed = Annotated[Sequence[tuple[str, str]], tyro.conf.UseAppendAction]


@command
def sweep(
    recipe: str,
    data: Data | None = None,
    /,
    *,
    vary: Varied = (),
    fix: Fixed = (),
    seeds: int = 1,
    test: Test = None,
    out: Out = "runs/sweep",
    data_root: PathLike | None = None,
    jobs: int | None = None,
    dry_run: DryRun = False,
) -> Outcome:
    """Train a recipe for every combination of settings and seeds, and evaluate what it learned.

    A recipe trains on its own data; --fix data.source PHOTOS trains on yours. DATA and --test are labeled images for
    the evaluation; without DATA only the training itself is recorded. A record of each trial is written to OUT/records,
    its run to OUT/runs. The same command resumes: it skips finished trials and retries failed ones.

    Example: anechoic sweep pocket_mae_digits digits:train --test digits:test --vary shortcut.alpha_min 0.6 1.0
        --seeds 3 --out runs/alpha

    Args:
        recipe: a name that `anechoic list recipes` lists.
        data: labeled images for the evaluation; training does not read them.
        vary: a setting and its values, such as shortcut.alpha_min 0.5 0.6 or model.options.depth 4 8; may be repeated.
        fix: a setting and its one value in every trial, such as optim.samples 20000; may be repeated.
        seeds: number of seeds, counted from 0.
        data_root: folder that relative names of data start from; default: the variable ANECHOIC_DATA, or here.
        jobs: number of processes; default one for each core.
    """
    from dataclasses import replace

    from anechoic.recipes import recipe as recipe_by_name
    from anechoic.sweeps.batch import check_counts, find_data_root, plan_trials, refuse_failures, run_trials
    from anechoic.sweeps.sweep import Folders, with_settings
    from anechoic.sweeps.sweep import vary as combinations
    from anechoic.sweeps.trial import EvalPlan

    check_counts(seeds, jobs)
    if data is None and test is not None:
        raise UserError("--test is what an evaluation tests on: give DATA, the labeled images it fits to, too.")
    root = find_data_root(data_root)
    grid = {}
    for name, *values in vary:
        if name == "seed":
            raise UserError("The seed is not varied like a setting: --seeds N takes the seeds 0 to N - 1.")
        if not values:
            raise UserError(f"--vary {name} has no values: give the setting and then its values.")
        grid[name] = [parsed(value) for value in values]
    twice = sorted(grid.keys() & {name for name, _ in fix})
    if twice:
        raise UserError(f"{twice[0]} is both fixed and varied: give it to --fix or to --vary.")
    base = replace(recipe_by_name(recipe), threads=1, devices=1)
    base = with_settings(base, {name: parsed(value) for name, value in fix})
    plan = EvalPlan(str(data or ""), str(test or ""))
    check_evaluation(plan, base, root)
    trials = with_samples(combinations(base, grid, seeds=range(seeds), evaluation=plan), root)
    folders = Folders(Path(out) / "records", Path(out) / "runs", root)
    if dry_run:
        return plan_trials(trials, folders, jobs)
    progress = run_trials(trials, folders, jobs)
    refuse_failures(progress.failed)
    metrics = {
        "records": [str(folders.record(trial)) for trial in trials],
        "done": progress.done,
        "skipped": progress.skipped,
    }
    return Outcome(config={}, metrics=metrics, text=summary(trials, folders))


def parsed(word: str) -> Any:
    """Return a value of the command line: JSON where it is JSON, none as other commands spell it, else text."""
    if word in ("None", "none"):
        return None
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word


def check_evaluation(plan: EvalPlan, config: Config, root: Path) -> None:
    """Refuse missing or unlabeled data before anything is trained."""
    from anechoic.eval.eval_data import open_eval_data
    from anechoic.sweeps.batch import check_source
    from anechoic.sweeps.trial import located

    for source in (plan.train, plan.test):
        check_source(source, root)
    if plan.train:
        test = located(plan.test, root) or None
        open_eval_data(located(plan.train, root), test, channels=config.data.channels, pixels=config.data.pixels)


def with_samples(trials: Sequence[Trial], root: Path) -> list[Trial]:
    """Return the trials with their budgets in samples, which an estimate of time needs, instead of epochs."""
    from dataclasses import replace

    from anechoic.config import budget, default_holdout
    from anechoic.data import open_source
    from anechoic.sweeps.trial import located

    sizes: dict[str, int] = {}
    found = []
    for trial in trials:
        data, optim = trial.config.data, trial.config.optim
        if optim.samples is None:
            if repr(data) not in sizes:
                source = open_source(located(data.source, root), channels=data.channels, pixels=data.pixels)
                held = default_holdout(len(source)) if data.holdout is None else data.holdout
                sizes[repr(data)] = len(source) - held
            optim = replace(optim, epochs=None, samples=budget(optim, sizes[repr(data)]))
        found.append(replace(trial, config=replace(trial.config, optim=optim)))
    return found


def summary(trials: Sequence[Trial], folders: Folders) -> str:
    """Return a row per variant: the mean over seeds of every plain number, with its interval."""
    from anechoic.pages.tables import text_table
    from anechoic.sweeps.records import Records

    records = Records(folders.records)
    variants = list(dict.fromkeys(trial.variant for trial in trials))
    known = [metrics for variant in variants for metrics in records.metrics(variant).values()]
    keys = [key for key, value in (known[0] if known else {}).items() if isinstance(value, float)]
    if not keys:
        keys = ["training.-1.held_out_loss"]
    rows = [
        [variant, *(str(records.mean(variant, key)) for key in keys), records.count(variant)] for variant in variants
    ]
    table = text_table(["variant", *(key.rpartition(".")[2] for key in keys), "seeds"], rows)
    return f"{table}\nMeans over seeds ± 95 % intervals; accuracies (knn, probe) in percent."
