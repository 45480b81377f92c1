"""The command `evaluate`: any registered metric of an encoder's frozen features."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anechoic.choices import CheckpointMetric, KnnScaling, Pooling, ProbeProtocol, Weights
from anechoic.cli._command import command
from anechoic.cli._shared import refuse_swapped, skipped_rows, skipped_text
from anechoic.cli.options import Data, Device, ImageSize, Layers, PathLike, Run, Seed, Test, WeightsOption
from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.eval.denoisers import Denoiser
    from anechoic.eval.encoders import Encoder
    from anechoic.eval.eval_data import EvalData
    from anechoic.eval.evaluator import EvalSpec

DEFAULT = ("knn", "rank")
# Metrics that compare layers with each other, for which all of them are read by default.
OF_ALL_LAYERS = {"echo", "stream", "branches"}
# Which tokens the published probes read.
PROTOCOL_POOLING: dict[ProbeProtocol, tuple[Pooling, ...]] = {"in100": ("all",), "mae": ("class",), "logistic": ()}
SEGMENT = "segment"
CHOICES = ("scaling", "noise", "layer", "pooling", "k")


@command
def evaluate(
    run: Run,
    data: Data,
    /,
    *,
    metrics: Sequence[str] = (),
    test: Test = None,
    holdout: float = 0.2,
    layers: Layers = None,
    pooling: Sequence[Pooling] = (),
    scaling: Sequence[KnnScaling] = ("raw",),
    k: Sequence[int] = (),
    temperature: float = 0.07,
    protocol: ProbeProtocol = "logistic",
    epochs: int | None = None,
    batch_size: int | None = None,
    noise: Sequence[float] = (),
    samples: int | None = None,
    baselines: bool = True,
    figures: PathLike | None = None,
    runs: Sequence[PathLike] = (),
    clusters: int | None = None,
    classes: int | None = None,
    void: int = 255,
    mapping: PathLike | None = None,
    image_list: PathLike | None = None,
    segment_channels: int = 100,
    segment_ema: float = 0.99,
    image_size: ImageSize = None,
    weights: WeightsOption = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> Outcome:
    """Evaluate frozen features by any registered metric: k-NN, linear probes, effective rank, segmentation and more.

    Labels are a sub-folder's name, the column or array `label`. Where several layers, poolings, scalings or k are
    evaluated, one of them is chosen on held-out training data; its test accuracy is reported, and the whole table
    beside it. `anechoic evaluate --metrics help` lists the metrics.

    Example: anechoic evaluate runs/mine photos/train --test photos/val --metrics knn probe rank --layers all

    Args:
        metrics: names of metrics; default knn, if there are labels, and rank.
        holdout: share of DATA to test on when there is no --test.
        pooling: class token, mean (of patches) or all (tokens); default: each that the model has.
        scaling: of the features of k-NN: raw, standardized (each channel to deviation 1 over the train images) or
            whitened (all directions; not for raw pixels); several are compared.
        k: numbers of neighbors; default those of 10, 20, 100 and 200 that there are train samples for.
        temperature: a neighbor's vote is exp(similarity / temperature).
        protocol: of probe: logistic (its regularizer chosen on held-out train data), in100 (the paper's ImageNet-100
            probe), mae (MAE's ImageNet-1K probe: augmented, so every epoch runs the encoder).
        epochs: of the probes in100 (default 200) and mae (90), or of segment (201).
        batch_size: of the probes in100 (default 1024) and mae (16384), or images per graph of segment (40).
        noise: for a denoiser (U-ViT, SiT): noise levels from 0 to 1 at which its features are read.
        samples: maximum number of images of each set, evenly spaced.
        baselines: also evaluate the untrained network, raw pixels and a constant.
        figures: a folder for pictures of layers, neighbors, patches and reconstructions, as PNG and SVG.
        runs: more runs that differ in alpha_min: rank and accuracy at every checkpoint of all of them, and how the two
            correlate.
        clusters: number of clusters of segment; default: as many as classes.
        classes: number of classes of the masks of segment; default: found in them.
        void: mask value of the pixels that segment does not count.
        mapping: a file for segment that maps mask values to classes (JSON, or lines of two numbers).
        image_list: a text file that names the images segment uses.
        segment_channels: channels of the soft assignment of segment.
        segment_ema: EMA decay of the tables of segment per batch; lower it for few epochs.
    """
    started = time.perf_counter()
    if "help" in metrics:
        from anechoic.cli.list import listing

        return listing("metrics")
    refuse_swapped(run, data)
    chosen: dict[str, Any] = {}
    drawn = None if figures is None else Path(figures)
    if SEGMENT in metrics:
        from anechoic.cli._segment import segment

        if len(metrics) > 1:
            raise UserError("segment reads masks instead of labels: evaluate it without other --metrics.")
        result, text, chosen["image_size"] = segment(
            str(run),
            str(data),
            clusters=clusters,
            classes=classes,
            void=void,
            mapping=None if mapping is None else Path(mapping),
            image_list=None if image_list is None else Path(image_list),
            samples=samples,
            image_size=image_size,
            weights=weights,
            epochs=epochs or 201,
            batch=batch_size or 40,
            channels=segment_channels,
            ema=segment_ema,
            baselines=baselines,
            figures=drawn,
            device=device,
            seed=seed,
        )
    elif runs:
        if weights is not None:
            raise UserError("--runs evaluates every checkpoint as a run would use it: omit --weights.")
        result, text = evaluate_checkpoints(
            [run, *runs],
            data,
            test,
            metric="knn" if "knn" in metrics else "probe",
            pooling=pooling,
            figures=drawn,
            device=device,
            seed=seed,
        )
    else:
        from anechoic.eval.evaluator import EvalSpec

        if samples is not None and samples < 2:
            raise UserError(f"An evaluation needs at least 2 samples, not {samples}.")
        encoder: Encoder | Denoiser
        if noise:
            encoder = open_denoiser(run, pooling, image_size, device, weights)
        else:
            encoder = open_encoder(run, image_size, weights)
            if not pooling and "probe" in metrics:
                pooling = PROTOCOL_POOLING[protocol] if "class" in encoder.poolings else ("mean",)
        source = open_data(
            data,
            test,
            holdout=holdout,
            seed=seed,
            images={"channels": encoder.channels, "pixels": encoder.pixels},
            split=bool(noise) or protocol == "mae",
        )
        default = DEFAULT if source.test_labels is not None else ("rank",)
        names = scaled(metrics or default, scaling)
        require_two_classes(names, source)
        if figures is not None:
            names = tuple(dict.fromkeys([*names, "rank", "echo"]))
        if layers is None:
            layers = "all" if noise or figures is not None or OF_ALL_LAYERS & set(names) else (-1,)
        spec = EvalSpec(
            names,
            layers="all" if layers == "all" else tuple(layers),
            poolings=tuple(pooling),
            neighbors=neighbors(tuple(k), source, holdout=holdout, samples=samples),
            temperature=temperature,
            protocol=protocol,
            epochs=epochs,
            batch_size=batch_size,
            noise=tuple(noise),
            max_train=samples,
            max_test=samples,
            holdout=holdout,
            seed=seed,
        )
        chosen |= {"metrics": names, "k": spec.neighbors, "layers": spec.layers}
        compared = baselines and not noise and protocol != "mae"
        result, text = evaluate_features(encoder, source, spec, baselines=compared, figures=drawn, device=device)
    return Outcome(chosen, result, seed, time.perf_counter() - started, text)


# ---- what is evaluated


def open_encoder(run: PathLike, image_size: int | None, weights: Weights | None = None) -> Encoder:
    from anechoic.eval import encoders

    return encoders.open_encoder(run, image_size=image_size, weights=weights)


def open_denoiser(
    run: PathLike, pooling: Sequence[Pooling], image_size: int | None, device: str, weights: Weights | None
) -> Denoiser:
    from anechoic.eval.denoisers import open_noisy
    from anechoic.runtime.devices import pick_device

    if str(run).startswith(("timm:", "transformers:")):
        raise UserError("--noise is for denoisers trained here: name a run directory.")
    if tuple(pooling) not in ((), ("mean",)):
        raise UserError("A denoiser's features are the mean of its patches: omit --pooling with --noise.")
    if image_size is not None:
        raise UserError("A denoiser takes images of the size it was trained on: omit --image-size with --noise.")
    return open_noisy(str(run), device=pick_device(device), weights=weights)


def open_data(
    data: PathLike, test: PathLike | None, *, holdout: float, seed: int, images: dict[str, Any], split: bool
) -> EvalData:
    """Return both splits, or the whole of DATA as the test split, of which metrics of labels hold out a part.

    images: channels and pixels that the encoder reads.
    """
    from anechoic.data.split import hold_out_share
    from anechoic.eval.eval_data import open_eval_data, open_maybe_labeled

    if test is not None or split:
        there = None if test is None else str(test)
        return open_eval_data(str(data), there, holdout=holdout, seed=seed, **images)
    found = open_maybe_labeled(str(data), **images)
    if found.test_labels is not None:
        hold_out_share(len(found.test), holdout, seed=seed)
    return found


def scaled(names: Sequence[str], scalings: Sequence[KnnScaling]) -> tuple[str, ...]:
    """("knn",) with raw and whitened -> ("knn", "knn_whitened")"""
    from anechoic.eval.selection import SCALED

    found = [
        name if scaling == "raw" or name not in SCALED else f"{name}_{scaling}"
        for name in names
        for scaling in scalings
    ]
    return tuple(dict.fromkeys(found))


def require_two_classes(names: Sequence[str], data: EvalData) -> None:
    import numpy as np

    from anechoic.eval.metrics.registry import find_metric

    labels = data.test_labels if data.train_labels is None else data.train_labels
    needed = any("labels" in find_metric(name).needs for name in names)
    if needed and labels is not None and len(np.unique(labels)) < 2:
        raise UserError(
            "The train data has one class only, so there is nothing to classify; give at least two classes."
        )


def neighbors(asked: tuple[int, ...], data: EvalData, *, holdout: float, samples: int | None) -> tuple[int, ...]:
    """Return the numbers of neighbors asked for, else the usual ones that there are train samples for."""
    from anechoic.eval.metrics.knn import KS

    train = len(data.test if data.train is None else data.train)
    train = min(train, samples or train)
    if data.train is None:
        train -= round(holdout * train)
    if asked and max(asked) > train:
        raise UserError(f"k = {max(asked)} is more than the {train} train samples; choose smaller --k.")
    return asked or tuple(k for k in KS if k <= train) or (train,)


# ---- features


def evaluate_features(
    encoder: Encoder | Denoiser,
    data: EvalData,
    spec: EvalSpec,
    *,
    baselines: bool,
    figures: Path | None,
    device: str,
) -> tuple[dict[str, Any], str]:
    """Return the numbers and the text of one encoder, with the output of its baselines beside it."""
    from anechoic.eval.encoders import Encoder
    from anechoic.eval.evaluator import Evaluator
    from anechoic.eval.metrics.registry import columns, find_metric
    from anechoic.eval.selection import choose, families, selection_rows

    evaluator = Evaluator(spec, device=device)
    subjects = list(evaluator.subjects(encoder, data))
    found = [evaluator.measure(subject) for subject in subjects]
    rows = [row for one in found for row in one.table(spec.metrics)]
    selected = [row for subject in subjects for row in selection_rows(subject, spec, device=device)]
    chosen = {name: choose(rows, selected, members) for name, members in families(spec.metrics).items() if selected}
    table = [{"encoder": encoder.name, **row} for row in rows]
    if baselines:
        assert isinstance(encoder, Encoder), "a denoiser has no baselines"
        table += baseline_rows(encoder, data, spec, device=device)
    counts = found[-1].counts
    if data.train is None and chosen:  # of one source, a part was held out to test on
        tested = round(spec.holdout * counts["test_samples"])
        counts = {**counts, "train_samples": counts["test_samples"] - tested, "test_samples": tested}
    per_layer = columns([name for name in spec.metrics if find_metric(name).per == "layer"])
    network = {name: value for name, value in found[-1].network.items() if name not in per_layer}
    metrics: dict[str, Any] = {
        **{name: choice["accuracy"] for name, choice in chosen.items()},
        **network,
        "chosen": chosen,
        "rows": table,
        **counts,
        "skipped": skipped_rows(dict.fromkeys(item for one in found for item in one.skipped)),
    }
    if figures is not None:
        from anechoic.pages.explanation import draw_all

        metrics["figures"] = [str(path) for path in draw_all(subjects[-1], rows, figures)]
    return metrics, evaluation_text(metrics, spec.metrics) + skipped_text(metrics["skipped"])


def baseline_rows(encoder: Encoder, data: EvalData, spec: EvalSpec, *, device: str) -> list[dict[str, Any]]:
    """Return the last layer of the untrained network, raw pixels and a constant; pixels are too many to whiten."""
    from anechoic.eval import encoders
    from anechoic.eval.evaluator import Evaluator
    from anechoic.eval.metrics.registry import find_metric

    rows = []
    for baseline in encoders.baselines(encoder, seed=spec.seed):
        names = [name for name in spec.metrics if find_metric(name).per != "network"]
        if baseline.name == "raw pixels":
            names = [name for name in names if not name.endswith("_whitened")]
        if not names:
            continue
        # The echo is measured against layer 0.
        layers = (0, -1) if "echo" in names else (-1,)
        poolings = tuple(pooling for pooling in spec.poolings if pooling in baseline.poolings)
        one = Evaluator(replace(spec, metrics=tuple(names), layers=layers, poolings=poolings), device=device)
        last = len(baseline.widths) - 1
        rows += [
            {"encoder": baseline.name, **row} for row in one.run(baseline, data).table(names) if row["layer"] == last
        ]
    return rows


# ---- text


def metric_descriptions() -> dict[str, str]:
    from anechoic.eval.metrics.registry import metric_table

    found = {row["name"]: row["description"] for row in metric_table()}
    return {**found, SEGMENT: "mIoU of spectral clusters of the patches against masks, without labels"}


def evaluation_text(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    from anechoic.eval.metrics.registry import columns, find_metric, shares
    from anechoic.pages.tables import percent, text_table

    rows = [flat_row(row) for row in metrics["rows"]]
    titles = {"encoder": "encoder", "noise": "noise", "layer": "layer", "pooling": "pooling", **columns(list(names))}
    accuracies = shares(list(names))

    def cell(row: Mapping[str, Any], name: str) -> Any:
        value = row.get(name)
        return percent(value) if name.partition(" ")[0] in accuracies and value is not None else value

    # "knn 20" is the column of knn at k = 20.
    shown = [
        column
        for name in titles
        for column in dict.fromkeys(key for row in rows for key in row)
        if column == name or column.startswith(f"{name} ")
    ]
    lines = []
    if rows:
        header = [titles[name.partition(" ")[0]] + name.partition(" ")[1] + name.partition(" ")[2] for name in shown]
        lines.append(text_table(header, [[cell(row, name) for name in shown] for row in rows]))
    of_network = columns([name for name in names if find_metric(name).per == "network"])
    lines += [f"{title}: {metrics[name]:.5g}" for name, title in of_network.items() if name in metrics]
    for name, choice in metrics["chosen"].items():
        which = ", ".join(f"{key} {choice[key]}" for key in CHOICES if key in choice)
        lines.append(
            f"{name}: {percent(choice['accuracy']):.2f} with {which}, chosen on held-out training data "
            f"({percent(choice['held_out']):.2f}); the largest of the table, selected on test labels, is "
            f"{percent(choice['test_maximum']):.2f}."
        )
    classes = f" of {metrics['classes']} classes" if "classes" in metrics else ""
    train = f"{metrics['train_samples']} train and " if metrics["train_samples"] else ""
    lines.append(f"{train}{metrics['test_samples']} test samples{classes}; accuracies in percent.")
    return "\n".join([*lines, *metrics.get("figures", ())])


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """{"knn": 0.5, "knn_by_k": {10: 0.5, 20: 0.6}} -> {"knn 10": 0.5, "knn 20": 0.6}; other tables stay in the JSON."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_by_k"):
            found |= {f"{name.removesuffix('_by_k')} {k}": accuracy for k, accuracy in value.items()}
        elif f"{name}_by_k" not in row and not isinstance(value, dict | list):
            found[name] = value
    return found


# ---- training dynamics


def evaluate_checkpoints(
    runs: Sequence[PathLike],
    data: PathLike,
    test: PathLike | None,
    *,
    metric: CheckpointMetric,
    pooling: Sequence[Pooling],
    figures: Path | None,
    device: str,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Return rank and accuracy at every checkpoint, how they correlate, and the same as a table."""
    from anechoic.eval.dynamics import dynamics
    from anechoic.pages.tables import text_table

    chosen = pooling[0] if pooling else open_encoder(runs[0], None).poolings[0]
    found = dynamics(
        [str(run) for run in runs],
        train=str(data),
        test=None if test is None else str(test),
        seed=seed,
        pooling=chosen,
        metric=metric,
        device=device,
    )
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
