"""The verbs that gather evidence: sweep a recipe over settings and seeds, reproduce the paper's tables and figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.sweeps.sweep import Folders, Progress
    from anechoic.sweeps.trial import Trial

Varied = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
Fixed = Annotated[tuple[tuple[str, str], ...], tyro.conf.UseAppendAction]


def sweep(
    recipe: str,
    /,
    *,
    vary: Varied = (),
    fix: Fixed = (),
    seeds: int = 1,
    train: str = "",
    test: str = "",
    out: Path = Path("runs/sweep"),
    data: Path | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Train a recipe for every combination of settings and seeds, a core each, and evaluate what it learned.

    The same command goes on where it was stopped: finished trials are skipped, failed ones tried again.

    Example: anechoic sweep pocket_mae_digits --vary shortcut.alpha_min 0.6 1.0 --seeds 3 --train digits:train --test
        digits:test --out runs/alpha

    Args:
        recipe: a name that `anechoic recipes` lists.
        vary: a setting and its values, such as shortcut.alpha_min 0.5 0.6 or model.options.depth 4 8; may be repeated.
        fix: a setting and its one value in every trial, such as optim.samples 20000; may be repeated.
        seeds: how many seeds, counted from 0.
        train: labeled images to evaluate by; without them only the training itself is recorded.
        test: labeled images to classify.
        out: a record for each trial is written to out/records, its run to out/runs.
        data: folder that relative names of data start from; default the environment variable ANECHOIC_DATA, or here.
        jobs: processes at once; default one for each core.
        dry_run: list the trials with their estimated time and stop.
    """
    from dataclasses import replace

    from anechoic.recipes import recipe as recipe_by_name
    from anechoic.sweeps.sweep import Folders, with_settings
    from anechoic.sweeps.sweep import vary as combinations
    from anechoic.sweeps.trial import EvalPlan

    check_counts(seeds, jobs)
    if bool(train) != bool(test):
        raise UserError("Evaluation needs labeled images to fit and others to classify: give both --train and --test.")
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
    if base.optim.samples is None:
        base = with_samples(base, data_root(data))
    trials = combinations(base, grid, seeds=range(seeds), evaluation=EvalPlan(train, test))
    folders = Folders(out / "records", out / "runs", data_root(data))
    if dry_run:
        return planned(trials, folders, jobs)
    progress = run(trials, folders, jobs)
    refuse_failures(progress.failed)
    metrics = {"records": [str(folders.record(trial)) for trial in trials], **counted(progress)}
    return Outcome(config={}, metrics=metrics, text=summary(trials, folders))


def reproduce(
    what: str = "all",
    /,
    *,
    scale: Literal["pocket", "full"] = "pocket",
    data: Path | None = None,
    results: Path = Path("results/evidence"),
    runs: Path = Path("runs/evidence"),
    seeds: int = 3,
    jobs: int | None = None,
    dry_run: bool = False,
    report: Path | None = None,
    verify: Path | None = None,
) -> Outcome:
    """Run the paper's tables and figures, at pocket scale on a laptop or at full scale, and compare with its numbers.

    Finished trials are skipped, so the same command goes on where it was stopped.

    Example: anechoic reproduce table2 --scale pocket --data images --dry-run

    Args:
        what: table1, table2, table3a, table3b, table4, fig3 to fig7, all, or a page of the map (stability, hands,
            natural and so on: a name it does not know lists them all).
        scale: pocket takes minutes to hours on two cores; full is the paper's own setting, for accelerators.
        data: folder with cifar100/train.parquet and so on; default the environment variable ANECHOIC_DATA, or here.
        results: where the records are, one JSON file for each trial.
        runs: where the runs are trained; may be deleted afterwards.
        seeds: how many seeds, counted from the first of the page.
        jobs: processes at once; default one for each core (full scale: one, which uses every accelerator).
        dry_run: list the runs with their estimated time and stop.
        report: write the pages and pictures of what has records into this folder, and run nothing.
        verify: run the trial of this record again and compare every number.
    """
    from anechoic_lab import catalog

    if verify is not None:
        return verified(verify, runs, data_root(data))
    check_counts(seeds, jobs)
    grids = catalog.choose(what, scale)
    root = results if scale == "pocket" else results / "full"
    if report is not None:
        from anechoic.storage.files import make_folder
        from anechoic_lab.records.pages import has_records, write_index, write_page
        from anechoic_lab.records.tally import write_tally

        make_folder(report)
        at = "" if scale == "pocket" else f" --scale {scale}"
        if what == "all":
            grids = [grid for grid in grids if has_records(grid, root)]
        pages = [write_page(grid, root, report, command=f"anechoic reproduce {grid.name}{at}") for grid in grids]
        if what == "all":
            tally = [write_tally(grids, root, report)] if scale == "pocket" else []
            pages += [*tally, write_index(grids, root, report, tally=bool(tally))]
        return Outcome(
            config={},
            metrics={"pages": [str(page) for page in pages]},
            text="\n".join(map(str, pages)),
        )
    return reproduced(grids, scale, root, runs, data_root(data), seeds, jobs, dry_run)


