"""Encoded bytes to pixels: JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF and HEIC of any color mode, depth and orientation.

Pillow decides what a valid image is; simplejpeg, if installed, makes JPEGs faster: both use libjpeg-turbo with the same
settings and decode the same pixels. Files and sources are elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
from PIL import Image, JpegImagePlugin, features
from torch import Tensor

from anechoic.data.pixels import ORIENTATION, Undecodable, plain, to_tensor, upright, with_axis

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# Larger images are skipped: a few bytes can declare any size, and decoding takes up to 12 bytes a pixel.
MAX_PIXELS = 1 << 26
# A scan of a JPEG costs time for every pixel and may be repeated at will in a few bytes each. Encoders write about ten.
MAX_SCANS, MAX_SCANNED_PIXELS = 200, 1 << 30
SCAN = b"\xff\xda"
# Resizing the shorter side of a narrow image to that of a network would need too much memory.
MAX_ASPECT = 100
# No other formats are read: some of Pillow's plugins start programs (PostScript starts Ghostscript).
FORMATS: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF")
if "avif" in features.modules and features.check("avif"):
    FORMATS += ("AVIF",)
# HEIC is read by a plugin, which is loaded with the first such image.
HEIC_PLUGIN = "pillow_heif"
HAS_HEIC = find_spec(HEIC_PLUGIN) is not None
HEIC_REMEDY = 'HEIC needs an extra package: pip install "anechoic[heic]"'
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
# Suffixes of files that are read, and of images that are not, with the remedy.
IMAGE_SUFFIXES: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
IMAGE_SUFFIXES += ((".avif",) if "AVIF" in FORMATS else ()) + ((".heic", ".heif") if HAS_HEIC else ())
IGNORED_SUFFIXES = {
    **dict.fromkeys((".heic", ".heif"), HEIC_REMEDY),
    ".avif": "AVIF needs a newer Pillow: pip install --upgrade pillow",
    **dict.fromkeys((".svg", ".psd", ".jxl", ".jp2", ".exr", ".hdr"), "convert them to PNG or JPEG"),
    **dict.fromkeys((".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".raf", ".rw2"), "develop them to JPEG"),
}
for known in IMAGE_SUFFIXES:
    IGNORED_SUFFIXES.pop(known, None)


def decoders() -> str:
    """Return the formats that can be read here; an image that is unreadable now may be readable with others."""
    return " ".join((*FORMATS, "HEIF") if HAS_HEIC else FORMATS)


def decode(data: bytes, *, channels: int = 3, min_side: int | None = None) -> Tensor:
    """Return uint8 (channels, H, W), upright.

    channels: 1 luminance, 2 luminance and alpha, 3 RGB, 4 RGB and alpha; without alpha, the image is composed on white.
    16-bit values are divided by 257. min_side: H and W may be divided by the largest of 1, 2, 4, 8 that leaves
    the shorter side at least this long (JPEGs are decoded at that scale, others averaged over squares of that side).
    """
    with errors_as_undecodable():
        pixels = _decode_jpeg_fast(data, simplejpeg, min_side) if simplejpeg is not None else None
        if pixels is None:
            pixels = _decode_with_pillow(data, min_side)
        return to_tensor(pixels, channels=channels)


def open_picture(data: bytes) -> Image.Image:
    """Open an image with Pillow, as one of the formats that are read; it is not loaded yet."""
    formats = FORMATS
    if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS and not ("AVIF" in FORMATS and b"avif" in data[:64]):
        if not HAS_HEIC:
            raise Undecodable(HEIC_REMEDY)
        import_module(HEIC_PLUGIN).register_heif_opener(thumbnails=False)
        formats = ("HEIF",)
    return Image.open(io.BytesIO(data), formats=formats)


def decode_labels(data: bytes) -> np.ndarray:
    """Return a mask as it is stored: one number a pixel (H, W), a palette's indices rather than its colors."""
    with errors_as_undecodable(), open_picture(data) as image:
        refuse_bomb(image.height, image.width, data)
        return np.array(image)


def stated_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of the file's header; nothing is decoded."""
    with errors_as_undecodable(), open_picture(data) as image:
        return image.size


@contextmanager
def errors_as_undecodable() -> Iterator[None]:
    """Turn any exception into Undecodable: Pillow's plugins raise almost any for a damaged file."""
    try:
        yield
    except (MemoryError, Undecodable):
        raise
    except Exception as error:
        raise Undecodable(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return "too many pixels"
    return str(error).split("\n", 1)[0] or type(error).__name__


def reduction(height: int, width: int, min_side: int | None) -> int:
    """Return the largest of 1, 2, 4, 8 by which the shorter side can be divided and stay at least min_side."""
    if min_side is None:
        return 1
    return next(factor for factor in (8, 4, 2, 1) if factor == 1 or min(height, width) >= factor * min_side)


def _decode_jpeg_fast(data: bytes, jpeg: ModuleType, min_side: int | None) -> np.ndarray | None:
    """Return (H, W, 3) upright, or None for an image that Pillow must decode."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        height, width, colors, _ = jpeg.decode_jpeg_header(data)
        if colors in ("CMYK", "YCCK"):
            return None
        refuse_bomb(height, width, data)
        factor = reduction(height, width, min_side)
        # Asking for exactly ceil(side / factor) selects the scale 1 / factor.
        pixels = jpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:
        return None  # stricter than Pillow, which decides
    orientation = 1
    if b"Exif\0\0" in data[: 1 << 17]:
        with open_picture(data) as image:
            orientation = image.getexif().get(ORIENTATION, 1)
    return upright(pixels, orientation)


def _decode_with_pillow(data: bytes, min_side: int | None) -> np.ndarray:
    """Return (H, W, 1 | 2 | 3 | 4) upright: luminance, luminance and alpha, RGB, RGB and alpha."""
    if not data:
        raise Undecodable("the file is empty")
    with open_picture(data) as image:
        width, height = image.size
        refuse_bomb(height, width, data)
        factor = reduction(height, width, min_side)
        if factor > 1 and isinstance(image, JpegImagePlugin.JpegImageFile):
            image.draft(None, (width // factor, height // factor))
            factor = 1
        image.load()
        pixels = plain(image)
        if factor > 1:
            pixels = with_axis(
                np.asarray(Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).reduce(factor))
            )
        return upright(pixels, image.getexif().get(ORIENTATION, 1))


def refuse_bomb(height: int, width: int, data: bytes = b"") -> None:
    """Raise Undecodable if decoding would take too much memory or time. The limits do not depend on the machine."""
    if height * width > MAX_PIXELS:
        raise Undecodable(f"{width} x {height} is too many pixels (up to {MAX_PIXELS:,} are read)")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise Undecodable(f"{width} x {height} is too narrow (sides up to 1 : {MAX_ASPECT} are read)")
    # Compressed data never contain the marker, so other parts of the file may only add to the number.
    scans = data.count(SCAN) if data.startswith(b"\xff\xd8") else 1
    if scans > MAX_SCANS or scans * height * width > MAX_SCANNED_PIXELS:
        raise Undecodable(f"{scans:,} scans of {width} x {height} pixels would take too long to decode")
