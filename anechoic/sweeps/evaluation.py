"""Evaluate a trained trial for its record. Numbers are percent or a metric's own unit, per layer from 0 (embedding)."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.data import Subset, open_source
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder, baselines, flat, run_encoder
from anechoic.eval.eval_data import EvalData, evenly, open_eval_data, split
from anechoic.eval.evaluator import EvalSpec, Evaluation, Evaluator, Subject
from anechoic.eval.features import Pooling
from anechoic.runtime.checkpoint import checkpoints

if TYPE_CHECKING:
    from anechoic.sweeps.trial import EvalPlan

# Samples for effective ranks.
RANK_SAMPLES = 2000
BRANCH_RANKS = ("writer_rank", "output_rank")
COMPONENT_SHARES = ("common_share", "first_share", "three_share", "look_share")


def settings_of(plan: EvalPlan, *, seed: int) -> dict[str, Any]:
    """Return the settings that all specs of a plan share."""
    return {
        "neighbors": (plan.neighbors,),
        "protocol": plan.protocol,
        "max_train": plan.max_train,
        "max_test": plan.max_test,
        "rank_samples": RANK_SAMPLES,
        "seed": seed,
    }


def evaluate_encoder(run_dir: Path, plan: EvalPlan, *, seed: int) -> dict[str, Any]:
    """Return k-NN, rank and norm of every layer and token, probes of the last, k-NN at the kept checkpoints."""
    encoder = run_encoder(run_dir)
    eval_data = open_eval_data(plan.train, plan.test or None, channels=encoder.channels, pixels=encoder.pixels)
    poolings: tuple[Pooling, ...] = tuple(p for p in ("class", "mean") if p in encoder.poolings)
    common = settings_of(plan, seed=seed) | {"poolings": poolings}
    votes = ("knn", "knn_standardized", *(["knn_whitened"] if plan.whitened else []))
    every = EvalSpec((*votes, "rank", "norm"), layers="all", **common)
    subject = Evaluator(every, cached=False).extract(encoder, eval_data)
    found = Evaluator(every).measure(subject)
    metrics: dict[str, Any] = {"layers": {pooling: by_layer(found, pooling, votes) for pooling in poolings}}
    for pooling in poolings:
        for kind in votes:
            metrics[f"{kind}_{pooling}"] = metrics["layers"][pooling][kind][-1]
    if plan.probe:
        probes = Evaluator(EvalSpec(("probe",), **common)).measure(subject)
        metrics |= {f"probe_{pooling}": 100 * probes.value("probe", pooling=pooling) for pooling in poolings}
    if plan.probe_layers:
        layers = tuple(layer for layer in plan.probe_layers if layer < len(encoder.widths))
        spec = EvalSpec(("probe",), layers=layers, **common | {"poolings": ("mean",), "protocol": "logistic"})
        probes = Evaluator(spec).measure(subject)
        metrics["probe_layers"] = {str(row["layer"]): 100 * row["probe"] for row in probes.rows}
    if plan.selection:
        metrics["selection"] = held_out_votes(encoder, plan, every, common)
    metrics["rank"] = metrics["layers"]["mean"]["rank"][-1]
    metrics["entropy"] = metrics["layers"]["mean"]["entropy"][-1]
    if plan.anatomy:
        add_anatomy(metrics, subject)
    if plan.retrieval:
        add_retrieval(metrics, encoder, plan, seed=seed)
    if plan.checkpoints:
        names = ("knn", "knn_standardized", "rank", *(["branches"] if plan.anatomy else []))
        spec = EvalSpec(names, **common)
        metrics["over_time"] = [
            evaluate_checkpoint(path, eval_data, spec) for path in checkpoints(run_dir / "checkpoints")
        ]
    if plan.pictures:
        metrics["pictures"] = keep_pictures(encoder, subject, seed=seed)
    if plan.same_shape:
        metrics["same_shape"] = same_shape(encoder, plan)
    return metrics


def held_out_votes(encoder: Encoder, plan: EvalPlan, every: EvalSpec, common: dict[str, Any]) -> dict[str, Any]:
    """Return k-NN of every layer and token and probes of the last, tested on held-out training images."""
    share = plan.max_test / (plan.max_train + plan.max_test)
    parts = split(
        open_source(plan.train, labels=True, channels=encoder.channels, pixels=encoder.pixels), holdout=share, seed=0
    )
    votes = tuple(name for name in every.metrics if name.startswith("knn"))
    subject = Evaluator(replace(every, metrics=votes), cached=False).extract(encoder, parts)
    found = Evaluator(replace(every, metrics=votes)).measure(subject)
    probes = Evaluator(EvalSpec(("probe",), **common)).measure(subject)
    return {
        pooling: {kind: [100 * value for value in found.column(kind, pooling=pooling)] for kind in votes}
        | {"probe": 100 * probes.value("probe", pooling=pooling)}
        for pooling in every.poolings
    }


def add_retrieval(metrics: dict[str, Any], encoder: Encoder, plan: EvalPlan, *, seed: int) -> None:
    """Add retrieval of the same object in another style: of every layer and token, and of untrained baselines."""
    source = open_source(plan.retrieval, channels=encoder.channels, pixels=encoder.pixels)
    drawings = EvalData(None, source, None, None)
    poolings: tuple[Pooling, ...] = tuple(metrics["layers"])
    names = ("retrieval", "retrieval_standardized", "retrieval_whitened")
    every = EvalSpec(names, layers="all", poolings=poolings)
    subject = Evaluator(every, cached=False).extract(encoder, drawings)
    found = Evaluator(every).measure(subject)
    votes = EvalSpec(("group_vote",), poolings=poolings, neighbors=(plan.neighbors,))
    groups = Evaluator(votes).measure(subject)
    for pooling in poolings:
        for name in names:
            values = [100 * value for value in found.column(name, pooling=pooling)]
            metrics["layers"][pooling][name] = values
            metrics[f"{name}_{pooling}"] = values[-1]
        metrics[f"group_vote_{pooling}"] = 100 * groups.value("group_vote", pooling=pooling)
    plain = ("retrieval", "retrieval_standardized", "group_vote")
    untrained, pixels, _ = baselines(encoder, seed=seed)
    metrics["beside"] = {}
    for other in (flat(encoder), *((untrained, pixels) if plan.baselines else ())):
        spec = EvalSpec(plain, poolings=poolings if other is untrained else ("mean",))
        rows = Evaluator(spec, cached=False).run(other, drawings).rows
        metrics["beside"][other.name] = {f"{key}_{row['pooling']}": 100 * row[key] for row in rows for key in plain}


def add_anatomy(metrics: dict[str, Any], subject: Subject) -> None:
    """Add shares of the components of every layer and token, and a rank per branch."""
    found = Evaluator(replace(subject.spec, metrics=("components", "branches"))).measure(subject)
    for pooling, values in metrics["layers"].items():
        values |= {name: found.column(name, pooling=pooling) for name in COMPONENT_SHARES}
    metrics |= {name: found.network[name] for name in BRANCH_RANKS}


def by_layer(found: Evaluation, pooling: str, votes: Sequence[str]) -> dict[str, list[float]]:
    """Return one value per layer, under the names of a record. votes: the kinds of k-NN."""
    return {
        **{kind: [100 * value for value in found.column(kind, pooling=pooling)] for kind in votes},
        **ranks_by_layer(found, pooling),
        "norm": found.column("norm", pooling=pooling),
    }


def ranks_by_layer(found: Evaluation, pooling: str) -> dict[str, list[float]]:
    names = {"entropy": "entropy_rows", "rank": "rank_rows", "entropy_centered": "entropy_columns"}
    return {name: found.column(value, pooling=pooling) for name, value in names.items()}


def evaluate_checkpoint(path: Path, eval_data: EvalData, spec: EvalSpec) -> dict[str, Any]:
    """Return a point of a curve over training: the last layer by k-NN and rank."""
    found = Evaluator(spec, cached=False).run(run_encoder(path), eval_data)
    row: dict[str, Any] = {"seen": int(path.name)}
    for pooling in spec.poolings:
        for kind in ("knn", "knn_standardized"):
            row[f"{kind}_{pooling}"] = 100 * found.value(kind, pooling=pooling)
        row[f"entropy_{pooling}"] = found.value("entropy_rows", pooling=pooling)
    return row | {name: values for name, values in found.network.items() if name in BRANCH_RANKS}


def evaluate_classifier(run_dir: Path, plan: EvalPlan, *, seed: int) -> dict[str, Any]:
    """Return the test accuracy of the trained head, and the effective rank of every layer's mean token."""
    encoder = run_encoder(run_dir)
    eval_data = open_eval_data(plan.train, plan.test or None, channels=encoder.channels, pixels=encoder.pixels)
    spec = EvalSpec(("accuracy", "rank"), layers="all", poolings=("mean",), **settings_of(plan, seed=seed))
    found = Evaluator(spec, cached=False).run(encoder, eval_data)
    return {"accuracy": 100 * found.network["accuracy"], "layers": {"mean": ranks_by_layer(found, "mean")}}


