"""TIFF by tifffile: any channels, pages, bit depth, planar or chunky, compressed; OME and ImageJ axes; GeoTIFF bands.

Regions are read from the strips or tiles that hold them, so that memory does not depend on the size of the page.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from anechoic.data.decoding import MAX_PIXELS
from anechoic.data.pixels import Undecodable
from anechoic.data.stored import ENDS_EARLY, MAX_CHANNELS, Box, StoredImage, file_or_memory, numbered

GDAL_METADATA, MAX_PAGES_CHECKED = 42112, 10_000


class Remarks(threading.local):
    """Keeps what tifffile logs about files from the terminal, and notes that there was something."""

    hidden, noted = False, False

    def filter(self, record: logging.LogRecord) -> bool:
        self.noted = True
        return not self.hidden


REMARKS = Remarks()
logging.getLogger("tifffile").addFilter(REMARKS.filter)


@contextmanager
def hidden_remarks() -> Iterator[None]:
    REMARKS.hidden, REMARKS.noted = True, False
    try:
        yield
    finally:
        REMARKS.hidden = False


def open_image(file: str | Path | bytes) -> StoredImage:
    with hidden_remarks():
        opened = tifffile.TiffFile(file_or_memory(file))
        try:
            image = TiffImage(opened, file)
            if REMARKS.noted and pages_end_early(opened):
                raise Undecodable(ENDS_EARLY)
            return image
        except BaseException:
            opened.close()
            raise


def pages_end_early(opened: Any) -> bool:
    """Return whether the list of pages, or the value of a tag, leads to a place beyond the end of the file."""
    handle, form, offset = opened.filehandle, opened.tiff, opened.pages.first.offset
    seen: set[int] = set()
    where = "I" if form.offsetsize == 4 else "Q"  # a tag: its code, type, number of values, and where they are
    while offset and offset not in seen and len(seen) < MAX_PAGES_CHECKED:
        seen.add(offset)
        try:
            handle.seek(offset)
            (number,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
            tags = handle.read(number * form.tagsize)
            (offset,) = struct.unpack(form.offsetformat, handle.read(form.offsetsize))
        except (struct.error, ValueError):  # nothing is there
            return True
        for _, kind, count, place in struct.iter_unpack(f"{form.byteorder}HH{where}{where}", tags):
            size = count * struct.calcsize(tifffile.TIFF.DATA_FORMATS.get(kind, "B"))
            if size > form.offsetsize and place + size > handle.size:
                return True
    return False


class TiffImage(StoredImage):
    """The first series of a file. The axes C and S are channels, as are a few unnamed pages; all others are frames."""

    def __init__(self, opened: Any, file: str | Path | bytes) -> None:
        self.opened, self.file = opened, file
        if not opened.series:
            raise Undecodable("it has no page; save it again")
        self.series = opened.series[0]
        axes, shape = self.series.axes, self.series.shape
        if "Y" not in axes or "X" not in axes or self.series.dtype is None:
            raise Undecodable(f"its axes {axes} are no image's; save pages of (Y, X)")
        self.dtype = np.dtype(self.series.dtype)
        sizes = dict(zip(axes, shape, strict=True))
        self.height, self.width = sizes["Y"], sizes["X"]
        self.channel_axes = [k for k, axis in enumerate(axes) if axis in "CS" and shape[k] > 1]
        if not self.channel_axes:
            # Pages without a meaning are channels if they are few.
            unnamed = [k for k, axis in enumerate(axes) if axis in "QI"]
            if len(unnamed) == 1 and shape[unnamed[0]] <= MAX_CHANNELS:
                self.channel_axes = unnamed
        self.frame_axes = [k for k, axis in enumerate(axes) if axis not in "YX" and k not in self.channel_axes]
        self.frames = math.prod(shape[k] for k in self.frame_axes)
        channels = math.prod(shape[k] for k in self.channel_axes)
        self.names = channel_names(opened, channels)
        self._check_offsets()

    def _check_offsets(self) -> None:
        """Raise Undecodable if the file ends before the data of its pages."""
        size = self.opened.filehandle.size
        if self.series.dataoffset is not None:
            ends = [self.series.dataoffset + math.prod(self.series.shape) * self.dtype.itemsize]
        else:
            keyframe = self.series.keyframe
            ends = [o + n for o, n in zip(keyframe.dataoffsets, keyframe.databytecounts, strict=False)]
        if max(ends, default=0) > size:
            raise Undecodable(ENDS_EARLY)

    def close(self) -> None:
        self.opened.close()

    def read(self, frame: int, box: Box) -> np.ndarray:
        axes, shape = self.series.axes, self.series.shape
        place = dict(
            zip(self.frame_axes, np.unravel_index(frame, [shape[k] for k in self.frame_axes] or [1]), strict=False)
        )
        window = {
            axes.index("Y"): slice(box.top, box.top + box.height),
            axes.index("X"): slice(box.left, box.left + box.width),
        }
        index = tuple(place.get(k, window.get(k, slice(None))) for k in range(len(axes)))
        with hidden_remarks():
            values = self._mapped(index) if self.series.dataoffset is not None else self._decoded(index)
        kept = [k for k in range(len(axes)) if k not in place]
        order = [kept.index(k) for k in (*self.channel_axes, axes.index("Y"), axes.index("X"))]
        return values.transpose(order).reshape(-1, box.height, box.width)

    def _mapped(self, index: tuple[Any, ...]) -> np.ndarray:
        """Read from uncompressed, contiguous values; the map is dropped, so that its pages do not stay in memory."""
        dtype = self.dtype.newbyteorder(self.opened.byteorder)
        offset, shape = self.series.dataoffset, self.series.shape
        if isinstance(self.file, bytes):
            count = math.prod(shape)
            return np.frombuffer(self.file, dtype, count, offset).reshape(shape)[index].astype(self.dtype)
        return np.array(np.memmap(self.file, dtype, "r", offset, shape)[index], dtype=self.dtype)

    def _decoded(self, index: tuple[Any, ...]) -> np.ndarray:
        """Read from pages: the leading axes number them, the last ones are those of a page."""
        inside = len(self.series.keyframe.shape)
        leading = self.series.shape[: len(self.series.shape) - inside]
        numbers = np.arange(math.prod(leading)).reshape(leading)[index[: len(leading)]]
        pages = [self._page(int(number), index[len(leading) :]) for number in numbers.ravel()]
        return np.stack(pages).reshape(*numbers.shape, *pages[0].shape)

    def _page(self, number: int, index: tuple[Any, ...]) -> np.ndarray:
        page = self.series.pages[number]
        keyframe = self.series.keyframe
        if page is None:
            raise Undecodable(f"its page {number} is missing; save it again")
        separate, depth, height, width, samples = keyframe.shaped
        if depth != 1:
            raise Undecodable("its pages are volumes; save one page per slice")
        axes = keyframe.axes
        rows, columns = (index[axes.index(axis)] for axis in "YX")
        out = np.zeros((separate, rows.stop - rows.start, columns.stop - columns.start, samples), self.dtype)
        for segment, top, left, plane in self._segments(page, rows, columns):
            tall, wide = segment.shape[:2]
            first, last = max(top, rows.start), min(top + tall, rows.stop, height)
            begin, end = max(left, columns.start), min(left + wide, columns.stop, width)
            if first < last and begin < end:
                out[plane, first - rows.start : last - rows.start, begin - columns.start : end - columns.start] = (
                    segment[first - top : last - top, begin - left : end - left]
                )
        # (planes, Y, X, samples) to the axes of the page.
        return out[..., 0].squeeze(0) if "S" not in axes else out.squeeze(0) if axes[-1] == "S" else out[..., 0]

    def _segments(self, page: Any, rows: slice, columns: slice) -> Any:
        """Yield (pixels (h, w, samples), top, left, plane) of the strips or tiles that meet the region."""
        keyframe = self.series.keyframe
        separate, _, height, width, _ = keyframe.shaped
        tall = keyframe.tilelength if keyframe.is_tiled else min(keyframe.rowsperstrip or height, height)
        wide = keyframe.tilewidth if keyframe.is_tiled else width
        if tall * wide > MAX_PIXELS:
            raise Undecodable(f"its parts are {wide} x {tall}, too many pixels; save it in tiles of 256 x 256")
        across, down = -(-width // wide), -(-height // tall)
        handle = self.opened.filehandle
        for plane in range(separate):
            for row in range(rows.start // tall, min(down, -(-rows.stop // tall))):
                for column in range(columns.start // wide, min(across, -(-columns.stop // wide))):
                    number = (plane * down + row) * across + column
                    offset, count = page.dataoffsets[number], page.databytecounts[number]
                    if not count:
                        continue  # a sparse file: zeros
                    handle.seek(offset)
                    data = handle.read(count)
                    if len(data) < count:
                        raise Undecodable(ENDS_EARLY)
                    segment, _, _ = keyframe.decode(data, number, jpegtables=page.jpegtables)
                    if segment is not None:
                        yield segment[0], row * tall, column * wide, plane


def channel_names(opened: Any, channels: int) -> tuple[str, ...]:
    """Return the names that OME, ImageJ or GDAL give to the channels; their numbers if there are none."""
    found: list[str] = []
    if opened.is_ome and opened.ome_metadata:
        tree = ElementTree.fromstring(opened.ome_metadata)
        image = next((item for item in tree if item.tag.endswith("}Image")), tree)
        found = [item.get("Name", "") for item in image.iter() if item.tag.endswith("}Channel")]
    elif opened.is_imagej and opened.imagej_metadata:
        found = list(opened.imagej_metadata.get("Labels") or [])
    elif GDAL_METADATA in opened.pages[0].tags:
        items = ElementTree.fromstring(opened.pages[0].tags[GDAL_METADATA].value).iter("Item")
        found = [item.text or "" for item in items if item.get("role") == "description"]
    unique = len(set(found)) == len(found) == channels and all(found)
    return tuple(found) if unique else numbered(channels)
