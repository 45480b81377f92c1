"""The page of the demo: pick a thing, and see block by block whether an encoder finds it drawn by another hand.

Below that the table, every layer, maps, reconstructions and the training. Its own script and style are assets/demo.*.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data.emoji import SHEETS, read_index
from anechoic.eval.evaluator import Subject
from anechoic.eval.metrics.knn import nearest
from anechoic.eval.metrics.retrieval import facet
from anechoic.eval.projections import tsne
from anechoic.eval.reconstruction import reconstructions
from anechoic.pages import figures
from anechoic.pages.charts import line_chart
from anechoic.pages.demo import ARMS, HEADER, Demo, points, verdict
from anechoic.pages.explanation import images_of, sampled
from anechoic.pages.html import (
    ASSETS,
    Html,
    Section,
    data_uri,
    embedded,
    figure,
    heading,
    machine_line,
    note,
    page,
    point_map,
    table,
)
from anechoic.pages.thumbnails import sheet
from anechoic.runtime.run import read_metrics

MAPPED_THINGS, NEIGHBORS = 200, 6


def demo_page(demo: Demo, out: Path, result: Mapping[str, Any]) -> str:
    """result: the outcome as JSON, embedded in the page."""
    subject = demo.subjects["decayed"]
    samples, seed = result["config"]["samples"], result["seed"]
    things, styles = (len(np.unique(facet(subject, name))) for name in ("object", "style"))
    lead = (
        f"{things:,} things, each drawn by {styles} hands. The hand changes the pixels, the thing stays. Two masked "
        f"autoencoders saw the drawings, {samples:,} of them each, without being told what or whose they are: one with "
        f"residual connections (alpha_min {ARMS['residual']:g}), one whose identity shortcuts decay with depth "
        f"(alpha_min {ARMS['decayed']:g}), all else equal. Which one has learned the thing, and which the drawing?"
    )
    sections = [
        Section("Pick a thing", [opening(), picker(demo)]),
        Section("What they are worth", worth(demo, things)),
        Section("Block by block", [charts(demo)]),
        Section("Maps", maps(demo, seed=seed)),
        Section("Reconstructions", [drawn_reconstructions(demo, out / "figures", seed=seed)]),
        Section("Training", [training_curves(out)]),
    ]
    footer = (
        machine_line(result["machine"], result["commit"], seed) + " Drawings: Noto Emoji, Fluent UI Emoji, Twemoji and "
        "EmojiOne 2, under the licenses in anechoic/data/emoji_sheets/ATTRIBUTION.md."
    )
    return page(
        "One thing, five hands" if styles == 5 else f"One thing, {styles} hands",
        sections,
        lead=lead,
        footer=footer,
        data=result,
        style=(ASSETS / "demo.css").read_text(encoding="utf-8"),
        script=(ASSETS / "demo.js").read_text(encoding="utf-8"),
    )


# ---- the picker


def picker(demo: Demo) -> Html:
    """A thing, a hand that draws it and a hand to search; the rest is the script's."""
    index = read_index()
    subject = demo.subjects["decayed"]
    things, styles = (np.unique(facet(subject, name)) for name in ("object", "style"))
    layers = [(name, layer, found) for name, by_layer in demo.across.items() for layer, found in by_layer.items()]
    data = {
        "things": [spaced(index["names"][thing]) for thing in things],
        "tiles": things,
        "kinds": index["group_names"],
        "kind": index["groups"][things],
        "hands": [index["styles"][style] for style in styles],
        "sheets": [data_uri(SHEETS / f"{index['styles'][style]}.webp") for style in styles],
        "columns": index["columns"],
        "rows": -(-len(index["names"]) // index["columns"]),
        "searches": [{"encoder": name, "layer": layer} for name, layer, _ in layers],
        "nearest": packed([found[0] for _, _, found in layers]),
        "place": packed([found[1] for _, _, found in layers]),
    }
    without = "<noscript>Choosing needs JavaScript; the numbers below do not.</noscript>"
    return Html(f'<div id="picker">{embedded(data)}{without}</div>')


def spaced(name: str) -> str:
    return name.replace("-", " ")


def opening() -> str:
    return (
        "Its drawing is compared with all drawings by the other hand, by the mean token after every block. The page "
        "opens with a thing that both networks find after their last block and neither after its first; most are not "
        "found."
    )


def packed(arrays: list[np.ndarray]) -> str:
    """Unsigned 16-bit numbers, little-endian, as base64; -1 becomes 65535."""
    return base64.b64encode(np.stack(arrays).astype("<i2").view("<u2").tobytes()).decode()


# ---- numbers


def worth(demo: Demo, things: int) -> list[str]:
    caption = (
        f"Frozen, last block. How often the nearest of {things:,} drawings by another hand is the same thing, in per "
        "cent, mean over pairs of hands, by the mean token (as it is, and whitened), class token, and all patch tokens "
        "as one vector; how often the nearest drawings of other things by other hands are of the same kind; effective "
        "rank and echo of the mean token."
    )
    rows = [[found[key] for key in HEADER] for found in demo.rows]
    return [note(verdict(demo)), table(list(HEADER.values()), rows), caption]


def charts(demo: Demo) -> Html:
    drawn = [
        line_chart(
            {name: (list(range(len(values))), list(values)) for name, values in arms.items()},
            title=words,
            xlabel="block (0: embedding)",
            from_zero=True,
        )
        for words, arms in demo.layers.items()
    ]
    return figure("Every layer of both; what is hidden in the last one may be found in another.", drawn)


def training_curves(out: Path) -> Html:
    metrics = {name: read_metrics(out / name) for name in ARMS}
    drawn = [
        line_chart(
            {name: points(records, key) for name, records in metrics.items()}, title=words, xlabel="drawings seen"
        )
        for key, words in (("loss", "training loss"), ("held_out_loss", "loss on held-out drawings"))
    ]
    return figure("Both have the same budget, rate and order of drawings.", drawn)


# ---- pictures


def maps(demo: Demo, *, seed: int) -> list[str]:
    """Both encoders on the same drawings, colored by the hand: mixed colors mean that the thing counts."""
    parts: list[str] = [
        "Drawings that lie close are alike to the encoder (t-SNE of the last block's mean token). Colors are hands: "
        "where they mix, the thing counts for more than the drawing."
    ]
    for name, subject in demo.subjects.items():
        parts += [heading(f"{name}, alpha_min {ARMS[name]:g}"), hands_map(subject, seed=seed)]
    return parts


def hands_map(subject: Subject, *, seed: int) -> Html:
    index = read_index()
    things, styles = (facet(subject, name) for name in ("object", "style"))
    shown = np.unique(things)[sampled(len(np.unique(things)), MAPPED_THINGS, seed=seed)]
    rows = np.flatnonzero(np.isin(things, shown))
    vectors = subject.sets[len(subject.encoder.widths) - 1, "mean"][rows]
    found = nearest(vectors, vectors, k=NEIGHBORS + 1).indices.tolist()
    source = subject.eval_data.test
    pictures = [image.permute(1, 2, 0).numpy() for image in source.read_many(rows.tolist())]  # type: ignore[union-attr]
    return point_map(
        tsne(vectors, seed=seed),
        names=[spaced(index["names"][thing]) for thing in things[rows]],
        groups=index["styles"],
        group=styles[rows].tolist(),
        sheet=sheet(pictures, side=48),
        neighbors=[[j for j in near if j != i][:NEIGHBORS] for i, near in enumerate(found)],
        filter_label="Hand",
        caption=f"{len(rows):,} drawings of {len(np.unique(shown))} things.",
    )


def drawn_reconstructions(demo: Demo, folder: Path, *, seed: int) -> Html:
    pictures = []
    for name, subject in demo.subjects.items():
        assert subject.test is not None
        images = images_of(subject, sampled(len(subject.test.ids), 6, seed=seed))
        found = reconstructions(subject.encoder, images, seed=seed)
        pictures += figures.draw_reconstructions(*found, folder / f"reconstructions-{name}", title=name)[:1]
    return figure("Three quarters of the patches are hidden and predicted; residual and decayed.", pictures)
