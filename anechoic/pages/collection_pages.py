"""The pages of `anechoic search` and `anechoic explore`. Numbers come in; thumbnails are made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anechoic.data import BadImage, Source
from anechoic.index.collection import Exploration, Map
from anechoic.index.index import Index
from anechoic.index.queries import Query
from anechoic.pages.charts import histogram
from anechoic.pages.html import (
    Html,
    Section,
    Thumbnail,
    download,
    grid,
    heading,
    joined,
    machine_line,
    note,
    page,
    paragraph,
    point_map,
    table,
)
from anechoic.pages.thumbnails import displayed, sheet, thumbnail

# Pictures of a list on a page; the CSV has all of it, up to this number of rows, which a browser still opens.
SHOWN_GROUPS, SHOWN_IN_GROUP, SHOWN_OUTLIERS = 40, 12, 36
MAX_ROWS = 100_000


def folder_of(name: str) -> str:
    """The folder an image lies in, as pages and lists name it."""
    return name.rpartition("/")[0] or "."


class Pictures:
    """Thumbnails of a source by the number of the image; a gray one where it can no longer be read."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def pixels(self, index: int, *, side: int) -> np.ndarray:
        """uint8 (H, W, C)"""
        try:
            return displayed(self.source.read(index, min_side=side))
        except BadImage:
            return np.full((side, side, 3), 128, np.uint8)

    def thumbnail(self, index: int) -> str:
        return thumbnail(self.pixels(index, side=96))

    def item(self, item: Mapping[str, Any], *words: str) -> Thumbnail:
        """With these words, its folder and its file's name below."""
        folder, _, file = item["image"].rpartition("/")
        return Thumbnail(self.thumbnail(item["index"]), (*words, folder or ".", file))


def search_page(result: Mapping[str, Any], queries: Sequence[Query], found_in: Source) -> str:
    """result: the command's JSON."""
    metrics = result["metrics"]
    pictures = Pictures(found_in)
    sections = []
    for number, query in enumerate(queries):
        hits = [row for row in metrics["rows"] if row["number"] == number]
        shown = [Thumbnail(Pictures(query.source).thumbnail(query.number), ("query", query.name), marked=True)]
        shown += [pictures.item(hit, f"{hit['rank']}: {hit['similarity']:.3f}") for hit in hits]
        rows = [[hit["rank"], hit["image"], hit["similarity"]] for hit in hits]
        listing = table(["rank", "image", "similarity"], rows, caption=f"Nearest to {query.name}")
        details = Html(f"<details><summary>as a table</summary>{listing}</details>")
        sections.append(Section(query.name, [grid(shown), details]))
    header = ["query", "rank", "image", "similarity"]
    lines = [[row[name] for name in header] for row in metrics["rows"]]
    sections.append(Section("The list", [download("neighbors.csv", header, lines)]))
    lead = (
        f"The nearest of {metrics['images']:,} images in {result['config']['data']}, by cosine, as "
        f"{metrics['encoder']} sees them ({metrics['vector']}). The first picture of each row is the query."
    )
    return page("Nearest images", sections, lead=lead, footer=footer_of(result), data=result)


def explore_page(result: Mapping[str, Any], index: Index, found: Exploration) -> str:
    """result: the command's JSON; found: for the map and the lists in full."""
    metrics = result["metrics"]
    pictures, names = Pictures(index.source), index.names()
    lead = (
        f"{metrics['images']:,} images in {result['config']['data']}, as {metrics['encoder']} "
        f"sees them ({metrics['vector']})."
    )
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
        Section("In short", [table(["", ""], counts, sortable=False), *skipped_note(metrics)]),
        Section("Map", [the_map(found.map, index, pictures)]),
        Section("Near-duplicates", duplicates(metrics, names, found, pictures)),
        Section("Outliers", outliers(metrics, names, found, pictures)),
        Section("Clusters", clusters(metrics, names, found, pictures)),
    ]
    return page("What is in these images", sections, lead=lead, footer=footer_of(result), data=result)


def the_map(points: Map, index: Index, pictures: Pictures) -> Html:
    ids = index.ids[points.rows].tolist()
    names = [index.source.name(i) for i in ids]
    folders = sorted({folder_of(name) for name in names})
    return point_map(
        points.places,
        names=names,
        groups=folders,
        group=[folders.index(folder_of(name)) for name in names],
        sheet=sheet(pictures.pixels(i, side=64) for i in ids),
        neighbors=points.neighbors,
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
    parts: list[str] = [words, ratios(limit)]
    groups = metrics["duplicates"]
    if not groups:
        return [*parts, note("There are none.", kind="good")]
    group_of = {row: number for number, group in enumerate(found.groups, 1) for row in group}
    lines = [[group_of[i], names[i], names[j], value] for i, j, value in found.pairs]
    parts.append(download("duplicates.csv", ["group", "image", "other image", "similarity"], lines))
    for number, group in enumerate(groups[:SHOWN_GROUPS]):
        members = [pictures.item(item) for item in group["images"][:SHOWN_IN_GROUP]]
        count = len(group["images"])
        parts.append(joined(heading(f"Group {number + 1}: {count} images, {group['similarity']:.4f}"), grid(members)))
    if len(groups) > SHOWN_GROUPS:
        parts.append(f"{len(groups) - SHOWN_GROUPS} more groups are in the list.")
    return parts


def ratios(limit: Mapping[str, Any]) -> Html:
    edges, counts = limit["histogram"]
    title = "Distance to the nearest image, as a share of that to the 20th"
    return histogram(edges, counts, title=title, xlabel="share", marks={"limit": limit["share"]})


def outliers(metrics: Mapping[str, Any], names: Sequence[str], found: Exploration, pictures: Pictures) -> list[str]:
    lines = [[names[row], folder_of(names[row]), float(found.likeness[row])] for row in found.oddest[:MAX_ROWS]]
    items = [pictures.item(item, f"{item['likeness']:.3f}") for item in metrics["outliers"][:SHOWN_OUTLIERS]]
    words = "The images least like their nearest neighbors, with the mean similarity to them; the oddest first."
    return [words, download("outliers.csv", ["image", "folder", "likeness"], lines), grid(items)]


def clusters(metrics: Mapping[str, Any], names: Sequence[str], found: Exploration, pictures: Pictures) -> list[str]:
    lines = [
        [name, folder_of(name), int(label) + 1, float(value)]
        for name, label, value in zip(names, found.clusters.label, found.clusters.similarity, strict=True)
    ][:MAX_ROWS]
    parts: list[str] = [
        "Groups found by k-means, each with the images nearest its center and the folders most of it comes from.",
        download("clusters.csv", ["image", "folder", "cluster", "similarity"], lines),
    ]
    for number, cluster in enumerate(metrics["clusters"], 1):
        folders = ", ".join(f"{name} ({count})" for name, count in cluster["folders"])
        title = heading(f"Cluster {number}: {cluster['size']:,} images")
        parts += [joined(title, paragraph(folders)), grid([pictures.item(item) for item in cluster["examples"]])]
    return parts


def skipped_note(metrics: Mapping[str, Any]) -> list[str]:
    skipped = metrics["skipped"]
    if not skipped:
        return []
    first = skipped[0]
    return [
        note(f"{len(skipped)} images could not be read; the first is {first['name']} ({first['reason']}).", kind="warn")
    ]


def footer_of(result: Mapping[str, Any]) -> str:
    return machine_line(result["machine"], result["commit"], result["seed"])
