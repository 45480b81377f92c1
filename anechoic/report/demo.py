"""The main job in one go: two autoencoders that differ in their shortcuts alone, trained, evaluated and drawn.

It chooses what the evaluator measures and words the result; the page is html.py's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from anechoic.config import to_json
from anechoic.errors import UserError
from anechoic.evals.analysis import tsne
from anechoic.evals.encoders import Encoder, baselines, open_encoder
from anechoic.evals.evaluator import EvalSpec, Evaluation, Evaluator, Subject
from anechoic.evals.labelled import Labelled, open_labelled
from anechoic.evals.reconstruction import reconstructions
from anechoic.recipes import recipe
from anechoic.report import figures
from anechoic.report.explanation import images_of, names_of, sampled
from anechoic.report.tables import percent, text_table
from anechoic.runtime.children import Children
from anechoic.runtime.files import write_json
from anechoic.runtime.run import read_metrics

TRAIN, TEST = "digits:train", "digits:test"
# Name of the run -> its alpha_min.
ARMS = {"residual": 1.0, "decayed": 0.6}
NEIGHBOURS = 20


@dataclass(frozen=True)
class Demo:
    """rows: one per encoder, of its last layer; layers: measure -> arm -> value per layer; files: pictures."""

    rows: list[dict[str, Any]]
    layers: dict[str, dict[str, list[float]]]
    files: dict[str, Path]
    training_seconds: float


def run_demo(out: Path, *, samples: int, seed: int) -> Demo:
    """samples: the budget of each arm."""
    started = time.perf_counter()
    train_arms(out, samples=samples, seed=seed)
    training_seconds = time.perf_counter() - started
    encoders = {name: open_encoder(out / name) for name in ARMS}
    labelled = open_labelled(TRAIN, TEST, channels=next(iter(encoders.values())).channels)
    found = {name: evaluate(encoder, labelled, layers="all", seed=seed) for name, encoder in encoders.items()}
    layers = {
        "k-NN accuracy (%)": {name: percents(arm.column("knn", pooling="mean")) for name, (arm, _) in found.items()},
        "effective rank": {name: arm.column("rank_columns", pooling="mean") for name, (arm, _) in found.items()},
        "echo (CKA)": {name: arm.column("cka", pooling="mean") for name, (arm, _) in found.items()},
    }
    of_decayed = {encoder.name: encoder for encoder in baselines(encoders["decayed"], seed=seed)}
    compared = {name: of_decayed[name] for name in ("raw pixels", "untrained")}
    rows = [
        last_row(name, *evaluate(encoder, labelled, layers=(0, -1), seed=seed)) for name, encoder in compared.items()
    ]
    rows += [last_row(name, *measured) for name, measured in found.items()]
    files = draw(layers, {name: subject for name, (_, subject) in found.items()}, out, seed=seed)
    return Demo(rows, layers, files, training_seconds)


# ---- training


def train_arms(out: Path, *, samples: int, seed: int) -> None:
    """Both at once, a process and a core each; a finished arm returns at once and a stopped one goes on."""
    out.mkdir(parents=True, exist_ok=True)
    processes = {}
    with Children() as children:  # stopped or failed, each saves before it ends
        for name, alpha_min in ARMS.items():
            config = recipe("demo_mae")
            config = replace(
                config,
                shortcut=replace(config.shortcut, alpha_min=alpha_min),
                optim=replace(config.optim, samples=samples),
                seed=seed,
            )
            write_json(out / f"{name}.json", to_json(config))
            command = [sys.executable, "-m", "anechoic.train", str(out / f"{name}.json"), str(out / name)]
            with open(out / f"{name}.log", "w") as log:
                processes[name] = children.start(command, stdout=log, stderr=log)
        follow(out, processes, children, total=samples * len(processes))
    for name, process in processes.items():
        if process.returncode:
            story = out / f"{name}.log"
            last = "".join(story.read_text().strip().splitlines()[-1:])
            raise UserError(f"The {name} autoencoder could not be trained: {last} ({story} has the whole story)")


def follow(out: Path, processes: dict[str, subprocess.Popen], children: Children, *, total: int) -> None:
    """One bar for both, read from their metrics, until both have ended."""
    with tqdm(total=total, unit="img", unit_scale=True, desc="training both", file=sys.stderr) as bar:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            children.check()
            seen = sum(last_seen(out / name) for name in processes)
            bar.update(seen - bar.n)
        children.check()
        bar.update(sum(last_seen(out / name) for name in processes) - bar.n)


def last_seen(run: Path) -> int:
    records = read_metrics(run)
    return int(records[-1]["seen"]) if records else 0


# ---- evaluation


def evaluate(encoder: Encoder, labelled: Labelled, *, layers: Any, seed: int) -> tuple[Evaluation, Subject]:
    """k-NN, rank and echo of these layers, the linear probe of the last."""
    spec = EvalSpec(("knn", "rank", "echo"), layers=layers, neighbours=(NEIGHBOURS,), seed=seed)
    subject = Evaluator(spec).extract(encoder, labelled)
    found = Evaluator(spec).measure(subject)
    probes = Evaluator(EvalSpec(("probe",), seed=seed)).measure(subject)
    probed = {row["pooling"]: row["probe"] for row in probes.rows}
    last = len(encoder.widths) - 1
    rows = [row | ({"probe": probed[row["pooling"]]} if row["layer"] == last else {}) for row in found.rows]
    return replace(found, rows=rows), subject


def last_row(name: str, found: Evaluation, subject: Subject) -> dict[str, Any]:
    """What the last layer is worth, frozen: k-NN and linear probe of each token, rank and echo of the mean token."""
    last = {row["pooling"]: row for row in found.rows if row["layer"] == len(subject.encoder.widths) - 1}
    row: dict[str, Any] = {"encoder": name}
    for pooling in ("class", "mean"):
        for kind in ("knn", "probe"):
            row[f"{kind}_{pooling}"] = percent(last[pooling][kind]) if pooling in last else None
    return {**row, "rank": last["mean"]["rank_columns"], "echo": last["mean"].get("cka")}


def percents(values: list[float]) -> list[float]:
    return [percent(value) for value in values]


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
        f"against the residual one; its last layer has effective rank {decayed['rank']:.1f} against "
        f"{residual['rank']:.1f}. Raw digits already are a good representation "
        f"({by_name['raw pixels']['knn_mean']:.1f} % k-NN), so an echo of the input is worth keeping here. The paper "
        f"reports its gains after some 100,000 updates on images whose pixels say little of their class: expect them "
        f"with a budget and data of that kind, not from this minute."
    )


def draw(
    layers: dict[str, dict[str, list[float]]], subjects: dict[str, Subject], out: Path, *, seed: int
) -> dict[str, Path]:
    """The pictures by name: curves, layers, and for each arm its reconstructions and its map of the test set."""
    folder = out / "figures"
    metrics = {name: read_metrics(out / name) for name in subjects}
    losses = {name: points(records, "loss") for name, records in metrics.items()}
    held_out = {name: points(records, "held_out_loss") for name, records in metrics.items()}
    by_layer = {
        measure: {name: dict(enumerate(values)) for name, values in arms.items()} for measure, arms in layers.items()
    }
    files = {
        "curves": figures.draw_curves(
            {"training loss": losses, "held-out loss": held_out}, folder / "curves", xlabel="samples seen"
        )[0],
        "layers": figures.draw_layers(by_layer, folder / "layers")[0],
    }
    for name, subject in subjects.items():
        vectors, labels = subject.sets[len(subject.encoder.widths) - 1, "mean"], subject.labels
        assert labels is not None
        shown = reconstructions(subject.encoder, images_of(subject, sampled(len(labels), 6, seed=seed)), seed=seed)
        files[f"{name} reconstructions"] = figures.draw_reconstructions(*shown, folder / f"reconstructions-{name}")[0]
        flat = np.asarray(tsne(vectors, seed=seed))
        files[f"{name} map"] = figures.draw_tsne(flat, labels, folder / f"map-{name}", names=names_of(subject))[0]
    return files


def points(records: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    known = [(float(record["seen"]), float(record[key])) for record in records if key in record]
    return [seen for seen, _ in known], [value for _, value in known]
