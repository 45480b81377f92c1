"""The pages of `anechoic search` and `anechoic explore`. Numbers come in; thumbnails are made here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from anechoic.data import BadImage, Source, split_limit
from anechoic.index.collection import Exploration
from anechoic.index.index import Index
from anechoic.index.queries import Query
from anechoic.outcome import counted
from anechoic.pages.charts import histogram
from anechoic.pages.cluster_names import folder_of
from anechoic.pages.html import (
    EMPTY,
    Grouping,
    Html,
    Section,
    Thumbnail,
    channel_picker,
    download,
    empty,
    grid,
    heading,
    joined,
    machine_line,
    note,
    page,
    paragraph,
    point_map,
    selectable,
    table,
)
from anechoic.pages.tables import bytes_text
from anechoic.pages.thumbnails import PICKED, SIDE, channel_thumbnails, displayed, sheet, thumbnail

# Pictures of a list on a page; the CSV has all of it, up to this number of rows, which a browser still opens.
SHOWN_GROUPS, SHOWN_IN_GROUP, SHOWN_OUTLIERS = 200, 12, 36
MAX_ROWS = 100_000
KEYS = "Keys: arrows walk through the pictures, space selects, Enter opens the file."


class Pictures:
    """Thumbnails of a source by the number of the image; a gray one where it can no longer be read.

    page: the file that links to the images.
    """

    def __init__(self, source: Source, page: str) -> None:
        self.source, self.folder = source, os.path.dirname(os.path.abspath(page))
        self.root = None if source.root is None else os.path.abspath(source.root)
        self.shown: set[int] = set()

    @property
    def channel_names(self) -> list[str]:
        """Of stored values with several channels, the names of those that can be picked; otherwise none."""
        pixels, count = self.source.pixels, self.source.channels
        if not pixels.stored or count < 2:
            return []
        names = pixels.select if len(pixels.select) == count else [f"channel {i}" for i in range(count)]
        return list(names[:PICKED])

    def read(self, index: int, *, side: int) -> Tensor:
        try:
            return self.source.read(index, min_side=side)
        except BadImage:
            return torch.full((3, side, side), 128, dtype=torch.uint8)

    def pixels(self, index: int, *, side: int) -> np.ndarray:
        """uint8 (H, W, C)"""
        return displayed(self.read(index, side=side))

    def item(self, index: int, *words: str, marked: bool = False, select: bool = True) -> Thumbnail:
        """With these words, its name, folder and size below, a link to its file and a check box."""
        folder, _, file = self.source.name(index).rpartition("/")
        caption = [*words, file, folder, self.size(index)]
        if select:
            self.shown.add(index)
        image = self.read(index, side=SIDE)
        channels = channel_thumbnails(image) if self.channel_names else []
        picture = thumbnail(displayed(image))
        return Thumbnail(picture, caption, marked, self.link(index), index if select else None, channels)

    def picker(self) -> list[Html]:
        return [channel_picker(self.channel_names)] if self.channel_names else []

    def path(self, index: int) -> str | None:
        file = self.source.file(index)
        return None if file is None or self.root is None else os.path.join(self.root, file)

    def link(self, index: int) -> str:
        """The address of the file, relative to the page, so that both can be moved together."""
        path = self.path(index)
        if path is None:
            return ""
        try:
            relative = os.path.relpath(path, self.folder)
        except ValueError:  # another drive
            return Path(path).as_uri()
        return quote(os.fsencode(relative.replace(os.sep, "/")))

    def size(self, index: int) -> str:
        """Pixels and, of a file, bytes."""
        try:
            width, height = self.source.stored_size(index)
            path = self.path(index)
            of_file = path is not None and os.path.isfile(path)  # a zarr array is a folder
            return f"{width} × {height}" + (f", {bytes_text(os.path.getsize(path))}" if path and of_file else "")
        except (BadImage, OSError):
            return ""

    def pixel_count(self, index: int) -> int:
        try:
            width, height = self.source.stored_size(index)
        except BadImage:
            return 0
        return width * height

    def selection(self) -> Html:
        """The bar for all images with a check box so far."""
        ids = sorted(self.shown)
        files = {i: file for i in ids if (file := self.source.file(i)) is not None}
        names = {i: self.source.name(i) for i in ids}
        return selectable(names, root=self.root if len(files) == len(ids) else None, files=files)


def search_page(result: Mapping[str, Any], queries: Sequence[Query], found_in: Source) -> str:
    """result: the command's JSON."""
    metrics = result["metrics"]
    pictures = Pictures(found_in, metrics["page"])
    sections = []
    for number, query in enumerate(queries):
        hits = [row for row in metrics["rows"] if row["number"] == number]
        asked = Pictures(query.source, metrics["page"])
        shown = [asked.item(query.number, "query", marked=True, select=False)]
        shown += [pictures.item(hit["index"], f"{hit['rank']}: {hit['similarity']:.3f}") for hit in hits]
        rows = [[hit["rank"], hit["image"], hit["similarity"]] for hit in hits]
        listing = table(["rank", "image", "similarity"], rows, caption=f"Nearest to {query.name}")
        details = Html(f"<details><summary>as a table</summary>{listing}</details>")
        sections.append(Section(query.name, [*(pictures.picker() if number == 0 else []), grid(shown), details]))
    header = ["query", "rank", "image", "similarity"]
    lines = [[row[name] for name in header] for row in metrics["rows"]]
    sections.append(Section("The list", [download("neighbors.csv", header, lines), pictures.selection()]))
    lead = (
        f"The nearest of {counted(metrics['images'], 'image')} in {data_of(result)}, by cosine similarity "
        f"({metrics['vector']}). The framed picture of each list is the query. {KEYS}"
    )
    return page(
        f"Nearest images · network {metrics['encoder']}", sections, lead=lead, footer=footer_of(result), data=result
    )


