"""What `search` and `explore` share: the index of a collection, and how it is described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anechoic.choices import Scaling, Vector
from anechoic.cli._shared import check_workers, refuse_swapped, skipped_rows
from anechoic.cli.options import PathLike
from anechoic.outcome import counted

if TYPE_CHECKING:
    from anechoic.eval.encoders import Encoder
    from anechoic.index.index import Index


def indexed(
    run: PathLike,
    data: PathLike,
    vector: Vector,
    layer: int,
    image_size: int | None,
    device: str,
    workers: int | None,
) -> tuple[Encoder, Index]:
    from anechoic.data import open_source
    from anechoic.eval.encoders import open_encoder
    from anechoic.index.index import open_index

    refuse_swapped(run, data)
    encoder = open_encoder(run, image_size=image_size)
    source = open_source(data, channels=encoder.channels, pixels=encoder.pixels)
    how: dict[str, Any] = {"vector": vector, "layer": layer, "device": device, "workers": check_workers(workers)}
    return encoder, open_index(encoder, source, encoder_name=str(run), place=str(data), **how)


def index_metrics(encoder: Encoder, index: Index, vector: Vector, scaling: Scaling) -> dict[str, Any]:
    return {
        "encoder": encoder.name,
        "vector": f"{VECTORS[vector]}, {scaling}",
        "images": len(index.ids),
        "added": index.added,
        "removed": index.removed,
        "skipped": skipped_rows(index.skipped),
    }


VECTORS = {
    "flat": "patches side by side",
    "class": "class token",
    "mean": "mean of the patches",
    "all": "mean of all tokens",
}


def changes_text(metrics: dict[str, Any]) -> str:
    return index_text(metrics) + search_text(metrics["search"])


def search_text(search: dict[str, Any]) -> str:
    if search["exact"]:
        return ""
    return (
        "\nSearch is approximate: recall at 10 is {recall:.3f} against exact search of a sample "
        "({read} of {lists} lists are read). Its index is rebuilt when images are added or removed."
    ).format(**search)


def index_text(metrics: dict[str, Any]) -> str:
    if metrics["added"] == metrics["images"]:
        return f"\nIndexed {counted(metrics['images'], 'image')}."
    parts = [f"{metrics[name]:,} {name}" for name in ("added", "removed") if metrics[name]]
    return f"\nThe index has {counted(metrics['images'], 'image')}" + (f" ({', '.join(parts)})." if parts else ".")
