"""How well do the label-free signals of `anechoic report` predict k-NN? Over runs at their end, and over checkpoints.

    python tools/validate_verdict.py --train runs/validation --emoji "runs/emoji/*" --out results/verdict-signals.json

`--train` trains the grid below on digits first (about 10 CPU minutes; the same command resumes). `--emoji` takes
finished runs on the embedded emoji and evaluates their end. A set that is not requested stays in the record. Labels are
used here only, to evaluate the signals.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap, spearmanr

from anechoic.config import Config, from_json
from anechoic.data import Subset
from anechoic.data.split import hold_out
from anechoic.eval.encoders import RawPixels, run_encoder
from anechoic.eval.eval_data import open_eval_data
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.verdict import measure, verdict_of
from anechoic.outcome import commit, machine
from anechoic.recipes import recipe
from anechoic.runtime.checkpoint import checkpoints
from anechoic.runtime.run import read_frozen_config, read_metrics
from anechoic.training.build import open_data

# Signal -> where it stands in a point.
SIGNALS = ("crop_retrieval", "crop_lead", "skill", "rank", "rank_share")
KNN = EvalSpec(("knn",), poolings=("mean",), neighbors=(20,), max_train=1500, max_test=600)
SAMPLES = 25_600
# Chosen to spread: good and bad rates, decay that suits and decay that does not, easy and hard masks.
GRID: dict[str, dict[str, Any]] = {
    f"alpha{alpha:g}-lr{lr:g}-mask{mask:g}": {"alpha_min": alpha, "lr": lr, "mask_ratio": mask}
    for alpha, lr, mask in [
        *((alpha, lr, 0.75) for alpha in (1.0, 0.6) for lr in (1e-5, 1e-4, 5e-4, 2e-3, 8e-3, 3e-2)),
        *((1.0, 2e-3, mask) for mask in (0.25, 0.5, 0.9)),
        *((alpha, 2e-3, 0.75) for alpha in (0.8, 0.4, 0.2)),
    ]
}


def config_of(*, alpha_min: float, lr: float, mask_ratio: float) -> Config:
    base = recipe("pocket_mae_digits")
    return replace(
        base,
        model=replace(base.model, options={**base.model.options, "mask_ratio": mask_ratio}),
        shortcut=replace(base.shortcut, alpha_min=alpha_min),
        optim=replace(base.optim, samples=SAMPLES, epochs=None, batch_size=128, lr=lr),
        save=replace(base.save, every=SAMPLES // 6, keep_every=1),
        validation=replace(base.validation, every=SAMPLES // 12, knn=0),
        data=replace(base.data, holdout=256),
        threads=1,
    )


def train_grid(folder: Path) -> list[Path]:
    from anechoic.errors import UserError
    from anechoic.training.loop import fit

    done = []
    for name, settings in GRID.items():
        try:
            fit(config_of(**settings), folder / name)
        except UserError as mistake:  # a rate at which it diverges has no end to look at
            print(f"{name}: {mistake}")
            continue
        done.append(folder / name)
        print(f"{name} is trained", flush=True)
    return done


def points_of(run: Path, train: str, test: str, *, part: slice) -> list[dict[str, Any]]:
    """Signals and k-NN of this part of a run's checkpoints."""
    config = from_json(read_frozen_config(run) or {})
    source = open_data(config)
    held_out = Subset(source, hold_out(len(source), config.data.holdout or 0)[1])
    records = read_metrics(run)
    found = []
    for path in checkpoints(run / "checkpoints")[part]:
        encoder = run_encoder(path)
        seen = int(path.name)
        signals = measure(encoder, held_out, [record for record in records if record["seen"] <= seen])
        eval_data = open_eval_data(train, test, channels=encoder.channels)
        evaluation = Evaluator(KNN, cached=False).run(encoder, eval_data)
        alpha = config.shortcut.alpha_min
        word = verdict_of(signals, alpha_min=None if isinstance(alpha, str) else alpha).word
        knn = evaluation.value("knn", pooling="mean")
        found.append(
            {"run": f"{run.parent.name}/{run.name}", "seen": seen, "knn": knn, "verdict": word, **signals.to_json()}
        )
    return found


