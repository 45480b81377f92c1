"""A source of images: a numbered, named collection of pixels, and what all sources share.

The kinds of source are in `files`, `archives`, `tables`, `arrays` and `embedded`; `open_source` chooses among them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
from torch import Tensor

from anechoic.config import EIGHT_BIT
from anechoic.data.decoding import IGNORED_SUFFIXES, IMAGE_SUFFIXES, Undecodable, decode, stated_size
from anechoic.data.stored import STORED_SUFFIXES, decode_stored, has_reader, reader_remedy, suffix_of
from anechoic.errors import UserError
from anechoic.outcome import counted
from anechoic.rng import SampleGenerator

log = logging.getLogger("anechoic")


class BadImage(Exception):
    """One image of a source cannot be read. The loader skips it and lists it with name and reason.

    permanent: its bytes are damaged, for as long as the decoders are the same (`decoding.decoders`). Otherwise it is
    temporarily unreadable: a disk that is not mounted, permissions.
    """

    def __init__(self, name: str, reason: str, *, permanent: bool = True):
        super().__init__(name, reason)
        self.name, self.reason, self.permanent = name, reason, permanent


class Transform(Protocol):
    """Samples of a batch and their random numbers to one tensor (B, C, image_size, image_size)."""

    def __call__(self, images: Sequence[Tensor], *, image_size: int, generator: SampleGenerator) -> Tensor: ...


class Source(ABC):
    """Images 0 .. len - 1. `skipped` lists (name, reason) of those found unreadable so far."""

    where = ""  # the name or path that it was opened by
    root: Path | None = None  # the folder that `file` is relative to, where images are files
    labels: np.ndarray | None = None  # int64 (len,), if requested
    classes: tuple[str, ...] | None = None  # names of the labels, where the source has names
    labels_apart = False  # the labels are in a file beside the images, of which the fingerprint is independent
    facets: Mapping[str, np.ndarray] = MappingProxyType({})  # further labels by name
    channels: int = 3
    pixels = EIGHT_BIT  # 8-bit pictures, or the values that the files store
    in_memory = False  # pixels come from memory or a memory map, so the pixel cache would be a second copy
    group_size = 1  # number of consecutive samples of one image; they are held out together
    transform: Transform | None = None  # replaces augmentation where samples are not pixels
    earlier_fingerprint: str | None = None  # as versions before 0.2 computed it, from names, sizes and times

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []

    @cached_property
    def fingerprint(self) -> str:
        """Return hex digits of the images' names and content; files are hashed when it is first asked for."""
        return self.compute_fingerprint()

    def compute_fingerprint(self) -> str:
        raise AssertionError(f"{type(self).__name__} sets its fingerprint when it is made")

    @property
    def fingerprint_with_labels(self) -> str:
        """Return hex digits of images and labels."""
        if self.labels is None or not self.labels_apart:
            return self.fingerprint
        return digest(self.fingerprint, self.labels, *(self.classes or ()))

    def has_fingerprint(self, saved: str) -> bool:
        """Return whether this is the data of a saved fingerprint, with or without labels or of an earlier version."""
        return saved in (self.earlier_fingerprint, self.fingerprint, self.fingerprint_with_labels)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str: ...

    @abstractmethod
    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        """Return (C, H, W) or raise BadImage: uint8, or the type of stored pixels (float32 where they are reduced).

        min_side: larger images may be reduced, see `decode`.
        """

    def stored_size(self, index: int) -> tuple[int, int]:
        """Return (width, height) as stored, or raise BadImage."""
        _, height, width = self.read(index).shape
        return width, height

    def file(self, index: int) -> str | None:
        """Return the path, relative to `root`, of the file that the image lies in; None in archives and tables."""
        return None

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        """Return one result per index; an unreadable image as its BadImage."""
        out: list[Tensor | BadImage] = []
        for index in indices:
            try:
                out.append(self.read(index, min_side=min_side))
            except BadImage as bad:
                out.append(bad)
        return out

    def identities(self) -> np.ndarray | None:
        """Return 16 bytes per image that change with its name or content; None if only the whole source is known."""
        return None

    def fingerprint_of(self, indices: np.ndarray) -> str:
        """Return hex digits of the names and content of some images; sources of many files read only theirs."""
        return digest(self.fingerprint, indices)

    def add_skipped(self, bad: Iterable[tuple[str, str]]) -> None:
        """Add unreadable images to `skipped`, each once; UserError if they are more than a tenth of the source."""
        known = set(self.skipped)
        self.skipped.extend(item for item in dict.fromkeys(bad) if item not in known)
        refuse_too_many(self.skipped, of=len(self))


class EncodedSource(Source):
    """A source whose images are encoded files: subclasses fetch bytes, this class decodes them."""

    def __init__(self, *, channels: int):
        super().__init__()
        self.channels = channels

    @abstractmethod
    def data(self, index: int) -> bytes:
        """Return the encoded image; OSError if it cannot be fetched, Undecodable if its container is damaged."""

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        with self._errors_as_bad(index):
            if self.pixels.stored:
                return decode_stored(
                    self.data(index),
                    name=self.name(index),
                    pixels=self.pixels,
                    channels=self.channels,
                    min_side=min_side,
                )
            return decode(self.data(index), channels=self.channels, min_side=min_side)

    def stored_size(self, index: int) -> tuple[int, int]:
        if self.pixels.stored:
            return super().stored_size(index)
        with self._errors_as_bad(index):
            return stated_size(self.data(index))

    @contextmanager
    def _errors_as_bad(self, index: int) -> Iterator[None]:
        try:
            yield
        except Undecodable as error:
            raise BadImage(self.name(index), str(error)) from error
        except OSError as error:
            refuse_exhaustion(error)
            raise BadImage(self.name(index), error.strerror or str(error), permanent=False) from error