# ---- denoisers


def evaluate_denoiser(run_dir: Path, plan: EvalPlan, *, source: str, seed: int) -> dict[str, Any]:
    """Return the distance of generated to real images, and the probe over layers and noise levels."""
    metrics: dict[str, Any] = {}
    if plan.samples:
        metrics |= compare_samples(run_dir, plan, real=plan.real or source, seed=seed)
    if plan.train:
        metrics |= probe_denoiser(run_dir, plan, seed=seed)
    return metrics


def compare_samples(run_dir: Path, plan: EvalPlan, *, real: str, seed: int) -> dict[str, Any]:
    """Return Frechet distance, precision and recall of `samples` images to at most four times as many real ones."""
    from anechoic.diffusion.generate import Request, generate, image_batches
    from anechoic.eval.extractors import extractor_named
    from anechoic.eval.frechet import compare, measure_images
    from anechoic.runtime.devices import pick_device

    made = generate(Request(run=str(run_dir), num=plan.samples, seed=seed), progress=False).pixels
    extractor = extractor_named(plan.extractor, device=pick_device("auto"))
    images = open_source(real, channels=made.shape[1])
    chosen = Subset(images, evenly(len(images), 4 * plan.samples))
    sides = [
        measure_images(image_batches(chosen, batch_size=64), extractor, images={}),
        measure_images(made.split(64), extractor, images={}),
    ]
    with warnings.catch_warnings():
        # Biased at few images (docs/protocol.md), equally for every trial of a table.
        warnings.filterwarnings("ignore", message=".* the Frechet distance is biased upwards")
        found = compare(*sides, seed=0)
    return {"frechet": found[extractor.receipt()["metric"]], **{name: found[name] for name in ("precision", "recall")}}


