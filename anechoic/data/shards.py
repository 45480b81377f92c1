"""WebDataset shards with an index beside them: written by `anechoic tools shard`, read in any order, here or by URL.

A shard is a plain tar of KEY.jpg (or another image) and KEY.cls, for any WebDataset reader. The index has the position
and checksum of every image, so opening a million images reads one file. The loader's order is a function of seed and
samples seen, as for folders, since any image can be read at any time. Shards without an index: archives.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anechoic.data.archives import CHECKED_TAR, MEMBER, ArchiveSource, archive_source_class, expand_braces, open_shards
from anechoic.data.arrays import numpy_damage, read_npz
from anechoic.data.decoding import Undecodable, decode
from anechoic.data.remote_files import filesystem, is_url
from anechoic.data.source import BadImage, EncodedSource, Names, Source, check_labels, digest, refuse_exhaustion
from anechoic.errors import UserError
from anechoic.storage.cache import hash_file
from anechoic.storage.files import write_aside
from anechoic.storage.safe_io import reason

INDEX = "index.npz"
FORMAT = "anechoic-shards-1"
MAX_INDEX_BYTES = 1 << 31
# The first bytes of each format; other formats are written as PNG.
SIGNATURES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"BM": ".bmp", b"II*\0": ".tif", b"MM\0*": ".tif"}
CHUNK = 256


# ---- writing


class Written(NamedTuple):
    """Numbers of shards, images and bytes, and (name, reason) of skipped images."""

    shards: int
    images: int
    size: int
    skipped: list[tuple[str, str]]


class ShardWriter:
    """Fills shard after shard, up to a number of bytes each, and keeps the index."""

    def __init__(self, folder: Path, *, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.shards: list[str] = []
        self.names: list[str] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self._file: io.BufferedWriter | None = None

    def add(self, name: str, data: bytes, label: int | None) -> None:
        key = f"{len(self.rows):09d}"
        if self._file is None or self._file.tell() + len(data) > self.shard_bytes:
            self.end()
            self.shards.append(f"shard-{len(self.shards):06d}.tar")
            self._file = open(self.folder / self.shards[-1], "wb")  # noqa: SIM115
        start = self._write(key + suffix_of(data), data)
        self.names.append(name)
        self.rows.append((len(self.shards) - 1, start, len(data), CHECKED_TAR, zlib.crc32(data)))
        if label is not None:
            self._write(f"{key}.cls", str(label).encode())

    def _write(self, name: str, data: bytes) -> int:
        """Write one member; return the offset of its data. No times or owners: equal images make equal shards."""
        assert self._file is not None
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._file.write(info.tobuf(tarfile.USTAR_FORMAT))
        start = self._file.tell()
        self._file.write(data)
        self._file.write(bytes(-len(data) % 512))
        return start

    def end(self) -> None:
        if self._file is not None:
            self._file.write(bytes(1024))
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write_index(self, labels: np.ndarray | None, classes: Sequence[str] | None) -> None:
        names = Names.of(self.names)
        arrays = {
            "format": np.array(FORMAT),
            "shards": np.array(self.shards),
            "sizes": np.array([(self.folder / name).stat().st_size for name in self.shards], np.int64),
            "hashes": np.frombuffer(b"".join(hash_file(self.folder / name) for name in self.shards), "V16"),
            "members": np.array(self.rows, dtype=MEMBER),
            "names": np.frombuffer(names.blob, np.uint8),
            "ends": names.ends,
        }
        if labels is not None:
            arrays["labels"] = labels
        if classes is not None:
            arrays["classes"] = np.array(classes)
        with open(self.folder / INDEX, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def suffix_of(data: bytes) -> str:
    """Return the suffix of a known format; empty for others."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for start, suffix in SIGNATURES.items() if data.startswith(start)), "")


def encode_image(source: Source, index: int) -> tuple[bytes, str] | BadImage:
    """Return (encoded image, name): the file itself if its format is known, else a PNG of its pixels."""
    name = source.name(index)
    try:
        if isinstance(source, EncodedSource):
            data = source.data(index)
            pixels = decode(data, channels=source.channels)
            return (data if suffix_of(data) else as_png(pixels)), name
        return as_png(source.read(index)), name
    except BadImage as bad:
        return bad
    except (Undecodable, OSError) as error:
        refuse_exhaustion(error)
        return BadImage(name, reason(error))


def as_png(pixels: Tensor) -> bytes:
    from PIL import Image

    array = pixels.permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(file, "PNG")
    return file.getvalue()


def write_shards(
    source: Source, out: Path, *, shard_bytes: int = 1 << 28, progress: Callable[[int], Any] = lambda count: None
) -> Written:
    """Write every readable image of the source to OUT, complete or not at all; equal data make equal bytes."""
    if source.transform is not None or source.channels > 4:
        raise UserError("Shards hold images of 1 to 4 channels; latents and other arrays stay as they are.")
    if out.exists():
        raise UserError(f"{out} exists already; choose another directory for the shards, or remove it first.")
    if shard_bytes < 1 << 16:
        raise UserError("A shard of less than 65,536 bytes is mostly headers; choose --shard-bytes larger.")
    kept: list[int] = []
    with (
        write_aside(out, folder=True) as temporary,
        contextlib.closing(ShardWriter(temporary, shard_bytes=shard_bytes)) as writer,
    ):
        for index, found in enumerate(_all_encoded(source)):
            if isinstance(found, BadImage):
                source.add_skipped([(found.name, found.reason)])
            else:
                writer.add(found[1], found[0], None if source.labels is None else int(source.labels[index]))
                kept.append(index)
            progress(1)
        writer.end()
        labels = None if source.labels is None else np.asarray(source.labels, dtype=np.int64)[kept]
        writer.write_index(labels, source.classes)
        size = sum(file.stat().st_size for file in temporary.iterdir())
    return Written(len(writer.shards), len(kept), size, list(source.skipped))


