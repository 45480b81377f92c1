"""What a trained trial is worth: frozen features of an encoder, images of a denoiser, decisions of a classifier.

Every number is per cent or a measure's own unit, per layer from the embedding (0) to the output.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anechoic.data import Subset
from anechoic.evals.analysis import effective_rank
from anechoic.evals.encoders import Encoder, run_encoder
from anechoic.evals.features import Key, Pooling, extract
from anechoic.evals.knn import knn_accuracy
from anechoic.evals.labelled import Labelled, open_labelled
from anechoic.evals.probe import logistic_probe
from anechoic.runtime.checkpoint import checkpoints

if TYPE_CHECKING:
    from anechoic.paper.trial import EvalPlan

# Samples whose spectrum is measured.
RANK_SAMPLES = 2000


def evenly(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` indices of `count`, evenly spaced, so that ordered data gives every class its share."""
    return np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64)


def open_judged(evaluation: EvalPlan, *, channels: int) -> Labelled:
    whole = open_labelled(evaluation.train, evaluation.test, channels=channels)
    train, test = evenly(len(whole.train), evaluation.fitted), evenly(len(whole.test), evaluation.tested)
    return Labelled(
        Subset(whole.train, train),
        Subset(whole.test, test),
        whole.train_labels[train],
        whole.test_labels[test],
        whole.classes,
    )


class Judged:
    """Features of the fitted and the tested images, every layer, and what judges make of them."""

    def __init__(self, encoder: Encoder, labelled: Labelled, *, layers: Sequence[int] | None = None) -> None:
        from anechoic.evals.bank import batches

        self.labelled = labelled
        self.poolings: tuple[Pooling, ...] = tuple(p for p in ("class", "mean") if p in encoder.poolings)
        self.layers = list(layers if layers is not None else range(len(encoder.widths)))
        self.train, self.test = (
            extract(
                encoder.model,
                batches(encoder, source, device="auto"),
                layers=self.layers,
                poolings=self.poolings,
            )
            for source in (labelled.train, labelled.test)
        )

    def knn(self, key: Key, *, k: int, standardised: bool = False) -> float:
        """standardised: every channel to mean 0 and deviation 1 over the fitted images, which a cosine is blind to."""
        train, test = self.train[key], self.test[key]
        if standardised:
            mean, deviation = train.mean(axis=0), train.std(axis=0).clip(min=1e-12)
            train, test = ((x - mean) / deviation for x in (train, test))
        labels = (self.labelled.train_labels, self.labelled.test_labels)
        return 100 * knn_accuracy(train, labels[0], test, labels[1], ks=(k,))[k]

    def probe(self, key: Key, *, seed: int) -> float:
        labels = (self.labelled.train_labels, self.labelled.test_labels)
        return 100 * logistic_probe(self.train[key], labels[0], self.test[key], labels[1], seed=seed).accuracy

    def published_probe(self, key: Key, evaluation: EvalPlan, encoder: Encoder, *, seed: int) -> float:
        """As the paper (in100) or MAE (mae) fit it, instead of to convergence."""
        from anechoic.evals.labelled import LabelledFeatures
        from anechoic.evals.protocols import in100_rows, mae_rows

        layer, pooling = key
        if evaluation.protocol == "mae":
            (row,) = mae_rows(
                encoder,
                self.labelled,
                layers=(layer,),
                poolings=(pooling,),
                epochs=90,
                batch_size=16_384,
                device="auto",
                seed=seed,
            )
        else:
            labels = (self.labelled.train_labels, self.labelled.test_labels)
            features = LabelledFeatures({key: self.train[key]}, labels[0], {key: self.test[key]}, labels[1])
            (row,) = in100_rows(features, epochs=200, batch_size=1024, device="auto", seed=seed)
        return 100 * row["accuracy"]

    def ranks(self, key: Key) -> dict[str, float]:
        part = self.test[key][:RANK_SAMPLES]
        rows, columns = effective_rank(part, centre="rows"), effective_rank(part, centre="columns")
        return {"entropy": rows.entropy, "rank": rows.rank, "entropy_centred": columns.entropy}

    def norm(self, key: Key) -> float:
        return float(torch.as_tensor(self.test[key]).norm(dim=1).mean())


