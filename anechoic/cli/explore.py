"""The command `explore`: what a collection of images is made of."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anechoic.cli._command import command
from anechoic.cli._index import changes_text, index_metrics, indexed
from anechoic.cli._shared import check_page, skipped_text
from anechoic.cli.options import (
    Data,
    Device,
    Engine,
    ImageSize,
    ImageVector,
    Layer,
    Out,
    Run,
    Seed,
    VectorScaling,
    Workers,
)
from anechoic.outcome import Outcome, counted, printable

if TYPE_CHECKING:
    from anechoic.index.collection import Exploration
    from anechoic.index.index import Index

# Outliers in the JSON; the page's list has every image.
LISTED = 100


@command
def explore(
    run: Run,
    data: Data,
    /,
    *,
    out: Out = "explore.html",
    clusters: int | None = None,
    layer: Layer = -1,
    vector: ImageVector = "flat",
    scaling: VectorScaling = "standardized",
    engine: Engine = "auto",
    image_size: ImageSize = None,
    device: Device = "auto",
    workers: Workers = None,
    seed: Seed = 0,
) -> Outcome:
    """Show what a collection is made of: near-duplicates, outliers, clusters and a map, on one page, without labels.

    The page opens from disk, and its lists can be saved as CSV.

    Example: anechoic explore runs/mine photos/ -o photos.html

    Args:
        clusters: number of clusters; by default the one with the best silhouette.
    """
    started = time.perf_counter()
    from anechoic.index.collection import explored
    from anechoic.index.index import Searchable
    from anechoic.pages.collection_pages import explore_page
    from anechoic.pages.html import write_page

    page = Path(out)
    check_page(page)
    encoder, index = indexed(run, data, vector, layer, image_size, device, workers)
    searchable = Searchable.of(index.vectors, scaling, engine=engine)
    found = explored(searchable.units, find=searchable.nearest_others, clusters=clusters, seed=seed)
    metrics: dict[str, Any] = {
        **index_metrics(encoder, index, vector, scaling),
        "search": searchable.described(),
        **described(index, found),
        "page": str(page),
    }
    text = explore_text(metrics) + changes_text(metrics) + f"\n{page}"
    text += skipped_text(metrics["skipped"])
    done = Outcome({"data": str(data)}, metrics, seed, time.perf_counter() - started, text)
    write_page(page, explore_page(done.to_json(), index, found))
    return done


def described(index: Index, found: Exploration) -> dict[str, Any]:
    """Return the numbers of an exploration, for the JSON and the page."""
    from collections import Counter

    import numpy as np

    from anechoic.index.collection import FALSE_ALARMS
    from anechoic.pages.cluster_names import cluster_names, folder_of

    names = index.names()

    def item(row: int) -> dict[str, Any]:
        return {"index": int(index.ids[row]), "image": names[row]}

    closest = {row: value for i, j, value in reversed(found.pairs) for row in (i, j)}
    counts, edges = np.histogram(found.limit.ratio, bins=40)
    folders: list[Counter] = [Counter() for _ in found.clusters.examples]
    for name, label in zip(names, found.clusters.label.tolist(), strict=True):
        folders[label][folder_of(name)] += 1
    called = cluster_names(names, found.clusters.label.tolist(), len(folders))
    of_clusters = zip(called, found.clusters.sizes, folders, found.clusters.examples, strict=True)
    return {
        "folders": len({folder_of(name) for name in names}),
        "limit": {
            "share": found.limit.share,
            "dimension": found.limit.dimension if math.isfinite(found.limit.dimension) else None,
            "false_alarms": FALSE_ALARMS,
            "histogram": [edges.tolist(), counts.tolist()],
        },
        "pairs": len(found.pairs),
        "duplicates": [
            {"similarity": max(closest[row] for row in group), "images": [item(row) for row in group]}
            for group in found.groups
        ],
        "outliers": [{**item(int(row)), "likeness": float(found.likeness[row])} for row in found.oddest[:LISTED]],
        "clusters": [
            {
                "name": name,
                "size": size,
                "folders": list(map(list, most.most_common(3))),
                "examples": [item(row) for row in examples],
            }
            for name, size, most, examples in of_clusters
        ],
    }


def explore_text(metrics: dict[str, Any]) -> str:
    from anechoic.pages.tables import text_table

    def named(items: list[dict[str, Any]]) -> str:
        return ", ".join(printable(item["image"]) for item in items[:3])

    def origin(cluster: dict[str, Any]) -> str:
        return ", ".join(f"{name or 'no folder'} ({count})" for name, count in cluster["folders"])

    groups, several = metrics["duplicates"], metrics["folders"] > 1
    lines = [
        f"{counted(metrics['images'], 'image')} in {counted(metrics['folders'], 'folder')}, compared by "
        f"{metrics['encoder']} ({metrics['vector']}).",
        f"Near-duplicates (closer than {metrics['limit']['share']:.2f} of the distance to other neighbors): "
        f"{counted(len(groups), 'group')}, {counted(sum(len(group['images']) for group in groups), 'image')}"
        + (f"; the closest are {named(groups[0]['images'])}." if groups else "."),
        f"Oddest: {named(metrics['outliers'])}.",
        text_table(
            ["cluster", "images", "name", *(["mostly from"] if several else [])],
            [
                [number, cluster["size"], cluster["name"] or "–", *([origin(cluster)] if several else [])]
                for number, cluster in enumerate(metrics["clusters"], 1)
            ],
        ),
    ]
    return "\n".join(lines)
