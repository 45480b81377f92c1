"""The page of `anechoic report`: verdict, training, layers, reconstructions, neighbors and map of one run or several.

Numbers come from summary.py; the page is made by html.py. The live page of `anechoic serve` uses the same sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data import described
from anechoic.eval.evaluator import Subject
from anechoic.eval.metrics.registry import report_metrics, shares, titles
from anechoic.eval.projections import tsne
from anechoic.eval.reconstruction import reconstructions, reconstructs, to_pixels
from anechoic.eval.verdict import Verdict
from anechoic.index.index import SCALING, Searchable
from anechoic.outcome import counted
from anechoic.pages.charts import line_chart
from anechoic.pages.explanation import images_of, names_of, sampled
from anechoic.pages.html import (
    Grouping,
    Html,
    Section,
    Thumbnail,
    figure,
    grid,
    heading,
    note,
    page,
    point_map,
    safe,
    table,
)
from anechoic.pages.summary import ONLINE, Summary, arms
from anechoic.pages.tables import cell, duration, percent
from anechoic.pages.thumbnails import sheet, thumbnail
from anechoic.runtime.run import picture_files
from anechoic.storage.safe_io import read_regular, reason

KINDS = {
    "learning": "good",
    "plateaued": "warn",
    "too short": "warn",
    "collapsed": "bad",
    "worse than raw pixels": "bad",
}
QUERIES, NEIGHBORS, SHOWN, MAPPED = 5, 6, 6, 600
# Layers of a network whose curve over time is drawn, spread over its depth.
TRACED = 4
# Pictures of validations that are shown, spread over the training.
HISTORY = 6
# Histograms of stored values.
BINS, HISTOGRAM_PERCENTILES, DRAWN_CHANNELS, READ_FOR_HISTOGRAM = 64, (0.5, 99.5), 9, 64


def report_page(
    summaries: Sequence[Summary], comparison: Sequence[Mapping[str, Any]], *, numbers: Mapping[str, Any], footer: str
) -> str:
    """numbers: embedded as JSON."""
    several = len(summaries) > 1
    sections = [
        Section("Verdict", [part for summary in summaries for part in verdict_parts(summary, named=several)]),
        *([Section("Comparison", comparison_parts(comparison, summaries))] if several else []),
        Section("What was trained", [facts_table(summaries)]),
        Section("Training", training_parts(summaries)),
    ]
    shown = [members[0] for members in arms(summaries).values()] if several else summaries
    drawn = [part for summary in shown for part in history_parts(summary, named=several)]
    if drawn:
        sections.append(Section("Pictures over the training", drawn))
    values = [part for summary in shown for part in value_parts(summary, named=several)]
    if values:
        sections.append(Section("Pixel values", values))
    if any(summary.layers for summary in summaries):
        sections.append(Section("Layer by layer", layer_parts(summaries)))
    sections += picture_sections([summary for summary in shown if summary.subject is not None], several=several)
    first = summaries[0]
    title = f"Report: {first.name}" if not several else f"Report on {len(summaries)} runs"
    return page(title, sections, lead=lead(summaries), footer=footer, data=numbers)


def lead(summaries: Sequence[Summary]) -> str:
    first = summaries[0].facts
    if len(summaries) > 1:
        return f"{len(summaries)} runs side by side. Intervals are 95 % over seeds; differences are paired by seed."
    state = "" if first["finished"] else f" It stands at {first['seen']:,} of {first['samples']:,}."
    return (
        f"{first['model']} (alpha_min {first['alpha_min']}) trained on {described(first['data'])}: "
        f"{first['seen']:,} samples, {first['epochs']} epochs, {duration(first['seconds'])}.{state}"
    )


# ---- words and numbers


def verdict_parts(summary: Summary, *, named: bool) -> list[str]:
    name = f"{summary.name}: " if named else ""
    parts: list[str] = [verdict_note(summary.verdict, name)] if summary.verdict else []
    return parts + [note(f"{name}{sentence}") for sentence in summary.missing]


def verdict_note(verdict: Verdict, name: str = "") -> Html:
    word = Html(f"<strong>{safe(name)}{safe(verdict.word.capitalize())}</strong>")
    return note(word, *verdict.reasons, *verdict.advice, kind=KINDS[verdict.word])


def facts_table(summaries: Sequence[Summary]) -> Html:
    """A row per fact, a column per run; what all runs share is still said once each, so that columns can be read."""
    names = {
        "model": "model",
        "options": "options",
        "weights": "weights",
        "alpha_min": "alpha_min",
        "objective": "objective",
        "data": "data",
        "images": "images trained on",
        "held_out": "images held out",
        "image_size": "image size",
        "pixels": "pixels",
        "channels": "channels",
        "seen": "samples seen",
        "epochs": "epochs (of whole batches)",
        "seconds": "time",
        "algorithm": "optimizer",
        "lr": "peak learning rate",
        "batch_size": "batch",
        "seed": "seed",
        "started": "started",
    }
    rows = [[name, *(fact(key, summary.facts[key]) for summary in summaries)] for key, name in names.items()]
    return table(["", *(summary.name for summary in summaries)], rows, sortable=False)


def fact(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key == "seconds":
        return duration(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items()) or "–"
    return f"{value:,}" if isinstance(value, int) and key != "seed" else cell(value)


def comparison_parts(rows: Sequence[Mapping[str, Any]], summaries: Sequence[Summary]) -> list[str]:
    if not rows:
        return ["None of these runs has a number to compare."]
    first = rows[0]["arm"]
    cells = [
        [row["arm"], row["title"], row["seeds"], interval(row["mean"]), interval(row["difference"], signed=True)]
        for row in rows
    ]
    header = ["runs with", "measure", "seeds", "mean ± 95 %", f"difference from {first}"]
    means = table(header, cells, caption="Means over seeds. A difference whose interval includes 0 is undecided.")
    alone = max(row["seeds"] for row in rows) < 2
    return [means, *(["One seed each: there is no interval, and a difference may be chance."] if alone else [])]


def interval(found: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    if found is None:
        return "–"
    mean = f"{found['mean']:+.3g}" if signed else f"{found['mean']:.4g}"
    return mean if found["half"] is None else f"{mean} ± {found['half']:.2g}"


# ---- curves


def training_parts(summaries: Sequence[Summary]) -> list[str]:
    """Loss, rank and norms over the samples seen."""
    if len(summaries) > 1:
        charts = [
            line_chart(
                {s.name: over_time(s, "validation", "held_out_loss") for s in summaries},
                title="held-out loss",
                xlabel="samples seen",
                dots=False,
            ),
            line_chart(
                {s.name: over_time(s, "validation", "rank_columns", -1) for s in summaries},
                title="effective rank of the last layer",
                xlabel="samples seen",
                dots=False,
            ),
            *accuracy_charts(summaries),
        ]
        return [figure("Every run over its training, on images held out of it.", charts)]
    return [
        figure(
            "Over the training: loss, effective rank and norms on images held out of it.", training_charts(summaries[0])
        )
    ]


def training_charts(summary: Summary) -> list[Html]:
    losses = {"training": over_time(summary, "train", "loss")}
    if summary.curves["validation"].get("held_out_loss"):
        losses["held out"] = over_time(summary, "validation", "held_out_loss")
    charts = [line_chart(losses, title="loss", xlabel="samples seen", dots=False)]
    for key, title in (("rank_columns", "effective rank"), ("token_norm", "mean token norm")):
        recorded = [x for x in summary.curves["validation"].get(key, []) if x and isinstance(x, list)]
        if recorded:
            depth = len(recorded[0])
            chosen = sorted({round(i * (depth - 1) / (TRACED - 1)) for i in range(TRACED)})
            lines = {f"layer {i}": over_time(summary, "validation", key, i) for i in chosen}
            charts.append(line_chart(lines, title=title, xlabel="samples seen", dots=False))
    if summary.curves["train"].get("gradient_norm"):
        norm = {"gradient": over_time(summary, "train", "gradient_norm")}
        charts.append(line_chart(norm, title="gradient norm", xlabel="samples seen", dots=False))
    return charts + accuracy_charts([summary])


def accuracy_charts(summaries: Sequence[Summary]) -> list[Html]:
    """Accuracies that validations recorded on labeled images, a line per run."""
    charts = []
    for key, title in ONLINE.items():
        curves = {s.name: over_time(s, "validation", key) for s in summaries if s.measure(key) is not None}
        lines = {name: (seen, [x if x is None else 100 * x for x in values]) for name, (seen, values) in curves.items()}
        if lines:
            charts.append(line_chart(lines, title=title, xlabel="samples seen", dots=False))
    return charts


def over_time(
    summary: Summary, kind: str, key: str, place: int | None = None
) -> tuple[list[float | None], list[float | None]]:
    """Return (seen, value) of a recorded number, or of one place of a recorded list; None where there is none."""
    recorded = summary.curves[kind]
    values = recorded.get(key, [])
    if place is not None:
        values = [
            value[place] if isinstance(value, list) and -len(value) <= place < len(value) else None for value in values
        ]
    picked = [None if isinstance(value, list) else value for value in values]
    return recorded.get("seen", [])[: len(picked)], picked


def history_parts(summary: Summary, *, named: bool) -> list[str]:
    """What validations drew, spread over the training: a denoiser's samples, from the same noise every time."""
    files = picture_files(summary.run.path)
    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, min(len(files), HISTORY)).round().astype(int))]
    parts: list[str] = []
    for file in chosen:
        try:
            content = read_regular(file)
        except OSError as problem:
            parts.append(note(f"{file} could not be read ({reason(problem)})."))
            continue
        parts.append(figure(f"After {int(file.stem):,} samples seen.", [content]))
    return [heading(summary.name)] * bool(parts and named) + parts


