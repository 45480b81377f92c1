"""Feature vectors by several ranks: a folder of parquet parts, each of a fixed range of images, written atomically.

Parts do not depend on the number of ranks, and begin at the start of a batch: their union has the rows of a single
file, bit by bit. A rank takes every world-size-th part and talks to no other rank, so any of them may be killed and
started again. A part that is there is not computed again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data import Source, Subset
from anechoic.data.source import readable
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.export_features import parquet_modules, write_vectors
from anechoic.eval.feature_cache import feature_batches, usable_poolings
from anechoic.eval.features import Key, Pooling, choose_layers
from anechoic.eval.tensors import warn_if_constant
from anechoic.runtime.devices import pick_device
from anechoic.storage.files import NEW, make_folder

log = logging.getLogger("anechoic")

# Images of a part, 13 MB of 384 channels, unless another number is given.
PART_SIZE = 8192
NAME = re.compile(r"part-(\d+)-of-(\d+)\.parquet")
# What must be equal in all parts of a folder, and how a user knows it.
SAME = {"weights": "weights", "layer": "--layer", "pooling": "--pooling", "device": "--device", "size": "--part-size"}


@dataclass(frozen=True)
class Parts:
    """The parts of one pass: where they are, whose images they have, and what is written into each."""

    folder: Path
    source: Source
    size: int
    about: dict[str, str]

    @property
    def count(self) -> int:
        return -(-len(self.source) // self.size)

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}-of-{self.count:05d}.parquet"

    def images(self, part: int) -> np.ndarray:
        return np.arange(part * self.size, min((part + 1) * self.size, len(self.source)))

    def check_folder(self) -> None:
        """Refuse a folder with parts of other images."""
        for path in self.folder.glob("[!.]*.parquet"):
            found = NAME.fullmatch(path.name)
            if found is None or int(found[2]) != self.count:
                raise UserError(
                    f"{path} is no part of these {len(self.source):,} images: choose another folder for --out."
                )

    def is_finished(self, part: int) -> bool:
        """Return whether the part is there, of these images; refuse one that other settings made."""
        found = self.read_about(part)
        if found is None:
            return False
        for name, option in SAME.items():
            if found.get(name) != self.about[name]:
                raise UserError(
                    f"{self.path(part)} was made with other {option} ({found.get(name)}, now {self.about[name]}): "
                    "choose another folder for --out, or delete this one."
                )
        if found.get("images") != self.source.fingerprint_of(self.images(part)):
            log.warning("%s is made again: its images have changed.", self.path(part))
            return False
        return not readable(self.source, json.loads(found["retry"]))

    def read_about(self, part: int) -> dict[str, str] | None:
        """Return what was written about the part; None if it is missing or damaged."""
        pa, pq = parquet_modules()
        try:
            with pq.ParquetFile(self.path(part)) as file:
                found = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
                return {**found, "rows": str(file.metadata.num_rows)}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, pa.ArrowException) as problem:
            log.warning("%s is damaged (%s) and is made again.", self.path(part), str(problem).split("\n", 1)[0])
            return None

    def write(self, part: int, ids: np.ndarray, vectors: np.ndarray, *, images: str) -> None:
        """Write the vectors of the images `ids`; images: the fingerprint of all images of the part."""
        missing = np.setdiff1d(self.images(part), ids).tolist()
        reasons = dict(self.source.skipped)
        skipped = [[name, reasons.get(name, "it could not be read")] for name in map(self.source.name, missing)]
        retry = readable(self.source, missing, or_later=True)
        about = {**self.about, "images": images, "skipped": json.dumps(skipped), "retry": json.dumps(retry)}
        write_vectors(self.path(part), vectors, names=[self.source.name(int(i)) for i in ids], about=about)


def embed_parts(
    encoder: Encoder,
    source: Source,
    folder: Path,
    *,
    layer: int = -1,
    pooling: Pooling | None = None,
    device: str = "auto",
    workers: int = 0,
    part_size: int = PART_SIZE,
    rank: int = 0,
    world_size: int = 1,
    about: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Embed the images of this rank's parts that are not finished; return what is in the folder then."""
    if part_size < 1 or part_size % encoder.batch_size:
        raise UserError(f"--part-size is a multiple of {encoder.batch_size} images, not {part_size}.")
    (number,) = choose_layers((layer,), count=len(encoder.widths))
    (chosen,) = usable_poolings(encoder, (pooling or encoder.poolings[0],))
    same = {"layer": number, "pooling": chosen, "weights": encoder.fingerprint, "device": pick_device(device).type}
    settings = {name: str(value) for name, value in {**same, "size": part_size}.items()}
    parts = Parts(folder, source, part_size, {**(about or {}), **settings})
    make_folder(folder)
    parts.check_folder()
    own = range(rank, parts.count, world_size)
    todo = [part for part in own if not parts.is_finished(part)]
    for part in todo:  # what a killed process left of it: nobody else writes it
        for leftover in folder.glob(f"{NEW}*-{parts.path(part).name}"):
            leftover.unlink(missing_ok=True)
    compute(encoder, parts, todo, (number, chosen), device=device, workers=workers)
    known = [found for part in range(parts.count) if (found := parts.read_about(part)) is not None]
    skipped = [{"name": name, "reason": reason} for found in known for name, reason in json.loads(found["skipped"])]
    return {
        "vectors": sum(int(found["rows"]) for found in known),
        "dim": encoder.widths[number],
        "parts": parts.count,
        "finished": len(known),
        "computed": len(todo),
        "rank": rank,
        "world_size": world_size,
        "skipped": skipped,
        **parts.about,
    }


def compute(encoder: Encoder, parts: Parts, todo: Sequence[int], key: Key, **how: Any) -> None:
    """Write these parts in one pass over their images."""
    chosen = [parts.images(part) for part in todo]
    images = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    stream = feature_batches(encoder, Subset(parts.source, images), [key], pixel_cache=False, **how)
    batches = ((images[ids], found[key]) for ids, found in stream)
    following = next(batches, None)
    for part in todo:
        fingerprint = parts.source.fingerprint_of(parts.images(part))
        ids, vectors = [np.empty(0, np.int64)], [np.empty((0, encoder.widths[key[0]]), np.float32)]
        while following is not None and following[0][0] // parts.size == part:
            ids.append(following[0])
            vectors.append(following[1])
            following = next(batches, None)
        made = np.concatenate(vectors)
        if part == todo[0]:
            warn_if_constant(made, f"of layer {key[0]} ({key[1]})")
        parts.write(part, np.concatenate(ids), made, images=fingerprint)
