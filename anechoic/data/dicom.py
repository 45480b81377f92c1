"""DICOM by pydicom: modality lookup table or rescaling, inverted gray, color spaces and palettes, several frames.

Gray values are float32 after the rescaling (Hounsfield units of a CT, for example); color is RGB as stored.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pydicom
from pydicom.errors import InvalidDicomError
from pydicom.pixels import apply_color_lut, apply_modality_lut, get_decoder, pixel_array

from anechoic.data.pixels import Undecodable
from anechoic.data.stored import Box, StoredImage, crop, file_or_memory, numbered
from anechoic.storage.safe_io import MAX_IMAGE_BYTES, read_regular

PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")


def open_image(file: str | Path | bytes) -> StoredImage:
    if not isinstance(file, bytes) and os.path.getsize(file) <= MAX_IMAGE_BYTES:
        file = read_regular(file)  # from memory, a damaged length reads only what is there
    try:
        data = pydicom.dcmread(file_or_memory(file))
    except InvalidDicomError as problem:
        raise Undecodable("it is no DICOM file (its header is missing); save it again or remove it") from problem
    if not any(name in data for name in PIXELS) or "Rows" not in data or "Columns" not in data:
        raise Undecodable("it has no pixels (a report, plan or directory); remove it")
    return DicomImage(data)


class DicomImage(StoredImage):
    """The frames of a data set."""

    def __init__(self, data: pydicom.Dataset) -> None:
        self.data = data
        syntax = data.file_meta.TransferSyntaxUID
        if syntax.is_compressed and not get_decoder(syntax).is_available:
            raise Undecodable(
                f"its transfer syntax {syntax.name} has no decoder here; install python-gdcm or decompress it"
            )
        self.frames = max(1, int(data.get("NumberOfFrames") or 1))
        self.height, self.width = int(data.Rows), int(data.Columns)
        self.photometric = str(data.get("PhotometricInterpretation", "MONOCHROME2"))
        self.gray = self.photometric.startswith("MONOCHROME")
        if self.gray:
            self.dtype = np.dtype(np.float32)
        elif self.photometric == "PALETTE COLOR":
            self.dtype = np.dtype(np.uint16 if int(data.RedPaletteColorLookupTableDescriptor[2]) > 8 else np.uint8)
        else:
            bits = int(data.BitsAllocated)
            self.dtype = np.dtype(np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32)
        self.names = numbered(1 if self.gray else 3)

    def read(self, frame: int, box: Box) -> np.ndarray:
        return crop(self._frame(frame), box).transpose(2, 0, 1)

    def _frame(self, frame: int) -> np.ndarray:
        """Return (H, W, C) of a frame."""
        syntax = self.data.file_meta.TransferSyntaxUID
        try:
            values = pixel_array(self.data, index=frame)
        except RuntimeError as problem:  # every decoder that is installed refused it
            if not syntax.is_compressed:
                raise
            why = str(problem).splitlines()[-1].strip(" .")
            raise Undecodable(
                f"no installed decoder reads its {syntax.name} ({why}); install python-gdcm or decompress it"
            ) from problem
        if self.gray:
            if self.photometric == "MONOCHROME1":  # 0 is white
                signed = bool(self.data.get("PixelRepresentation"))
                values = (-1 if signed else 2 ** int(self.data.BitsStored) - 1) - values.astype(np.int64)
            values = apply_modality_lut(values, self.data)[:, :, None]
        elif self.photometric == "PALETTE COLOR":
            values = apply_color_lut(values, self.data)[:, :, :3]
        return np.asarray(values, self.dtype)