def data_of(result: Mapping[str, Any]) -> str:
    """The data without the prefix of --limit; the number of images is beside it."""
    return split_limit(result["config"]["data"])[1]


def explore_page(result: Mapping[str, Any], index: Index, found: Exploration) -> str:
    """result: the command's JSON; found: for the map and the lists in full."""
    metrics = result["metrics"]
    pictures, names = Pictures(index.source, metrics["page"]), index.names()
    lead = f"{metrics['images']:,} images in {data_of(result)}, compared by {metrics['vector']}. {KEYS}"
    counts = [
        ["images", metrics["images"]],
        ["folders", metrics["folders"]],
        ["groups of near-duplicates", len(metrics["duplicates"])],
        ["images in them", sum(len(group["images"]) for group in metrics["duplicates"])],
        ["clusters", len(metrics["clusters"])],
    ]
    if not metrics["search"]["exact"]:
        counts.append(["recall at 10 of the approximate search", f"{metrics['search']['recall']:.3f}"])
    sections = [
        Section("In short", [table(["", ""], counts, sortable=False), *skipped_note(metrics), *pictures.picker()]),
        Section("Map", [the_map(metrics, found, index, pictures)]),
        Section("Near-duplicates", duplicates(metrics, names, found, pictures)),
        Section("Outliers", outliers(metrics, names, found, pictures)),
        Section("Clusters", clusters(metrics, names, found, pictures)),
    ]
    last = sections[-1]
    sections[-1] = Section(last.heading, [*last.parts, pictures.selection()])
    return page(
        f"What is in {os.path.basename(data_of(result).rstrip('/'))} · network {metrics['encoder']}",
        sections,
        lead=lead,
        footer=footer_of(result),
        data=result,
    )


def the_map(metrics: Mapping[str, Any], found: Exploration, index: Index, pictures: Pictures) -> Html:
    points = found.map
    ids = index.ids[points.rows].tolist()
    names = [index.source.name(i) for i in ids]
    folders = sorted({folder_of(name) for name in names})
    pictures.shown.update(ids)
    groupings = [
        Grouping("Cluster", cluster_titles(metrics), found.clusters.label[points.rows].tolist()),
        Grouping("Folder", [name or "no folder" for name in folders], [folders.index(folder_of(n)) for n in names]),
    ]
    return point_map(
        points.places,
        names=names,
        groupings=groupings if len(folders) > 1 else groupings[:1],
        sheet=sheet(pictures.pixels(i, side=64) for i in ids),
        neighbors=points.neighbors,
        ids=ids,
        caption="Images that look alike to the network lie together (t-SNE).",
    )


