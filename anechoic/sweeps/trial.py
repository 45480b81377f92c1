"""One trial of a table: a config trained and its features, images or decisions evaluated, kept as one JSON record.

A record holds everything that is needed to measure it again: the config, the evaluation, the seed, the commit and the
machine. Data is named relative to a folder given at run time, so that a record made on one machine can be checked on
another. How many trials run side by side is sweep.py's business.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anechoic.choices import ProbeProtocol
from anechoic.config import Config, Count, Section, Share, Whole, from_json, from_mapping, to_json
from anechoic.errors import NotFiniteError, UserError
from anechoic.outcome import SCHEMA, commit, machine
from anechoic.runtime.run import VALIDATION, last_seen, read_metrics
from anechoic.runtime.subprocesses import exit_when_parent_exits
from anechoic.storage.files import read_json, write_json

# Of what is measured on held-out samples during training, what a record keeps.
MONITORED = (
    "held_out_loss",
    "held_out_accuracy",
    "entropy_rows",
    "entropy_columns",
    "token_norm",
    "knn_accuracy",
)
DIGITS = 6


@dataclass(frozen=True)
class EvalPlan(Section):
    """What is measured once a trial is trained. Labels are read here and nowhere before."""

    train: str = ""
    """labeled images that vote and fit"""
    test: str = ""
    """labeled images to classify"""
    max_train: Count = 10_000
    """at most so many of the first, evenly spaced"""
    max_test: Count = 10_000
    """at most so many of the second, evenly spaced"""
    neighbors: Count = 20
    """votes of the k-NN evaluation"""
    whitened: bool = False
    """let whitened features vote too"""
    selection: bool = False
    """measure k-NN and probe on held-out training images too: settings are chosen by those"""
    probe: bool = True
    """fit a logistic regression to the last layer's tokens"""
    protocol: ProbeProtocol = "logistic"
    """how the probe is fitted: converged, as the paper does on ImageNet-100, or as MAE does on ImageNet-1K"""
    pictures: bool = False
    """keep a map of the features, colors of patches and reconstructions; for embedded data only"""
    probe_layers: tuple[int, ...] = ()
    """layers whose mean token is probed too"""
    checkpoints: bool = False
    """evaluate every kept checkpoint by k-NN, not the last one alone"""
    anatomy: bool = False
    """the ranks of what branches write, at kept checkpoints too, and what the first components of features hold"""
    retrieval: str = ""
    """drawings of things by several hands, such as emoji, whose twins are searched across hands"""
    baselines: bool = False
    """search them by raw pixels and by an untrained network too"""
    samples: Whole = 0
    """images a denoiser makes to be compared with the real ones; 0 makes none"""
    real: str = ""
    """the real images, where the run's own data is not images"""
    extractor: str = "efflite0"
    """whose features compare them"""
    noise: tuple[Share, ...] = (0.02, 0.1)
    """levels of noise at which a denoiser's features are probed"""


@dataclass(frozen=True)
class Trial:
    """name: unique in its table, such as "alpha0.6-seed1"; variant: the same without the seed."""

    name: str
    variant: str
    config: Config
    evaluation: EvalPlan = field(default_factory=EvalPlan)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "variant": self.variant,
            "config": to_json(self.config),
            "evaluation": to_json(self.evaluation),
        }


# Keys of records in earlier versions -> theirs now.
RENAMED: dict[str, str] = {
    "judge": "evaluation",
    "neighbours": "neighbors",
    "fitted": "max_train",
    "tested": "max_test",
    "colours": "colors",
    "processor": "cpu",
    "processor_seconds": "cpu_seconds",
}


def read_record(path: Path) -> dict[str, Any]:
    """Return a record on disk under the names of this version."""
    return with_current_names(read_json(path))


def with_current_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            RENAMED.get(str(name), str(name)).replace("standardised", "standardized"): with_current_names(item)
            for name, item in value.items()
        }
    return [with_current_names(item) for item in value] if isinstance(value, list) else value