def probe_denoiser(run_dir: Path, plan: EvalPlan, *, seed: int) -> dict[str, Any]:
    """Return the test accuracy at the (noise, layer) that is best on held-out training data."""
    from anechoic.eval.denoisers import open_noisy
    from anechoic.runtime.devices import pick_device

    denoiser = open_noisy(run_dir, device=pick_device("auto"))
    eval_data = open_eval_data(plan.train, plan.test or None, channels=denoiser.channels, pixels=denoiser.pixels)
    common = settings_of(plan, seed=seed)
    every = EvalSpec(("probe",), layers="all", noise=plan.noise, **common)
    subjects = dict(zip(plan.noise, Evaluator(every, cached=False).subjects(denoiser, eval_data), strict=True))
    rows = [
        {"noise": level, "layer": row["layer"], "held_out": 100 * row["probe"]}
        for level, subject in subjects.items()
        for row in Evaluator(every).measure(subject.for_selection()).rows
    ]
    best = max(rows, key=lambda row: row["held_out"])
    chosen = EvalSpec(("probe",), layers=(best["layer"],), noise=(best["noise"],), **common)
    tested = Evaluator(chosen).measure(subjects[best["noise"]])
    ranks = Evaluator(replace(every, metrics=("rank",))).measure(subjects[best["noise"]])
    return {
        "probe": 100 * tested.value("probe", pooling="mean"),
        "chosen": best,
        "held_out": rows,
        "entropy": ranks.column("entropy_rows", pooling="mean"),
    }