def value_parts(summary: Summary, *, named: bool) -> list[str]:
    """Histograms of stored values, a chart per channel."""
    subject, pixels = summary.subject, summary.run.config.data.pixels
    if subject is None or subject.test is None or not pixels.stored:
        return []
    chosen = subject.test.ids[sampled(count_of(subject), READ_FOR_HISTOGRAM, seed=subject.spec.seed)]
    images = [subject.eval_data.test.read(int(i), min_side=subject.encoder.image_size) for i in chosen]
    charts = []
    for channel in range(min(len(images[0]), DRAWN_CHANNELS)):
        values = np.concatenate([image[channel].double().numpy().ravel() for image in images])
        counts, edges = np.histogram(values, BINS, range=np.percentile(values, HISTOGRAM_PERCENTILES))
        points = ((edges[1:] + edges[:-1]) / 2).tolist(), (100 * counts / values.size).tolist()
        name = pixels.select[channel] if channel < len(pixels.select) else f"channel {channel}"
        title = f"{name}: share of pixels (%)"
        charts.append(line_chart({name: points}, title=title, xlabel="stored value", from_zero=True, dots=False))
    low, high = HISTOGRAM_PERCENTILES
    caption = (
        f"Values as files store them, of {counted(len(images), 'image')}: percentiles {low} to {high} of each channel."
    )
    parts: list[str] = [figure(caption, charts)]
    return [heading(summary.name)] * named + parts


