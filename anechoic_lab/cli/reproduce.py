"""The command `reproduce`: the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from anechoic.cli import command
from anechoic.cli.options import DryRun, PathLike
from anechoic.errors import UserError
from anechoic.outcome import Outcome


@command
def reproduce(
    what: str = "all",
    /,
    *,
    scale: Literal["pocket", "full"] = "pocket",
    data_root: PathLike | None = None,
    results: PathLike = "results/evidence",
    runs: PathLike = "runs/evidence",
    seeds: int = 3,
    jobs: int | None = None,
    dry_run: DryRun = False,
    report: PathLike | None = None,
    verify: PathLike | None = None,
) -> Outcome:
    """Run the paper's tables and figures, at pocket scale on a laptop or at full scale, and compare with its numbers.

    Finished trials are skipped, so the same command resumes.

    Example: anechoic reproduce table2 --scale pocket --data-root images --dry-run

    Args:
        what: table1, table2, table3a, table3b, table4, fig3 to fig7, all, or a page of the map: an unknown name lists
            them all.
        scale: pocket takes minutes to hours on two cores; full is the paper's own setting, for GPUs.
        data_root: folder with cifar100/train.parquet and so on; default: the variable ANECHOIC_DATA, or here.
        results: folder of the records, one JSON file for each trial.
        runs: folder of the runs; may be deleted afterwards.
        seeds: number of seeds, counted from the first of the page.
        jobs: number of processes; default one for each core (full scale: one, which uses every GPU).
        report: write the pages and pictures of what has records into this folder, and run nothing.
        verify: run the trial of this record again and compare every number; records of other seeds beside it, or else
            of the same data, show how much may differ on another CPU.
    """
    from anechoic.sweeps.batch import check_counts, find_data_root
    from anechoic_lab import catalog

    results, runs, root_of_data = Path(results), Path(runs), find_data_root(data_root)
    if verify is not None:
        return verified(Path(verify), runs, root_of_data)
    check_counts(seeds, jobs)
    grids = catalog.choose(what, scale)
    root = results if scale == "pocket" else results / "full"
    if report is not None:
        from anechoic.storage.files import make_folder
        from anechoic_lab.records.cost import write_costs
        from anechoic_lab.records.pages import has_records, write_index, write_page
        from anechoic_lab.records.tally import write_tally

        report = Path(report)
        make_folder(report)
        at = "" if scale == "pocket" else f" --scale {scale}"
        if what == "all":
            grids = [grid for grid in grids if has_records(grid, root)]
        pages = [write_page(grid, root, report, command=f"anechoic reproduce {grid.name}{at}") for grid in grids]
        if what == "all":
            extra = [write_tally(grids, root, report), write_costs(root, report)] if scale == "pocket" else []
            pages += [*extra, write_index(grids, root, report, more=bool(extra))]
        return Outcome(
            config={},
            metrics={"pages": [str(page) for page in pages]},
            text="\n".join(map(str, pages)),
        )
    return reproduced(grids, scale, root, runs, root_of_data, seeds, jobs, dry_run)


def reproduced(
    grids: Sequence[Any], scale: str, results: Path, runs: Path, root: Path, seeds: int, jobs: int | None, dry: bool
) -> Outcome:
    """Run each grid's missing trials, then return its table."""
    from anechoic.sweeps.batch import plan_trials, refuse_failures, run_trials
    from anechoic.sweeps.sweep import Folders
    from anechoic_lab import catalog
    from anechoic_lab.records.markdown_tables import difference_table, measured_table
    from anechoic_lab.records.scoreboard import records_of

    texts: list[str] = []
    metrics: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for grid in grids:
        trials = grid.trials(catalog.variants(grid, scale), seeds)
        folders = Folders(results / grid.group, runs / grid.group, root)
        if dry:
            found = plan_trials(trials, folders, jobs, on_gpu=scale == "full")
            texts.append(f"{grid.title}\n{found.text}")
            metrics[grid.name] = found.metrics
            continue
        progress = run_trials(
            trials, folders, 1 if scale == "full" and jobs is None else jobs, pinned=scale == "pocket"
        )
        records = records_of(grid, results)
        table = [*measured_table(grid, records), "", *difference_table(grid, records)]
        texts.append("\n".join([grid.title, *table]))
        failed |= progress.failed
        metrics[grid.name] = {"done": progress.done, "skipped": progress.skipped}
    refuse_failures(failed)
    return Outcome(config={}, metrics=metrics, text="\n\n".join(texts))


def verified(path: Path, runs: Path, root: Path) -> Outcome:
    """Train and evaluate the record's trial again, and compare every number with the recorded one."""
    import tempfile
    from dataclasses import asdict

    from anechoic.storage.files import make_folder
    from anechoic.sweeps.trial import read_record, run_trial, trial_from_json
    from anechoic_lab.records.verify import compare, neighbors_of, of_same_data, verdict_text

    record = read_record(path)
    trial = trial_from_json(record)
    if "metrics" not in record:
        raise UserError(f"{path} describes a trial but has no numbers to repeat: give a record that a sweep wrote.")
    make_folder(runs)
    with tempfile.TemporaryDirectory(dir=runs, prefix="verify-") as folder:
        again = run_trial(trial, Path(folder) / "run", root=root)
    found = compare(record, again, neighbors_of(path), of_same_data(path, record))
    if not found.within_tolerance:
        raise UserError(f"{path} could not be repeated: {verdict_text(record, again, found)}")
    return Outcome(
        config={},
        metrics={
            "identical": found.identical,
            "compared": found.compared,
            "largest_difference": found.largest,
            "differences": [asdict(difference) for difference in found.differences],
        },
        seed=trial.config.seed,
        seconds=again["seconds"],
        text=f"{path}: {verdict_text(record, again, found)}\n{found.table}",
    )