def pixels_knn(run: Path, train: str, test: str) -> float:
    encoder = run_encoder(run)
    eval_data = open_eval_data(train, test, channels=encoder.channels)
    pixels = replace(encoder, name="raw pixels", model=RawPixels(), untrained=None)
    return Evaluator(KNN, cached=False).run(pixels, eval_data).value("knn", pooling="mean")


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Spearman's rho over runs; the interval is a 95 % bootstrap over runs."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a is not None and b is not None]
    if len(pairs) < 5:
        return {"rho": None, "low": None, "high": None, "runs": len(pairs)}
    a, b = np.array(pairs).T

    def rho(a: np.ndarray, b: np.ndarray) -> float:
        return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(spearmanr(a, b).statistic)

    how: dict[str, Any] = {"n_resamples": 2000, "method": "percentile", "rng": np.random.default_rng(0)}
    drawn = bootstrap((a, b), rho, paired=True, vectorized=False, **how)
    low, high = drawn.confidence_interval
    return {"rho": rho(a, b), "low": float(low), "high": float(high), "runs": len(pairs)}


def over_checkpoints(by_run: dict[str, list[dict[str, Any]]], signal: str) -> dict[str, Any]:
    """Spearman's rho over all checkpoints; the interval is a 95 % bootstrap over runs, each with its checkpoints."""
    groups = [[(p[signal], p["knn"]) for p in points if p[signal] is not None] for points in by_run.values()]
    groups = [group for group in groups if group]

    def rho(chosen: Sequence[int]) -> float:
        a, b = np.array([pair for i in chosen for pair in groups[i]]).T
        return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(spearmanr(a, b).statistic)

    count = sum(map(len, groups))
    if len(groups) < 5 or count == len(groups):
        return {"rho": None, "low": None, "high": None, "checkpoints": count}
    rng = np.random.default_rng(0)
    drawn = [rho(rng.integers(0, len(groups), len(groups))) for _ in range(2000)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"rho": rho(range(len(groups))), "low": float(low), "high": float(high), "checkpoints": count}


def evaluated(runs: Sequence[Path], train: str, test: str, *, part: slice) -> dict[str, Any]:
    points = []
    for run in runs:
        points += points_of(run, train, test, part=part)
        print(f"{run.name}: k-NN {points[-1]['knn']:.3f}, {points[-1]['verdict']}", flush=True)
    return {"train": train, "test": test, **summed_up(points, pixels_knn(runs[0], train, test))}


def summed_up(points: list[dict[str, Any]], of_pixels: float) -> dict[str, Any]:
    """What the points say. of_pixels: k-NN of raw pixels on the same data."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        by_run.setdefault(point["run"], []).append(point)
    ends = [found[-1] for found in by_run.values()]
    knn = [end["knn"] for end in ends]
    bad = ("worse than raw pixels", "too short", "collapsed")
    said = [(end["verdict"] in bad, end["knn"] < of_pixels) for end in points]
    # How much k-NN still rose in the last third, against how much the loss still fell there.
    rises = [late_rise(found) for found in by_run.values()]
    return {
        "runs": len(ends),
        "checkpoints": len(points),
        "knn_of_raw_pixels": of_pixels,
        "over_runs": {name: rank_correlation([end[name] for end in ends], knn) for name in SIGNALS},
        "over_checkpoints": {name: over_checkpoints(by_run, name) for name in SIGNALS},
        "late_gain_and_late_rise": rank_correlation([end["late_gain"] for end in ends], rises),
        "worse_than_pixels": {
            "said_and_true": sum(a and b for a, b in said),
            "said_and_false": sum(a and not b for a, b in said),
            "not_said_and_true": sum(b and not a for a, b in said),
            "not_said_and_false": sum(not a and not b for a, b in said),
        },
        "points": points,
    }


def late_rise(points: list[dict[str, Any]]) -> float | None:
    end = points[-1]
    before = [point for point in points if point["seen"] <= 2 / 3 * end["seen"]]
    return end["knn"] - before[-1]["knn"] if before else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--emoji", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sets = json.loads(arguments.out.read_text())["sets"] if arguments.out.exists() else {}
    if arguments.train:
        sets["digits"] = evaluated(train_grid(arguments.train), "digits:train", "digits:test", part=slice(1, None, 2))
    runs = sorted(Path(path) for pattern in arguments.emoji for path in glob(pattern))
    runs = [run for run in runs if (run / "checkpoints").is_dir()]
    if runs:
        sets["emoji"] = evaluated(runs, "emoji:train:label=group", "emoji:test:label=group", part=slice(-1, None))
    record = {"schema": 1, "seed": 0, "commit": commit(), "machine": machine(), "sets": sets}
    arguments.out.write_text(json.dumps(rounded(record), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Six digits are more than any of this is worth."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