def layer_parts(summaries: Sequence[Summary]) -> list[str]:
    measured = [summary for summary in summaries if summary.layers]
    images = max((count_of(one.subject) for one in measured if one.subject is not None), default=0)
    charts = [
        line_chart(
            {
                s.name: ([row["layer"] for row in s.layers], [shown_value(key, row) for row in s.layers])
                for s in measured
            },
            title=title,
            xlabel="layer",
        )
        for key, title in (next(iter(titles([name]).items())) for name in report_metrics(charts=True))
        if any(row.get(key) is not None for s in measured for row in s.layers)
    ]
    parts: list[str] = [
        f"Of the mean token of {counted(images, 'image')}. Layer 0 is the embedding. Effective rank: how many "
        "directions the features fill; it grows with the number of images. "
        "Echo: how much of the embedding is left (CKA, 0 to 1). "
        "Input share: what is left of it on the identity path. Branch/shortcut: what a block adds over what it keeps.",
        figure("Layer by layer.", charts),
    ]
    for summary in measured:
        rows = summary.layers
        named = {"layer": "layer", **report_titles()}
        shown = {key: title for key, title in named.items() if any(row.get(key) is not None for row in rows)}
        cells = [[shown_value(key, row) for key in shown] for row in rows]
        parts.append(table(list(shown.values()), cells, caption=summary.name, strong=[len(rows) - 1]))
    return parts


def report_titles() -> dict[str, str]:
    """Of a metric that is drawn only the value that is drawn, so that there is one of each; of others all."""
    drawn = report_metrics(charts=True)
    return {
        key: title
        for name in report_metrics()
        for key, title in list(titles([name]).items())[: 1 if name in drawn else None]
    }


def shown_value(key: str, row: Mapping[str, Any]) -> Any:
    """Shares in percent."""
    value = row.get(key)
    return percent(value) if value is not None and key in shares(report_metrics()) else value


