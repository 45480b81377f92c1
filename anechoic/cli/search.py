"""The command `search`: the images most like a given one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

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
    OptionalOut,
    Run,
    VectorScaling,
    Workers,
)
from anechoic.errors import UserError
from anechoic.outcome import Outcome

NumNeighbors = Annotated[int, tyro.conf.arg(aliases=["-k"])]


@command
def search(
    run: Run,
    data: Data,
    query: Sequence[str],
    /,
    *,
    k: NumNeighbors = 12,
    out: OptionalOut = None,
    layer: Layer = -1,
    vector: ImageVector = "flat",
    scaling: VectorScaling = "standardized",
    engine: Engine = "auto",
    image_size: ImageSize = None,
    device: Device = "auto",
    workers: Workers = None,
) -> Outcome:
    """Find the images most like a given one, as a table and as a page of pictures.

    The index, one vector per image, is cached: added images are embedded next time, and all of them when the weights
    have changed. --out is a page with the pictures, which opens from disk.

    Example: anechoic search runs/mine photos/ photos/beach/0017.jpg -o near.html

    Args:
        query: image files or folders of them, or names or numbers of images in the data.
        k: number of images to find for each query.
    """
    started = time.perf_counter()
    from anechoic.index.index import Searchable
    from anechoic.index.queries import query_vectors, resolve
    from anechoic.pages.collection_pages import search_page
    from anechoic.pages.html import write_page
    from anechoic.pages.tables import text_table

    if k < 1:
        raise UserError(f"-k is the number of images to find, 1 or more, not {k}.")
    page = None if out is None else Path(out)
    check_page(page)
    encoder, index = indexed(run, data, vector, layer, image_size, device, workers)
    queries = resolve(query, index.source)
    vectors = query_vectors(queries, index, encoder, vector=vector, layer=layer, device=device)
    searchable = Searchable.of(index.vectors, scaling, engine=engine)
    found = searchable.nearest(vectors, k=k + 1)
    rows = []
    for number, (asked, near, values) in enumerate(zip(queries, found.indices, found.similarities, strict=True)):
        hits = zip(index.ids[near.numpy()].tolist(), values.tolist(), strict=True)
        others = [(i, value) for i, value in hits if i != asked.own][:k]
        for rank, (i, value) in enumerate(others, 1):
            where = {"index": i, "image": index.source.name(i), "similarity": value}
            rows.append({"number": number, "query": asked.name, "rank": rank, **where})
    metrics: dict[str, Any] = {**index_metrics(encoder, index, vector, scaling), "search": searchable.described()}
    metrics["rows"] = rows
    columns = ("query", "rank", "similarity", "image")
    text = text_table(columns, [[row[name] for name in columns] for row in rows]) + changes_text(metrics)
    if page is not None:
        metrics["page"] = str(page)
        text += f"\n{page}"
    text += skipped_text(metrics["skipped"])
    done = Outcome({"k": k, "data": str(data)}, metrics, seconds=time.perf_counter() - started, text=text)
    if page is not None:
        write_page(page, search_page(done.to_json(), queries, index.source))
    return done
