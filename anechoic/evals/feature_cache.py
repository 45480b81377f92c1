"""The features of a source: what an encoder makes of its images in one pass, in memory or in a cache on disk.

The cache's key is the encoder's weights and preparation and the source's images, so a stale entry cannot be met; a
checksum tells a damaged one. Files are written as features come, so memory does not grow with the number of images,
unless the disk refuses: then they are held in memory. It knows neither labels nor metrics.
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from anechoic.data import Augment, Loader, Source, cache_dir
from anechoic.data.cache import locked
from anechoic.errors import UserError
from anechoic.evals.encoders import Encoder
from anechoic.evals.features import Key, Pooling, choose_layers, extract_batches
from anechoic.runtime.files import (
    read_json,
    remove,
    reserve,
    sealed,
    sweep_leftovers,
    unsealed,
    write_aside,
    write_json,
)

IDS, INDEX = "ids.npy", "index.json"


@dataclass(frozen=True)
class Features:
    """sets: (layer, pooling) -> float32 (n, D); ids (n,): which images of the source; skipped: (name, reason) of those
    that cannot be read."""

    sets: dict[Key, np.ndarray]
    ids: np.ndarray
    skipped: tuple[tuple[str, str], ...] = ()


def pick_device(device: str) -> torch.device:
    """The device of this name; "auto" is an accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        return accelerator or torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"There is no device {device!r} here; choose {accelerator or 'cpu'} or auto.") from error


def features_of(
    encoder: Encoder,
    source: Source,
    *,
    layers: Sequence[int] | Literal["all"] = (-1,),
    poolings: Sequence[Pooling] | None = None,
    device: str = "auto",
    workers: int = 0,
    cached: bool = True,
    keep_pixels: bool = True,
) -> Features:
    """Deterministic, unmasked features of every readable image, in the source's order. Centre crop, no augmentation.

    cached: kept on disk and read from there as used; otherwise in memory. keep_pixels: decode the images into the pixel
    cache first, which pays when they are passed over again.
    """
    pick_device(device)  # a mistake is told even when nothing has to be computed
    chosen = choose_layers(layers, count=len(encoder.widths))
    wanted: list[Key] = [(layer, pooling) for layer in chosen for pooling in usable_poolings(encoder, poolings)]
    how = {"device": device, "workers": workers, "keep_pixels": keep_pixels}
    if not cached:
        return compute_in_memory(encoder, source, wanted, **how)
    folder = cache_dir() / "features" / f"{encoder.fingerprint}-{source.fingerprint}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", working_on=folder):
            sweep_leftovers(folder)
            good = intact(folder, [IDS, *map(file_name, wanted)])
            missing = [key for key in wanted if not {IDS, file_name(key)} <= good]
            if missing:
                compute(encoder, source, missing, folder, **how)
            return read(folder, wanted, source)
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"Features cannot be kept in {folder} ({reason}); they are held in memory.", stacklevel=2)
        return compute_in_memory(encoder, source, wanted, **how)


def usable_poolings(encoder: Encoder, poolings: Sequence[Pooling] | None) -> Sequence[Pooling]:
    if poolings is None:
        return encoder.poolings
    if "class" in poolings and "class" not in encoder.poolings:
        raise UserError(f"{encoder.name} has no class token; use --pooling mean.")
    return poolings


def file_name(key: Key) -> str:
    return f"{key[0]:03d}-{key[1]}.npy"


def intact(folder: Path, names: Sequence[str]) -> set[str]:
    """Those of the files that are what was written; a warning names one that is there but damaged."""
    good = set()
    for name, expected in read_index(folder).items():
        if name in names and (folder / name).is_file():
            if file_crc(folder / name) == expected:
                good.add(name)
            else:
                warnings.warn(f"Features in {folder / name} are damaged; they are computed anew.", stacklevel=3)
    return good


def read_index(folder: Path) -> dict[str, int]:
    """File name -> checksum of everything kept here; nothing if the index is missing or damaged."""
    try:
        return unsealed(read_json(folder / INDEX))["files"]
    except (ValueError, KeyError):  # a UserError is a ValueError
        return {}