# ---- pictures


def picture_sections(summaries: Sequence[Summary], *, several: bool) -> list[Section]:
    """Reconstructions, neighbors and map of the first run of each arm."""
    kinds = {"Reconstructions": reconstruction_parts, "Neighbors": neighbor_parts, "Map": map_parts}
    sections = []
    for title, draw in kinds.items():
        parts: list[str] = []
        for summary in summaries:
            assert summary.subject is not None
            found = draw(summary.subject)
            parts += [heading(summary.name)] * bool(found and several) + found
        if parts:
            sections.append(Section(title, parts))
    return sections


def reconstruction_parts(subject: Subject) -> list[str]:
    """Each image, what the encoder saw of it, and what the decoder made of that."""
    encoder = subject.encoder
    if not reconstructs(encoder):
        return []
    seed = subject.spec.seed
    images = images_of(subject, sampled(count_of(subject), SHOWN, seed=seed))
    strips = [strip(*three) for three in zip(*reconstructions(encoder, images, seed=seed), strict=True)]
    caption = "Left: the image. Middle: the patches that the encoder sees. Right: the decoder's prediction."
    return [figure(caption, [thumbnail(picture, side=330) for picture in strips])]


def strip(image: np.ndarray, hidden: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Image, image without its hidden places, and with the prediction there, side by side; uint8."""
    masked = np.where(hidden[..., None], 0.5, image)
    filled = np.where(hidden[..., None], predicted, image)
    gap = np.ones((image.shape[0], max(1, image.shape[1] // 16), image.shape[2]))
    return as_bytes(np.concatenate([image, gap, masked, gap, filled], axis=1))


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    return (255 * np.clip(pixels, 0, 1)).round().astype(np.uint8)


def pictures_of(subject: Subject, rows: np.ndarray) -> list[np.ndarray]:
    return list(as_bytes(to_pixels(subject.encoder, images_of(subject, rows))))


def count_of(subject: Subject) -> int:
    assert subject.test is not None
    return len(subject.test.ids)


def vectors_of(subject: Subject) -> np.ndarray:
    """Of the last layer."""
    return list(subject.sets.values())[-1]


def neighbor_parts(subject: Subject) -> list[str]:
    vectors = vectors_of(subject)
    k = min(NEIGHBORS, len(vectors) - 1)
    if k < 1:
        return []
    queries = sampled(len(vectors), QUERIES, seed=subject.spec.seed)
    near = Searchable.of(vectors, SCALING).nearest_others(queries, k=k)
    parts: list[str] = [
        "The framed image of each row is the query; its nearest neighbors follow, by the mean token of the last layer."
    ]
    for query, found, similarities in zip(queries, near.indices.numpy(), near.similarities.tolist(), strict=True):
        rows = np.array([query, *found])
        labels = ["", *(f"{similarity:.3f}" for similarity in similarities)]
        shown = zip(rows, pictures_of(subject, rows), labels, strict=True)
        parts.append(
            grid(
                [
                    Thumbnail(thumbnail(picture), [*names_for(subject, row), words], marked=row == query)
                    for row, picture, words in shown
                ]
            )
        )
    return parts


def names_for(subject: Subject, row: int) -> list[str]:
    """The end of an image's name and, if it has one, its class."""
    assert subject.test is not None
    index = int(subject.test.ids[row])
    labels, name = subject.eval_data.test_labels, Path(subject.eval_data.test.name(index)).name
    return [name] if labels is None else [name, names_of(subject)[int(labels[index])]]


def map_parts(subject: Subject) -> list[str]:
    """t-SNE of the last layer, with pictures."""
    vectors, seed = vectors_of(subject), subject.spec.seed
    if len(vectors) < 8:
        return []
    assert subject.test is not None
    chosen = sampled(len(vectors), MAPPED, seed=seed)
    ids = subject.test.ids[chosen]
    labels = subject.eval_data.test_labels
    groups = ["images"] if labels is None else list(names_of(subject))
    return [
        point_map(
            tsne(vectors[chosen], seed=seed),
            names=[Path(subject.eval_data.test.name(int(i))).name for i in ids],
            groupings=[Grouping("Class", groups, [0] * len(ids) if labels is None else labels[ids].tolist())],
            sheet=sheet(pictures_of(subject, chosen), side=48),
            caption=f"{len(chosen)} images by the mean token of the last layer (t-SNE).",
        )
    ]
