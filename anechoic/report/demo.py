"""The main job in one go: two autoencoders that differ in their shortcuts alone, trained, judged and drawn.

It calls what the verbs call and adds nothing of its own to what is measured; the page is written by pages/.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from anechoic.data import open_source
from anechoic.errors import UserError
from anechoic.evals.analyses import reconstructions
from anechoic.evals.analysis import effective_rank, linear_cka, tsne
from anechoic.evals.bank import batches
from anechoic.evals.encoders import Encoder, baselines, open_encoder
from anechoic.evals.features import Key, Pooling
from anechoic.evals.knn import knn_accuracy
from anechoic.evals.labelled import LabelledFeatures, labelled_features, open_labelled
from anechoic.evals.probe import logistic_probe
from anechoic.report import figures
from anechoic.report.tables import percent, text_table
from anechoic.runtime.run import read_metrics

TRAIN, TEST = "digits:train", "digits:test"
# Name of the run -> its alpha_min.
TWINS = {"residual": 1.0, "decayed": 0.6}
NEIGHBOURS = 20


@dataclass(frozen=True)
class Showcase:
    """rows: one per encoder, of its last layer; layers: measure -> encoder -> value per layer; files: pictures."""

    rows: list[dict[str, Any]]
    layers: dict[str, dict[str, list[float]]]
    files: dict[str, Path]
    training_seconds: float


def run_showcase(out: Path, *, samples: int, seed: int) -> Showcase:
    """samples: the budget of each twin."""
    started = time.perf_counter()
    train_twins(out, samples=samples, seed=seed)
    training_seconds = time.perf_counter() - started
    encoders = {name: open_encoder(out / name) for name in TWINS}
    rows, layers, features = judge(encoders, seed=seed)
    files = draw(encoders, layers, features, out, seed=seed)
    return Showcase(rows, layers, files, training_seconds)


# ---- training


def train_twins(out: Path, *, samples: int, seed: int) -> None:
    """Both at once, a process and a core each; a finished twin returns at once and a stopped one goes on."""
    out.mkdir(parents=True, exist_ok=True)
    processes = {}
    for name, alpha_min in TWINS.items():
        with open(out / f"{name}.log", "w") as log:
            line = command(out / name, alpha_min, samples=samples, seed=seed)
            processes[name] = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        follow(out, processes, total=samples * len(processes))
    except BaseException:
        for process in processes.values():  # each saves before it ends
            process.send_signal(signal.SIGTERM)
        raise
    finally:
        for process in processes.values():
            process.wait()
    for name, process in processes.items():
        if process.returncode:
            story = out / f"{name}.log"
            last = "".join(story.read_text().strip().splitlines()[-1:])
            raise UserError(f"The {name} autoencoder could not be trained: {last} ({story} has the whole story)")


def command(run: Path, alpha_min: float, *, samples: int, seed: int) -> list[str]:
    verb = [sys.executable, "-m", "anechoic.cli", "train", "demo_mae", "--out", str(run)]
    return [*verb, "--shortcut.alpha-min", str(alpha_min), "--optim.samples", str(samples), "--seed", str(seed)]


def follow(out: Path, processes: dict[str, subprocess.Popen], *, total: int) -> None:
    """One bar for both, read from their metrics, until both have ended."""
    with tqdm(total=total, unit="img", unit_scale=True, desc="training both", file=sys.stderr) as bar:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.5)
            seen = sum(last_seen(out / name) for name in processes)
            bar.update(seen - bar.n)
        bar.update(sum(last_seen(out / name) for name in processes) - bar.n)


def last_seen(run: Path) -> int:
    records = read_metrics(run)
    return int(records[-1]["seen"]) if records else 0


# ---- judging


def judge(
    encoders: dict[str, Encoder], *, seed: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, list[float]]], dict[str, LabelledFeatures]]:
    """Last-layer rows of raw pixels, the untrained network and the twins; every layer's measures of the twins."""
    channels = next(iter(encoders.values())).channels
    labelled = open_labelled(TRAIN, TEST, channels=channels)
    of_decayed = {encoder.name: encoder for encoder in baselines(encoders["decayed"], seed=seed)}
    judged = {"raw pixels": of_decayed["raw pixels"], "untrained": of_decayed["untrained"], **encoders}
    features = {
        name: labelled_features(encoder, labelled, layers="all" if name in encoders else (0, -1))
        for name, encoder in judged.items()
    }
    rows = [row(name, judged[name], features[name], seed=seed) for name in judged]
    layers: dict[str, dict[str, list[float]]] = {"k-NN accuracy (%)": {}, "effective rank": {}, "echo (CKA)": {}}
    for name, encoder in encoders.items():
        keys: list[Key] = [(layer, "mean") for layer in range(len(encoder.widths))]
        found = features[name]
        layers["k-NN accuracy (%)"][name] = [knn(found, key) for key in keys]
        layers["effective rank"][name] = [effective_rank(found.test[key]).rank for key in keys]
        layers["echo (CKA)"][name] = [linear_cka(found.test[key], found.test[keys[0]]) for key in keys]
    return rows, layers, features


