"""The demo: two autoencoders of drawings that differ in their shortcuts only, evaluated; a fresh pair is trained.

A pair that comes with the package was trained longer and is shown first. Without one, the fresh pair is shown. The
page is in demo_page.py.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
from anechoic.runtime.checkpoint import checkpoints, path_of, run_path
from anechoic.runtime.run import last_seen
from anechoic.runtime.subprocesses import Subprocesses
from anechoic.storage.files import read_json, write_json

log = logging.getLogger("anechoic")

# Objects in several styles; no label is read in training.
SOURCE = "emoji"
# Name of the run -> its alpha_min.
ARMS = {"residual": 1.0, "decayed": 0.6}


# Names of the same two networks in the package, trained longer.
PRETRAINED = {name: f"emoji-{name}" for name in ARMS}
# Checkpoints of the fresh pair at which the curve has a point.
CURVE_POINTS = 5
# Seconds between two drawings of the losses into the open page.
REPORT_EVERY = 5.0
# Percentage points. The difference of the two arms varies with the seed by this standard deviation, by the mean token,
# raw as well as whitened (18 pairs of 96,000 drawings, docs/evidence).
SEED_DEVIATION = 0.65
NOISE = 2 * SEED_DEVIATION
# Numbers of the pair that comes with the package and those of its record, in percentage points: its weights are
# rounded to float16, and other CPUs add in another order.
TOLERANCE = 0.25

# Arm -> samples seen -> {"mean": %, "whitened": %} of the last block's mean token.
Curve = dict[str, dict[int, dict[str, float]]]


@dataclass(frozen=True)
class Demo:
    """One pair and the baselines. rows: one per encoder, of its last block. layers: measure -> arm -> value per layer,
    the embedding first. samples: drawings that each arm has seen.

    across: encoder -> layer -> (nearest, rank) as `retrieval_ranks` returns them, of the mean token.
    """

    rows: list[dict[str, Any]]
    layers: dict[str, dict[str, list[float]]]
    across: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]
    subjects: dict[str, Subject]
    samples: int


def pretrained_pair() -> dict[str, Path] | None:
    """Return the directories of the pair that comes with the package; None if this copy has none."""
    found = {name: run_path(shipped) for name, shipped in PRETRAINED.items()}
    return found if all(path.is_dir() for path in found.values()) else None


def evaluate_pair(paths: Mapping[str, Path], *, samples: int, seed: int) -> Demo:
    encoders = {name: open_encoder(path) for name, path in paths.items()}
    drawings = EvalData(None, open_source(SOURCE, channels=3), None, None)
    subjects = {name: extract(encoder, drawings, layers="all") for name, encoder in encoders.items()}
    beside = {encoder.name: encoder for encoder in baselines(encoders["decayed"], seed=seed)}
    # Ranks of thousands of pixels take longer than the rest together, and their echo is 1 by definition.
    pixels = extract(beside["raw pixels"], drawings, layers=(-1,), metrics=("retrieval",))
    untrained = extract(beside["untrained"], drawings, layers=(0, -1))
    every = {"raw pixels": pixels, "untrained": untrained, **subjects}
    found = {name: measure(subject) for name, subject in every.items()}
    across = {name: ranks_across_styles(subject) for name, subject in every.items()}
    rows = [last_row(name, subject, found[name]) for name, subject in every.items()]
    layers = {words: {name: column(found[name], key) for name in ARMS} for key, words in LAYERS.items()}
    return Demo(rows, layers, across, subjects, samples)


def evaluate_arms(out: Path) -> list[dict[str, Any]]:
    """Return the rows of the fresh pair."""
    drawings = EvalData(None, open_source(SOURCE, channels=3), None, None)
    subjects = {name: extract(open_encoder(out / name), drawings, layers=(0, -1)) for name in ARMS}
    rows = [last_row(name, subject, measure(subject)) for name, subject in subjects.items()]
    return with_tokens(rows, subjects)


def with_tokens(rows: list[dict[str, Any]], subjects: Mapping[str, Subject]) -> list[dict[str, Any]]:
    """Return the rows with what all patch tokens side by side retrieve; it takes as long as all else together."""
    spec = EvalSpec(("retrieval",), poolings=("mean",))

    def tokens(subject: Subject) -> float:
        rows = Evaluator(spec, cached=False).run(flat(subject.encoder), subject.eval_data).rows
        return percent(rows[0]["retrieval"])

    return [row | {"tokens": tokens(subjects[row["encoder"]])} if row["encoder"] in subjects else row for row in rows]


def check_record(demo: Demo, paths: Mapping[str, Path]) -> float:
    """Return the largest difference, in percentage points, between the pair's numbers and those of its records.

    Warn if it is beyond the tolerance.
    """
    found = []
    for row in demo.rows:
        if row["encoder"] in paths:
            metrics = read_json(paths[row["encoder"]] / "record.json")["metrics"]
            recorded = {
                "mean": metrics["retrieval_mean"],
                "whitened": metrics["retrieval_whitened_mean"],
                "class": metrics["retrieval_class"],
                "kind": metrics["group_vote_mean"],
            }
            found += [abs(row[key] - value) for key, value in recorded.items()]
            for pooling in ("mean", "class"):
                layers = demo.layers[LAYERS[f"retrieval_{pooling}"]][row["encoder"]]
                pairs = zip(layers, metrics["layers"][pooling]["retrieval"], strict=True)
                found += [abs(here - value) for here, value in pairs]
    if max(found) > TOLERANCE:
        log.warning(
            "The numbers of the pair that comes with the package differ from its record by up to %.2f points, beyond "
            "the tolerance of %g: was a file or the evaluation changed?",
            max(found),
            TOLERANCE,
        )
    return max(found)


# ---- training


def train_arms(out: Path, *, samples: int, seed: int, report: Callable[[Curve], None] = lambda curve: None) -> Curve:
    """Train both arms at the same time, a process each, and return the curve of what their checkpoints retrieve.

    A finished arm is skipped and an interrupted one resumes. report: called with the curve at every new point, and
    every few seconds for the losses.
    """
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
        curve = follow(out, processes, children, total=samples * len(processes), report=report)
    for name, process in processes.items():
        if process.returncode:
            log_file = out / f"{name}.log"
            last = "".join(log_file.read_text().strip().splitlines()[-1:])
            raise UserError(f"The {name} autoencoder could not be trained: {last} (see {log_file})")
    return add_points(curve, out, report)


def arm(alpha_min: float, *, samples: int, seed: int) -> Config:
    config = recipe("demo_mae")
    return replace(
        config,
        data=replace(config.data, source=SOURCE),
        shortcut=replace(config.shortcut, alpha_min=alpha_min),
        optim=replace(config.optim, samples=samples),
        save=replace(config.save, every=-(-samples // CURVE_POINTS), keep_last=CURVE_POINTS + 1),
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


def follow(
    out: Path,
    processes: dict[str, subprocess.Popen],
    children: Subprocesses,
    *,
    total: int,
    report: Callable[[Curve], None],
) -> Curve:
    """One bar for both, read from their metrics, until both have ended; the curve up to then."""
    curve: Curve = {name: {} for name in ARMS}
    bar = tqdm(total=total, unit="img", unit_scale=True, desc="training both", mininterval=1, file=sys.stderr)
    reported = time.monotonic()
    with bar:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            children.check()
            bar.update(sum(last_seen(out / name) for name in processes) - bar.n)
            add_points(curve, out, report)
            if time.monotonic() - reported > REPORT_EVERY:
                report(curve)  # the losses, between two points
                reported = time.monotonic()
        children.check()
        bar.update(sum(last_seen(out / name) for name in processes) - bar.n)
    return curve


def add_points(curve: Curve, out: Path, report: Callable[[Curve], None]) -> Curve:
    """Evaluate the checkpoints that the curve lacks, the earlier ones first."""
    missing = [
        (int(path.name), name)
        for name in ARMS
        for path in checkpoints(out / name / "checkpoints")
        if int(path.name) not in curve[name]
    ]
    for seen, name in sorted(missing):
        drawings = EvalData(None, open_source(SOURCE, channels=3), None, None)
        encoder = open_encoder(path_of(out / name / "checkpoints", seen))
        spec = EvalSpec(("retrieval", "retrieval_whitened"), poolings=("mean",))
        row = Evaluator(spec, cached=False).run(encoder, drawings).rows[0]
        curve[name][seen] = {"mean": percent(row["retrieval"]), "whitened": percent(row["retrieval_whitened"])}
        report(curve)
    return curve


# ---- evaluation

# What is measured of every layer -> how it is called on the page.
LAYERS = {
    "retrieval_whitened_mean": "same object, mean token whitened (%)",
    "retrieval_mean": "same object, mean token (%)",
    "retrieval_class": "same object, class token (%)",
    "rank_columns_mean": "effective rank, centered",
    "cka_mean": "echo (CKA with the embedding)",
}


MEASURED = ("retrieval", "retrieval_whitened", "rank", "echo")


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
    return [percent(value) for value in values] if name.startswith("retrieval") else [float(value) for value in values]


def ranks_across_styles(subject: Subject) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return for every layer (mean token) the nearest drawing in another style and the rank of the same object."""
    objects, styles = (facet(subject, name) for name in ("object", "style"))
    means = {layer: x for (layer, pooling), x in subject.sets.items() if pooling == "mean"}
    return {layer: retrieval_ranks(x, objects, styles) for layer, x in means.items()}


