"""The page of the demo: pick an object, and see block by block whether an encoder finds it in another style.

Below that the table, every layer, the training of a fresh pair, maps and reconstructions. While that pair is trained,
`live.js` beside the page holds its curve. Its own script and style are assets/demo.*.
"""

from __future__ import annotations

import base64
import json
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
from anechoic.pages.demo import ARMS, HEADER, LAYERS, Curve, Demo, points
from anechoic.pages.explanation import images_of, sampled
from anechoic.pages.html import (
    ASSETS,
    Grouping,
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
    write_page,
)
from anechoic.pages.thumbnails import sheet
from anechoic.runtime.run import last_seen, read_metrics

MAPPED_OBJECTS, NEIGHBORS = 200, 6
# What a point of the curve has -> how it is called.
POINT = {"whitened": LAYERS["retrieval_whitened_mean"], "mean": LAYERS["retrieval_mean"]}
OPENING = (
    "The drawing is compared with all drawings of the other style, by the mean token after every block. The page opens "
    "with an object that both networks find after their last block and neither after its first; most are not found."
)


class DemoPage:
    """The page of one demo; it is written several times while a fresh pair is trained."""

    def __init__(self, demo: Demo, out: Path) -> None:
        self.demo, self.out = demo, out
        subject = demo.subjects["decayed"]
        self.objects, self.styles = (len(np.unique(facet(subject, name))) for name in ("object", "style"))
        self.picker = picker(demo)
        self.pictures: list[Section] = []

    def draw(self, *, seed: int) -> None:
        """Draw maps and reconstructions, which take longer than the rest of the page."""
        self.pictures = [
            Section("Maps", maps(self.demo, seed=seed)),
            Section("Reconstructions", [drawn_reconstructions(self.demo, self.out / "figures", seed=seed)]),
        ]

    def write(self, result: Mapping[str, Any], curve: Curve) -> None:
        """result: the outcome as JSON, embedded in the page; its training has ended if it has `training_seconds`."""
        done = "training_seconds" in result["metrics"]
        live = Html(f'<div id="live"{" data-done=1" if done else ""}>{self.training(result, curve)}</div>')
        lead = (
            f"{self.objects:,} objects, each drawn in {self.styles} styles. The style changes the pixels, the object "
            f"stays. Two masked autoencoders were trained on {self.demo.samples:,} drawings each, without labels: one "
            f"with residual connections (alpha_min {ARMS['residual']:g}), one whose identity shortcuts decay with "
            f"depth (alpha_min {ARMS['decayed']:g}), all else equal. Which one represents the object, and which the "
            "style?"
        )
        footer = (
            machine_line(result["machine"], result["commit"], result["seed"]) + " Drawings: Noto Emoji, Fluent UI "
            "Emoji, Twemoji and EmojiOne 2, under the licenses in anechoic/data/emoji_sheets/ATTRIBUTION.md."
        )
        html = page(
            "One object, five styles" if self.styles == 5 else f"One object, {self.styles} styles",
            [
                Section("Pick an object", [OPENING, self.picker]),
                Section("Results", worth(result["metrics"], self.objects)),
                Section("Block by block", [charts(self.demo)]),
                Section("Training", [live]),
                *self.pictures,
            ],
            lead=lead,
            footer=footer,
            data=result,
            script=(ASSETS / "demo.js").read_text(encoding="utf-8"),
            beside=not done,
        )
        write_page(self.out / "index.html", html)

    def update(self, result: Mapping[str, Any], curve: Curve) -> None:
        """Write live.js, which a page that is already open loads."""
        done = json.dumps("training_seconds" in result["metrics"])
        write_page(self.out / "live.js", f"showLive({json.dumps(self.training(result, curve))}, {done});\n")

    def training(self, result: Mapping[str, Any], curve: Curve) -> str:
        """Return what the pair that is trained here has reached, with the pair above if that is another one."""
        metrics, samples = result["metrics"], result["config"]["samples"]
        fresh = metrics.get("fresh")
        parts: list[str] = []
        if fresh is not None:
            minutes = f" Each was trained for {metrics['training_seconds'] / 60:.1f} minutes on this machine."
            rows = [[row[key] for key in HEADER] for row in fresh["rows"]]
            parts += [note(fresh["verdict"] + minutes), table(list(HEADER.values()), rows)]
        elif "training_seconds" not in metrics:
            seen = min(last_seen(self.out / name) for name in ARMS)
            parts.append(
                note(f"A fresh pair is being trained: {seen:,} of {samples:,} drawings each. Its curve grows here.")
            )
        if any(curve.values()):
            parts.append(self.curves(curve, samples))
        return "\n".join([*parts, training_curves(self.out)])

    def curves(self, curve: Curve, samples: int) -> Html:
        lines: dict[str, dict[str, list[Any]]] = {
            name: {"seen": list(points), **columns(points)} for name, points in curve.items()
        }
        caption = "What the checkpoints of the pair trained here retrieve, by their last block."
        if self.demo.samples != samples:
            above = {
                row["encoder"]: {"seen": [self.demo.samples]} | {key: [row[key]] for key in POINT}
                for row in self.demo.rows
            }
            lines |= {f"{name}, pair above": above[name] for name in ARMS}
            caption += (
                f" The dots on the right are the pair above: the same networks, data and optimizer, "
                f"{self.demo.samples / samples:.0f} times as many drawings, and a learning rate for that length."
            )
        drawn = [
            line_chart(
                {name: (line["seen"], line[key]) for name, line in lines.items()},
                title=title,
                xlabel="drawings seen",
                from_zero=True,
                log_x=True,
            )
            for key, title in POINT.items()
        ]
        return figure(caption, drawn)


def columns(points: Mapping[int, Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [point[key] for point in points.values()] for key in POINT}


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


def worth(metrics: Mapping[str, Any], objects: int) -> list[str]:
    caption = (
        f"Frozen, last block. How often the nearest of {objects:,} drawings in another style is the same object, in "
        "percent, mean over pairs of styles, by the mean token (raw and whitened), the class token, and all patch "
        "tokens as one vector; how often the nearest drawings of other objects in other styles are of the same kind; "
        "effective rank and echo of the mean token."
    )
    rows = [[found[key] for key in HEADER] for found in metrics["rows"]]
    return [note(metrics["verdict"]), table(list(HEADER.values()), rows), caption]


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
    """Return the losses of both arms; nothing before the first of them."""
    metrics = {name: read_metrics(out / name) for name in ARMS}
    if not any(metrics.values()):
        return Html("")
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
        groupings=[Grouping("Style", index["styles"], styles[rows].tolist())],
        sheet=sheet(pictures, side=48),
        neighbors=[[j for j in near if j != i][:NEIGHBORS] for i, near in enumerate(found)],
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
