"""What a source of images is: a numbered, named collection that hands out uint8 pixels; and what all sources share.

The kinds of source live in `files`, `archives`, `tables`, `arrays` and `embedded`; `open_source` chooses among them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
from torch import Tensor

from anechoic.data.content_checksums import Contents
from anechoic.data.decoding import IGNORED_SUFFIXES, IMAGE_SUFFIXES, Undecodable, decode
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

log = logging.getLogger("anechoic")


class BadImage(Exception):
    """One image of a source cannot be read. The loader leaves it out and lists it; a person sees name and reason.

    lasting: a verdict about its bytes, which holds as long as the decoders are the same (`decoding.decoders`). If not,
    the bytes were not to be had, which may pass: a disk that is away, permissions.
    """

    def __init__(self, name: str, reason: str, *, lasting: bool = True):
        super().__init__(name, reason)
        self.name, self.reason, self.lasting = name, reason, lasting


class Transform(Protocol):
    """Samples of a batch and their random numbers -> one tensor (B, C, image_size, image_size)."""

    def __call__(self, images: Sequence[Tensor], *, image_size: int, generator: SampleGenerator) -> Tensor: ...


class Source(ABC):
    """Images 0 .. len - 1. `skipped` lists (name, reason) of those found unreadable so far."""

    fingerprint: str  # hex; changes when the images do
    labels: np.ndarray | None = None  # int64 (len,), if they were asked for
    classes: tuple[str, ...] | None = None  # names of the labels, where the source has names
    facets: Mapping[str, np.ndarray] = MappingProxyType({})  # further labels by their names, where the source has some
    channels: int = 3
    resident = False  # True: pixels come from memory or a memory map, and a cache of them would be a copy
    group_size = 1  # so many samples in a row are of one image: none of them is held out without the others
    transform: Transform | None = None  # what stands in for augmentation where samples are not pixels

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str: ...

    @abstractmethod
    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        """uint8 (C, H, W); raises BadImage. min_side: larger images may come reduced, see `decode`."""

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        """One result per index, unreadable ones as the BadImage itself."""
        out: list[Tensor | BadImage] = []
        for index in indices:
            try:
                out.append(self.read(index, min_side=min_side))
            except BadImage as bad:
                out.append(bad)
        return out

    def identities(self) -> np.ndarray | None:
        """16 bytes per image, equal as long as the image is the same; None where only the whole can be told."""
        return None

    def note_skipped(self, bad: Iterable[tuple[str, str]]) -> None:
        """Add unreadable images to `skipped`, each once; stop when they are more than a tenth of the source."""
        known = set(self.skipped)
        self.skipped.extend(item for item in dict.fromkeys(bad) if item not in known)
        refuse_too_many(self.skipped, of=len(self))


class EncodedSource(Source):
    """A source whose images are encoded files: subclasses fetch bytes, this class decodes them."""

    def __init__(self, *, channels: int):
        super().__init__()
        if channels not in (1, 2, 3, 4):
            raise UserError(
                f"Image files have 1 to 4 channels, not {channels}; save such images as a .npy array (N, H, W, C)."
            )
        self.channels = channels
        self.contents: Contents | None = None

    @abstractmethod
    def data(self, index: int) -> bytes:
        """The encoded image; OSError if it cannot be fetched, Undecodable if it is damaged on the way."""

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        try:
            data = self.data(index)
            if self.contents is not None:
                self.contents.check(index, data, self.name)
            return decode(data, channels=self.channels, min_side=min_side)
        except Undecodable as error:
            raise BadImage(self.name(index), str(error)) from error
        except OSError as error:
            refuse_exhaustion(error)
            raise BadImage(self.name(index), error.strerror or str(error), lasting=False) from error

    def compare_content(self, index: int) -> None:
        """UserError if the image's bytes are known to have been others."""
        if self.contents is not None:
            with contextlib.suppress(OSError, Undecodable):  # what cannot be read has no content to compare
                self.contents.check(index, self.data(index), self.name)


def refuse_exhaustion(error: Exception) -> None:
    """UserError if no more files can be opened here, which is nobody's fault but the process's own."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise UserError(
            f"No more files can be opened ({os.strerror(error.errno)}): allow more (ulimit -n 65536), then give the "
            "same command again."
        ) from error


class Subset(Source):
    """Some images of a source, numbered anew in the order of indices; unreadable ones are noted with the whole."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray):
        super().__init__()
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.fingerprint = digest("subset", source.fingerprint, self.indices)
        self.labels = None if source.labels is None else source.labels[self.indices]
        self.classes, self.channels, self.resident = source.classes, source.channels, source.resident
        self.facets = {name: values[self.indices] for name, values in source.facets.items()}
        self.transform = source.transform
        self.skipped = source.skipped

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        return self.source.read(int(self.indices[index]), min_side=min_side)

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        return self.source.read_many(self.indices[list(indices)].tolist(), min_side=min_side)

    def identities(self) -> np.ndarray | None:
        own = self.source.identities()
        return None if own is None else own[self.indices]

    def note_skipped(self, bad: Iterable[tuple[str, str]]) -> None:
        self.source.note_skipped(bad)


