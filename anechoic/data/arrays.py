"""Images in an array: `.npy` (memory-mapped) and `.npz` with `images` and, if requested, `labels`.

Layout (N, H, W) or (N, H, W, C) with any C: the only source of images with more than 4 channels.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from anechoic.config import EIGHT_BIT, PixelConfig
from anechoic.data.content_checksums import FileHashes
from anechoic.data.decoding import MAX_ASPECT, MAX_PIXELS
from anechoic.data.pixels import Undecodable, luminance, sixteen_to_eight
from anechoic.data.source import BadImage, Source, check_labels, digest
from anechoic.data.stored import Box, DecodedImage, read_region
from anechoic.errors import UserError
from anechoic.storage.safe_io import open_regular, reason, refuse_bomb

# The bytes at either end of a file that earlier versions made the fingerprint from.
ENDS = 1 << 20
# What reading a damaged .npy or .npz raises; numpy parses its headers as Python literals.
NUMPY_DAMAGE = (
    *(ValueError, TypeError, EOFError, BadZipFile, OSError, KeyError, IndexError, OverflowError, NotImplementedError),
    *(struct.error, zlib.error, TokenError, SyntaxError, RecursionError, MemoryError, RuntimeError),
)


class Array(Source):
    """Pixels from one array (N, H, W, C).

    As 8-bit pictures: of uint8, uint16 (divided by 257), bool, integers in 0 .. 255 or floats in [0, 1]. As stored
    pixels: the values and channels of the array.
    """

    in_memory = True

    def __init__(
        self,
        images: np.ndarray,
        *,
        channels: int = 3,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] | None = None,
        fingerprint: str = "",
        where: str = "the array",
        path: Path | None = None,
        pixels: PixelConfig = EIGHT_BIT,
    ):
        """path: the .npy file that images are a memory map of."""
        super().__init__()
        self.pixels = pixels
        self.images = check_images(images, where=where, values=not pixels.stored)
        have = self.images.shape[3]
        if have != channels and {have, channels} != {1, 3} and not pixels.select:
            raise UserError(f"{where} has {have} channels and {channels} are wanted; ask for channels={have}.")
        self.channels, self.labels, self.classes = channels, labels, classes
        if labels is not None and len(labels) != len(images):
            raise UserError(f"{where} has {len(images)} images but {len(labels)} labels; give one label an image.")
        self.path, self.hashes = path, FileHashes("", [] if path is None else [str(path)])
        if path is None:
            self.fingerprint = fingerprint or digest("array", str(images.dtype), str(images.shape), images)

    def compute_fingerprint(self) -> str:
        return digest("array file", self.hashes.all)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file again instead of receiving a copy.
        return {**self.__dict__, "images": None} if self.path else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path:
            self.images = check_images(np.load(self.path, mmap_mode="r"), where=str(self.path), values=False)

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        if self.path:
            self.hashes.check_file(0)
        if self.pixels.stored:
            return self._stored(index, min_side)
        pixels = to_bytes(self.images[index])
        if pixels.shape[2] == 1 and self.channels == 3:
            pixels = np.repeat(pixels, 3, axis=2)
        elif pixels.shape[2] == 3 and self.channels == 1:
            pixels = luminance(pixels)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)

    def _stored(self, index: int, min_side: int | None) -> Tensor:
        image = DecodedImage(self.images[index])
        whole = Box(0, 0, image.height, image.width)
        try:
            return read_region(image, 0, whole, pixels=self.pixels, channels=self.channels, min_side=min_side)
        except Undecodable as problem:
            raise BadImage(self.name(index), str(problem)) from problem


def to_bytes(pixels: np.ndarray) -> np.ndarray:
    """Return uint8: 16-bit divided by 257, bool and floats in [0, 1] times 255, rounded."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.uint16:
        return sixteen_to_eight(pixels)
    if pixels.dtype == bool:
        return pixels.astype(np.uint8) * 255
    if pixels.dtype.kind == "f":
        return np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    return pixels.astype(np.uint8)


