"""The features of a source: what an encoder makes of its images in one pass, in memory or in a cache on disk.

The cache's key is the encoder's weights and preparation and the source's images, so a stale entry cannot be met; files
are written as features come, so memory does not grow with the number of images. It knows neither labels nor metrics.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from anechoic.data import Augment, Loader, Source, cache_dir
from anechoic.errors import UserError
from anechoic.evals.encoders import Encoder
from anechoic.evals.features import Key, Pooling, choose_layers, extract, extract_batches


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
    if not cached:
        return in_memory(encoder, source, wanted, device=device)
    folder = cache_dir() / "features" / f"{encoder.fingerprint}-{source.fingerprint}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [key for key in wanted if not (folder / file_name(key)).exists()]
        if missing:
            compute(encoder, source, missing, folder, device=device, workers=workers, keep_pixels=keep_pixels)
    except PermissionError as error:
        warnings.warn(f"Features cannot be kept in {folder} ({error.strerror}); they are computed anew.", stacklevel=2)
        return in_memory(encoder, source, wanted, device=device)
    return read(folder, wanted, source)


def in_memory(encoder: Encoder, source: Source, wanted: Sequence[Key], *, device: str) -> Features:
    ids: list[np.ndarray] = []
    sets = extract(
        encoder.model,
        batches(encoder, source, device=device, ids=ids),
        layers=list(dict.fromkeys(layer for layer, _ in wanted)),
        poolings=list(dict.fromkeys(pooling for _, pooling in wanted)),
        forward=encoder.forward,
    )
    refuse_nothing(ids)
    return Features(sets, np.concatenate(ids), tuple(source.skipped))


def refuse_nothing(ids: Sequence[np.ndarray]) -> None:
    if not ids:
        raise UserError("None of the images could be read, so there are no features; check the data.")


def usable_poolings(encoder: Encoder, poolings: Sequence[Pooling] | None) -> Sequence[Pooling]:
    if poolings is None:
        return encoder.poolings
    if "class" in poolings and "class" not in encoder.poolings:
        raise UserError(f"{encoder.name} has no class token; use --pooling mean.")
    return poolings


def file_name(key: Key) -> str:
    return f"{key[0]:03d}-{key[1]}.npy"


def read(folder: Path, wanted: Sequence[Key], source: Source) -> Features:
    sets = {key: np.load(folder / file_name(key), mmap_mode="r") for key in wanted}
    ids = np.load(folder / "ids.npy")
    # A cached set knows which images are missing, but only a pass over the images knows why.
    missing = np.setdiff1d(np.arange(len(source)), ids)
    known = dict(source.skipped)
    named = (source.name(int(index)) for index in missing)
    return Features(sets, ids, tuple((name, known.get(name, "it could not be read")) for name in named))


def compute(
    encoder: Encoder,
    source: Source,
    wanted: Sequence[Key],
    folder: Path,
    *,
    device: str,
    workers: int,
    keep_pixels: bool,
) -> None:
    """One pass over the source; files take their names only when they are complete."""
    layers = sorted({layer for layer, _ in wanted})
    poolings = list(dict.fromkeys(pooling for _, pooling in wanted))
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".new-"))
    try:
        tables = {
            key: np.lib.format.open_memmap(
                temporary / file_name(key), mode="w+", dtype=np.float32, shape=(len(source), encoder.widths[key[0]])
            )
            for key in wanted
        }
        ids: list[np.ndarray] = []
        stream = batches(encoder, source, device=device, workers=workers, ids=ids, keep_pixels=keep_pixels)
        done = 0
        for found in extract_batches(encoder.model, stream, layers=layers, poolings=poolings, forward=encoder.forward):
            for key, table in tables.items():
                table[done : done + len(found[key])] = found[key].numpy(force=True)
            done += len(found[wanted[0]])
        refuse_nothing(ids)
        np.save(temporary / "ids.npy", np.concatenate(ids))
        for key, table in tables.items():
            table.flush()
            if done < len(source):  # unreadable images were left out
                np.save(temporary / file_name(key), np.array(table[:done]))
        for path in temporary.iterdir():
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def batches(
    encoder: Encoder,
    source: Source,
    *,
    device: str,
    workers: int = 0,
    ids: list[np.ndarray] | None = None,
    keep_pixels: bool = True,
) -> Iterator[Tensor]:
    """Normalised images on the device, with the model there too; the ids of each batch are appended to `ids`."""
    where = pick_device(device)
    encoder.model.to(where)
    loader = Loader(
        source,
        image_size=encoder.image_size,
        batch_size=encoder.batch_size_on_cores if where.type == "cpu" else encoder.batch_size,
        augment=Augment(kind="centre"),
        workers=workers,
        build_cache=keep_pixels,
    )
    bar = tqdm(loader, total=loader.num_batches, desc=encoder.name, leave=False, disable=not sys.stderr.isatty())
    for batch in bar:
        if ids is not None:
            ids.append(batch.ids.numpy())
        yield encoder.prepare(batch.images.to(where), batch.ids)