def reproduced(
    grids: Sequence[Any], scale: str, results: Path, runs: Path, root: Path, seeds: int, jobs: int | None, dry: bool
) -> Outcome:
    """Each grid in turn: its missing trials, then its table."""
    from anechoic.sweeps.sweep import Folders
    from anechoic_lab import catalog
    from anechoic_lab.records.markdown_tables import difference_table, measured_table
    from anechoic_lab.records.statistics import Records

    texts: list[str] = []
    metrics: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for grid in grids:
        trials = grid.trials(catalog.variants(grid, scale), seeds)
        folders = Folders(results / grid.group, runs / grid.group, root)
        if dry:
            found = planned(trials, folders, jobs, accelerator=scale == "full")
            texts.append(f"{grid.title}\n{found.text}")
            metrics[grid.name] = found.metrics
            continue
        progress = run(trials, folders, 1 if scale == "full" and jobs is None else jobs, pinned=scale == "pocket")
        records = Records(folders.records)
        table = [*measured_table(grid, records), "", *difference_table(grid, records)]
        texts.append("\n".join([grid.title, *table]))
        failed |= progress.failed
        metrics[grid.name] = counted(progress)
    refuse_failures(failed)
    return Outcome(config={}, metrics=metrics, text="\n\n".join(texts))


def verified(path: Path, runs: Path, root: Path) -> Outcome:
    """The record's trial trained and evaluated anew; every number beside the recorded one."""
    import tempfile

    from anechoic.storage.files import make_folder
    from anechoic.sweeps.trial import read_record, run_trial, trial_from_json
    from anechoic_lab.records.verify import compare, verdict_text

    record = read_record(path)
    trial = trial_from_json(record)
    if "metrics" not in record:
        raise UserError(f"{path} describes a trial but has no numbers to repeat: give a record that a sweep wrote.")
    make_folder(runs)
    with tempfile.TemporaryDirectory(dir=runs, prefix="verify-") as folder:
        again = run_trial(trial, Path(folder) / "run", root=root)
    found = compare(record, again)
    if not found.within_tolerance:
        raise UserError(f"{path} could not be repeated: {verdict_text(record, again, found)}")
    return Outcome(
        config={},
        metrics={"identical": found.identical, "compared": found.compared, "largest_difference": found.largest},
        seed=trial.config.seed,
        seconds=again["seconds"],
        text=f"{path}: {verdict_text(record, again, found)}",
    )


# ---- what they share


def data_root(data: Path | None) -> Path:
    if data is not None and not data.is_dir():
        raise UserError(f"There is no folder {data}: name the one that has the data with --data, or set ANECHOIC_DATA.")
    return data or Path(os.environ.get("ANECHOIC_DATA", "."))


def check_counts(seeds: int, jobs: int | None) -> None:
    if seeds < 1 or (jobs is not None and jobs < 1):
        raise UserError("There must be at least one seed and one job: give --seeds and --jobs of 1 or more.")


