"""Small pictures for pages: one image as a data URI, many as one sheet. Pixels in, text out."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from anechoic.data.pixels import stretched
from anechoic.pages.html import Sheet

SIDE, TINY = 96, 16
# Channels of an image that a page can show one by one.
PICKED = 16


def displayed(image: Tensor) -> np.ndarray:
    """(C, H, W) -> uint8 (H, W, 1 | 3): pictures as they are; of stored values the first three channels, or the first,
    each stretched between its percentiles."""
    if image.dtype == torch.uint8 and len(image) in (1, 3, 4):
        return image.permute(1, 2, 0).numpy()
    values = image[: 3 if len(image) >= 3 else 1].float().permute(1, 2, 0).numpy()
    return (255 * stretched(values)).round().astype(np.uint8)


def channel_thumbnails(image: Tensor) -> list[str]:
    """Return the thumbnails of the first channels of stored values (C, H, W), each stretched by itself."""
    return [thumbnail(displayed(image[i : i + 1].float())) for i in range(min(len(image), PICKED))]


def thumbnail(pixels: np.ndarray, *, side: int = SIDE) -> str:
    """uint8 (H, W, C) -> the data URI of a JPEG whose longer side is about `side`."""
    return jpeg(fitted(pixels, side))


def sheet(images: Iterable[np.ndarray], *, side: int = 64) -> Sheet:
    """uint8 (H, W, C) images, each fitted into a square of its own, row after row."""
    tiles = [fitted(pixels, side) for pixels in images]
    columns = max(1, round(len(tiles) ** 0.5))
    rows = max(1, -(-len(tiles) // columns))
    whole = Image.new("RGB", (columns * side, rows * side), (128, 128, 128))
    for i, tile in enumerate(tiles):
        corner = (i % columns * side + (side - tile.width) // 2, i // columns * side + (side - tile.height) // 2)
        whole.paste(tile, corner)
    return Sheet(jpeg(whole), side, columns, rows)


def fitted(pixels: np.ndarray, side: int) -> Image.Image:
    """Its longer side is `side`; tiny ones are enlarged by a whole factor, their pixels kept apart."""
    picture = as_picture(pixels)
    longer = max(picture.size)
    if longer <= TINY:
        factor = max(1, side // longer)
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    size = (max(1, round(side * picture.width / longer)), max(1, round(side * picture.height / longer)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def as_picture(pixels: np.ndarray) -> Image.Image:
    """One channel as gray, the first three of more."""
    pixels = np.ascontiguousarray(pixels[..., :3] if pixels.shape[-1] >= 3 else np.repeat(pixels[..., :1], 3, axis=-1))
    return Image.fromarray(pixels)


def jpeg(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