def refuse_exhaustion(error: Exception) -> None:
    """Raise UserError if the process has reached its limit of open files: that is no defect of the image."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise UserError(
            f"No more files can be opened ({os.strerror(error.errno)}): allow more (ulimit -n 65536), then give the "
            "same command again."
        ) from error


class Subset(Source):
    """Some images of a source, in the order of indices; `skipped` is that of the whole source."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray):
        super().__init__()
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.labels = None if source.labels is None else source.labels[self.indices]
        self.classes, self.channels, self.in_memory = source.classes, source.channels, source.in_memory
        self.pixels, self.labels_apart = source.pixels, source.labels_apart
        self.facets = {name: values[self.indices] for name, values in source.facets.items()}
        self.transform, self.skipped = source.transform, source.skipped
        self.where, self.root = source.where, source.root

    def compute_fingerprint(self) -> str:
        return digest("subset", self.source.fingerprint, self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        return self.source.read(int(self.indices[index]), min_side=min_side)

    def stored_size(self, index: int) -> tuple[int, int]:
        return self.source.stored_size(int(self.indices[index]))

    def file(self, index: int) -> str | None:
        return self.source.file(int(self.indices[index]))

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        return self.source.read_many(self.indices[list(indices)].tolist(), min_side=min_side)

    def identities(self) -> np.ndarray | None:
        own = self.source.identities()
        return None if own is None else own[self.indices]

    def add_skipped(self, bad: Iterable[tuple[str, str]]) -> None:
        self.source.add_skipped(bad)


def readable(source: Source, indices: Iterable[int], *, or_later: bool = False) -> list[int]:
    """Return those of the images that can be read; or_later: also those that are temporarily unreadable."""
    found = []
    for index in indices:
        try:
            source.read(index)
        except BadImage as bad:
            if bad.permanent or not or_later:
                continue
        found.append(index)
    return found


def refuse_too_many(bad: Sequence[tuple[str, str]], *, of: int) -> None:
    """Raise UserError if more than a tenth of the images that were read are bad."""
    if 10 * len(bad) > of:
        name, reason = bad[0]
        raise UserError(
            f"{len(bad)} of {of} images cannot be read (the first is {name!r}: {reason}); "
            "repair or remove them, since at most a tenth may be bad."
        )


class Names(Sequence[str]):
    """Strings in one block of bytes: small in memory for millions, and not copied when a worker process is forked."""

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
    """Return hex digits of the parts in order, each with its length."""
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
    """Decide by suffix; hidden files and the resource forks in archives of macOS are not images."""
    base = name.rsplit("/", 1)[-1]
    return base.lower().endswith(IMAGE_SUFFIXES) and not base.startswith(".") and "__MACOSX/" not in name


def why_ignored(name: str) -> str:
    """Return the remedy for an image of a format that is not read here; nothing for other files."""
    suffix = suffix_of(name)
    if suffix in STORED_SUFFIXES and not has_reader(suffix):
        return reader_remedy(suffix)
    return IGNORED_SUFFIXES.get(suffix, "")


def warn_ignored(names: Iterable[str], *, where: str) -> None:
    """Warn about images of formats that are not read, with the remedy."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        remedy = why_ignored(name)
        if remedy and not os.path.basename(name).startswith("."):
            kinds.setdefault(remedy, []).append(name)
    for remedy, found in kinds.items():
        log.warning("%s in %s not read, such as %s: %s.", counted(len(found), "image"), where, found[0], remedy)


def number_classes(names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels (int64) for the class names of images, and the sorted class names they index."""
    classes = sorted(set(names))
    number = {name: k for k, name in enumerate(classes)}
    return np.fromiter((number[name] for name in names), dtype=np.int64, count=len(names)), tuple(classes)


def classes_from_folders(names: Sequence[str], *, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels by the first folder of each relative path."""
    parts = [name.split("/", 1) for name in names]
    loose = next((part[0] for part in parts if len(part) == 1), None)
    if loose is not None:
        raise UserError(
            f"Labels are the names of sub-folders, and {loose!r} of {where!r} is in none; make a folder per class."
        )
    return number_classes([part[0] for part in parts])


# A class number beyond this is an error in the data: memory is allocated for every class up to it.
MAX_CLASSES = 1_000_000


def check_labels(labels: np.ndarray, *, where: str) -> np.ndarray:
    """Return class numbers as int64 (N,), counted from 0."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"The labels of {where} must be one whole number an image.")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= MAX_CLASSES):
        raise UserError(
            f"The labels of {where} go from {int(labels.min())} to {int(labels.max())}; number the classes from 0, up "
            f"to {MAX_CLASSES - 1:,}."
        )
    return labels.astype(np.int64)


def labels_of(source: Source) -> np.ndarray:
    """Return the labels, or raise a UserError with the way to add some."""
    if source.labels is None:
        raise UserError(
            "This needs labels and the data has none; sort the images into one folder per class, for example."
        )
    return source.labels


def common_labels(first: Source, second: Source) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Return the labels of two sources in one numbering: by class name where both have names, unchanged otherwise.

    A test folder may lack classes of the training folder, so equal numbers alone do not mean equal classes.
    """
    one, two = labels_of(first), labels_of(second)
    if first.classes is None or second.classes is None or first.classes == second.classes:
        return one, two, first.classes or second.classes
    names = (*first.classes, *(name for name in second.classes if name not in first.classes))
    number = np.array([names.index(name) for name in second.classes], dtype=np.int64)
    return one, number[two], names
