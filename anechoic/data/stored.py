"""Images as files store them: any number of channels, any of five pixel types, several frames, read by region.

Formats have one file each and a row in READERS. `decoding` converts pictures to 8-bit gray or RGB instead.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anechoic.config import PixelConfig
from anechoic.data.decoding import (
    IMAGE_SUFFIXES,
    MAX_PIXELS,
    errors_as_undecodable,
    open_picture,
    reduction,
    refuse_bomb,
)
from anechoic.data.pixels import ORIENTATION, Undecodable, plain, upright
from anechoic.errors import UserError
from anechoic.outcome import counted
from anechoic.storage.safe_io import open_regular, read_regular, reason

# Suffix -> module with `open_image`, the package it needs and the extra that installs that.
READERS: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys((".tif", ".tiff"), ("anechoic.data.tiff", "tifffile", "tiff")),
    **dict.fromkeys((".dcm", ".dicom", ".ima"), ("anechoic.data.dicom", "pydicom", "dicom")),
    **dict.fromkeys((".nii", ".nii.gz"), ("anechoic.data.nifti", "nibabel", "nifti")),
    ".zarr": ("anechoic.data.zarr_array", "zarr", "zarr"),
    ".npy": ("anechoic.data.npy", "numpy", ""),
}
# Formats that are no pictures: a folder is searched for them if it has no picture.
STORED_SUFFIXES = tuple(suffix for suffix in READERS if suffix not in IMAGE_SUFFIXES)
# A folder with one of these is one image or stack of images.
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
# Type of the samples by numpy's kind and size; what is not listed is no image.
TYPES = {
    "b1": "uint8",
    "u1": "uint8",
    "u2": "uint16",
    "i1": "int16",
    "i2": "int16",
    "f2": "float16",
    "f4": "float32",
    **dict.fromkeys(("u4", "i4", "u8", "i8", "f8"), "float32"),
}
SNIFFED_BYTES = 352
ENDS_EARLY = "the file ends before its pixels do; copy or download it again"
TOO_MUCH_MEMORY = "it claims more than fits into memory; save it again"
# More unnamed pages than this are frames, not channels.
MAX_CHANNELS = 32


class Box(NamedTuple):
    """A region of an image in pixels."""

    top: int
    left: int
    height: int
    width: int


class StoredImage(ABC):
    """An open file: `frames` images of height x width with the same channels. It reads regions of them."""

    frames: int = 1
    height: int
    width: int
    names: tuple[str, ...]  # of the channels; their numbers where the file has no names
    dtype: np.dtype

    @property
    def type(self) -> str:
        """Return the type of its samples."""
        kind = f"{self.dtype.kind}{self.dtype.itemsize}"
        if kind not in TYPES:
            raise Undecodable(f"{self.dtype} values are no pixels; convert them to uint16 or float32")
        return TYPES[kind]

    @abstractmethod
    def read(self, frame: int, box: Box) -> np.ndarray:
        """Return the region of a frame, (C, height, width)."""

    def close(self) -> None:
        """Close what is open. A picture is decoded already."""
        return


class DecodedImage(StoredImage):
    """A picture that Pillow decodes as a whole."""

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels
        self.height, self.width, channels = pixels.shape
        self.names, self.dtype = numbered(channels), pixels.dtype

    def read(self, frame: int, box: Box) -> np.ndarray:
        return crop(self.pixels, box).transpose(2, 0, 1)


def numbered(channels: int) -> tuple[str, ...]:
    return tuple(str(k) for k in range(channels))


def crop(pixels: np.ndarray, box: Box) -> np.ndarray:
    """Return the region of (H, W, ...)."""
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


@cache
def has_reader(suffix: str) -> bool:
    return find_spec(READERS[suffix][1]) is not None


def reader_remedy(suffix: str) -> str:
    return f'all its values and channels need an extra package: pip install "anechoic[{READERS[suffix][2]}]"'


def suffix_of(name: str | Path) -> str:
    """Return the suffix in lower case; of compressed NIfTI both."""
    name = str(name).lower()
    return ".nii.gz" if name.endswith(".nii.gz") else os.path.splitext(name)[1]


def reads_stored(name: str) -> bool:
    """Return whether this is a file of a format for stored pixels whose reader is installed."""
    suffix = suffix_of(name)
    return suffix in STORED_SUFFIXES and has_reader(suffix)


def is_zarr(path: str | Path) -> bool:
    """Return whether a folder is an array, or a group of them, rather than a folder of images."""
    return suffix_of(path) == ".zarr" or any(os.path.isfile(os.path.join(path, name)) for name in ZARR_FILES)


def may_be_dicom(name: str) -> bool:
    """Return whether scanners name images so: without a suffix, or by a number such as 1.2.840.10008."""
    suffix = os.path.splitext(name)[1]
    return (not suffix or suffix[1:].isdecimal()) and not name.startswith(".") and name.upper() != "DICOMDIR"


def format_of(path: str | Path, *, name: str = "") -> str:
    """Return the suffix of a file's format: by its name, or by its first bytes. OSError if it cannot be read now."""
    if os.path.isdir(path):
        return ".zarr"
    suffix = suffix_of(name or path)
    with open_regular(path) as file:  # OSError for a pipe
        return suffix if suffix in READERS else sniffed(file.read(SNIFFED_BYTES)) or suffix


