"""Training dynamics of a set of runs: effective rank and probe accuracy at every checkpoint, and how they go together.

At each point that all runs have reached, Pearson's coefficient across the runs (which differ in alpha_min) relates rank
and accuracy. It trains nothing. (Figure 5.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anechoic.choices import CheckpointMetric
from anechoic.errors import UserError
from anechoic.eval.correlation import pearson
from anechoic.eval.encoders import run_encoder
from anechoic.eval.eval_data import open_eval_data
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.features import Pooling
from anechoic.runtime.checkpoint import checkpoints


def checkpoints_of(run: str | Path) -> list[Path]:
    found = checkpoints(Path(run) / "checkpoints")
    if not found:
        raise UserError(f"{run} has no checkpoints; train it, and keep them with --save.keep-every N.")
    return found


def dynamics(
    runs: Sequence[str | Path],
    *,
    train: str,
    test: str | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    pooling: Pooling = "class",
    metric: CheckpointMetric = "probe",
    device: str = "auto",
) -> dict[str, list[dict[str, Any]]]:
    """points: a row per run and checkpoint; correlations: a row per `seen` at which every run has a checkpoint.

    Rank is that of the last layer on the test part, row-centered as in the paper and column-centered beside it.
    """
    evaluator = Evaluator(EvalSpec((metric, "rank"), poolings=(pooling,), seed=seed), device=device)
    points = []
    for run in runs:
        for path in checkpoints_of(run):
            encoder = run_encoder(path)
            eval_data = open_eval_data(
                train, test, holdout=holdout, seed=seed, channels=encoder.channels, pixels=encoder.pixels
            )
            (row,) = evaluator.run(encoder, eval_data).rows
            config: Any = encoder.model.config
            spectrum = ("entropy_rows", "rank_rows", "entropy_columns", "rank_columns")
            points.append(
                {
                    "run": str(run),
                    "alpha_min": config.alpha_min,
                    "seen": int(path.name),
                    "accuracy": row[metric],
                    **{name: row[name] for name in spectrum},
                }
            )
    return {"points": points, "correlations": correlations(points, num_runs=len(runs))}


def correlations(points: Sequence[dict[str, Any]], *, num_runs: int) -> list[dict[str, Any]]:
    """Pearson's r of entropy (the paper's rank) and accuracy across runs, at every `seen` common to all of them."""
    rows = []
    for seen in sorted({point["seen"] for point in points}):
        here = [point for point in points if point["seen"] == seen]
        if len(here) < max(2, num_runs):
            continue
        accuracy = [point["accuracy"] for point in here]
        row: dict[str, Any] = {"seen": seen, "runs": len(here)}
        for center in ("rows", "columns"):
            found = pearson([point[f"entropy_{center}"] for point in here], accuracy)
            # JSON has no NaN: what is not defined (few runs, equal values) is None.
            ends = (("r", found.r), ("low", found.low), ("high", found.high))
            row |= {f"{name}_{center}": None if math.isnan(value) else value for name, value in ends}
        rows.append(row)
    return rows
