"""The page of the demo: pick an object, and see block by block whether an encoder finds it in another style.

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

MAPPED_OBJECTS, NEIGHBORS = 200, 6
OPENING = (
    "The drawing is compared with all drawings of the other style, by the mean token after every block. The page opens "
    "with an object that both networks find after their last block and neither after its first; most are not found."
)


def demo_page(demo: Demo, out: Path, result: Mapping[str, Any]) -> str:
    """result: the outcome as JSON, embedded in the page."""
    subject = demo.subjects["decayed"]
    samples, seed = result["config"]["samples"], result["seed"]
    objects, styles = (len(np.unique(facet(subject, name))) for name in ("object", "style"))
    lead = (
        f"{objects:,} objects, each drawn in {styles} styles. The style changes the pixels, the object stays. Two "
        f"masked autoencoders were trained on {samples:,} drawings each, without labels: one with residual connections "
        f"(alpha_min {ARMS['residual']:g}), one whose identity shortcuts decay with depth (alpha_min "
        f"{ARMS['decayed']:g}), all else equal. Which one represents the object, and which the style?"
    )
    sections = [
        Section("Pick an object", [OPENING, picker(demo)]),
        Section("Results", worth(demo, objects)),
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
        "One object, five styles" if styles == 5 else f"One object, {styles} styles",
        sections,
        lead=lead,
        footer=footer,
        data=result,
        style=(ASSETS / "demo.css").read_text(encoding="utf-8"),
        script=(ASSETS / "demo.js").read_text(encoding="utf-8"),
    )


# ---- the picker


def picker(demo: Demo) -> Html:
    """Return the picker: an object, its style, and the style to search in; assets/demo.js does the rest."""
    index = read_index()
    subject = demo.subjects["decayed"]
    objects, styles = (np.unique(facet(subject, name)) for name in ("object", "style"))
    layers = [(name, layer, found) for name, by_layer in demo.across.items() for layer, found in by_layer.items()]
    data = {
        "objects": [spaced(index["names"][object_]) for object_ in objects],
        "tiles": objects,
        "kinds": index["group_names"],
        "kind": index["groups"][objects],
        "styles": [index["styles"][style] for style in styles],
        "sheets": [data_uri(SHEETS / f"{index['styles'][style]}.webp") for style in styles],
        "columns": index["columns"],
        "rows": -(-len(index["names"]) // index["columns"]),
        "searches": [{"encoder": name, "layer": layer} for name, layer, _ in layers],
        "nearest": packed([found[0] for _, _, found in layers]),
        "rank": packed([found[1] for _, _, found in layers]),
    }
    without = "<noscript>Choosing needs JavaScript; the numbers below do not.</noscript>"
    return Html(f'<div id="picker">{embedded(data)}{without}</div>')


def spaced(name: str) -> str:
    return name.replace("-", " ")


def packed(arrays: list[np.ndarray]) -> str:
    """Unsigned 16-bit numbers, little-endian, as base64; -1 becomes 65535."""
    return base64.b64encode(np.stack(arrays).astype("<i2").view("<u2").tobytes()).decode()


# ---- numbers


def worth(demo: Demo, objects: int) -> list[str]:
    caption = (
        f"Frozen, last block. How often the nearest of {objects:,} drawings in another style is the same object, in "
        "percent, mean over pairs of styles, by the mean token (raw and whitened), the class token, and all patch "
        "tokens as one vector; how often the nearest drawings of other objects in other styles are of the same kind; "
        "effective rank and echo of the mean token."
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
    return figure("Every layer of both networks; an earlier layer may be better than the last one.", drawn)


def training_curves(out: Path) -> Html:
    metrics = {name: read_metrics(out / name) for name in ARMS}
    drawn = [
        line_chart(
            {name: points(records, key) for name, records in metrics.items()}, title=words, xlabel="drawings seen"
        )
        for key, words in (("loss", "training loss"), ("held_out_loss", "loss on held-out drawings"))
    ]
    return figure("Both have the same budget, learning rate and order of drawings.", drawn)


# ---- pictures


def maps(demo: Demo, *, seed: int) -> list[str]:
    """Return maps of both encoders on the same drawings, colored by style."""
    parts: list[str] = [
        "Drawings that lie close are similar to the encoder (t-SNE of the last block's mean token). Colors are styles: "
        "where they mix, the object counts for more than the style."
    ]
    for name, subject in demo.subjects.items():
        parts += [heading(f"{name}, alpha_min {ARMS[name]:g}"), style_map(subject, seed=seed)]
    return parts


def style_map(subject: Subject, *, seed: int) -> Html:
    index = read_index()
    objects, styles = (facet(subject, name) for name in ("object", "style"))
    shown = np.unique(objects)[sampled(len(np.unique(objects)), MAPPED_OBJECTS, seed=seed)]
    rows = np.flatnonzero(np.isin(objects, shown))
    vectors = subject.sets[len(subject.encoder.widths) - 1, "mean"][rows]
    found = nearest(vectors, vectors, k=NEIGHBORS + 1).indices.tolist()
    source = subject.eval_data.test
    pictures = [image.permute(1, 2, 0).numpy() for image in source.read_many(rows.tolist())]  # type: ignore[union-attr]
    return point_map(
        tsne(vectors, seed=seed),
        names=[spaced(index["names"][object_]) for object_ in objects[rows]],
        groups=index["styles"],
        group=styles[rows].tolist(),
        sheet=sheet(pictures, side=48),
        neighbors=[[j for j in near if j != i][:NEIGHBORS] for i, near in enumerate(found)],
        filter_label="Style",
        caption=f"{len(rows):,} drawings of {len(np.unique(shown))} objects.",
    )


def drawn_reconstructions(demo: Demo, folder: Path, *, seed: int) -> Html:
    pictures = []
    for name, subject in demo.subjects.items():
        assert subject.test is not None
        images = images_of(subject, sampled(len(subject.test.ids), 6, seed=seed))
        found = reconstructions(subject.encoder, images, seed=seed)
        pictures += figures.draw_reconstructions(*found, folder / f"reconstructions-{name}", title=name)[:1]
    return figure("Three quarters of the patches are hidden and predicted; residual and decayed.", pictures)