@contextmanager
def open_stored(file: str | Path | bytes, *, name: str = "") -> Iterator[StoredImage]:
    """Open a file, or its content; name: decides the format. Undecodable for what is damaged, OSError from the disk."""
    if isinstance(file, bytes):
        suffix = suffix_of(name)
        suffix = suffix if suffix in READERS else sniffed(file) or suffix
    else:
        suffix = format_of(file, name=name)
    with errors_as_undecodable():
        if suffix in READERS:
            if not has_reader(suffix):
                raise Undecodable(reader_remedy(suffix))
            with damage_as_undecodable():
                image = import_module(READERS[suffix][0]).open_image(file)
        else:
            image = DecodedImage(_picture(file))
        try:
            with damage_as_undecodable():
                yield image
        finally:
            image.close()


@contextmanager
def damage_as_undecodable() -> Iterator[None]:
    """Turn what decoders raise for a damaged file, which is almost anything, into one sentence."""
    try:
        yield
    except Undecodable:
        raise
    except MemoryError as problem:
        raise Undecodable(TOO_MUCH_MEMORY) from problem
    except Exception as problem:
        raise Undecodable(f"its pixels cannot be decoded ({reason(problem)}); save it again or remove it") from problem


def sniffed(data: bytes) -> str:
    """Return the suffix of a format for stored pixels by the first bytes, or nothing."""
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return ".tif"
    if data[344:348] in (b"n+1\0", b"n+2\0") or data[4:8] == b"n+2\0":
        return ".nii"
    return ".dcm" if data[128:132] == b"DICM" else ".npy" if data[:6] == b"\x93NUMPY" else ""


def _picture(file: str | Path | bytes) -> np.ndarray:
    """Return (H, W, C) of a picture, upright; 16-bit and floating-point values as they are."""
    if not isinstance(file, bytes):
        file = read_regular(file)
    with open_picture(file) as image:
        refuse_bomb(image.height, image.width, file)
        if file[:8] == b"\x89PNG\r\n\x1a\n" and file[24] == 16 and file[25] != 0:
            # Pillow reads 16-bit color as 8-bit.
            if find_spec("imagecodecs") is None:
                raise Undecodable('16-bit color PNG needs an extra package: pip install "anechoic[tiff]"')
            return import_module("imagecodecs").png_decode(file)
        image.load()
        raw = image.mode.startswith("I") or image.mode == "F"
        pixels = np.asarray(image)[:, :, None] if raw else plain(image)
        if image.mode == "I" and pixels.size and pixels.min() >= 0 and pixels.max() <= 65535:
            pixels = pixels.astype(np.uint16)  # an older Pillow opens 16-bit PNG in 32 bits
        return upright(pixels, image.getexif().get(ORIENTATION, 1))


