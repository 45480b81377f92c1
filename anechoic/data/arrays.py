"""Images that are an array already: `.npy` (memory-mapped) and `.npz` with `images` and, if wanted, `labels`.

Layout (N, H, W) or (N, H, W, C), any C. This is also how any number of channels enters the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from anechoic.data.decoding import luminance, sixteen_to_eight
from anechoic.data.source import Source, digest
from anechoic.errors import UserError

FINGERPRINT_BYTES = 1 << 20


class Array(Source):
    """Pixels from one array (N, H, W, C) of uint8, uint16, bool, integers in 0 .. 255 or floats in [0, 1]."""

    resident = True

    def __init__(
        self,
        images: np.ndarray,
        *,
        channels: int = 3,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] | None = None,
        fingerprint: str = "",
        where: str = "the array",
    ):
        super().__init__()
        self.images = check_images(images, where=where)
        have = self.images.shape[3]
        if have != channels and {have, channels} != {1, 3}:
            raise UserError(f"{where} has {have} channels and {channels} are wanted; ask for channels={have}.")
        self.channels, self.labels, self.classes = channels, labels, classes
        if labels is not None and len(labels) != len(images):
            raise UserError(f"{where} has {len(images)} images but {len(labels)} labels; give one label an image.")
        self.fingerprint = fingerprint or digest("array", str(images.dtype), str(images.shape), images)
        self.path: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A memory-mapped array is mapped again by a worker process, not copied to it.
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
        pixels = to_bytes(self.images[index])
        if pixels.shape[2] == 1 and self.channels == 3:
            pixels = np.repeat(pixels, 3, axis=2)
        elif pixels.shape[2] == 3 and self.channels == 1:
            pixels = luminance(pixels)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def to_bytes(pixels: np.ndarray) -> np.ndarray:
    """uint8: 16-bit divided by 257, bool and floats in [0, 1] times 255, rounded."""
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
    """The array as (N, H, W, C), refused with a remedy if its shape, type or range is not that of images."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(f"{where} has the shape {images.shape}; images are (N, H, W) or (N, H, W, C).")
    if images.shape[1] in (1, 3) and images.shape[3] not in (1, 3) and images.shape[2] == images.shape[3]:
        raise UserError(
            f"{where} has the shape {images.shape}, channels first; save images.transpose(0, 2, 3, 1) instead."
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
    """Smallest and largest value, a thousand images at a time; NaN if there is one."""
    parts = [images[k : k + 1000] for k in range(0, len(images), 1000)]
    return float(np.min([part.min() for part in parts])), float(np.max([part.max() for part in parts]))


def open_array(path: Path, *, labels: bool, channels: int) -> Array:
    stat = path.stat()
    with open(path, "rb") as file:
        head = file.read(FINGERPRINT_BYTES)
        file.seek(max(0, stat.st_size - FINGERPRINT_BYTES))
        fingerprint = digest("array file", stat.st_size, stat.st_mtime_ns, head, file.read())
    try:
        if path.suffix == ".npy":
            if labels:
                raise UserError(f"{str(path)!r} has no labels; save a .npz with the arrays 'images' and 'labels'.")
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            array = Array(mapped, channels=channels, fingerprint=fingerprint, where=str(path))
            array.path = path
            return array
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except UserError:
        raise
    except (ValueError, TypeError, EOFError, BadZipFile, OSError) as error:
        raise UserError(f"{str(path)!r} is not a complete NumPy file ({error}); save it again with numpy.") from error
    numbers = _npz_labels(arrays, path) if labels else None
    classes = tuple(map(str, arrays["classes"])) if "classes" in arrays and labels else None
    images = _npz_images(arrays, path)
    return Array(images, channels=channels, labels=numbers, classes=classes, fingerprint=fingerprint, where=str(path))


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
    if arrays["labels"].ndim != 1 or arrays["labels"].dtype.kind not in "iu":
        raise UserError(f"The array 'labels' of {str(path)!r} must be one integer an image.")
    return arrays["labels"].astype(np.int64)
