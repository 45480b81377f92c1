"""NIfTI by nibabel: every axial slice of a volume is an image, oriented as DICOM viewers show it.

Rows go from anterior to posterior, columns from the patient's right to left, slices from inferior to superior, by the
file's affine map. Values are float32 after the file's scaling. Slices of a compressed file are decompressed from its
start, those of a plain one are read from their place.
"""

from __future__ import annotations

import gzip
import io
import math
from pathlib import Path
from typing import Any, cast

import nibabel
import numpy as np
from nibabel.orientations import io_orientation

from anechoic.data.pixels import Undecodable
from anechoic.data.stored import ENDS_EARLY, MAX_CHANNELS, Box, StoredImage, numbered
from anechoic.storage.safe_io import MAX_IMAGE_BYTES

GZIP = b"\x1f\x8b"


def open_image(file: str | Path | bytes) -> StoredImage:
    if not isinstance(file, bytes):
        return NiftiImage(nibabel.load(file), Path(file).stat().st_size)
    if file[:2] == GZIP:
        with gzip.open(io.BytesIO(file)) as opened:
            file = opened.read(MAX_IMAGE_BYTES)
    second = 540 in (int.from_bytes(file[:4], "little"), int.from_bytes(file[:4], "big"))
    kind = nibabel.Nifti2Image if second else nibabel.Nifti1Image
    return NiftiImage(kind.from_bytes(file), len(file))


class NiftiImage(StoredImage):
    """A volume (X, Y, Z, ...). Up to 32 volumes are channels; more, a film, are frames."""

    dtype = np.dtype(np.float32)

    def __init__(self, opened: Any, size: int) -> None:
        if not isinstance(opened, nibabel.Nifti1Pair):
            raise Undecodable("it is no NIfTI file; save it again or remove it")
        self.values = cast(Any, opened.dataobj)
        if self.values.dtype.kind not in "buif":
            raise Undecodable(f"its values are {self.values.dtype.name}, no pixels; save numbers")
        self.shape = (*self.values.shape, 1, 1)[: max(3, len(self.values.shape))]
        if not math.prod(self.shape):
            raise Undecodable("it has no pixels; remove it")
        plain = Path(opened.get_filename() or "a.nii").suffix == ".nii"
        if plain and self.values.offset + math.prod(self.shape) * self.values.dtype.itemsize > size:
            raise Undecodable(ENDS_EARLY)
        self.columns, self.rows, self.slices = voxel_axes(opened.affine)
        self.width, self.height = (self.shape[axis] for axis, _ in (self.columns, self.rows))
        volumes = math.prod(self.shape[3:])
        self.film = volumes > MAX_CHANNELS
        self.names = numbered(1 if self.film else volumes)
        self.frames = self.shape[self.slices[0]] * (volumes if self.film else 1)

    def read(self, frame: int, box: Box) -> np.ndarray:
        depth = self.shape[self.slices[0]]
        volume, number = divmod(frame, depth)
        index: list[Any] = [slice(None)] * 3
        index[self.slices[0]] = slice_of(number, 1, depth, self.slices)
        index[self.rows[0]] = slice_of(box.top, box.height, self.height, self.rows)
        index[self.columns[0]] = slice_of(box.left, box.width, self.width, self.columns)
        if self.film:
            index += [int(k) for k in np.unravel_index(volume, self.shape[3:])]
        index += [slice(None)] * (len(self.shape) - len(index))
        try:
            values = np.asarray(self.values[tuple(index[: len(self.values.shape)])], np.float32)
        except (EOFError, OSError) as problem:  # nibabel raises OSError for missing bytes
            raise Undecodable(ENDS_EARLY) from problem
        values = values.reshape(*(len(range(*k.indices(n))) for k, n in zip(index[:3], self.shape, strict=False)), -1)
        flipped = [axis for axis, forward in (self.columns, self.rows) if not forward]
        values = np.flip(values, tuple(flipped)).transpose(3, self.rows[0], self.columns[0], self.slices[0])
        return values[..., 0]


def voxel_axes(affine: np.ndarray) -> list[tuple[int, bool]]:
    """Return the axis of the array, and whether it runs forward, of columns (to the left), rows (to posterior) and
    slices (to superior)."""
    with np.errstate(all="ignore"):
        usable = np.isfinite(affine).all() and abs(np.linalg.det(affine[:3, :3])) > 0
    found = io_orientation(affine) if usable else np.array([[0, -1], [1, -1], [2, 1]])
    wanted = (-1, -1, 1)  # NIfTI's axes point to right, anterior and superior
    return [
        (int(np.flatnonzero(found[:, 0] == world)[0]), bool(found[found[:, 0] == world][0, 1] == wanted[world]))
        for world in range(3)
    ]


def slice_of(start: int, length: int, side: int, axis: tuple[int, bool]) -> slice:
    """Return where a range lies on an axis of the array, which may run backward."""
    first = start if axis[1] else side - start - length
    return slice(first, first + length)
