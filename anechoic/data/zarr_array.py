"""Zarr (version 2 and 3) by zarr: an array, or the largest one of an OME-Zarr image, read by its chunks.

Axes named by OME, by the array or by xarray decide; without names an array is (H, W), (H, W, C), (C, H, W), or a stack
of these. Axes that are neither Y, X nor channels are frames.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from anechoic.data.decoding import MAX_PIXELS
from anechoic.data.pixels import Undecodable
from anechoic.data.stored import MAX_CHANNELS, Box, StoredImage, numbered

# Names of axes that mean the same.
MEANING = {
    **dict.fromkeys(("y", "lat", "latitude", "row", "rows", "height"), "y"),
    **dict.fromkeys(("x", "lon", "longitude", "column", "columns", "width"), "x"),
    **dict.fromkeys(("c", "channel", "channels", "band", "bands", "s"), "c"),
}


class RegularFiles(LocalStore):
    """Refuses what is no file: opening a pipe would wait for its writer."""

    async def get(self, key: str, *rest: Any, **options: Any) -> Any:
        path = os.path.join(self.root, key)
        if os.path.exists(path) and not os.path.isfile(path):
            raise Undecodable(f"its {key} is not a regular file; copy it again")
        return await super().get(key, *rest, **options)


def open_image(file: str | Path | bytes) -> StoredImage:
    if isinstance(file, bytes):
        raise Undecodable("a zarr array is a folder; unpack it")
    try:
        opened = zarr.open(RegularFiles(file, read_only=True), mode="r")
    except FileNotFoundError as problem:
        raise Undecodable("it has no zarr array (no zarr.json, .zarray or .zgroup); copy it again") from problem
    return ZarrImage(*find_image(opened))


def find_image(opened: Any) -> tuple[Any, Sequence[str] | None, list[str]]:
    """Return the array, the names of its axes and those of its channels."""
    if isinstance(opened, zarr.Array):
        named: Any = getattr(opened.metadata, "dimension_names", None) or opened.attrs.get("_ARRAY_DIMENSIONS")
        return opened, named, []
    about = opened.attrs.get("ome", opened.attrs)  # version 0.5 of OME-Zarr, and those before
    if "multiscales" in about:
        image = about["multiscales"][0]
        axes = [axis["name"] if isinstance(axis, dict) else str(axis) for axis in image.get("axes", "tczyx")]
        channels = about.get("omero", {}).get("channels", [])
        array = opened[str(image["datasets"][0]["path"])]
        return array, axes, [str(channel.get("label", "")) for channel in channels]
    arrays = [name for name, item in opened.arrays() if len(item.shape) >= 2]
    if len(arrays) != 1:
        listed = ", ".join(sorted(arrays)[:5]) or "none"
        raise Undecodable(f"it is a group of arrays ({listed}) that names no image; give the folder of one array")
    return find_image(opened[arrays[0]])


class ZarrImage(StoredImage):
    """An array whose axes are known."""

    def __init__(self, array: Any, named: Sequence[str] | None, channels: list[str]) -> None:
        if not isinstance(array, zarr.Array):
            raise Undecodable("its image is no array; save it again")
        self.array, self.shape, self.dtype = array, array.shape, np.dtype(array.dtype)
        if not math.prod(self.shape):
            raise Undecodable("it has no pixels; remove it")
        if math.prod(array.chunks) > MAX_PIXELS:
            size = " x ".join(map(str, array.chunks))
            raise Undecodable(f"its chunks are {size}, too many pixels; save it in chunks of 256 x 256")
        axes = meanings(named, self.shape)
        self.y, self.x = axes.index("y"), axes.index("x")
        self.height, self.width = self.shape[self.y], self.shape[self.x]
        self.channel_axes = [k for k, axis in enumerate(axes) if axis == "c"]
        self.frame_axes = [k for k, axis in enumerate(axes) if axis == "n"]
        self.frames = math.prod(self.shape[k] for k in self.frame_axes)
        count = math.prod(self.shape[k] for k in self.channel_axes)
        unique = len(set(channels)) == len(channels) == count and all(channels)
        self.names = tuple(channels) if unique else numbered(count)

    def read(self, frame: int, box: Box) -> np.ndarray:
        index: list[Any] = [slice(None)] * len(self.shape)
        places = np.unravel_index(frame, [self.shape[k] for k in self.frame_axes] or [1])
        for axis, place in zip(self.frame_axes, places, strict=False):
            index[axis] = slice(int(place), int(place) + 1)
        index[self.y] = slice(box.top, box.top + box.height)
        index[self.x] = slice(box.left, box.left + box.width)
        values = np.asarray(self.array[tuple(index)])
        order = (*self.frame_axes, *self.channel_axes, self.y, self.x)
        return values.transpose(order).reshape(-1, box.height, box.width)


def meanings(named: Sequence[str] | None, shape: Sequence[int]) -> list[str]:
    """Return y, x, c (channels) or n (frames) for each axis."""
    if named and len(named) == len(shape):
        found = [MEANING.get(str(name).lower(), "n") for name in named]
        if found.count("y") == found.count("x") == 1:
            return found
    if not 2 <= len(shape) <= 5:
        raise Undecodable(f"an array of shape {tuple(shape)} is no image; save (H, W), (C, H, W) or a stack of them")
    if len(shape) == 5:
        return list("ncnyx")  # OME's order T, C, Z, Y, X
    frames, image = ["n"] * (len(shape) - 3), shape[-3:]
    if len(shape) == 2:
        return list("yx")
    if min(image[0], image[2]) > MAX_CHANNELS:
        return [*frames, *"nyx"]
    return [*frames, *("cyx" if image[0] < image[2] else "yxc")]
