"""The verbs that find things in one's own pictures: search and explore."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from anechoic.cli.evaluating import listed, outcome, refuse_swapped, skipped_text
from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.eval.encoders import Encoder
    from anechoic.index.collection import Exploration
    from anechoic.index.index import Index

Page = Annotated[Path | None, tyro.conf.arg(aliases=["-o"])]
Count = Annotated[int, tyro.conf.arg(aliases=["-k"])]
Vector = Literal["class", "mean", "all", "flat"]
Scaling = Literal["raw", "centered", "standardized", "whitened"]
# Outliers in the JSON; the page's list has every image.
LISTED = 100


def search(
    run: str,
    data: str,
    query: tuple[str, ...],
    /,
    *,
    k: Count = 12,
    output: Page = None,
    layer: int = -1,
    vector: Vector = "flat",
    scaling: Scaling = "standardized",
    engine: Literal["torch", "faiss"] = "torch",
    image_size: int | None = None,
    device: str = "auto",
    workers: int = 0,
) -> Outcome:
    """Find the images most like a given one, as a table and as a page of pictures.

    The index, one vector per image, is kept in the cache: added images are embedded next time, and all of them when the
    weights have changed.

    Example: anechoic search runs/mine photos/ photos/beach/0017.jpg -o near.html

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER.
        data: the images that are searched: a folder, list, zip, tar, parquet, npz, digits, scenes, emoji or hf:NAME.
        query: image files or folders of them, or names or numbers of images in the data.
        k: how many images to find for each query.
        output: a page with the pictures, which opens from disk.
        layer: 0 is the embedding, k the k-th block, -1 the encoder's output.
        vector: all patches side by side (flat), the class token, the mean of the patches, or of all tokens; flat and
            standardized searched best, measured with labels.
        scaling: raw; centered to mean 0; standardized, each channel to deviation 1 too; or whitened, all directions.
        engine: torch, or faiss, which needs an extra package; both are exact.
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        workers: processes that decode ahead.
    """
    started = time.perf_counter()
    from anechoic.index.index import Searchable
    from anechoic.index.queries import query_vectors, resolve
    from anechoic.pages.collection_pages import search_page
    from anechoic.pages.html import write_page
    from anechoic.pages.tables import text_table

    if k < 1:
        raise UserError(f"-k counts the images to find, 1 or more, not {k}.")
    check_page(output)
    encoder, index = opened(run, data, vector, layer, image_size, device, workers)
    queries = resolve(query, index.source)
    vectors = query_vectors(queries, index, encoder, vector=vector, layer=layer, device=device)
    searchable = Searchable.of(index.vectors, scaling)
    found = searchable.nearest(vectors, k=k + 1, engine=engine)
    rows = []
    for number, (asked, near, values) in enumerate(zip(queries, found.indices, found.similarities, strict=True)):
        hits = zip(index.ids[near.numpy()].tolist(), values.tolist(), strict=True)
        others = [(i, value) for i, value in hits if i != asked.own][:k]
        for rank, (i, value) in enumerate(others, 1):
            where = {"index": i, "image": index.source.name(i), "similarity": value}
            rows.append({"number": number, "query": asked.name, "rank": rank, **where})
    metrics: dict[str, Any] = {**about(encoder, index, vector, scaling), "rows": rows}
    columns = ("query", "rank", "similarity", "image")
    text = text_table(columns, [[row[name] for name in columns] for row in rows]) + changes_text(metrics)
    if output is not None:
        metrics["page"] = str(output)
        text += f"\n{output}"
    done = outcome(metrics, text + skipped_text(metrics["skipped"]), started, k=k, data=data)
    if output is not None:
        write_page(output, search_page(done.to_json(), queries, index.source))
    return done


def explore(
    run: str,
    data: str,
    /,
    *,
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("explore.html"),
    clusters: int | None = None,
    layer: int = -1,
    vector: Vector = "flat",
    scaling: Scaling = "standardized",
    image_size: int | None = None,
    device: str = "auto",
    workers: int = 0,
    seed: int = 0,
) -> Outcome:
    """Show what a collection is made of: near-duplicates, outliers, clusters and a map, on one page, without labels.

    Example: anechoic explore runs/mine photos/ -o photos.html

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER.
        data: the images: a folder, list, zip, tar, parquet, npz, digits, scenes, emoji or hf:NAME.
        output: the page to write; it opens from disk, and its lists can be saved as CSV.
        clusters: how many; by default the number with the best silhouette.
        layer: 0 is the embedding, k the k-th block, -1 the encoder's output.
        vector: all patches side by side (flat), the class token, the mean of the patches, or of all tokens; flat and
            standardized searched best, measured with labels.
        scaling: raw; centered to mean 0; standardized, each channel to deviation 1 too; or whitened, all directions.
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        workers: processes that decode ahead.
        seed: of the clusters and of the map.
    """
    started = time.perf_counter()
    from anechoic.index.collection import explored
    from anechoic.index.index import Searchable
    from anechoic.pages.collection_pages import explore_page
    from anechoic.pages.html import write_page

    check_page(output)
    encoder, index = opened(run, data, vector, layer, image_size, device, workers)
    found = explored(Searchable.of(index.vectors, scaling).units, clusters=clusters, seed=seed)
    metrics: dict[str, Any] = {
        **about(encoder, index, vector, scaling),
        **described(index, found),
        "page": str(output),
    }
    text = explore_text(metrics) + changes_text(metrics) + f"\n{output}"
    done = outcome(metrics, text + skipped_text(metrics["skipped"]), started, seed, data=data)
    write_page(output, explore_page(done.to_json(), index, found))
    return done


# ---- what the two share


def opened(
    run: str, data: str, vector: Vector, layer: int, image_size: int | None, device: str, workers: int
) -> tuple[Encoder, Index]:
    from anechoic.data import open_source
    from anechoic.eval.encoders import open_encoder
    from anechoic.index.index import open_index

    if workers < 0:
        raise UserError(f"--workers counts processes, 0 or more, not {workers}.")
    refuse_swapped(run, data)
    encoder = open_encoder(run, image_size=image_size)
    source = open_source(data, channels=encoder.channels)
    how: dict[str, Any] = {"vector": vector, "layer": layer, "device": device, "workers": workers}
    return encoder, open_index(encoder, source, encoder_name=run, place=data, **how)


def check_page(output: Path | None) -> None:
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"The page is written as HTML, and {output.name!r} does not end in .html.")


def about(encoder: Encoder, index: Index, vector: str, scaling: str) -> dict[str, Any]:
    return {
        "encoder": encoder.name,
        "vector": f"{VECTORS[vector]}, {scaling}",
        "images": len(index.ids),
        "added": index.added,
        "removed": index.removed,
        "skipped": listed(index.skipped),
    }


VECTORS = {
    "flat": "patches side by side",
    "class": "class token",
    "mean": "mean of the patches",
    "all": "mean of all tokens",
}


def changes_text(metrics: dict[str, Any]) -> str:
    if metrics["added"] == metrics["images"]:
        return f"\nIndexed {metrics['images']:,} images."
    parts = [f"{metrics[name]:,} {name}" for name in ("added", "removed") if metrics[name]]
    return f"\nThe index has {metrics['images']:,} images" + (f" ({', '.join(parts)})." if parts else ".")


def described(index: Index, found: Exploration) -> dict[str, Any]:
    """The numbers of an exploration, for the JSON and the page alike."""
    from collections import Counter

    import numpy as np

    from anechoic.index.collection import FALSE_ALARMS
    from anechoic.pages.collection_pages import folder_of

    names = index.names()

    def item(row: int) -> dict[str, Any]:
        return {"index": int(index.ids[row]), "image": names[row]}

    closest = {row: value for i, j, value in reversed(found.pairs) for row in (i, j)}
    counts, edges = np.histogram(found.limit.ratio, bins=40)
    folders: list[Counter] = [Counter() for _ in found.clusters.examples]
    for name, label in zip(names, found.clusters.label.tolist(), strict=True):
        folders[label][folder_of(name)] += 1
    of_clusters = zip(found.clusters.sizes, folders, found.clusters.examples, strict=True)
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
            {"size": size, "folders": list(map(list, most.most_common(3))), "examples": [item(row) for row in examples]}
            for size, most, examples in of_clusters
        ],
    }


def explore_text(metrics: dict[str, Any]) -> str:
    from anechoic.pages.tables import text_table

    groups = metrics["duplicates"]
    lines = [
        f"{metrics['images']:,} images in {metrics['folders']:,} folders, as {metrics['encoder']} sees them "
        f"({metrics['vector']}).",
        f"Near-duplicates (closer than {metrics['limit']['share']:.2f} of the distance to other neighbors): "
        f"{len(groups)} groups, {sum(len(group['images']) for group in groups)} images"
        + (f"; the closest are {', '.join(item['image'] for item in groups[0]['images'][:3])}." if groups else "."),
        f"Oddest: {', '.join(item['image'] for item in metrics['outliers'][:3])}.",
        text_table(
            ["cluster", "images", "mostly from"],
            [
                [number, cluster["size"], ", ".join(f"{name} ({count})" for name, count in cluster["folders"])]
                for number, cluster in enumerate(metrics["clusters"], 1)
            ],
        ),
    ]
    return "\n".join(lines)
