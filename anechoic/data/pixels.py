"""Pillow images and arrays of any color mode, depth and orientation to uint8 pixels.

It reads no file; data/decoding.py decodes bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from anechoic.errors import UserError

# Values are converted in bands of about this number of pixels, which bounds the memory of wide temporary numbers.
PIXELS_AT_ONCE = 1 << 22
ORIENTATION = 0x0112
ALPHA_MODES = {"RGBA", "LA", "PA", "RGBa", "La"}
# Stored values are shown between these percentiles of each channel.
SHOWN_PERCENTILES = (1, 99)


class Undecodable(Exception):
    """The bytes are not an image that can be read; the message has the reason."""


def stretched(values: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
    """Return (..., H, W, C) in 0 .. 1 for viewing: 0 and 1 are percentiles of each channel of each image.

    like: images whose percentiles are used (default: values).
    """
    low, high = np.percentile(values if like is None else like, SHOWN_PERCENTILES, axis=(-3, -2), keepdims=True)
    return ((values - low) / np.where(high > low, high - low, 1)).clip(0, 1)


def as_pixels(picture: Any, *, channels: int) -> Tensor:
    """Return uint8 (channels, H, W) of a Pillow image, upright, an array (H, W) or (H, W, C), or a tensor (C, H, W)."""
    if isinstance(picture, Image.Image):
        try:
            return to_tensor(upright(plain(picture), picture.getexif().get(ORIENTATION, 1)), channels=channels)
        except (Undecodable, OSError) as error:
            raise UserError(f"This Pillow image cannot be used: {error}.") from error
    if isinstance(picture, Tensor) and picture.ndim == 3:
        picture = picture.permute(1, 2, 0).numpy(force=True)
    if not isinstance(picture, np.ndarray) or picture.ndim not in (2, 3):
        kind = f"An array of shape {tuple(picture.shape)}" if hasattr(picture, "shape") else type(picture).__name__
        raise UserError(
            f"{kind} is no image: give a Pillow image, an array (H, W, C), a tensor (C, H, W), a path or a list."
        )
    if np.issubdtype(picture.dtype, np.floating) and picture.size and picture.min() >= 0 and picture.max() <= 1:
        picture = np.round(255 * picture).astype(np.uint8)
    if picture.dtype != np.uint8:
        raise UserError(
            f"Pixels are whole numbers 0 .. 255 (uint8) or floats 0 .. 1, and this array holds {picture.dtype} up to "
            f"{picture.max(initial=0):g}: convert it."
        )
    pixels = with_axis(picture)
    if pixels.shape[2] != channels and (channels not in (1, 2, 3, 4) or pixels.shape[2] not in (1, 2, 3, 4)):
        raise UserError(f"The network takes images of {channels} channels and this one has {pixels.shape[2]}.")
    return to_tensor(pixels, channels=channels)


def to_tensor(pixels: np.ndarray, *, channels: int) -> Tensor:
    """Return (channels, H, W) for (H, W, C) uint8."""
    pixels = in_bands(partial(to_channels, channels=channels), pixels)
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)


def with_axis(pixels: np.ndarray) -> np.ndarray:
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def plain(image: Image.Image) -> np.ndarray:
    """Return a loaded Pillow image of any mode as uint8 (H, W, 1 | 2 | 3 | 4)."""
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        # A PNG may declare one gray or color transparent instead of having an alpha channel.
        if "transparency" in image.info and image.mode in ("L", "RGB"):
            return np.asarray(image.convert("RGBA"))
        return with_axis(np.asarray(image))
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise Undecodable("pixel values beyond 16 bits")
        return in_bands(sixteen_to_eight, values)[:, :, None]
    if image.mode == "F":
        raise Undecodable("floating-point pixels; save them as 8 or 16 bits or as a .npy array")
    if image.mode == "1":
        return np.asarray(image.convert("L"))[:, :, None]
    has_alpha = image.mode in ALPHA_MODES or "transparency" in image.info
    return np.asarray(image.convert("RGBA" if has_alpha else "RGB"))


def sixteen_to_eight(values: np.ndarray) -> np.ndarray:
    """Round 0 .. 65535 to the nearest of 0 .. 255 (65535 = 257 * 255)."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def in_bands(change: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray) -> np.ndarray:
    """Return change(pixels) of an image (H, W, ...), computed by bands of rows."""
    rows = max(1, PIXELS_AT_ONCE // max(1, pixels.shape[1]))
    if len(pixels) <= rows:
        return change(pixels)
    return np.concatenate([change(pixels[top : top + rows]) for top in range(0, len(pixels), rows)])


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the rotation or reflection that EXIF's orientation 1 .. 8 describes."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def luminance(pixels: np.ndarray) -> np.ndarray:
    """Convert (..., 3) RGB to (..., 1), ITU-R 601 in 16-bit fixed point, as Pillow does."""
    red, green, blue = (pixels[..., k : k + 1].astype(np.uint32) for k in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)


def to_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert (H, W, 1 | 2 | 3 | 4) to (H, W, channels)."""
    have = pixels.shape[2]
    if have == channels:
        return pixels
    color, alpha = (pixels[..., :-1], pixels[..., -1:]) if have in (2, 4) else (pixels, None)
    if alpha is not None and channels in (1, 3):
        wide = color.astype(np.uint32) * alpha + 255 * (255 - alpha.astype(np.uint32))
        color, alpha = ((wide + 127) // 255).astype(np.uint8), None
    if color.shape[2] == 1 and channels >= 3:
        color = np.repeat(color, 3, axis=2)
    elif color.shape[2] == 3 and channels < 3:
        color = luminance(color)
    if channels in (2, 4):
        alpha = np.full_like(color[..., :1], 255) if alpha is None else alpha
        return np.concatenate([color, alpha], axis=2)
    return color