def _all_encoded(source: Source) -> Iterator[tuple[bytes, str] | BadImage]:
    """Yield every image in order, checked by threads: decoders release the interpreter's lock."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for first in range(0, len(source), CHUNK):
            chunk = range(first, min(first + CHUNK, len(source)))
            yield from pool.map(lambda index: encode_image(source, index), chunk)


# ---- reading


def open_indexed(where: str, *, labels: bool, channels: int) -> ArchiveSource:
    """Open a folder, or the URL of one, that `anechoic tools shard` wrote."""
    arrays = _remote_index(where) if is_url(where) else read_npz(Path(where) / INDEX)
    shards, members, names, numbers, classes = _checked_index(arrays, where)
    if labels and numbers is None:
        raise UserError(f"The shards in {where!r} have no labels; write them from data that has some.")
    archives: list[Path | str] = [f"{where.rstrip('/')}/{shard}" for shard in shards]
    if not is_url(where):
        archives = [Path(where) / shard for shard in shards]
        _check_sizes(archives, arrays["sizes"])
    kind = archive_source_class(archives)
    given = (numbers, classes) if labels else (None, None)
    source = kind(archives, names, members, channels=channels, labels=given[0], classes=given[1])
    source.earlier_fingerprint = digest("shards", names.blob, names.ends, members["length"], members["crc"])
    source.indexed_hashes, source.labels_apart = arrays.get("hashes"), True
    if is_url(where):  # the index has the checksum of every image
        source.fingerprint = source.earlier_fingerprint
    return source


def _remote_index(url: str) -> dict[str, np.ndarray]:
    system, path = filesystem(f"{url.rstrip('/')}/{INDEX}")
    try:
        if system.size(path) > MAX_INDEX_BYTES:
            raise UserError(f"The index of {url!r} has more than {MAX_INDEX_BYTES:,} bytes.")
        data = system.cat_file(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"There is no {INDEX} at {url!r} ({reason(error)}); write shards with anechoic tools shard, or give all of "
            f"their names, as shard-{{000000..000009}}.tar."
        ) from error
    with numpy_damage(Path(path)), np.load(io.BytesIO(data), allow_pickle=False) as loaded:
        return {name: loaded[name] for name in loaded.files}


Index = tuple[list[str], np.ndarray, Names, np.ndarray | None, tuple[str, ...] | None]


def _checked_index(arrays: dict[str, np.ndarray], where: str) -> Index:
    """Return shards, members, names, labels and classes after checking every number."""
    damage = f"The index of the shards in {where!r} is damaged; write them again with anechoic tools shard."
    wanted = {"format": (0, "U"), "shards": (1, "U"), "sizes": (1, "i"), "members": (1, "V"), "names": (1, "u")}
    for name, (ndim, kind) in {**wanted, "ends": (1, "i")}.items():
        if name not in arrays or arrays[name].ndim != ndim or arrays[name].dtype.kind != kind:
            raise UserError(damage)
    shards, sizes, members, ends = (
        [str(name) for name in arrays["shards"]],
        *(arrays[name] for name in ("sizes", "members", "ends")),
    )
    if str(arrays["format"]) != FORMAT or members.dtype != MEMBER or len(sizes) != len(shards) or not len(members):
        raise UserError(damage)
    inside = (members["archive"] >= 0) & (members["archive"] < len(shards)) & (members["start"] >= 0)
    inside &= (members["length"] >= 0) & (members["method"] == CHECKED_TAR)
    if not inside.all() or any("/" in name or name.startswith(".") for name in shards):
        raise UserError(damage)
    if (members["start"] + members["length"] > sizes[members["archive"]]).any():
        raise UserError(damage)
    lengths = np.diff(ends, prepend=0)
    if len(ends) != len(members) or (lengths < 0).any() or int(ends[-1]) != len(arrays["names"]):
        raise UserError(damage)
    numbers, classes = arrays.get("labels"), arrays.get("classes")
    if numbers is not None:
        numbers = check_labels(numbers, where=where)
        if len(numbers) != len(members):
            raise UserError(damage)
    if classes is not None and (classes.ndim != 1 or numbers is None or numbers.max() >= len(classes)):
        raise UserError(damage)
    names = Names(arrays["names"].tobytes(), ends)
    return shards, members, names, numbers, None if classes is None else tuple(map(str, classes))


def _check_sizes(archives: Sequence[Path | str], sizes: np.ndarray) -> None:
    for path, size in zip(archives, sizes.tolist(), strict=True):
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            raise UserError(f"{path} is missing or does not have the {size:,} bytes its index promises; copy it again.")


def open_remote(url: str, *, labels: bool, channels: int) -> ArchiveSource:
    """Open the URL of a folder with an index, or of shards by their names: `s3://bucket/shard-{000..127}.tar`."""
    if url.endswith(".tar"):
        return open_shards(expand_braces(url), labels=labels, channels=channels)
    return open_indexed(url, labels=labels, channels=channels)
