"""The demo: two autoencoders of drawings that differ in their shortcuts only, trained and evaluated.

It chooses what the evaluator measures and words the result; the page is in demo_page.py.
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

from anechoic.config import Config, adopt, differences, from_json, to_json
from anechoic.data import open_source
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder, baselines, flat, open_encoder
from anechoic.eval.eval_data import EvalData
from anechoic.eval.evaluator import EvalSpec, Evaluator, Subject
from anechoic.eval.metrics.retrieval import facet, retrieval_ranks
from anechoic.pages.tables import percent, text_table
from anechoic.recipes import recipe
from anechoic.runtime.run import last_seen
from anechoic.runtime.subprocesses import Subprocesses
from anechoic.storage.files import read_json, write_json

# Objects in several styles; no label is read in training.
SOURCE = "emoji"
# Name of the run -> its alpha_min.
ARMS = {"residual": 1.0, "decayed": 0.6}


@dataclass(frozen=True)
class Demo:
    """rows: one per encoder, of its last block. layers: measure -> arm -> value per layer, the embedding first.

    across: encoder -> layer -> (nearest, rank) as `retrieval_ranks` returns them, of the mean token.
    """

    rows: list[dict[str, Any]]
    layers: dict[str, dict[str, list[float]]]
    across: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]
    subjects: dict[str, Subject]
    training_seconds: float


def run_demo(out: Path, *, samples: int, seed: int) -> Demo:
    """samples: the budget of each arm."""
    train_arms(out, samples=samples, seed=seed)
    training_seconds = max(float(read_json(out / name / "results.json")["seconds"]) for name in ARMS)
    encoders = {name: open_encoder(out / name) for name in ARMS}
    drawings = EvalData(None, open_source(SOURCE, channels=3), None, None)
    subjects = {name: extract(encoder, drawings, layers="all") for name, encoder in encoders.items()}
    beside = {encoder.name: encoder for encoder in baselines(encoders["decayed"], seed=seed)}
    # Ranks of thousands of pixels take longer than the rest together, and their echo is 1 by definition.
    pixels = extract(beside["raw pixels"], drawings, layers=(-1,), metrics=("retrieval",))
    untrained = extract(beside["untrained"], drawings, layers=(0, -1))
    every = {"raw pixels": pixels, "untrained": untrained, **subjects}
    found = {name: measure(subject) for name, subject in every.items()}
    across = {name: ranks_across_styles(subject) for name, subject in every.items()}
    rows = [last_row(name, subject, found[name], drawings) for name, subject in every.items()]
    layers = {words: {name: column(found[name], key) for name in ARMS} for key, words in LAYERS.items()}
    return Demo(rows, layers, across, subjects, training_seconds)


# ---- training


def train_arms(out: Path, *, samples: int, seed: int) -> None:
    """Train both arms at the same time, a process each; a finished arm is skipped and an interrupted one resumes."""
    out.mkdir(parents=True, exist_ok=True)
    configs = {name: arm(alpha_min, samples=samples, seed=seed) for name, alpha_min in ARMS.items()}
    processes: dict[str, subprocess.Popen] = {}
    with Subprocesses() as children:  # stopped or failed, each saves before it ends
        for name, config in configs.items():
            if is_trained(out / name, config):
                continue
            write_json(out / f"{name}.json", to_json(config))
            command = [sys.executable, "-m", "anechoic.training", str(out / f"{name}.json"), str(out / name)]
            with open(out / f"{name}.log", "w") as log:
                processes[name] = children.start(command, stdout=log, stderr=log)
        if processes:
            follow(out, processes, children, total=samples * len(processes))
    for name, process in processes.items():
        if process.returncode:
            log_file = out / f"{name}.log"
            last = "".join(log_file.read_text().strip().splitlines()[-1:])
            raise UserError(f"The {name} autoencoder could not be trained: {last} (see {log_file})")


def arm(alpha_min: float, *, samples: int, seed: int) -> Config:
    config = recipe("demo_mae")
    return replace(
        config,
        data=replace(config.data, source=SOURCE),
        shortcut=replace(config.shortcut, alpha_min=alpha_min),
        optim=replace(config.optim, samples=samples),
        seed=seed,
    )


def is_trained(run: Path, config: Config) -> bool:
    """Whether the arm is finished; one that was made with other settings is refused before the other is started."""
    if not (run / "results.json").exists():
        return False
    frozen = from_json(read_json(run / "config.json"))
    changed = differences(frozen, adopt(config, frozen))
    if changed:
        raise UserError(f"{run} was trained with other settings ({'; '.join(changed)}): choose another --out.")
    return True


def follow(out: Path, processes: dict[str, subprocess.Popen], children: Subprocesses, *, total: int) -> None:
    """One bar for both, read from their metrics, until both have ended."""
    with tqdm(total=total, unit="img", unit_scale=True, desc="training both", mininterval=1, file=sys.stderr) as bar:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            children.check()
            seen = sum(last_seen(out / name) for name in processes)
            bar.update(seen - bar.n)
        children.check()
        bar.update(sum(last_seen(out / name) for name in processes) - bar.n)


# ---- evaluation

# What is measured of every layer -> how it is called on the page.
LAYERS = {
    "retrieval_mean": "same object, mean token (%)",
    "retrieval_class": "same object, class token (%)",
    "rank_columns_mean": "effective rank, centered",
    "cka_mean": "echo (CKA with the embedding)",
}


MEASURED = ("retrieval", "rank", "echo")


def extract(encoder: Encoder, drawings: EvalData, *, layers: Any, metrics: tuple[str, ...] = MEASURED) -> Subject:
    spec = EvalSpec(metrics, layers=layers, poolings=poolings_of(encoder))
    return Evaluator(spec, cached=False).extract(encoder, drawings)


def poolings_of(encoder: Encoder) -> tuple[Any, ...]:
    return tuple(name for name in ("class", "mean") if name in encoder.poolings)


def measure(subject: Subject) -> list[dict[str, Any]]:
    """Measure retrieval across styles, effective rank and echo of every layer and token."""
    return Evaluator(subject.spec).measure(subject).rows


def column(rows: list[dict[str, Any]], key: str) -> list[float]:
    """Return one value per layer; shares in percent."""
    name, _, pooling = key.rpartition("_")
    values = [row[name] for row in rows if row["pooling"] == pooling]
    return [percent(value) for value in values] if name == "retrieval" else [float(value) for value in values]


def ranks_across_styles(subject: Subject) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return for every layer (mean token) the nearest drawing in another style and the rank of the same object."""
    objects, styles = (facet(subject, name) for name in ("object", "style"))
    means = {layer: x for (layer, pooling), x in subject.sets.items() if pooling == "mean"}
    return {layer: retrieval_ranks(x, objects, styles) for layer, x in means.items()}