def duplicates(metrics: Mapping[str, Any], names: Sequence[str], found: Exploration, pictures: Pictures) -> list[str]:
    limit = metrics["limit"]
    words = (
        "There are too few images to tell which distance is small among them, so only equal ones count."
        if limit["dimension"] is None
        else f"Two images count as near-duplicates if they are closer than {limit['share']:.3f} of the distance that "
        "each has to its other neighbors. The limit comes from this collection itself: around an image it looks like "
        f"points in {limit['dimension']:.1f} dimensions, where {limit['false_alarms']:g} images in all are expected "
        "below it by chance."
    )
    why = Html(
        f"<details><summary>What counts as a near-duplicate</summary>{paragraph(words)}{ratios(limit)}</details>"
    )
    groups = metrics["duplicates"]
    if not groups:
        return [empty("There are no near-duplicates."), why]
    group_of = {row: number for number, group in enumerate(found.groups, 1) for row in group}
    lines = [[group_of[i], names[i], names[j], value] for i, j, value in found.pairs[:MAX_ROWS]]
    header = ["group", "image", "other image", "similarity"]
    parts: list[str] = [
        f"{counted(len(groups), 'group')}, the most similar first. Each begins with its image of the most pixels.",
        *listing("duplicates.csv", header, lines, of=len(found.pairs), extra=SELECT_COPIES),
    ]
    cards = []
    for number, group in enumerate(groups[:SHOWN_GROUPS], 1):
        ordered = sorted((item["index"] for item in group["images"]), key=pictures.pixel_count, reverse=True)
        members = [pictures.item(i) for i in ordered[:SHOWN_IN_GROUP]]
        count = len(group["images"])
        title = heading(f"{number}: {count} images, {group['similarity']:.4f}")
        more = [paragraph(f"{count - SHOWN_IN_GROUP} more are in the list.")] * (count > SHOWN_IN_GROUP)
        cards.append(f'<div class="card">{joined(title, grid(members, row=True), *more)}</div>')
    parts.append(Html(f'<div class="cards duplicates">{"".join(cards)}</div>'))
    if len(groups) > SHOWN_GROUPS:
        parts.append(f"{len(groups) - SHOWN_GROUPS} more groups are in the list.")
    return [*parts, why]


SELECT_COPIES = Html(
    '<button type="button" class="plain" data-select="copies">Select all but the first of each group shown</button>'
)


def ratios(limit: Mapping[str, Any]) -> Html:
    edges, counts = limit["histogram"]
    title = "Distance to the nearest image, as a share of that to the 20th"
    return histogram(edges, counts, title=title, xlabel="share", marks={"limit": limit["share"]})


def outliers(metrics: Mapping[str, Any], names: Sequence[str], found: Exploration, pictures: Pictures) -> list[str]:
    lines = [[names[row], folder_of(names[row]), float(found.likeness[row])] for row in found.oddest[:MAX_ROWS]]
    items = [pictures.item(item["index"], f"{item['likeness']:.3f}") for item in metrics["outliers"][:SHOWN_OUTLIERS]]
    words = "The images least like their nearest neighbors, with the mean similarity to them; the oddest first."
    return [words, *listing("outliers.csv", ["image", "folder", "likeness"], lines, of=len(names)), grid(items)]


def listing(name: str, header: Sequence[str], rows: Sequence[Any], *, of: int, extra: Html = EMPTY) -> list[str]:
    """Return the button that saves the rows, and a sentence if they are not all of them; of: the number of all."""
    rest = [f"The file has the first {len(rows):,} rows of {of:,}."] * (len(rows) < of)
    return [download(name, header, rows, extra=extra), *rest]


def cluster_titles(metrics: Mapping[str, Any]) -> list[str]:
    """Number and name, such as "2: beach"."""
    return [
        f"{number}: {cluster['name']}" if cluster["name"] else f"cluster {number}"
        for number, cluster in enumerate(metrics["clusters"], 1)
    ]


def clusters(metrics: Mapping[str, Any], names: Sequence[str], found: Exploration, pictures: Pictures) -> list[str]:
    each = zip(names, found.clusters.label, found.clusters.similarity, strict=True)
    lines = [
        [name, folder_of(name), int(label) + 1, float(value)] for name, label, value in itertools.islice(each, MAX_ROWS)
    ]
    parts: list[str] = [
        "Groups found by k-means, each with the images nearest its center. A cluster is named after its most "
        "frequent folder, or a word that its file names share.",
        *listing("clusters.csv", ["image", "folder", "cluster", "similarity"], lines, of=len(names)),
    ]
    for title, cluster in zip(cluster_titles(metrics), metrics["clusters"], strict=True):
        folders = ", ".join(f"{name or 'no folder'} ({count})" for name, count in cluster["folders"])
        head = heading(f"{title[0].upper()}{title[1:]}, {counted(cluster['size'], 'image')}")
        origin = [paragraph(f"From {folders}.")] * (metrics["folders"] > 1)
        parts += [joined(head, *origin), grid([pictures.item(item["index"]) for item in cluster["examples"]])]
    return parts


def skipped_note(metrics: Mapping[str, Any]) -> list[str]:
    skipped = metrics["skipped"]
    if not skipped:
        return []
    first = skipped[0]
    count = counted(len(skipped), "image")
    return [note(f"{count} could not be read; the first is {first['name']} ({first['reason']}).", kind="warn")]


def footer_of(result: Mapping[str, Any]) -> str:
    return machine_line(result["machine"], result["commit"], result["seed"])