def check_images(images: np.ndarray, *, where: str, values: bool = True) -> np.ndarray:
    """Return the array as (N, H, W, C); UserError with a remedy if its shape, type or range is not that of images."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(f"{where} has the shape {images.shape}; images are (N, H, W) or (N, H, W, C).")
    if images.shape[1] in (1, 3) and images.shape[3] not in (1, 3) and images.shape[2] == images.shape[3]:
        raise UserError(
            f"{where} has the shape {images.shape}, channels first; save images.transpose(0, 2, 3, 1) instead."
        )
    sides = images.shape[1:3]
    if math.prod(sides) > MAX_PIXELS or max(sides) > MAX_ASPECT * min(sides):
        raise UserError(
            f"{where} has images of {images.shape[1]} x {images.shape[2]}; up to {MAX_PIXELS:,} pixels are read."
        )
    kind = images.dtype.kind
    if kind not in "ufib":
        raise UserError(f"{where} holds {images.dtype} values, which are not pixels; save uint8.")
    if values and (kind in "fi" or images.dtype.itemsize > 2):
        low, high = _range(images)
        top = 1 if kind == "f" else 255
        if not (low >= 0 and high <= top):
            raise UserError(
                f"{where} holds {images.dtype} values from {low:g} to {high:g}; save uint8, or values from 0 to {top}."
            )
    return images


def _range(images: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest value, a thousand images at a time; NaN if there is one."""
    parts = [images[k : k + 1000] for k in range(0, len(images), 1000)]
    return float(np.min([part.min() for part in parts])), float(np.max([part.max() for part in parts]))


def open_array(path: Path, *, labels: bool, channels: int, pixels: PixelConfig = EIGHT_BIT) -> Array:
    how: dict[str, Any] = {"channels": channels, "where": str(path), "pixels": pixels}
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        head = file.read(ENDS)
        file.seek(max(0, status.st_size - ENDS))
        earlier = digest("array file", status.st_size, status.st_mtime_ns, head, file.read())
    if path.suffix.lower() == ".npy":
        if labels:
            raise UserError(f"{str(path)!r} has no labels; save a .npz with the arrays 'images' and 'labels'.")
        with numpy_damage(path):
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        array = Array(mapped, path=path, **how)
    else:
        # Hashed now: the file may change after its arrays are in memory.
        fingerprint = digest("array file", FileHashes("", [str(path)]).all)
        arrays = read_npz(path)
        numbers = _npz_labels(arrays, path) if labels else None
        named = labels and "classes" in arrays and arrays["classes"].ndim == 1
        classes = tuple(map(str, arrays["classes"])) if named else None
        array = Array(_npz_images(arrays, path), labels=numbers, classes=classes, fingerprint=fingerprint, **how)
    array.earlier_fingerprint = earlier
    return array


@contextmanager
def numpy_damage(path: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into a UserError."""
    try:
        yield
    except UserError:
        raise
    except NUMPY_DAMAGE as error:
        raise UserError(
            f"{str(path)!r} is not a complete NumPy file ({reason(error)}); save it again with numpy."
        ) from error


def read_npz_names(path: Path) -> set[str]:
    """Return the names of the arrays in a .npz file, without reading them."""
    with numpy_damage(path), open_regular(path) as file, ZipFile(file) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def read_npz(path: Path, *, only: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file, or only those of these names.

    Sizes in their headers are compared with those of the file before memory is allocated.
    """
    with numpy_damage(path), open_regular(path) as file:
        with ZipFile(file) as archive:
            refuse_bomb(archive, path)
            for info in archive.infolist():
                _check_member(archive, info, path)
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files if only is None or name in only}
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise UserError(f"{str(path)!r} holds something else than NumPy arrays; save it again with numpy.savez.")
    return arrays


def _check_member(archive: ZipFile, info: ZipInfo, path: Path) -> None:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(member)
        claimed = math.prod(shape) * dtype.itemsize
        if claimed != info.file_size - member.tell():
            raise UserError(
                f"{str(path)!r} is damaged: {info.filename[:100]} claims {claimed:,} bytes and has {info.file_size:,}."
            )


def _npz_images(arrays: dict[str, np.ndarray], path: Path) -> np.ndarray:
    if "images" in arrays:
        return arrays["images"]
    candidates = [name for name, array in arrays.items() if array.ndim in (3, 4)]
    if len(candidates) != 1:
        raise UserError(
            f"{str(path)!r} has the arrays {', '.join(arrays) or '(none)'}; name the one with the pixels 'images'."
        )
    return arrays[candidates[0]]


def _npz_labels(arrays: dict[str, np.ndarray], path: Path) -> np.ndarray:
    if "labels" not in arrays:
        raise UserError(f"{str(path)!r} has no array 'labels' (only {', '.join(arrays)}); add one integer an image.")
    return check_labels(arrays["labels"], where=f"the array 'labels' of {str(path)!r}")
