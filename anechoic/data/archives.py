"""Images inside zip and tar files, WebDataset shards among them, read in any order through a memory map.

Nothing is unpacked, and no extra package is needed: the members' positions are listed once, and the listing of a long
archive is cached. Compressed tar files have no random access and are refused.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from torch import Tensor

from anechoic.data.content_checksums import FileHashes, is_settled, stamp_of
from anechoic.data.decoding import Undecodable, decode
from anechoic.data.remote_files import Location, filesystem, identity_of, is_url, open_location, size_of, version_of
from anechoic.data.source import (
    BadImage,
    EncodedSource,
    Names,
    check_labels,
    classes_from_folders,
    digest,
    is_image_name,
    number_classes,
    refuse_exhaustion,
    warn_ignored,
)
from anechoic.errors import UserError
from anechoic.storage.cache import has_entry, open_entry
from anechoic.storage.files import write_aside
from anechoic.storage.safe_io import MAX_IMAGE_BYTES, open_regular, reason

# Listings of fewer members are made again in less than a second.
CACHE_LISTINGS_FROM = 20_000
# Archives that stay mapped; each counts against the process's limit of open files, often 1024.
MAX_MAPS = 256
# What reading the index of a damaged archive raises.
TAR_DAMAGE = (tarfile.TarError, struct.error, ValueError, OverflowError, EOFError, OSError)
ZIP_DAMAGE = (*TAR_DAMAGE, zipfile.BadZipFile, zlib.error, NotImplementedError)
MAX_CLASS_NAME = 1000
NUMBER = re.compile(r"[0-9]{1,18}")
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")
# A member's position: which archive, the first byte of its data (zip: of its local header), stored length, method, CRC.
MEMBER = np.dtype([("archive", "i4"), ("start", "i8"), ("length", "i8"), ("method", "i4"), ("crc", "u4")])
# A member of a tar, and one whose checksum is known from an index beside the shards.
TAR, CHECKED_TAR = -1, -2
LISTING = "listing.npz"


class ArchiveSource(EncodedSource):
    """Members of one or more uncompressed archives."""

    def __init__(
        self,
        archives: Sequence[Location],
        names: Names,
        members: np.ndarray,
        *,
        channels: int = 3,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] | None = None,
    ):
        super().__init__(channels=channels)
        self.archives, self.names, self.members = tuple(archives), names, members
        self.labels, self.classes = labels, classes
        self.hashes = FileHashes("", [str(path) for path in archives])
        self.indexed_hashes: np.ndarray | None = None  # of the archives, in an index beside them
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
        self.hashes.check_file(archive)
        return member_bytes(self._map(archive), start, length, method, crc)

    def compute_fingerprint(self) -> str:
        if self.indexed_hashes is not None and np.array_equal(self.hashes.all, self.indexed_hashes):
            return str(self.earlier_fingerprint)  # of all that the index knows
        return digest("archives", self.names.blob, self.names.ends, self.hashes.all)

    def fingerprint_of(self, indices: np.ndarray) -> str:
        members = self.members[indices]
        archives = [self.archives[number] for number in np.unique(members["archive"])]
        return digest(*(self.names[i] for i in indices.tolist()), members["start"], self.content_of(archives))

    def content_of(self, archives: Sequence[Location]) -> np.ndarray:
        """Return an array that changes with the content of these archives."""
        return FileHashes("", [str(path) for path in archives]).all

    def _new_map(self, archive: int) -> mmap.mmap:
        """Map an archive; it is closed with the last reference, so threads may use it after it leaves the LRU cache."""
        with open(self.archives[archive], "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class RemoteArchiveSource(ArchiveSource):
    """Members of shards behind URLs of fsspec, fetched by ranges, those of a batch in parallel."""

    def compute_fingerprint(self) -> str:
        versions = self.content_of(self.archives)
        return digest("remote archives", self.names.blob, self.names.ends, self.members["length"], versions)

    def content_of(self, archives: Sequence[Location]) -> np.ndarray:
        return np.frombuffer(b"".join(bytes.fromhex(digest(identity_of(str(url)))) for url in archives), "V16")

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
                    out.append(BadImage(self.name(index), reason(found), permanent=False))
                    continue
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
                _, _, length, method, crc = row.item()
                out.append(data if isinstance(data, Exception) else member_bytes(data, 0, length, method, crc))
            except Undecodable as error:
                out.append(error)
        return out


def archive_source_class(archives: Sequence[Location]) -> type[ArchiveSource]:
    return RemoteArchiveSource if any(map(is_url, archives)) else ArchiveSource


def member_bytes(archive: mmap.mmap | bytes, start: int, length: int, method: int, crc: int) -> bytes:
    """Return one member, decompressed and checked as far as its archive allows."""
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
        data = inflate(data)
    elif method not in (STORED, TAR, CHECKED_TAR):
        raise Undecodable(f"zip compression method {method} is not supported; use deflate or store")
    if method != TAR and zlib.crc32(data) != crc:
        raise Undecodable("the archive is damaged here")
    return data


def inflate(data: bytes) -> bytes:
    """Unpack a raw deflate stream up to the limit: a small stream can unpack to more than the memory."""
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
    """Return names relative to the folder that holds all: a zip of a folder reads like the folder."""
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


def open_zip(path: Path, *, labels: bool, channels: int) -> ArchiveSource:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if is_image_name(info.filename)]
            warn_ignored(archive.namelist(), where=str(path))
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
    return _archive_source([path], names, members, members["crc"], labels=labels, channels=channels, where=str(path))


def open_tar(path: Path, *, labels: bool, channels: int) -> ArchiveSource:
    """Open a plain tar of images, its folders the classes, or one WebDataset shard, recognized by its .cls files."""
    names, members = list_tar(path)
    if any(name.endswith(".cls") for name in names):
        return open_shards([path], labels=labels, channels=channels)
    warn_ignored(names, where=str(path))
    order = sorted((k for k in range(len(names)) if is_image_name(names[k])), key=names.__getitem__)
    inside = without_common_folder([names[k] for k in order])
    return _archive_source(
        [path], inside, members[order], version_of(path), labels=labels, channels=channels, where=str(path)
    )


class Shard(NamedTuple):
    """The images of one shard: names, positions and, if requested, classes."""

    names: list[str]
    members: np.ndarray
    kinds: list[str]


def list_shard(location: Location, *, labels: bool) -> Shard:
    inside, rows = list_tar(location)
    chosen = [k for k, name in enumerate(inside) if is_image_name(name)]
    kinds: list[str] = []
    if labels:
        classes = {name[: -len(".cls")]: k for k, name in enumerate(inside) if name.endswith(".cls")}
        with open_location(location) as file:
            kinds = [_shard_class(file, rows, classes, inside[k], location) for k in chosen]
    return Shard([inside[k] for k in chosen], rows[chosen], kinds)


def open_shards(paths: Sequence[Location], *, labels: bool, channels: int) -> ArchiveSource:
    """Open WebDataset shards: members that share a name up to the first dot are a sample; .cls holds its class."""
    try:
        # In parallel: listing waits for the disk, or for a server.
        with ThreadPoolExecutor(8) as pool:
            shards = list(pool.map(lambda path: list_shard(path, labels=labels), paths))
    except OSError as error:
        raise UserError(f"Not all of the shards can be read ({reason(error)}); give those that are there.") from error
    names = [
        f"{str(path).rpartition('/')[2]}/{name}" if len(paths) > 1 else name
        for path, shard in zip(paths, shards, strict=True)
        for name in shard.names
    ]
    members = np.concatenate([shard.members for shard in shards])
    members["archive"] = np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards])
    kinds = [kind for shard in shards for kind in shard.kinds]
    where = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    versions = np.concatenate([version_of(path) for path in paths])
    source = _archive_source(paths, names, members, versions, labels=False, channels=channels, where=where)
    if labels and all(NUMBER.fullmatch(kind) for kind in kinds):
        source.labels = check_labels(np.array([int(kind) for kind in kinds], dtype=np.int64), where=where)
    elif labels:
        source.labels, source.classes = number_classes(kinds)
    return source


def _shard_class(file: BinaryIO, rows: np.ndarray, classes: dict[str, int], name: str, path: Location) -> str:
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


def _archive_source(
    archives: Sequence[Location],
    names: list[str],
    members: np.ndarray,
    versions: np.ndarray,
    *,
    labels: bool,
    channels: int,
    where: str,
) -> ArchiveSource:
    """versions: what earlier versions made the fingerprint from."""
    if not names:
        raise UserError(
            f"There is no image that is read here (JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF) in {where!r}; give an "
            "archive that holds some."
        )
    numbers, classes = classes_from_folders(names, where=where) if labels else (None, None)
    table = Names.of(names)
    source = archive_source_class(archives)(
        archives, table, members, channels=channels, labels=numbers, classes=classes
    )
    source.earlier_fingerprint = digest("packed", table.blob, table.ends, members["length"], versions)
    return source


def list_tar(path: Location) -> tuple[list[str], np.ndarray]:
    """Return every file of a tar, names and positions, in the order of the archive. A long list is cached."""
    started = time.time()
    stamp = np.array((0,) * 5 if is_url(path) else stamp_of(os.stat(path)), np.int64)
    key, about = digest("tar listing", identity_of(str(path)) if is_url(path) else "", stamp), f"members of {path}"
    if has_entry("listings", key):
        with suppress(OSError), open_entry("listings", key, about=about) as entry:
            if entry.intact([LISTING]):
                with np.load(entry.path / LISTING, allow_pickle=False) as arrays:
                    return list(Names(arrays["names"].tobytes(), arrays["ends"])), arrays["members"]
    names, members = _scan_tar(path)
    if is_url(path) or (len(names) >= CACHE_LISTINGS_FROM and is_settled(stamp, started)):
        table = Names.of(names)
        with suppress(OSError), open_entry("listings", key, about=about) as entry:
            with write_aside(entry.path / LISTING) as temporary, open(temporary, "wb") as file:
                np.savez(file, names=np.frombuffer(table.blob, np.uint8), ends=table.ends, members=members)
            entry.commit(entry.hashes([LISTING]))
    return names, members


def _scan_tar(path: Location) -> tuple[list[str], np.ndarray]:
    try:
        # "r:" refuses compression: a compressed stream has no random access.
        with open_location(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            # The bytes of a sparse member are not contiguous.
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
    members = np.array([(0, start, length, TAR, 0) for _, start, length in files], dtype=MEMBER)
    return [name for name, _, _ in files], members


BRACES = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
MAX_SHARDS = 100_000


def expand_braces(pattern: str) -> list[str]:
    """Return a-00.tar, a-01.tar, a-02.tar for `a-{00..02}.tar`; several ranges multiply, the last one fastest."""
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


def open_shard_pattern(pattern: str, *, labels: bool, channels: int) -> ArchiveSource:
    paths = [Path(name) for name in expand_braces(pattern)]
    missing = [path for path in paths if not path.is_file()]
    if not paths or missing:
        example = f"{str(missing[0])!r} does not exist" if missing else "the range is empty"
        raise UserError(f"The shards {pattern!r} are not all there: {example}; give the range of those that are.")
    return open_shards(paths, labels=labels, channels=channels)