def row(name: str, encoder: Encoder, features: LabelledFeatures, *, seed: int) -> dict[str, Any]:
    """What the last layer is worth, frozen: k-NN and linear probe of each token, rank and echo of the mean token."""
    last = len(encoder.widths) - 1
    found: dict[str, Any] = {"encoder": name}
    poolings: tuple[Pooling, ...] = ("class", "mean")
    for pooling in poolings:
        key = (last, pooling)
        found[f"knn_{pooling}"] = knn(features, key) if key in features.train else None
        found[f"probe_{pooling}"] = probe(features, key, seed=seed) if key in features.train else None
    found["rank"] = effective_rank(features.test[last, "mean"]).rank
    same_width = encoder.widths[0] == encoder.widths[last]
    found["echo"] = linear_cka(features.test[last, "mean"], features.test[0, "mean"]) if same_width else None
    return found


def knn(features: LabelledFeatures, key: Key) -> float:
    labels = (features.train_labels, features.test_labels)
    found = knn_accuracy(features.train[key], labels[0], features.test[key], labels[1], ks=(NEIGHBOURS,))
    return percent(found[NEIGHBOURS])


def probe(features: LabelledFeatures, key: Key, *, seed: int) -> float:
    labels = (features.train_labels, features.test_labels)
    return percent(logistic_probe(features.train[key], labels[0], features.test[key], labels[1], seed=seed).accuracy)


# ---- words and pictures

HEADER = {
    "encoder": "frozen encoder",
    "knn_class": "k-NN class",
    "knn_mean": "k-NN mean",
    "probe_class": "probe class",
    "probe_mean": "probe mean",
    "rank": "eff. rank",
    "echo": "echo (CKA)",
}


def table(rows: list[dict[str, Any]]) -> str:
    return text_table(list(HEADER.values()), [[found[key] for key in HEADER] for found in rows])


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the table says about the two, whichever way it came out, and what a longer budget changes."""
    by_name = {found["encoder"]: found for found in rows}
    residual, decayed = by_name["residual"], by_name["decayed"]
    gap = decayed["knn_mean"] - residual["knn_mean"]
    words = "gains" if gap > 0 else "loses" if gap < 0 else "changes nothing:"
    return (
        f"After this short training the decayed encoder {words} {abs(gap):.1f} points of k-NN accuracy (mean token) "
        f"against its residual twin; its last layer has effective rank {decayed['rank']:.1f} against "
        f"{residual['rank']:.1f}. Raw digits already are a good representation "
        f"({by_name['raw pixels']['knn_mean']:.1f} % k-NN), so an echo of the input is worth keeping here. The paper "
        f"reports its gains after some 100,000 updates on images whose pixels say little of their class: expect them "
        f"with a budget and data of that kind, not from this minute."
    )


def draw(
    encoders: dict[str, Encoder],
    layers: dict[str, dict[str, list[float]]],
    features: dict[str, LabelledFeatures],
    out: Path,
    *,
    seed: int,
) -> dict[str, Path]:
    """The pictures by name: curves, layers, and for each twin its reconstructions and its map of the test set."""
    folder = out / "figures"
    metrics = {name: read_metrics(out / name) for name in encoders}
    losses = {name: points(records, "loss") for name, records in metrics.items()}
    held_out = {name: points(records, "held_out_loss") for name, records in metrics.items()}
    files = {
        "curves": figures.draw_curves(
            {"training loss": losses, "held-out loss": held_out}, folder / "curves", xlabel="samples seen"
        )[0],
        "layers": figures.draw_layers(layers, folder / "layers")[0],
    }
    source = open_source(TEST, labels=True, channels=encoders["decayed"].channels)
    for name, encoder in encoders.items():
        images = next(batches(encoder, source, device="cpu"))[:6]
        found = reconstructions(encoder, images, seed=seed)
        files[f"{name} reconstructions"] = figures.draw_reconstructions(*found, folder / f"reconstructions-{name}")[0]
        last: Key = (len(encoder.widths) - 1, "mean")
        flat = tsne(features[name].test[last], seed=seed)
        labels = features[name].test_labels
        names = [str(digit) for digit in range(10)]
        files[f"{name} map"] = figures.draw_tsne(np.asarray(flat), labels, folder / f"map-{name}", names=names)[0]
    return files


def points(records: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    known = [(float(record["seen"]), float(record[key])) for record in records if key in record]
    return [seen for seen, _ in known], [value for _, value in known]


def save_results(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