def unsettled(source: Source, indices: Iterable[int]) -> list[int]:
    """Those of the images that can be read now, or might be another time."""
    verdicts = ((index, _verdict(source, index)) for index in indices)
    return [index for index, bad in verdicts if bad is None or not bad.lasting]


def readable(source: Source, indices: Iterable[int]) -> list[int]:
    """Those of the images that can be read now."""
    return [index for index in indices if _verdict(source, index) is None]


def _verdict(source: Source, index: int) -> BadImage | None:
    try:
        source.read(index)
    except BadImage as bad:
        return bad
    return None


def refuse_too_many(bad: Sequence[tuple[str, str]], *, of: int) -> None:
    """UserError if more than a tenth of the images looked at are bad."""
    if 10 * len(bad) > of:
        name, reason = bad[0]
        raise UserError(
            f"{len(bad)} of {of} images cannot be read (the first is {name!r}: {reason}); "
            "repair or remove them, since at most a tenth may be bad."
        )


class Names(Sequence[str]):
    """A million strings in one block of bytes: small in memory, never copied when a worker process starts."""

    def __init__(self, blob: bytes, ends: np.ndarray):
        self.blob, self.ends = blob, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        encoded = [os.fsencode(name) for name in names]
        return cls(b"".join(encoded), np.cumsum([len(name) for name in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.tolist():
            yield os.fsdecode(self.blob[start:end])
            start = end

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.blob[start : self.ends[index]])


def digest(*parts: bytes | str | int | np.ndarray) -> str:
    """A hex fingerprint of the parts in order; lengths are part of it, so boundaries matter."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).tobytes()
        elif not isinstance(part, bytes):
            part = str(part).encode("utf-8", "surrogateescape")
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def is_image_name(name: str) -> bool:
    """By suffix; hidden files and the shadow files of macOS archives are not images."""
    base = name.rsplit("/", 1)[-1]
    return base.lower().endswith(IMAGE_SUFFIXES) and not base.startswith(".") and "__MACOSX/" not in name


def note_ignored(names: Iterable[str], *, where: str) -> None:
    """Tell of images that are left out because their kind is not read here, and of the remedy."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        suffix = os.path.splitext(name)[1].lower()
        if suffix in IGNORED_SUFFIXES and not os.path.basename(name).startswith("."):
            kinds.setdefault(IGNORED_SUFFIXES[suffix], []).append(name)
    for remedy, found in kinds.items():
        log.warning("%d images in %s are ignored, such as %s: %s.", len(found), where, found[0], remedy)


def number_classes(names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class names per image -> labels (int64) and the sorted class names they index."""
    classes = sorted(set(names))
    number = {name: k for k, name in enumerate(classes)}
    return np.fromiter((number[name] for name in names), dtype=np.int64, count=len(names)), tuple(classes)


def classes_from_folders(names: Sequence[str], *, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels from the first folder of each relative path."""
    parts = [name.split("/", 1) for name in names]
    loose = next((part[0] for part in parts if len(part) == 1), None)
    if loose is not None:
        raise UserError(
            f"Labels are the names of sub-folders, and {loose!r} of {where!r} is in none; make a folder per class."
        )
    return number_classes([part[0] for part in parts])


# A class number beyond this is damage: whatever counts classes makes room for each of them.
MAX_CLASSES = 1_000_000


def check_labels(labels: np.ndarray, *, where: str) -> np.ndarray:
    """Class numbers as int64 (N,), counted from 0."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"The labels of {where} must be one whole number an image.")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= MAX_CLASSES):
        raise UserError(
            f"The labels of {where} go from {int(labels.min())} to {int(labels.max())}; number the classes from 0, up "
            f"to {MAX_CLASSES - 1:,}."
        )
    return labels.astype(np.int64)


def labels_of(source: Source) -> np.ndarray:
    """The labels, or a UserError that says how to give some."""
    if source.labels is None:
        raise UserError(
            "This needs labels and the data has none; sort the images into one folder per class, for example."
        )
    return source.labels


def common_labels(first: Source, second: Source) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """The labels of two sources in one numbering: by class name where both have names, as they are otherwise.

    A test folder may lack classes of the training folder, so equal numbers alone do not mean equal classes.
    """
    one, two = labels_of(first), labels_of(second)
    if first.classes is None or second.classes is None or first.classes == second.classes:
        return one, two, first.classes or second.classes
    names = (*first.classes, *(name for name in second.classes if name not in first.classes))
    place = np.array([names.index(name) for name in second.classes], dtype=np.int64)
    return one, place[two], names