def last_row(name: str, subject: Subject, rows: list[dict[str, Any]], drawings: EvalData) -> dict[str, Any]:
    """Return the row of the last layer, frozen."""
    encoder = subject.encoder
    last = {row["pooling"]: row for row in rows if row["layer"] == len(encoder.widths) - 1}
    row: dict[str, Any] = {"encoder": name, "mean": percent(last["mean"]["retrieval"])}
    row["class"] = percent(last["class"]["retrieval"]) if "class" in last else None
    # Whitening thousands of channels takes too long.
    wide = name == "raw pixels"
    more = ("group_vote",) if wide else ("retrieval_whitened", "group_vote")
    whole = Evaluator(EvalSpec(more, layers=(-1,), poolings=("mean",))).measure(subject).rows[0]
    row["whitened"] = None if wide else percent(whole["retrieval_whitened"])
    tokens = EvalSpec(("retrieval",), poolings=("mean",))
    row["tokens"] = (
        None if wide else percent(Evaluator(tokens, cached=False).run(flat(encoder), drawings).rows[0]["retrieval"])
    )
    row["kind"] = percent(whole["group_vote"])
    return {**row, "rank": last["mean"].get("rank_columns"), "echo": last["mean"].get("cka")}


# ---- words

HEADER = {
    "encoder": "encoder",
    "mean": "mean token",
    "whitened": "whitened",
    "class": "class token",
    "tokens": "all tokens",
    "kind": "kind",
    "rank": "eff. rank",
    "echo": "echo (CKA)",
}


def table(rows: list[dict[str, Any]]) -> str:
    return text_table(list(HEADER.values()), [[found[key] for key in HEADER] for found in rows])


def verdict(demo: Demo) -> str:
    """Return the result in words, and how far it can be trusted."""
    by_name = {found["encoder"]: found for found in demo.rows}
    residual, decayed = by_name["residual"], by_name["decayed"]
    gap = decayed["mean"] - residual["mean"]
    words = "ahead of" if gap > 0 else "behind" if gap < 0 else "level with"
    by = f" by {abs(gap):.1f} points" if gap else ""
    bests = {name: best_block(values) for name, values in demo.layers[LAYERS["retrieval_mean"]].items()}
    pixels, untrained = by_name["raw pixels"]["mean"], by_name["untrained"]["mean"]
    tokens = max(residual["tokens"], decayed["tokens"])
    return (
        f"After this short training the decayed encoder is {words} the residual one{by}: the nearest drawing in "
        f"another style is the same object in {decayed['mean']:.1f} against {residual['mean']:.1f} % of cases (mean "
        f"token, last block; untrained {untrained:.1f} %). Block by block the decayed one is best after block "
        f"{bests['decayed'][0]} ({bests['decayed'][1]:.1f} %), the residual one after block {bests['residual'][0]} "
        f"({bests['residual'][1]:.1f} %). Raw pixels find {pixels:.1f} %: they keep the layout, which a mean over "
        f"patches loses; all patch tokens together find {tokens:.1f} %. This is one seed and one short "
        f"training, which decides nothing about the method: docs/evidence/emoji-styles.md has five seeds at a fair "
        f"learning rate, and docs/when-does-it-pay.md when to expect the paper's gains."
    )


def best_block(values: list[float]) -> tuple[int, float]:
    best = int(np.argmax(values))
    return best, values[best]


def points(records: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    known = [(float(record["seen"]), float(record[key])) for record in records if key in record]
    return [seen for seen, _ in known], [value for _, value in known]
