"""One cell of a table: a config trained and its features, images or decisions judged, kept as one JSON record.

A record holds everything that is needed to measure it again: the config, the judge, the seed, the commit and the
machine. Data is named relative to a folder given at run time, so that a record made on one machine can be checked on
another. How many cells run side by side is sweep.py's business.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from anechoic.config import Config, Count, Section, Share, Whole, from_json, from_mapping, to_json
from anechoic.errors import NotFiniteError, UserError
from anechoic.outcome import SCHEMA, commit, machine
from anechoic.run import read_json, read_metrics, write_json

# Sources that are no files, such as digits:train: they are the same on every machine.
EMBEDDED = ("digits", "scenes", "emoji", "hf")
# Of the looks at held-out samples during training, what a record keeps.
WATCHED = (
    "held_out_loss",
    "held_out_accuracy",
    "entropy_rows",
    "entropy_columns",
    "token_norm",
    "knn_accuracy",
)
DIGITS = 6


@dataclass(frozen=True)
class Judge(Section):
    """What is measured once a cell is trained. Labels are read here and nowhere before."""

    train: str = ""
    """labelled images that vote and fit"""
    test: str = ""
    """labelled images to classify"""
    fitted: Count = 10_000
    """at most so many of the first, evenly spaced"""
    tested: Count = 10_000
    """at most so many of the second, evenly spaced"""
    neighbours: Count = 20
    """votes of the k-NN judge"""
    probe: bool = True
    """fit a logistic regression to the last layer's tokens"""
    protocol: Literal["logistic", "in100", "mae"] = "logistic"
    """how the probe is fitted: converged, as the paper does on ImageNet-100, or as MAE does on ImageNet-1K"""
    pictures: bool = False
    """keep a map of the features, colours of patches and reconstructions; for embedded data only"""
    probe_layers: tuple[int, ...] = ()
    """layers whose mean token is probed too"""
    checkpoints: bool = False
    """judge every kept checkpoint by k-NN, not the last one alone"""
    samples: Whole = 0
    """images a denoiser makes to be compared with the real ones; 0 makes none"""
    extractor: str = "efflite0"
    """whose features compare them"""
    noise: tuple[Share, ...] = (0.02, 0.1)
    """levels of noise at which a denoiser's features are probed"""


@dataclass(frozen=True)
class Cell:
    """name: unique in its table, such as "alpha0.6-seed1"; variant: the same without the seed."""

    name: str
    variant: str
    config: Config
    judge: Judge = field(default_factory=Judge)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "variant": self.variant,
            "config": to_json(self.config),
            "judge": to_json(self.judge),
        }


def cell_from_json(values: dict[str, Any]) -> Cell:
    try:
        judge = from_mapping(Judge, values["judge"], where="judge.")
        return Cell(values["name"], values["variant"], from_json(values["config"]), judge)
    except (KeyError, TypeError) as problem:
        raise UserError(f"This is no record of a cell ({problem}): give a file that a sweep wrote.") from problem


# ---- where the data is


def is_file(source: str) -> bool:
    return bool(source) and source.partition(":")[0] not in EMBEDDED


def located(source: str, root: Path) -> str:
    """The source as this machine names it: embedded data as it is, files below `root`."""
    return str(root / source) if is_file(source) else source


def localised(cell: Cell, root: Path) -> Cell:
    """The cell with every source of data as this machine names it."""
    config, judge = cell.config, cell.judge
    return replace(
        cell,
        config=replace(config, data=replace(config.data, source=located(config.data.source, root))),
        judge=replace(judge, train=located(judge.train, root), test=located(judge.test, root)),
    )


# ---- running one


def run_cell(cell: Cell, run_dir: Path, *, root: Path, verbose: bool = False) -> dict[str, Any]:
    """Train (or go on, or find it done), judge, and give the record. A run that diverges is a result, not a fault."""
    from anechoic.engine import DivergedError, fit

    here = localised(cell, root)
    started, processor = time.perf_counter(), time.process_time()
    metrics: dict[str, Any]
    try:
        fit(here.config, run_dir, verbose=verbose)
        with threads(here.config.threads):
            metrics = {"diverged": False, **measure(here, run_dir)}
    except (DivergedError, NotFiniteError) as problem:
        metrics = {
            "diverged": True,
            "reason": str(problem).replace(str(run_dir), "the run"),
            "seen": last_seen(run_dir),
        }
    metrics["training"] = curve(run_dir)
    return {
        "schema": SCHEMA,
        **cell.to_json(),
        "seed": cell.config.seed,
        "commit": commit(),
        "machine": machine(),
        "metrics": rounded(metrics),
        "seconds": round(time.perf_counter() - started, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Judge with as many threads as were trained with: sums, and so a neighbour now and then, depend on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(cell: Cell, run_dir: Path) -> dict[str, Any]:
    """By what the cell was trained for."""
    from anechoic.evidence import judging

    objective = cell.config.objective.name
    if objective in ("noise_prediction", "flow_matching"):
        return judging.judge_denoiser(run_dir, cell.judge, source=cell.config.data.source, seed=cell.config.seed)
    if not cell.judge.train:
        return {}
    if objective == "supervised":
        return judging.judge_classifier(run_dir, cell.judge)
    return judging.judge_encoder(run_dir, cell.judge, seed=cell.config.seed)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """What was seen of the held-out samples during training."""
    return [
        {"seen": record["seen"], **{name: record[name] for name in WATCHED if name in record}}
        for record in read_metrics(run_dir)
        if record["kind"] == "watch"
    ]


def last_seen(run_dir: Path) -> int:
    records = read_metrics(run_dir)
    return int(records[-1]["seen"]) if records else 0


def rounded(value: Any) -> Any:
    """Floats to a few significant digits, in nested JSON; NaN and infinity, which JSON has not, as None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def finished(cell: Cell, path: Path) -> bool:
    """Whether the record at `path` is of exactly this cell."""
    if not path.exists():
        return False
    return cell_from_json(read_json(path)) == cell


def clean(run_dir: Path) -> None:
    """A judged run has served: its weights are larger than everything it taught."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def main(arguments: list[str]) -> None:
    """python -m anechoic.evidence.cell CELL.json RUN_DIR RECORD.json DATA_ROOT: what a sweep starts for each cell."""
    cell_file, run_dir, record_file, root = map(Path, arguments)
    record = run_cell(cell_from_json(read_json(cell_file)), run_dir, root=root)
    record_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(record_file, record)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