def file_crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def read(folder: Path, wanted: Sequence[Key], source: Source) -> Features:
    sets = {key: np.load(folder / file_name(key), mmap_mode="r") for key in wanted}
    ids = np.load(folder / IDS)
    # The cache knows which images are missing, but only a pass over the images knows why.
    known = dict(source.skipped)
    missing = (source.name(int(index)) for index in np.setdiff1d(np.arange(len(source)), ids))
    return Features(sets, ids, tuple((name, known.get(name, "it could not be read")) for name in missing))


def compute(encoder: Encoder, source: Source, wanted: Sequence[Key], folder: Path, **how: Any) -> None:
    """One pass over the source; files take their names, and are listed, only when they are complete."""
    with write_aside(folder / "pass", folder=True) as temporary:
        tables = {key: new_table(temporary / file_name(key), len(source), encoder.widths[key[0]]) for key in wanted}
        ids = fill(encoder, source, tables, still_here=temporary, **how)
        for key, table in tables.items():
            table.flush()
            if len(ids) < len(source):  # unreadable images were left out
                np.save(temporary / file_name(key), np.array(table[: len(ids)]))
        np.save(temporary / IDS, ids)
    # Nobody reads before the index lists the files, and only the holder of the lock writes.
    made = {path.name: file_crc(path) for path in (folder / "pass").iterdir()}
    for name in made:
        os.replace(folder / "pass" / name, folder / name)
    remove(folder / "pass")
    write_json(folder / INDEX, sealed({"files": {**read_index(folder), **made}}))


def new_table(path: Path, rows: int, width: int) -> np.memmap:
    """float32 (rows, width) in a file whose room is taken now: later a full disk could not be told any more."""
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    with open(path, "r+b") as file:
        reserve(file.fileno(), path.stat().st_size)
    return table


def compute_in_memory(encoder: Encoder, source: Source, wanted: Sequence[Key], **how: Any) -> Features:
    tables = {key: np.empty((len(source), encoder.widths[key[0]]), np.float32) for key in wanted}
    ids = fill(encoder, source, tables, **how)
    return Features({key: table[: len(ids)] for key, table in tables.items()}, ids, tuple(source.skipped))


def fill(
    encoder: Encoder,
    source: Source,
    tables: Mapping[Key, np.ndarray],
    *,
    still_here: Path | None = None,
    device: str,
    workers: int,
    keep_pixels: bool,
) -> np.ndarray:
    """Write features into the first rows of each table; returns the ids of the images that could be read.

    still_here: touched now and then, so that processes that wait for this one see that it gets on.
    """
    layers = sorted({layer for layer, _ in tables})
    poolings = list(dict.fromkeys(pooling for _, pooling in tables))
    ids: list[np.ndarray] = []
    stream = batches(encoder, source, device=device, workers=workers, ids=ids, keep_pixels=keep_pixels)
    done = 0
    for found in extract_batches(encoder.model, stream, layers=layers, poolings=poolings, forward=encoder.forward):
        rows = len(next(iter(found.values())))
        for key, table in tables.items():
            table[done : done + rows] = found[key].numpy(force=True)
        done += rows
        if still_here is not None:
            os.utime(still_here)
    if done == 0:
        raise UserError("None of the images could be read, so there are no features; check the data.")
    return np.concatenate(ids)


def batches(
    encoder: Encoder,
    source: Source,
    *,
    device: str,
    workers: int = 0,
    ids: list[np.ndarray] | None = None,
    keep_pixels: bool = True,
    augment: Augment | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Prepared images on the device, with the model there too; the ids of each batch are appended to `ids`.

    augment: instead of the centre crop, drawn from the seed.
    """
    where = pick_device(device)
    encoder.model.to(where)
    loader = Loader(
        source,
        image_size=encoder.image_size,
        batch_size=encoder.batch_size_on_cores if where.type == "cpu" else encoder.batch_size,
        augment=augment or Augment(kind="centre"),
        seed=seed,
        workers=workers,
        build_cache=keep_pixels,
    )
    bar = tqdm(loader, total=loader.num_batches, desc=encoder.name, leave=False, disable=not sys.stderr.isatty())
    for batch in bar:
        if ids is not None:
            ids.append(batch.ids.numpy())
        yield encoder.prepare(batch.images.to(where), batch.ids)