def parsed(word: str) -> Any:
    """A value from the command line: JSON where it is JSON, else text."""
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word


def with_samples(config: Any, root: Path) -> Any:
    """The budget in samples, which an estimate of time needs, where the recipe gives epochs."""
    from dataclasses import replace

    from anechoic.config import budget, default_holdout
    from anechoic.data import open_source
    from anechoic.sweeps.trial import located

    size = len(open_source(located(config.data.source, root), channels=config.data.channels))
    held = default_holdout(size) if config.data.holdout is None else config.data.holdout
    return replace(config, optim=replace(config.optim, epochs=None, samples=budget(config.optim, size - held)))


def planned(trials: Sequence[Trial], folders: Folders, jobs: int | None, *, accelerator: bool = False) -> Outcome:
    """The trials with their estimated time, and which are done."""
    from anechoic.sweeps.sweep import cores_for, duration, estimates
    from anechoic.sweeps.trial import finished
    from anechoic.training.cost import training_flops
    from anechoic_lab.records.markdown_tables import line

    seconds = estimates(trials, folders) if not accelerator else {}
    rows, left = [], 0.0
    for trial in trials:
        done = finished(trial, folders.record(trial))
        if accelerator:
            cost = f"{training_flops(trial.config) / 1e18:,.2f} exaFLOP"
        else:
            cost = duration(seconds[trial.name])
            left += 0.0 if done else seconds[trial.name]
        rows.append(line([trial.name, f"{trial.config.optim.samples or 0:,}", cost, "done" if done else "to run"]))
    head = [line(["run", "samples", "exaFLOP" if accelerator else "one core", "state"]), line(["---"] * 4)]
    cores = len(cores_for(jobs))
    total = (
        f"\nAbout {duration(left / cores)} on {cores} core{'s' if cores > 1 else ''} for what is to run."
        if left
        else ""
    )
    metrics = {"trials": [trial.name for trial in trials], "seconds": seconds}
    return Outcome(config={}, metrics=metrics, text="\n".join([*head, *rows]) + total)


def run(trials: Sequence[Trial], folders: Folders, jobs: int | None, *, pinned: bool = True) -> Progress:
    from anechoic.sweeps.sweep import sweep as run_sweep

    named = ((t.config.data.source, t.evaluation.train, t.evaluation.test, t.evaluation.real) for t in trials)
    for source in sorted({source for sources in named for source in sources}):
        check_source(source, folders.data)
    return run_sweep(trials, folders, jobs=jobs, pinned=pinned)


def check_source(source: str, root: Path) -> None:
    """One sentence before anything is started, instead of one failure for each trial."""
    from anechoic.sweeps.trial import is_file

    if is_file(source) and not (root / source).exists():
        raise UserError(
            f"There is no {source} in {root}: name the folder that has it with --data, or set ANECHOIC_DATA."
        )


def summary(trials: Sequence[Trial], folders: Folders) -> str:
    """One line per variant: the mean over seeds of every plain number, with its interval."""
    from anechoic_lab.records.markdown_tables import line
    from anechoic_lab.records.statistics import Records

    records = Records(folders.records)
    variants = list(dict.fromkeys(trial.variant for trial in trials))
    known = [metrics for variant in variants for metrics in records.metrics(variant).values()]
    keys = [key for key, value in (known[0] if known else {}).items() if isinstance(value, float)]
    if not keys:
        keys = ["training.-1.held_out_loss"]
    head = [line(["variant", *(key.rpartition(".")[2] for key in keys), "seeds"]), line(["---"] * (len(keys) + 2))]
    rows = [
        line([variant, *(str(records.mean(variant, key)) for key in keys), str(records.count(variant))])
        for variant in variants
    ]
    return "\n".join([*head, *rows])


def counted(progress: Progress) -> Mapping[str, Any]:
    return {"done": progress.done, "skipped": progress.skipped}


def refuse_failures(failed: Mapping[str, str]) -> None:
    if failed:
        name, words = next(iter(failed.items()))
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(
            f"{name}{others} failed ({words}). The records of the others are kept, and the same command tries what "
            "failed again."
        )
