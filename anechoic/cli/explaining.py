"""The verb that explains an encoder layer by layer: analyze."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anechoic.cli.evaluating import (
    Layers,
    Pooling,
    encoder_and_data,
    listed,
    names_of,
    outcome,
    skipped_text,
    usable_poolings,
    without,
)
from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.eval.encoders import Encoder
    from anechoic.eval.evaluator import Evaluation


def analyze(
    run: str,
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    runs: tuple[str, ...] = (),
    test: str | None = None,
    samples: int = 5000,
    layers: Layers = "all",
    pooling: tuple[Pooling, ...] = (),
    baselines: bool = True,
    figures: Path | None = None,
    image_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Explain an encoder layer by layer: effective rank, the echo of its input, and how well classes separate.

    Example: anechoic analyze runs/mine photos/val --figures pictures/

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER (with --model, the data).
        data: the images; with labels, silhouette and k-NN are measured too.
        model: timm:NAME or hf:FOLDER instead of a run.
        runs: more runs that differ in alpha_min: rank and accuracy at every checkpoint of all of them, and how the two
            correlate (training dynamics; needs labels).
        test: data to test the accuracies of --runs on; without it, a fifth of data is held out.
        samples: use at most so many images, evenly spaced.
        layers: layers to explain, or all; 0 is the embedding.
        pooling: class, mean (of patches) or all (tokens); by default class and mean.
        baselines: also show the last layer of the untrained network, raw pixels and a constant.
        figures: a folder to draw pictures into, as PNG and SVG.
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the held-out part and of the untrained network.
    """
    started = time.perf_counter()
    from anechoic.eval.encoders import baselines as baselines_of
    from anechoic.eval.eval_data import open_maybe_labeled
    from anechoic.eval.evaluator import EvalSpec, Evaluator, usable_metrics

    encoder, where = encoder_and_data(run, data, model, image_size)
    if runs:
        pool = pooling[0] if pooling else encoder.poolings[0]
        found = dynamics_outcome([run, *runs], where, test, pooling=pool, figures=figures, device=device, seed=seed)
        return outcome(*found, started, seed)
    if samples < 2:
        raise UserError(f"An analysis needs at least 2 samples, not {samples}.")
    eval_data = open_maybe_labeled(where, channels=encoder.channels)
    chosen = pooling or tuple(p for p in ("class", "mean") if p in encoder.poolings)
    names = usable_metrics(("rank", "echo", "silhouette", "knn", "stream"), encoder, eval_data)
    spec = EvalSpec(names, layers=layers, poolings=chosen, max_test=samples, seed=seed)
    evaluator = Evaluator(spec, device=device)
    subject = evaluator.extract(encoder, eval_data)
    own = evaluator.measure(subject)
    rows = explained(encoder, own)
    for other in baselines_of(encoder, seed=seed) if baselines else []:
        # The echo is measured against layer 0, so a baseline's table has it too.
        of_baseline = replace(spec, layers=(0, -1), poolings=usable_poolings(other, chosen))
        found_rows = explained(other, Evaluator(of_baseline, device=device).run(other, eval_data))
        rows += [row for row in found_rows if row["layer"] == len(other.widths) - 1]
    metrics: dict[str, Any] = {"samples": own.counts["test_samples"], "rows": rows, "skipped": listed(own.skipped)}
    if eval_data.test_labels is not None:
        metrics["classes"] = len(set(eval_data.test_labels.tolist()))
    if figures is not None:
        from anechoic.pages.explanation import draw_all

        of_encoder = [row for row in rows if row["encoder"] == encoder.name]
        metrics["figures"] = [str(path) for path in draw_all(subject, of_encoder, figures)]
    return outcome(metrics, layer_text(metrics) + skipped_text(metrics["skipped"]), started, seed)


def explained(encoder: Encoder, found: Evaluation) -> list[dict[str, Any]]:
    """A row per (pooling, layer), with the numbers of whole layers beside those of its features."""
    poolings = list(dict.fromkeys(row["pooling"] for row in found.rows))
    rows = [
        {"encoder": encoder.name, **without(row, "knn_by_k")}
        | {name: values[row["layer"]] for name, values in found.network.items()}
        for row in found.rows
    ]
    return sorted(rows, key=lambda row: (poolings.index(row["pooling"]), row["layer"]))


COLUMNS = {
    "rank_rows": "rank",
    "entropy_rows": "entropy",
    "rank_columns": "rank, centered",
    "cka": "CKA with 0",
    "cosine": "cosine with 0",
    "input_share": "input share",
    "branch_ratio": "branch/shortcut",
    "gain": "gain",
    "token_norm": "norm",
    "silhouette": "silhouette",
    "knn": "k-NN",
}


def layer_text(metrics: Mapping[str, Any]) -> str:
    from anechoic.pages.tables import text_table

    rows = metrics["rows"]
    shown = {key: name for key, name in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    cells = [[*names_of(row).values(), *(row.get(key) for key in shown)] for row in rows]
    notes = (
        f"{metrics['samples']} samples. rank = exp(entropy), each sample's mean removed as in the paper; centered: the "
        "mean over samples removed. Layer 0 is the embedding; input share is what is left of it on the identity path."
    )
    drawn = "".join(f"\n{path}" for path in metrics.get("figures", ()))
    return text_table(["encoder", "layer", "pooling", *shown.values()], cells) + "\n" + notes + drawn


def dynamics_outcome(
    runs: list[str],
    train: str,
    test: str | None,
    *,
    pooling: Pooling,
    figures: Path | None,
    device: str,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Rank and accuracy at every checkpoint, how they correlate, and the same as a table."""
    from anechoic.eval.dynamics import dynamics
    from anechoic.pages.tables import text_table

    found = dynamics(runs, train=train, test=test, seed=seed, pooling=pooling, device=device)
    if figures is not None:
        from anechoic.pages.figures import draw_dynamics

        draw_dynamics(found, figures / "dynamics")
    keys = ("run", "alpha_min", "seen", "accuracy", "entropy_rows", "rank_rows", "rank_columns")
    text = text_table(keys, [[point[key] for key in keys] for point in found["points"]])
    if not found["correlations"]:
        return found, text + "\nNo checkpoint is common to all runs, so there is no correlation."
    columns = ("seen", "runs", "r_rows", "low_rows", "high_rows", "r_columns")
    table = text_table(columns, [[row[key] for key in columns] for row in found["correlations"]])
    return found, f"{text}\n\n{table}"
