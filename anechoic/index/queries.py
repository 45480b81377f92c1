"""Queries of a search: images on disk or in the collection, by path, name or number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anechoic.data import BadImage, Source, Subset, open_source
from anechoic.data.files import Files
from anechoic.data.stored_files import StoredFiles
from anechoic.errors import UserError, nearest_name
from anechoic.eval.encoders import Encoder
from anechoic.eval.feature_cache import features_of
from anechoic.index.index import Index, Vector, encoder_for


class Query(NamedTuple):
    """The image `number` of a source; own: its number in the collection, if it is part of it."""

    name: str
    source: Source
    number: int
    own: int | None = None


def resolve(words: Sequence[str], collection: Source) -> list[Query]:
    """Return queries for words: an image file, a folder, or an image of the collection by name, suffix or number."""
    if not words:
        raise UserError("Nothing is searched for: name an image, or several, after the data.")
    names = {collection.name(i): i for i in range(len(collection))}
    queries = []
    for word in words:
        path = Path(word).expanduser()
        if path.exists():
            opened = open_source(path, channels=collection.channels, pixels=collection.pixels)
            queries += [on_disk(opened, i, collection, names) for i in range(len(opened))]
        else:
            own = by_name(word, names)
            queries.append(Query(collection.name(own), collection, own, own))
    return queries


def on_disk(opened: Source, index: int, collection: Source, names: dict[str, int]) -> Query:
    name = opened.name(index)
    if isinstance(opened, Files | StoredFiles) and isinstance(collection, Files | StoredFiles):
        file, root = (opened.root / name).resolve(), collection.root.resolve()
        own = names.get(file.relative_to(root).as_posix()) if file.is_relative_to(root) else None
        return Query(name, opened, index, own)
    return Query(name, opened, index)


def by_name(word: str, names: dict[str, int]) -> int:
    if word in names:
        return names[word]
    ends = [name for name in names if name.endswith(f"/{word}")]
    if len(ends) == 1:
        return names[ends[0]]
    if len(ends) > 1:
        raise UserError(f"{word!r} is the end of {len(ends)} names, such as {ends[0]} and {ends[1]}: write more of it.")
    if word.isdecimal() and int(word) < len(names):
        return int(word)
    known = [name.rsplit("/", 1)[-1] for name in names]
    raise UserError(f"There is no image {word!r}, neither a file nor a name in the data; {nearest_name(word, known)}")


def query_vectors(
    queries: Sequence[Query], index: Index, encoder: Encoder, *, vector: Vector, layer: int, device: str
) -> np.ndarray:
    """Return (Q, D): rows of the index where it has them, computed otherwise."""
    encoder, pooling = encoder_for(encoder, vector, layer)
    layer = -1 if vector == "flat" else layer
    rows = {int(i): row for row, i in enumerate(index.ids)}
    found = np.empty((len(queries), index.vectors.shape[1]), np.float32)
    for number, query in enumerate(queries):
        if query.own is not None and query.own in rows:
            found[number] = index.vectors[rows[query.own]]
            continue
        one = Subset(query.source, [query.number])
        (read,) = query.source.read_many([query.number])
        if isinstance(read, BadImage):
            raise UserError(f"{query.name!r} cannot be searched for ({read.reason}): choose another query.")
        try:
            made = features_of(encoder, one, layers=(layer,), poolings=(pooling,), device=device, cached=False)
        except UserError as error:
            raise UserError(f"{query.name!r} cannot be searched for: {error}") from error
        found[number] = next(iter(made.sets.values()))[0]
    return found
