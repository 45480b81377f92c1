"""Encoded bytes to pixels: one function for JPEG, PNG, WebP, BMP and TIFF of any colour mode, depth and orientation.

It knows nothing of files or sources. Pillow decides what a valid image is; simplejpeg, if installed, only makes JPEGs
faster: both use libjpeg-turbo with the same settings and give the same pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import torch
from PIL import Image, JpegImagePlugin
from torch import Tensor

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# Larger images are left out: a few bytes can claim any size, and decoding takes up to 12 bytes a pixel.
MAX_PIXELS = 1 << 26
# Resizing the shorter side of a line of pixels to that of a network would make a giant of it.
MAX_ASPECT = 100
# The formats that are read, and no others: some of Pillow's plugins start programs (PostScript starts Ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF")
# Values are converted so many rows' worth at a time, so that wide temporary numbers stay small.
PIXELS_AT_ONCE = 1 << 22
ORIENTATION = 0x0112
ALPHA_MODES = {"RGBA", "LA", "PA", "RGBa", "La"}


class Undecodable(Exception):
    """These bytes are not an image that can be read; the message says why."""


def decode(data: bytes, *, channels: int = 3, min_side: int | None = None) -> Tensor:
    """uint8 (channels, H, W), upright.

    channels: 1 luminance, 2 luminance and alpha, 3 RGB, 4 RGB and alpha; where alpha is not wanted the image is laid on
    white. 16-bit values are divided by 257. min_side: H and W may be divided by the largest of 1, 2, 4, 8 that leaves
    the shorter side at least this long (JPEGs are decoded at that scale, others averaged over squares of that side).
    """
    try:
        pixels = _decode_jpeg_fast(data, simplejpeg, min_side) if simplejpeg is not None else None
        if pixels is None:
            pixels = _decode_with_pillow(data, min_side)
        pixels = in_bands(partial(_to_channels, channels=channels), pixels)
        pixels = np.require(pixels, requirements=["C", "W"])
        return torch.from_numpy(pixels).permute(2, 0, 1)
    except (MemoryError, Undecodable):
        raise
    # Pillow's plugins meet damaged files with almost any exception; each becomes a reason to leave the image out.
    except Exception as error:
        raise Undecodable(_reason(error)) from error


def decode_labels(data: bytes) -> np.ndarray:
    """A mask as it is stored: one number a pixel (H, W), a palette's numbers rather than its colours."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _refuse_bomb(image.height, image.width)
            return np.array(image)
    except (MemoryError, Undecodable):
        raise
    except Exception as error:  # as above
        raise Undecodable(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return "too many pixels"
    return str(error).split("\n", 1)[0] or type(error).__name__


def reduction(height: int, width: int, min_side: int | None) -> int:
    """The largest of 1, 2, 4, 8 by which the shorter side can be divided and stay at least min_side."""
    if min_side is None:
        return 1
    return next(factor for factor in (8, 4, 2, 1) if factor == 1 or min(height, width) >= factor * min_side)


def _decode_jpeg_fast(data: bytes, jpeg: ModuleType, min_side: int | None) -> np.ndarray | None:
    """(H, W, 3) upright, or None for anything this decoder should leave to Pillow."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        height, width, colours, _ = jpeg.decode_jpeg_header(data)
        if colours in ("CMYK", "YCCK"):
            return None
        _refuse_bomb(height, width)
        factor = reduction(height, width, min_side)
        # Asking for exactly ceil(side / factor) selects the scale 1 / factor.
        pixels = jpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:
        return None  # stricter than Pillow, which has the last word
    orientation = 1
    if b"Exif\0\0" in data[: 1 << 17]:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            orientation = image.getexif().get(ORIENTATION, 1)
    return _upright(pixels, orientation)


def _decode_with_pillow(data: bytes, min_side: int | None) -> np.ndarray:
    """(H, W, 1 | 2 | 3 | 4) upright: luminance, luminance and alpha, RGB, RGB and alpha."""
    if not data:
        raise Undecodable("the file is empty")
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        _refuse_bomb(height, width)
        factor = reduction(height, width, min_side)
        if factor > 1 and isinstance(image, JpegImagePlugin.JpegImageFile):
            image.draft(None, (width // factor, height // factor))
            factor = 1
        image.load()
        pixels = _plain(image)
        if factor > 1:
            pixels = _with_axis(
                np.asarray(Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).reduce(factor))
            )
        return _upright(pixels, image.getexif().get(ORIENTATION, 1))


def _refuse_bomb(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise Undecodable(f"{width} x {height} is too many pixels (up to {MAX_PIXELS:,} are read)")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise Undecodable(f"{width} x {height} is too narrow (sides up to 1 : {MAX_ASPECT} are read)")


def _with_axis(pixels: np.ndarray) -> np.ndarray:
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _plain(image: Image.Image) -> np.ndarray:
    """A loaded Pillow image of any mode as uint8 (H, W, 1 | 2 | 3 | 4)."""
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        # A PNG may name one grey or colour as transparent instead of carrying an alpha channel.
        if "transparency" in image.info and image.mode in ("L", "RGB"):
            return np.asarray(image.convert("RGBA"))
        return _with_axis(np.asarray(image))
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
    """0 .. 65535 to the nearest of 0 .. 255 (65535 = 257 * 255)."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def in_bands(change: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray) -> np.ndarray:
    """change(pixels) of an image (H, W, ...), a band of rows at a time."""
    rows = max(1, PIXELS_AT_ONCE // max(1, pixels.shape[1]))
    if len(pixels) <= rows:
        return change(pixels)
    return np.concatenate([change(pixels[top : top + rows]) for top in range(0, len(pixels), rows)])


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the rotation or reflection that EXIF's orientation 1 .. 8 describes."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def luminance(pixels: np.ndarray) -> np.ndarray:
    """(..., 3) RGB to (..., 1), ITU-R 601 in 16-bit fixed point, as Pillow does it."""
    red, green, blue = (pixels[..., k : k + 1].astype(np.uint32) for k in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)


def _to_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """(H, W, 1 | 2 | 3 | 4) to (H, W, channels)."""
    have = pixels.shape[2]
    if have == channels:
        return pixels
    colour, alpha = (pixels[..., :-1], pixels[..., -1:]) if have in (2, 4) else (pixels, None)
    if alpha is not None and channels in (1, 3):
        wide = colour.astype(np.uint32) * alpha + 255 * (255 - alpha.astype(np.uint32))
        colour, alpha = ((wide + 127) // 255).astype(np.uint8), None
    if colour.shape[2] == 1 and channels >= 3:
        colour = np.repeat(colour, 3, axis=2)
    elif colour.shape[2] == 3 and channels < 3:
        colour = luminance(colour)
    if channels in (2, 4):
        alpha = np.full_like(colour[..., :1], 255) if alpha is None else alpha
        return np.concatenate([colour, alpha], axis=2)
    return colour