def judge_encoder(run_dir: Path, evaluation: EvalPlan, *, seed: int) -> dict[str, Any]:
    """k-NN, effective rank and norm of every layer and token; probes of the last; k-NN at the kept checkpoints."""
    encoder = run_encoder(run_dir)
    labelled = open_judged(evaluation, channels=encoder.channels)
    found = Judged(encoder, labelled)
    last = found.layers[-1]
    metrics: dict[str, Any] = {"layers": {}}
    for pooling in found.poolings:
        keys: list[Key] = [(layer, pooling) for layer in found.layers]
        table = [found.ranks(key) for key in keys]
        metrics["layers"][pooling] = {
            "knn": [found.knn(key, k=evaluation.neighbours) for key in keys],
            "knn_standardised": [found.knn(key, k=evaluation.neighbours, standardised=True) for key in keys],
            **{name: [row[name] for row in table] for name in table[0]},
            "norm": [found.norm(key) for key in keys],
        }
        for kind in ("knn", "knn_standardised"):
            metrics[f"{kind}_{pooling}"] = metrics["layers"][pooling][kind][-1]
        if evaluation.probe:
            metrics[f"probe_{pooling}"] = (
                found.probe((last, pooling), seed=seed)
                if evaluation.protocol == "logistic"
                else found.published_probe((last, pooling), evaluation, encoder, seed=seed)
            )
    if evaluation.probe_layers:
        metrics["probe_layers"] = {
            str(layer): found.probe((layer, "mean"), seed=seed) for layer in evaluation.probe_layers if layer <= last
        }
    metrics["rank"] = metrics["layers"]["mean"]["rank"][-1]
    metrics["entropy"] = metrics["layers"]["mean"]["entropy"][-1]
    if evaluation.checkpoints:
        metrics["over_time"] = [
            judge_checkpoint(path, labelled, evaluation) for path in checkpoints(run_dir / "checkpoints")
        ]
    if evaluation.pictures:
        metrics["pictures"] = keep_pictures(encoder, found, seed=seed)
    return metrics


def keep_pictures(encoder: Encoder, found: Judged, *, seed: int) -> dict[str, Any]:
    """A map of the tested images, colours of the first ones' patches, and their reconstructions, as packed arrays."""
    from anechoic.evals.analyses import reconstructions, to_pixels
    from anechoic.evals.analysis import eigenvector_colours, tsne
    from anechoic.evals.bank import batches
    from anechoic.evals.features import patch_maps

    last: Key = (found.layers[-1], "mean")
    images = next(batches(encoder, found.labelled.test, device="cpu"))[:8]
    originals, hidden, predictions = reconstructions(encoder, images, seed=seed)
    return {
        "map": {
            "points": np.asarray(tsne(found.test[last], seed=seed)).tolist(),
            "labels": [int(label) for label in found.labelled.test_labels],
            "names": list(found.labelled.classes or map(str, range(int(found.labelled.test_labels.max()) + 1))),
        },
        "colours": {
            "images": packed(to_pixels(encoder, images)),
            "colours": packed(eigenvector_colours(patch_maps(encoder.model, images)).numpy(force=True)),
        },
        "reconstructions": {
            "images": packed(originals[:4]),
            "hidden": packed(hidden[:4].astype(np.float32)),
            "predictions": packed(predictions[:4]),
        },
    }


def packed(values: np.ndarray) -> dict[str, Any]:
    """Numbers in 0 .. 1 as bytes in base64, with their shape."""
    data = (values.clip(0, 1) * 255).round().astype(np.uint8)
    return {"shape": list(data.shape), "bytes": base64.b64encode(data.tobytes()).decode()}


def unpacked(kept: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(kept["bytes"]), np.uint8).reshape(kept["shape"]) / 255


def judge_checkpoint(path: Path, labelled: Labelled, evaluation: EvalPlan) -> dict[str, Any]:
    """One point of a curve over training: the last layer by k-NN and rank."""
    encoder = run_encoder(path)
    last = len(encoder.widths) - 1
    found = Judged(encoder, labelled, layers=[last])
    row: dict[str, Any] = {"seen": int(path.name)}
    for pooling in found.poolings:
        row[f"knn_{pooling}"] = found.knn((last, pooling), k=evaluation.neighbours)
        row[f"knn_standardised_{pooling}"] = found.knn((last, pooling), k=evaluation.neighbours, standardised=True)
        row[f"entropy_{pooling}"] = found.ranks((last, pooling))["entropy"]
    return row


