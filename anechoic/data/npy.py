"""One image in a `.npy` file: (H, W), (H, W, C) or (C, H, W), memory-mapped. Arrays of many images are in `arrays`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from anechoic.data.pixels import Undecodable
from anechoic.data.stored import DecodedImage, StoredImage


def open_image(file: str | Path | bytes) -> StoredImage:
    if isinstance(file, bytes):
        array = np.load(io.BytesIO(file), allow_pickle=False)
    else:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3:
        raise Undecodable(f"an array of shape {array.shape} is no image; save (H, W) or (H, W, C)")
    # The shortest axis holds the channels.
    return DecodedImage(array.transpose(1, 2, 0) if array.shape[0] < array.shape[2] else array)