def trial_from_json(values: dict[str, Any]) -> Trial:
    try:
        evaluation = from_mapping(EvalPlan, values["evaluation"], where="evaluation.")
        return Trial(values["name"], values["variant"], from_json(values["config"]), evaluation)
    except (KeyError, TypeError) as problem:
        raise UserError(f"This is no record of a trial ({problem}): give a file that a sweep wrote.") from problem


# ---- where the data is


def is_file(source: str) -> bool:
    """Whether the source is files; those with a name, such as digits:train, are the same on every machine."""
    from anechoic.data import NAMED

    return bool(source) and source.partition(":")[0] not in NAMED


def located(source: str, root: Path) -> str:
    """The source as this machine names it: embedded data as it is, files below `root`."""
    return str(root / source) if is_file(source) else source


def localized(trial: Trial, root: Path) -> Trial:
    """The trial with every source of data as this machine names it."""
    config, evaluation = trial.config, trial.evaluation
    return replace(
        trial,
        config=replace(config, data=replace(config.data, source=located(config.data.source, root))),
        evaluation=replace(
            evaluation,
            train=located(evaluation.train, root),
            test=located(evaluation.test, root),
            retrieval=located(evaluation.retrieval, root),
            real=located(evaluation.real, root),
        ),
    )


# ---- running one


def run_trial(trial: Trial, run_dir: Path, *, root: Path, verbose: bool = False) -> dict[str, Any]:
    """Train (or go on, or find it done), evaluate, and give the record. Divergence is a result, not a fault."""
    from anechoic.training.loop import DivergedError, fit

    here = localized(trial, root)
    check_plan(here)
    started, cpu_started = time.perf_counter(), time.process_time()
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
        **trial.to_json(),
        "seed": trial.config.seed,
        "commit": commit(),
        "machine": machine(),
        "metrics": rounded(metrics),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
    }


def check_plan(trial: Trial) -> None:
    """Refuse what could not be evaluated before it is trained."""
    from anechoic.data.latents import is_latents

    plan = trial.evaluation
    if plan.samples and not plan.real and is_latents(trial.config.data.source):
        raise UserError(
            f"{trial.config.data.source} holds latents, and made images are compared with real ones: name those in "
            "the evaluation's `real`."
        )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Evaluate with as many threads as were trained with: sums, and so a neighbor now and then, depend on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(trial: Trial, run_dir: Path) -> dict[str, Any]:
    """By what the trial was trained for."""
    from anechoic.sweeps import evaluation

    plan, seed = trial.evaluation, trial.config.seed
    objective = trial.config.objective.name
    if objective in ("noise_prediction", "flow_matching"):
        return evaluation.evaluate_denoiser(run_dir, plan, source=trial.config.data.source, seed=seed)
    if not plan.train:
        return {}
    if objective == "supervised":
        return evaluation.evaluate_classifier(run_dir, plan, seed=seed)
    return evaluation.evaluate_encoder(run_dir, plan, seed=seed)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """What was seen of the held-out samples during training."""
    return [
        {"seen": record["seen"], **{name: record[name] for name in MONITORED if name in record}}
        for record in read_metrics(run_dir)
        if record["kind"] in VALIDATION
    ]


def rounded(value: Any) -> Any:
    """Floats to a few significant digits, in nested JSON; NaN and infinity, which JSON has not, as None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def finished(trial: Trial, path: Path) -> bool:
    """Whether the record at `path` is of exactly this trial."""
    if not path.exists():
        return False
    return trial_from_json(read_record(path)) == trial


def clean(run_dir: Path) -> None:
    """An evaluated run has served: its weights are larger than everything it taught."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def main(arguments: list[str]) -> None:
    """python -m anechoic.sweeps.trial TRIAL.json RUN_DIR RECORD.json DATA_ROOT: what a sweep starts for each trial."""
    exit_when_parent_exits()
    trial_file, run_dir, record_file, root = map(Path, arguments)
    record = run_trial(trial_from_json(read_record(trial_file)), run_dir, root=root)
    record_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(record_file, record)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