def selected(select: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the numbers of the channels that are asked for by name or number; all if none are."""
    if not select:
        return list(range(len(names)))
    found = []
    for word in select:
        if word in names:
            found.append(names.index(word))
        elif word.isdecimal() and int(word) < len(names):
            found.append(int(word))
        else:
            known = ", ".join(names) if names != numbered(len(names)) else f"0 to {len(names) - 1}"
            raise Undecodable(f"it has no channel {word!r}; its channels are {known}: choose with --channels")
    return found


def selected_channels(image: StoredImage, pixels: PixelConfig, *, channels: int) -> list[int]:
    """Return the numbers of the channels to read; Undecodable if type or channels are not those of the data set."""
    if image.type != pixels.type:
        raise Undecodable(f"its pixels are {image.type} and those of the data set {pixels.type}; convert them")
    chosen = selected(pixels.select, image.names)
    if len(chosen) != channels:
        raise Undecodable(
            f"it has {counted(len(chosen), 'channel')} and {channels} are expected; choose common ones with --channels"
        )
    return chosen


def read_region(
    image: StoredImage, frame: int, box: Box, *, pixels: PixelConfig, channels: int, min_side: int | None
) -> Tensor:
    """Return (channels, H, W) in the type of `pixels`; float32 if the image is larger than needed and is averaged."""
    chosen = selected_channels(image, pixels, channels=channels)
    if max(box.height * box.width, box.height * box.width * max(channels, len(image.names)) // 4) > MAX_PIXELS:
        raise Undecodable(
            f"{box.width} x {box.height} with {len(image.names)} channels is too many pixels; use --tile 224"
        )
    refuse_bomb(box.height, box.width)
    values = image.read(frame, box)[chosen]
    found = torch.from_numpy(np.ascontiguousarray(values, dtype=np.dtype(pixels.type)))
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise Undecodable(
            f"{int((~found.isfinite()).sum()):,} of its values are infinite or not a number; replace them"
        )
    factor = 1 if pixels.tile else reduction(box.height, box.width, min_side)
    if factor > 1:
        means = F.avg_pool2d(found.float(), factor)
        return means.round().to(torch.uint8) if found.dtype == torch.uint8 else means
    return found


def decode_stored(
    data: bytes,
    *,
    name: str = "",
    pixels: PixelConfig,
    channels: int,
    min_side: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Return the single image in encoded bytes, (channels, H, W), with its values as they are."""
    with open_stored(data, name=name) as image:
        if image.frames > 1:
            raise Undecodable(f"it has {image.frames} frames; unpack it to a folder, where each is a sample")
        if image.height * image.width > max_pixels:
            raise Undecodable(
                f"{image.width} x {image.height} is too many pixels (up to {max_pixels:,} are read); use --tile 224"
            )
        whole = Box(0, 0, image.height, image.width)
        return read_region(image, 0, whole, pixels=pixels, channels=channels, min_side=min_side)


def read_label_image(data: bytes, *, name: str) -> np.ndarray:
    """Return a mask of any integer type, (H, W) or as it is."""
    with open_stored(data, name=name) as image:
        refuse_bomb(image.height, image.width)
        values = image.read(0, Box(0, 0, image.height, image.width)).transpose(1, 2, 0)
    return values[:, :, 0] if values.shape[2] == 1 else values


def file_or_memory(file: str | Path | bytes) -> str | io.BytesIO:
    return io.BytesIO(file) if isinstance(file, bytes) else str(file)


def as_stored(picture: object, *, pixels: PixelConfig, channels: int) -> Tensor:
    """Return (C, H, W) of an array (H, W) or (H, W, C) or a tensor (C, H, W), with its values as they are."""
    values = picture.permute(1, 2, 0).numpy(force=True) if isinstance(picture, Tensor) else np.asarray(picture)
    if values.ndim == 2:
        values = values[:, :, None]
    if values.ndim != 3 or values.dtype.kind not in "buif":
        raise UserError(f"An array of {values.dtype} of shape {values.shape} is no image: give numbers (H, W, C).")
    image = DecodedImage(values)
    whole = Box(0, 0, image.height, image.width)
    try:
        return read_region(image, 0, whole, pixels=pixels, channels=channels, min_side=None)
    except Undecodable as problem:
        raise UserError(f"This image cannot be used: {problem}.") from problem
