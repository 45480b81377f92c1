"""Data sets of every kind of source, as the files that hold them, and what may happen to such files."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from anechoic.data import open_source
from anechoic.data.preprocess import Preprocess
from anechoic.data.shards import write_shards
from anechoic.models import build_model
from anechoic.runtime.checkpoint import model_card, write_model

COUNT, SIDE, LONG_AGO = 21, 8, 1_000_000_000
SIZES = {"image_size": SIDE, "patch_size": 2, "dim": 16, "depth": 2, "num_heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


# ---- data sets


@dataclass(frozen=True)
class Picture:
    """An image of a data set; torn: its encoded bytes are damaged, at the same length."""

    name: str
    label: int
    pixels: np.ndarray
    torn: bool = False

    @property
    def path(self) -> str:
        return f"{'ab'[self.label]}/{self.name}.bmp"

    @property
    def data(self) -> bytes:
        """A BMP file: of one size whatever it shows."""
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "BMP")
        data = file.getvalue()
        return b"XX" + data[2:] if self.torn else data


def draw(rng: random.Random) -> np.ndarray:
    return np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def draw_set(rng: random.Random) -> list[Picture]:
    return [Picture(f"{number:02d}", number % 2, draw(rng)) for number in range(COUNT)]


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def shards_of(pictures: list[Picture]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        for picture in pictures:
            path = Path(place) / "in" / picture.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.data)
        write_shards(open_source(Path(place) / "in", labels=True), Path(place) / "out")
        return {path.name: path.read_bytes() for path in (Path(place) / "out").iterdir()}


def parquet_of(pictures: list[Picture], *, inside: bool) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"bytes": picture.data if inside else None, "path": picture.path} for picture in pictures]
    image = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    out = io.BytesIO()
    table = pa.table({"image": image, "label": [picture.label for picture in pictures]})
    pq.write_table(table, out, compression="none", use_dictionary=False, row_group_size=5)
    return out.getvalue()


def array_of(pictures: list[Picture], *, labels: bool) -> bytes:
    out, images = io.BytesIO(), np.stack([picture.pixels for picture in pictures])
    if labels:
        np.savez(out, images=images, labels=np.array([picture.label for picture in pictures]))
    else:
        np.save(out, images)
    return out.getvalue()


def images_of(pictures: list[Picture]) -> dict[str, bytes]:
    return {picture.path: picture.data for picture in pictures}


def saved_of(pictures: list[Picture]) -> dict[str, bytes]:
    """A folder of the library `datasets`, with a fixed id."""
    import datasets

    columns = {
        "image": [{"bytes": picture.data, "path": None} for picture in pictures],
        "label": [picture.label for picture in pictures],
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    with tempfile.TemporaryDirectory() as place:
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(place)
        state = json.loads((Path(place) / "state.json").read_text())
        (Path(place) / "state.json").write_text(json.dumps({**state, "_fingerprint": "0" * 16}))
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


# Kind -> (what to open in the data set's folder, the files of the data set).
KINDS: dict[str, tuple[str, Callable[[list[Picture]], dict[str, bytes]]]] = {
    "folder": ("", images_of),
    "list": (
        "list.txt",
        lambda p: {**images_of(p), "list.txt": "".join(f"{q.path}\t{'ab'[q.label]}\n" for q in p).encode()},
    ),
    "zip": ("a.zip", lambda p: {"a.zip": zip_of(images_of(p))}),
    "tar": ("a.tar", lambda p: {"a.tar": tar_of(images_of(p))}),
    "webdataset": (
        "{0..1}.tar",
        lambda p: {
            f"{k}.tar": tar_of({f"{q.name}.{end}": data for q in p[k::2] for end, data in members_of(q)})
            for k in range(2)
        },
    ),
    "shards": ("", shards_of),
    "parquet": ("a.parquet", lambda p: {"a.parquet": parquet_of(p, inside=True)}),
    "parquet folder": ("", lambda p: {f"{k}.parquet": parquet_of(p[k::2], inside=True) for k in range(2)}),
    "parquet paths": ("a.parquet", lambda p: {**images_of(p), "a.parquet": parquet_of(p, inside=False)}),
    "npy": ("a.npy", lambda p: {"a.npy": array_of(p, labels=False)}),
    "npz": ("a.npz", lambda p: {"a.npz": array_of(p, labels=True)}),
    "saved": ("", saved_of),
}


def members_of(picture: Picture) -> list[tuple[str, bytes]]:
    return [("bmp", picture.data), ("cls", b"%d" % picture.label)]


def synchronize(place: Path, files: dict[str, bytes], *, in_place: bool, keep_times: bool) -> None:
    """Make a folder hold these files; those that differ are overwritten in place or replaced by new ones."""
    for path in [path for path in place.rglob("*") if path.is_file() and str(path.relative_to(place)) not in files]:
        path.unlink()
    for name, data in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() == data:
            continue
        if in_place and path.exists():
            with open(path, "r+b") as file:
                file.write(data)
                file.truncate()
        else:
            path.with_name("new").write_bytes(data)
            os.replace(path.with_name("new"), path)
    if keep_times:
        for path in [*place.rglob("*"), place]:
            os.utime(path, (LONG_AGO, LONG_AGO))


# ---- what may happen to a data set


def other_pictures(p: list[Picture], rng: random.Random, number: int) -> list[Picture]:
    chosen = rng.sample(range(len(p)), number)
    return [replace(q, pixels=draw(rng)) if k in chosen else q for k, q in enumerate(p)]


def swap(p: list[Picture], rng: random.Random) -> list[Picture]:
    """Exchange the content of two files of equal size."""
    i, j = rng.sample(range(len(p)), 2)
    return [replace(q, pixels=p[{i: j, j: i}.get(k, k)].pixels) for k, q in enumerate(p)]


def change_one(p: list[Picture], rng: random.Random, **changes: Any) -> list[Picture]:
    chosen = rng.randrange(len(p))
    return [replace(q, **changes) if k == chosen else q for k, q in enumerate(p)]


MUTATIONS: dict[str, Callable[[list[Picture], random.Random], list[Picture]]] = {
    "nothing": lambda p, rng: p,
    "one other picture": lambda p, rng: other_pictures(p, rng, 1),
    "all other pictures": lambda p, rng: other_pictures(p, rng, len(p)),
    "two swapped": swap,
    "one renamed": lambda p, rng: change_one(p, rng, name=rng.choice(["zz", "aa", "05x"])),
    "one removed": lambda p, rng: rng.sample(p, len(p) - 1),
    "one added": lambda p, rng: [*p, Picture("added", rng.randrange(2), draw(rng))],
    "another label": lambda p, rng: change_one(p, rng, label=rng.randrange(2)),
    "another order": lambda p, rng: rng.sample(p, len(p)),
    "one torn": lambda p, rng: change_one(p, rng, torn=True),
}


def damage_cache(cache: Path, rng: random.Random) -> str:
    """Flip or cut bytes in a file of the cache, delete it, or delete all entries of a kind."""
    files = sorted(
        path for path in cache.rglob("*") if path.is_file() and path.stat().st_size and ".lock" not in path.name
    )
    if not files:
        return "an empty cache"
    path, kind = rng.choice(files), rng.choice(["flipped", "cut", "deleted", "kind deleted"])
    data = bytearray(path.read_bytes())
    if kind == "flipped":
        for _ in range(rng.choice([1, 1, 9])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "deleted":
        path.unlink()
    else:
        shutil.rmtree(cache / path.relative_to(cache).parts[0])
    return f"{path.relative_to(cache)} {kind}"


def write_weights(path: Path, rng: random.Random, *, mean: float = 0.5) -> None:
    """An untrained network, of equal size and times for every seed."""
    torch.manual_seed(rng.randrange(1 << 30))
    model = build_model("mae_tiny_patch4", alpha_min=0.7, **SIZES, **DECODER)
    shutil.rmtree(path, ignore_errors=True)
    write_model(path, model.state_dict(), model_card(model, Preprocess((mean,) * 3, (0.25,) * 3, SIDE, 3)))
    for file in path.iterdir():
        os.utime(file, (LONG_AGO, LONG_AGO))