def judge_classifier(run_dir: Path, evaluation: EvalPlan) -> dict[str, Any]:
    """Test accuracy of the trained head, and effective rank of every layer's mean token."""
    encoder = run_encoder(run_dir)
    labelled = open_judged(evaluation, channels=encoder.channels)
    return {
        "accuracy": classifier_accuracy(run_dir, encoder, labelled),
        "layers": {"mean": layer_ranks(Judged(encoder, labelled))},
    }


def layer_ranks(found: Judged) -> dict[str, list[float]]:
    table = [found.ranks((layer, "mean")) for layer in found.layers]
    return {name: [row[name] for row in table] for name in table[0]}


@torch.inference_mode()
def classifier_accuracy(run_dir: Path, encoder: Encoder, labelled: Labelled) -> float:
    from anechoic.evals.bank import batches
    from anechoic.runtime.checkpoint import load

    model = load(run_dir).eval()
    right = 0
    labels = torch.as_tensor(labelled.test_labels)
    start = 0
    for images in batches(encoder, labelled.test, device="cpu"):
        right += int((model(images).argmax(dim=1) == labels[start : start + len(images)]).sum())
        start += len(images)
    return 100 * right / start


def judge_denoiser(run_dir: Path, evaluation: EvalPlan, *, source: str, seed: int) -> dict[str, Any]:
    """Distance of its images to the real ones, and the probe of its features over layers and noise levels."""
    metrics: dict[str, Any] = {}
    if evaluation.samples:
        metrics |= judge_samples(run_dir, evaluation, source=source, seed=seed)
    if evaluation.train:
        metrics |= probe_denoiser(run_dir, evaluation, seed=seed)
    return metrics


def judge_samples(run_dir: Path, evaluation: EvalPlan, *, source: str, seed: int) -> dict[str, Any]:
    """Frechet distance and its companions of `samples` images to at most four times as many real ones."""
    from anechoic.data import open_source
    from anechoic.diffusion.generation import Request, generate, image_batches
    from anechoic.evals.extractors import extractor_named
    from anechoic.evals.frechet import compare, measure_images

    made = generate(Request(run=str(run_dir), num=evaluation.samples, seed=seed), progress=False).pixels
    extractor = extractor_named(evaluation.extractor)
    real = open_source(source, channels=made.shape[1])
    chosen = Subset(real, evenly(len(real), 4 * evaluation.samples))
    sides = [
        measure_images(image_batches(chosen, batch_size=64), extractor, images={}),
        measure_images(made.split(64), extractor, images={}),
    ]
    with warnings.catch_warnings():
        # The estimate is biased at so few images, equally for every trial of a table; the page says how many.
        warnings.simplefilter("ignore")
        found = compare(*sides, seed=0)
    return {"frechet": found[extractor.receipt()["metric"]], **{name: found[name] for name in ("precision", "recall")}}


def probe_denoiser(run_dir: Path, evaluation: EvalPlan, *, seed: int) -> dict[str, Any]:
    """probe: test accuracy at the (noise, layer) that is best on held-out training data."""
    from anechoic.evals.noisy_probe import held_out_part, level_features, open_noisy
    from anechoic.evals.protocols import logistic_rows

    denoiser = open_noisy(run_dir)
    labelled = open_judged(evaluation, channels=denoiser.channels)
    by_level = {
        level: level_features(denoiser, labelled, level=level, layers="all", seed=seed) for level in evaluation.noise
    }
    rows = [
        {"noise": level, "layer": row["layer"], "held_out": 100 * row["accuracy"]}
        for level, features in by_level.items()
        for row in logistic_rows(held_out_part(features, seed=seed), seed=seed)
    ]
    best = max(rows, key=lambda row: row["held_out"])
    features = by_level[best["noise"]]
    key: Key = (best["layer"], "mean")
    only = replace(features, train={key: features.train[key]}, test={key: features.test[key]})
    (tested,) = logistic_rows(only, seed=seed)
    ranks = [
        effective_rank(features.test[layer, "mean"][:RANK_SAMPLES], centre="rows").entropy for layer, _ in features.test
    ]
    return {"probe": 100 * tested["accuracy"], "chosen": best, "held_out": rows, "entropy": ranks}