def last_row(name: str, subject: Subject, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the last layer, frozen, without `tokens`."""
    encoder = subject.encoder
    last = {row["pooling"]: row for row in rows if row["layer"] == len(encoder.widths) - 1}
    row: dict[str, Any] = {"encoder": name, "mean": percent(last["mean"]["retrieval"])}
    row["class"] = percent(last["class"]["retrieval"]) if "class" in last else None
    # Whitening thousands of channels takes half a minute.
    wide = name == "raw pixels"
    row["whitened"] = None if wide else percent(last["mean"]["retrieval_whitened"])
    whole = Evaluator(EvalSpec(("group_vote",), layers=(-1,), poolings=("mean",))).measure(subject).rows[0]
    row["kind"] = percent(whole["group_vote"])
    return {**row, "tokens": None, "rank": last["mean"].get("rank_columns"), "echo": last["mean"].get("cka")}


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


def verdict(
    rows: list[dict[str, Any]], *, samples: int, layers: Mapping[str, dict[str, list[float]]] | None = None
) -> str:
    """Return the result of a pair in words, and how far it can be trusted. layers: adds the best blocks."""
    by_name = {found["encoder"]: found for found in rows}
    residual, decayed = by_name["residual"], by_name["decayed"]
    bests = ""
    if layers is not None:
        best = {name: best_block(values) for name, values in layers[LAYERS["retrieval_whitened_mean"]].items()}
        bests = "Best are block {} of the decayed one ({:.1f} %) and block {} of the residual one ({:.1f} %). ".format(
            *best["decayed"], *best["residual"]
        )
    tokens = ""
    if decayed["tokens"] is not None:
        tokens = (
            f"All patch tokens side by side, which keep it, find {decayed['tokens']:.1f} against "
            f"{residual['tokens']:.1f} %. "
        )
    return (
        f"After {samples:,} drawings each, {compared(by_name)}. The nearest drawing in another style is the same "
        f"object in {decayed['whitened']:.1f} against {residual['whitened']:.1f} % of cases (whitened mean token, last "
        f"block; not whitened {decayed['mean']:.1f} against {residual['mean']:.1f} %). {bests}"
        f"{beside_pixels(by_name)} {tokens}"
        "One pair decides nothing about the method: docs/evidence/emoji-styles.md has more seeds, "
        "docs/when-does-it-pay.md has the cases in which to expect gains."
    )


def compared(by_name: Mapping[str, dict[str, Any]], *, key: str = "whitened") -> str:
    """Return which arm leads. No lead within the noise of one pair, nor at the level of the untrained network."""
    decayed, residual, untrained = (by_name[name][key] for name in ("decayed", "residual", "untrained"))
    if max(decayed, residual) <= untrained + NOISE:
        return f"neither encoder is better than the untrained network ({untrained:.1f} %)"
    gap = decayed - residual
    if abs(gap) <= NOISE:
        return f"the two encoders are level (a pair differs by up to {NOISE:.1f} points by its seed alone)"
    words = "ahead of" if gap > 0 else "behind"
    return f"the decayed encoder is {words} the residual one by {abs(gap):.1f} points (untrained: {untrained:.1f} %)"


def beside_pixels(by_name: Mapping[str, dict[str, Any]]) -> str:
    """Return what raw pixels find, and which arms find more."""
    pixels = by_name["raw pixels"]["mean"]
    above = [name for name in ARMS if by_name[name]["whitened"] > pixels + NOISE]
    if not above:
        return f"Raw pixels find {pixels:.1f} %: they keep the layout, which a mean over patches loses."
    words = "Both are" if len(above) == len(ARMS) else f"The {above[0]} one is"
    return f"{words} above raw pixels ({pixels:.1f} %), which keep the layout that a mean over patches loses."


def best_block(values: list[float]) -> tuple[int, float]:
    best = int(np.argmax(values))
    return best, values[best]


def points(records: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    known = [(float(record["seen"]), float(record[key])) for record in records if key in record]
    return [seen for seen, _ in known], [value for _, value in known]
