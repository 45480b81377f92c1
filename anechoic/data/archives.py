"""Images inside zip and tar files, WebDataset shards among them, read in any order through a memory map.

Nothing is unpacked, and no extra package is needed: the members' places are listed once, and the listing of a long
archive is remembered. Compressed tar files cannot be read in any order and are refused.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from torch import Tensor

from anechoic.data.decoding import Undecodable, decode
from anechoic.data.pixel_cache import cache_dir, read_cached, write_cached
from anechoic.data.remote_files import Place, filesystem, is_url, name_of, open_place, size_of, stamp_of
from anechoic.data.source import (
    BadImage,
    EncodedSource,
    Names,
    check_labels,
    classes_from_folders,
    digest,
    is_image_name,
    note_ignored,
    number_classes,
    refuse_exhaustion,
)
from anechoic.errors import UserError
from anechoic.storage.safe_io import MAX_IMAGE_BYTES, open_regular, reason

REMEMBER_FROM = 20_000
# Archives that stay mapped; each takes one of the files a process may have open, often 1024.
MAX_MAPS = 256
# What reading the index of a damaged archive ends in.
ZIP_DAMAGE = (
    zipfile.BadZipFile,
    struct.error,
    zlib.error,
    ValueError,
    OverflowError,
    NotImplementedError,
    EOFError,
    OSError,
)
TAR_DAMAGE = (tarfile.TarError, struct.error, ValueError, OverflowError, EOFError, OSError)
MAX_CLASS_NAME = 1000
NUMBER = re.compile(r"[0-9]{1,18}")
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Where a member lies: which archive, the first byte of its data (zip: of its local header), stored length, method, CRC.
MEMBER = np.dtype([("archive", "i4"), ("start", "i8"), ("length", "i8"), ("method", "i4"), ("crc", "u4")])
# A member of a tar, and one whose sum is known from an index beside the shards.
TAR, CHECKED_TAR = -1, -2


class Packed(EncodedSource):
    """Members of one or more uncompressed archives."""

    def __init__(
        self,
        archives: Sequence[Place],
        names: Names,
        members: np.ndarray,
        *,
        fingerprint: str,
        channels: int = 3,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] | None = None,
    ):
        super().__init__(channels=channels)
        self.archives, self.names, self.members, self.fingerprint = tuple(archives), names, members, fingerprint
        self.labels, self.classes = labels, classes
        self._map = lru_cache(maxsize=MAX_MAPS)(self._new_map)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_map"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map = lru_cache(maxsize=MAX_MAPS)(self._new_map)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def data(self, index: int) -> bytes:
        archive, start, length, method, crc = self.members[index].item()
        return member_bytes(self._map(archive), start, length, method, crc)

    def _new_map(self, archive: int) -> mmap.mmap:
        """Closed when nobody refers to it any more, so one that another thread reads from outlives its place here."""
        with open(self.archives[archive], "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class RemotePacked(Packed):
    """Members of shards behind URLs of fsspec, fetched by ranges, those of a batch side by side."""

    def data(self, index: int) -> bytes:
        (found,) = self._fetch([index])
        if isinstance(found, Undecodable):
            raise found
        if isinstance(found, Exception):
            raise OSError(f"{self.archives[int(self.members[index]['archive'])]}: {reason(found)}") from found
        return found

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        out: list[Tensor | BadImage] = []
        for index, found in zip(indices, self._fetch(indices), strict=True):
            try:
                if isinstance(found, Undecodable):
                    raise found
                if isinstance(found, Exception):
                    refuse_exhaustion(found)
                    out.append(BadImage(self.name(index), reason(found), lasting=False))
                    continue
                if self.contents is not None:
                    self.contents.check(index, found, self.name)
                out.append(decode(found, channels=self.channels, min_side=min_side))
            except Undecodable as error:
                out.append(BadImage(self.name(index), str(error)))
        return out

    def _fetch(self, indices: Sequence[int]) -> list[bytes | Exception]:
        if not len(indices):
            return []
        rows = self.members[list(indices)]
        paths = [self.archives[number] for number in rows["archive"].tolist()]
        starts, lengths = rows["start"].tolist(), np.minimum(rows["length"], MAX_IMAGE_BYTES + 1).tolist()
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        system, _ = filesystem(str(paths[0]))
        found = system.cat_ranges([filesystem(str(path))[1] for path in paths], starts, ends, on_error="return")
        out: list[bytes | Exception] = []
        for row, data in zip(rows, found, strict=True):
            try:
                out.append(data if isinstance(data, Exception) else whole_member(data, row))
            except Undecodable as error:
                out.append(error)
        return out


def whole_member(data: bytes, row: np.void) -> bytes:
    """The fetched bytes of a member, checked against its row of the index."""
    _, _, length, method, crc = row.item()
    return member_bytes(data, 0, length, method, crc)


def packed_class(archives: Sequence[Place]) -> type[Packed]:
    return RemotePacked if any(is_url(place) for place in archives) else Packed


def member_bytes(archive: mmap.mmap | bytes, start: int, length: int, method: int, crc: int) -> bytes:
    """One member, decompressed and checked as far as its archive allows."""
    if method not in (TAR, CHECKED_TAR):
        try:
            magic, name_length, extra_length = ZIP_LOCAL_HEADER.unpack_from(archive, start)
        except struct.error as error:
            raise Undecodable("the zip file is damaged here") from error
        if magic != b"PK\3\4":
            raise Undecodable("the zip file is damaged here")
        start += ZIP_LOCAL_HEADER.size + name_length + extra_length
    if length > MAX_IMAGE_BYTES:
        raise Undecodable(f"it has {length:,} bytes (up to {MAX_IMAGE_BYTES:,} are read)")
    data = archive[start : start + length]
    if len(data) < length:
        raise Undecodable("the archive ends before this image does")
    if method == DEFLATED:
        data = inflated(data)
    elif method not in (STORED, TAR, CHECKED_TAR):
        raise Undecodable(f"zip compression method {method} is not supported; use deflate or store")
    if method != TAR and zlib.crc32(data) != crc:
        raise Undecodable("the archive is damaged here")
    return data


def inflated(data: bytes) -> bytes:
    """A raw deflate stream unpacked, never beyond the limit: a thousandth of it can be made to claim all of memory."""
    stream = zlib.decompressobj(wbits=-15)
    try:
        found = stream.decompress(data, MAX_IMAGE_BYTES + 1)
    except zlib.error as error:
        raise Undecodable("the zip file is damaged here") from error
    if len(found) > MAX_IMAGE_BYTES:
        raise Undecodable(f"it unpacks to more than {MAX_IMAGE_BYTES:,} bytes")
    if not stream.eof:
        raise Undecodable("the zip file is damaged here")
    return found


def without_common_folder(names: Sequence[str]) -> list[str]:
    """Names relative to the folder that holds them all: a zip of a folder reads like the folder."""
    if not names:
        return []
    first, *_ = names
    cut = 0
    while (slash := first.find("/", cut)) >= 0:
        # The last folder stays when the images lie directly in it: it may be the only class.
        if not all(name.startswith(first[: slash + 1]) and "/" in name[slash + 1 :] for name in names):
            break
        cut = slash + 1
    return [name[cut:] for name in names]


def open_zip(path: Path, *, labels: bool, channels: int) -> Packed:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if is_image_name(info.filename)]
            note_ignored(archive.namelist(), where=str(path))
    except ZIP_DAMAGE as error:
        raise UserError(
            f"{str(path)!r} is not a complete zip file ({reason(error)}); make or download it again."
        ) from error
    if any(info.flag_bits & 1 for info in infos):
        raise UserError(f"{str(path)!r} is encrypted; unpack it and give the folder.")
    infos.sort(key=lambda info: info.filename)
    size = path.stat().st_size
    lost = next(
        (info for info in infos if not 0 <= info.header_offset <= info.header_offset + info.compress_size < size), None
    )
    if lost is not None:
        raise UserError(f"{str(path)!r} is damaged: {lost.filename!r} lies outside of it; make or download it again.")
    rows = [(0, info.header_offset, info.compress_size, info.compress_type, info.CRC) for info in infos]
    names = without_common_folder([info.filename for info in infos])
    members = np.array(rows, dtype=MEMBER)
    return _packed([path], names, members, labels=labels, channels=channels, where=str(path), content=members["crc"])


def open_tar(path: Path, *, labels: bool, channels: int) -> Packed:
    """A plain tar of images, its folders the classes; a single WebDataset shard is recognized by its .cls files."""
    names, members = list_tar(path)
    if any(name.endswith(".cls") for name in names):
        return open_shards([path], labels=labels, channels=channels)
    note_ignored(names, where=str(path))
    order = sorted((k for k in range(len(names)) if is_image_name(names[k])), key=names.__getitem__)
    inside = without_common_folder([names[k] for k in order])
    return _packed(
        [path], inside, members[order], labels=labels, channels=channels, where=str(path), content=stamp_of(path)
    )


class Shard(NamedTuple):
    """The images of one shard: names, places and, if asked for, classes."""

    names: list[str]
    members: np.ndarray
    kinds: list[str]


def list_shard(place: Place, *, labels: bool) -> Shard:
    inside, rows = list_tar(place)
    chosen = [k for k, name in enumerate(inside) if is_image_name(name)]
    kinds: list[str] = []
    if labels:
        classes = {name[: -len(".cls")]: k for k, name in enumerate(inside) if name.endswith(".cls")}
        with open_place(place) as file:
            kinds = [_shard_class(file, rows, classes, inside[k], place) for k in chosen]
    return Shard([inside[k] for k in chosen], rows[chosen], kinds)


def open_shards(paths: Sequence[Place], *, labels: bool, channels: int) -> Packed:
    """WebDataset shards: a sample is the run of members that share a name up to the first dot; .cls holds its class."""
    try:
        # Shards are listed side by side: listing waits for the disk, or for a server.
        with ThreadPoolExecutor(8) as pool:
            shards = list(pool.map(lambda place: list_shard(place, labels=labels), paths))
    except OSError as error:
        raise UserError(f"Not all of the shards can be read ({reason(error)}); give those that are there.") from error
    names = [
        f"{name_of(place)}/{name}" if len(paths) > 1 else name
        for place, shard in zip(paths, shards, strict=True)
        for name in shard.names
    ]
    members = np.concatenate([shard.members for shard in shards])
    members["archive"] = np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards])
    kinds = [kind for shard in shards for kind in shard.kinds]
    where = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    packed = _packed(
        paths,
        names,
        members,
        labels=False,
        channels=channels,
        where=where,
        content=np.concatenate([stamp_of(place) for place in paths]),
    )
    if labels and all(NUMBER.fullmatch(kind) for kind in kinds):
        packed.labels = check_labels(np.array([int(kind) for kind in kinds], dtype=np.int64), where=where)
    elif labels:
        packed.labels, packed.classes = number_classes(kinds)
    return packed


def _shard_class(file: BinaryIO, rows: np.ndarray, classes: dict[str, int], name: str, path: Place) -> str:
    folder, _, base = name.rpartition("/")
    key = f"{folder}/{base.split('.', 1)[0]}" if folder else base.split(".", 1)[0]
    if key not in classes:
        raise UserError(
            f"{name!r} of {str(path)!r} has no {key + '.cls'!r} beside it to label it; add one, or do without labels."
        )
    row = rows[classes[key]]
    file.seek(int(row["start"]))
    try:
        text = file.read(min(int(row["length"]), MAX_CLASS_NAME + 1)).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{key + '.cls'!r} of {str(path)!r} is not text; write the class into it.") from error
    if not text or len(text) > MAX_CLASS_NAME:
        raise UserError(
            f"{key + '.cls'!r} of {str(path)!r} must hold a class of 1 to {MAX_CLASS_NAME} letters, not {len(text)}."
        )
    return text


def _packed(
    archives: Sequence[Place],
    names: list[str],
    members: np.ndarray,
    *,
    labels: bool,
    channels: int,
    where: str,
    content: np.ndarray,
) -> Packed:
    if not names:
        raise UserError(
            f"There is no image that is read here (JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF) in {where!r}; give an "
            "archive that holds some."
        )
    numbers, classes = classes_from_folders(names, where=where) if labels else (None, None)
    packed_names = Names.of(names)
    fingerprint = digest("packed", packed_names.blob, packed_names.ends, members["length"], content)
    return packed_class(archives)(
        archives, packed_names, members, fingerprint=fingerprint, channels=channels, labels=numbers, classes=classes
    )


def list_tar(path: Place) -> tuple[list[str], np.ndarray]:
    """Every file of a tar: names and places, in the order of the archive. A long list is remembered."""
    full = str(path) if is_url(path) else os.path.realpath(path)
    memory = cache_dir() / "listings" / f"{digest(os.fsencode(full), stamp_of(path))}.tar.npz"
    if (arrays := read_cached(memory)) is not None:
        return list(Names(arrays["names"].tobytes(), arrays["ends"])), arrays["members"]
    try:
        # "r:" refuses compression: a compressed stream has no places to jump to.
        with open_place(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            # A sparse member's bytes do not lie one after the other.
            files = []
            for item in archive:
                if item.isfile() and not item.issparse():
                    files.append((item.name.removeprefix("./"), item.offset_data, item.size))
                archive.members.clear()  # type: ignore[attr-defined]  # it keeps every header, a kilobyte each
    except TAR_DAMAGE as error:
        raise UserError(
            f"{str(path)!r} is not a plain tar file ({reason(error)}); uncompress it, or give a zip or the folder."
        ) from error
    size = size_of(path)
    lost = next((name for name, start, length in files if length < 0 or start + length > size), None)
    if lost is not None:
        raise UserError(f"{str(path)!r} ends before its member {lost[:200]!r} does; make or download it again.")
    names = [name for name, _, _ in files]
    members = np.array([(0, start, length, TAR, 0) for _, start, length in files], dtype=MEMBER)
    if len(names) >= REMEMBER_FROM or is_url(path):
        packed = Names.of(names)
        write_cached(memory, {"names": np.frombuffer(packed.blob, np.uint8), "ends": packed.ends, "members": members})
    return names, members


BRACES = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
MAX_SHARDS = 100_000


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` -> a-00.tar, a-01.tar, a-02.tar; several ranges multiply, the last one fastest."""
    pieces = BRACES.split(pattern)
    texts, firsts, lasts = pieces[0::3], pieces[1::3], pieces[2::3]
    count = math.prod(max(0, int(last) - int(first) + 1) for first, last in zip(firsts, lasts, strict=True))
    if count > MAX_SHARDS:
        raise UserError(
            f"{pattern!r} names {count:,} shards; give the range of those that are there (up to {MAX_SHARDS:,})."
        )
    ranges = [
        [f"{k:0{len(first)}d}" for k in range(int(first), int(last) + 1)]
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return [
        "".join(part for pair in zip(texts, (*choice, ""), strict=True) for part in pair) for choice in product(*ranges)
    ]


def open_shard_pattern(pattern: str, *, labels: bool, channels: int) -> Packed:
    paths = [Path(name) for name in expand_braces(pattern)]
    missing = [path for path in paths if not path.is_file()]
    if not paths or missing:
        example = f"{str(missing[0])!r} does not exist" if missing else "the range is empty"
        raise UserError(f"The shards {pattern!r} are not all there: {example}; give the range of those that are.")
    return open_shards(paths, labels=labels, channels=channels)
