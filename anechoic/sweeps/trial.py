"""One trial: a config trained, its features, images or predictions evaluated, the result written as a JSON record.

A record holds everything needed to repeat it: config, evaluation, seed, commit and machine. Data paths are relative to
a folder given at run time, so that another machine can verify the record.
"""

from __future__ import annotations

import math
import shutil
import sys
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

# Validation metrics that a record keeps.
VALIDATION_METRICS = (
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
    """What is measured once a trial is trained. Labels are read only here."""

    train: str = ""
    """labeled images that vote and fit"""
    test: str = ""
    """labeled images to classify; empty: a fifth of the train images, held out"""
    max_train: Count = 10_000
    """maximum number of train images, evenly spaced"""
    max_test: Count = 10_000
    """maximum number of test images, evenly spaced"""
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
    """keep a map of the features, patch colors and reconstructions; for embedded data only"""
    same_shape: Whole = 0
    """number of test scenes for the measure of patches of one shape being alike"""
    probe_layers: tuple[int, ...] = ()
    """layers whose mean token is probed too"""
    checkpoints: bool = False
    """evaluate every kept checkpoint by k-NN, not the last one alone"""
    anatomy: bool = False
    """ranks of branch outputs, at kept checkpoints too, and shares of the first components of features"""
    retrieval: str = ""
    """drawings of objects in several styles, such as emoji, for retrieval across styles"""
    baselines: bool = False
    """retrieval by raw pixels and by an untrained network too"""
    samples: Whole = 0
    """number of images that a denoiser generates for comparison with real ones"""
    real: str = ""
    """the real images, where the run's own data is latents"""
    extractor: str = "efflite0"
    """feature extractor of the comparison"""
    noise: tuple[Share, ...] = (0.02, 0.1)
    """noise levels at which a denoiser's features are probed"""


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


# Keys of records in earlier versions -> current keys.
RENAMED: dict[str, str] = {
    "judge": "evaluation",  # legacy name
    "neighbours": "neighbors",  # legacy name
    "fitted": "max_train",
    "tested": "max_test",
    "colours": "colors",  # legacy name
    "processor": "cpu",
    "processor_seconds": "cpu_seconds",
}


def read_record(path: Path) -> dict[str, Any]:
    """Return a record on disk under the names of this version."""
    return with_current_names(read_json(path))


def with_current_names(value: Any) -> Any:
    if isinstance(value, dict):
        names = (RENAMED.get(str(name), str(name)) for name in value)
        names = (name.replace("standardised", "standardized") for name in names)  # legacy name
        return dict(zip(names, map(with_current_names, value.values()), strict=True))
    return [with_current_names(item) for item in value] if isinstance(value, list) else value


def trial_from_json(values: dict[str, Any]) -> Trial:
    try:
        evaluation = from_mapping(EvalPlan, values["evaluation"], where="evaluation.")
        return Trial(values["name"], values["variant"], from_json(values["config"]), evaluation)
    except (KeyError, TypeError) as problem:
        raise UserError(f"This is not the record of a trial ({problem}): use a file that a sweep wrote.") from problem


# ---- data paths


def is_file(source: str) -> bool:
    """Return whether the source is files; named sources such as digits:train are the same on every machine."""
    from anechoic.data import NAMED, split_limit

    source = split_limit(source)[1]
    return bool(source) and source.partition(":")[0] not in NAMED


def located(source: str, root: Path) -> str:
    """Return the source on this machine: embedded data as it is, files below `root`."""
    from anechoic.data import split_limit

    limit, rest = split_limit(source)
    return f"{limit}{root / rest}" if is_file(rest) else source


def localized(trial: Trial, root: Path) -> Trial:
    """Return the trial with every data source located on this machine."""
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
    """Train (or resume), evaluate, and return the record. Divergence is a result, not an error."""
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
    """Raise UserError before training for what could not be evaluated afterwards."""
    from anechoic.data.latents import is_latents

    plan = trial.evaluation
    if plan.samples and not plan.real and is_latents(trial.config.data.source):
        raise UserError(
            f"{trial.config.data.source} holds latents, but generated images are compared with real ones: set `real` "
            "of the evaluation to images."
        )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Evaluate with the number of threads of the training: sums, and so neighbors, depend on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(trial: Trial, run_dir: Path) -> dict[str, Any]:
    """Evaluate by the kind of objective."""
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
    """Return the validation metrics during training."""
    return [
        {"seen": record["seen"], **{name: record[name] for name in VALIDATION_METRICS if name in record}}
        for record in read_metrics(run_dir)
        if record["kind"] in VALIDATION
    ]


def rounded(value: Any) -> Any:
    """Round floats of nested JSON to a few significant digits; NaN and infinity become None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def finished(trial: Trial, path: Path) -> bool:
    """Return whether the record at `path` is of exactly this trial."""
    if not path.exists():
        return False
    return trial_from_json(read_record(path)) == trial


def clean(run_dir: Path) -> None:
    """Delete the checkpoints of an evaluated run."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def main(arguments: list[str]) -> None:
    """python -m anechoic.sweeps.trial TRIAL.json RUN_DIR RECORD.json DATA_ROOT: what a sweep starts for each trial."""
    exit_when_parent_exits()
    trial_file, run_dir, record_file, root = map(Path, arguments)
    try:
        record = run_trial(trial_from_json(read_record(trial_file)), run_dir, root=root)
    except UserError as error:
        sys.exit(str(error))
    record_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(record_file, record)


if __name__ == "__main__":
    main(sys.argv[1:])