# ---- pictures


def keep_pictures(encoder: Encoder, subject: Subject, *, seed: int) -> dict[str, Any]:
    """Return a map of the test images, patch colors and reconstructions of the first ones, as packed arrays."""
    from anechoic.eval.feature_cache import batches
    from anechoic.eval.features import patch_maps
    from anechoic.eval.projections import eigenvector_colors, tsne
    from anechoic.eval.reconstruction import reconstructions, to_pixels

    labels, classes = subject.labels, subject.eval_data.classes
    assert labels is not None
    images = next(batches(encoder, subject.eval_data.test, device="cpu"))[:8]
    originals, hidden, predictions = reconstructions(encoder, images, seed=seed)
    return {
        "map": {
            "points": np.asarray(tsne(subject.sets[len(encoder.widths) - 1, "mean"], seed=seed)).tolist(),
            "labels": [int(label) for label in labels],
            "names": list(classes or map(str, range(int(labels.max()) + 1))),
        },
        "colors": {
            "images": packed(to_pixels(encoder, images)),
            "colors": packed(eigenvector_colors(patch_maps(encoder.model, images)).numpy(force=True)),
        },
        "reconstructions": {
            "images": packed(originals[:4]),
            "hidden": packed(hidden[:4].astype(np.float32)),
            "predictions": packed(predictions[:4]),
        },
    }


def same_shape(encoder: Encoder, plan: EvalPlan) -> float:
    """Return how often two patches of a scene's shape are more alike than one of them and one of the ground, in %.

    A scene without two patches of its shape does not count.
    """
    from anechoic.data.embedded import Scenes
    from anechoic.eval.feature_cache import batches
    from anechoic.eval.features import patch_maps

    scenes = open_source(plan.test, channels=encoder.channels, pixels=encoder.pixels)
    if not isinstance(scenes, Scenes):
        raise UserError(f"Only scenes have masks, not {plan.test}: give scenes:test as test data, or same_shape 0.")
    chosen = Subset(scenes, range(plan.same_shape))
    maps = torch.cat([patch_maps(encoder.model, images).float() for images in batches(encoder, chosen, device="cpu")])
    masks = torch.stack([scenes.mask(index) > 0 for index in range(plan.same_shape)]).float()
    shapes = F.adaptive_avg_pool2d(masks, maps.shape[1]) > 0.5
    found = [
        triplets(one[shape], one[~shape])
        for one, shape in zip(maps, shapes, strict=True)
        if 1 < shape.sum() < shape.numel()
    ]
    return 100 * float(np.mean(found))


def triplets(shape: Tensor, ground: Tensor) -> float:
    """Return the share of (a, b, c), a and b of shape (n, D) and c of ground (m, D), where a is nearer to b by cosine.

    Ties count half.
    """
    shape, ground = F.normalize(shape, dim=1), F.normalize(ground, dim=1)
    within = (shape @ shape.T)[~torch.eye(len(shape), dtype=torch.bool)].view(len(shape), -1, 1)
    difference = within - (shape @ ground.T)[:, None, :]
    return float((difference.sign().mean() + 1) / 2)


def packed(values: np.ndarray) -> dict[str, Any]:
    """Return numbers in 0 .. 1 as bytes in base64, with their shape."""
    data = (values.clip(0, 1) * 255).round().astype(np.uint8)
    return {"shape": list(data.shape), "bytes": base64.b64encode(data.tobytes()).decode()}


def unpacked(kept: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(kept["bytes"]), np.uint8).reshape(kept["shape"]) / 255
