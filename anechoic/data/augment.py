"""Images of any size to a batch of one size: random resized crop, padded crop, center crop, rotation.

uint8 in, uint8 out; other types become float32, which holds their values exactly. Each uint8 sample is resampled on the
CPU in integer arithmetic, so its crop has the same bits on every machine and in every batch. The crops are those of
He et al. 2022 (pre-training and linear probe).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anechoic.choices import CropKind, Resize
from anechoic.data.preprocess import MARGIN, evaluation_side, middle, resize
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

KINDS = ("crop", "pad", "center", "none")


@dataclass(frozen=True)
class Augment:
    """Crop and resize an image to image_size x image_size.

    crop: a random box with a fraction `scale` of the area and the aspect `ratio`, resized (bicubic, antialiased). A box
      that does not fit is drawn again, `tries` times in all, then the center is used; with tries=1 the box is clipped
      to the image instead.
    pad: the shorter side resized to image_size, `padding` black pixels around it, a random window.
    center: the shorter side resized to image_size * 256 / 224, then the center. resize="auto" does not enlarge an image
      for that margin (32-pixel images evaluated at 32 pixels stay unchanged); resize="margin" always does.
    none: the shorter side resized to image_size, then the center.
    flip: mirror half of the visits; by default for crop and pad only.
    rotate: turn by 0, 90, 180 or 270 degrees; with flip, every one of the eight orientations is equally likely.
    """

    kind: CropKind = "crop"
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool | None = None
    tries: int = 10
    padding: int = 4
    resize: Resize = "auto"
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"There is no augmentation {self.kind!r}; choose one of {', '.join(KINDS)}.")
        if not (0 < self.scale[0] <= self.scale[1] <= 1):
            raise UserError(f"The scale of a crop is two fractions, 0 < low <= high <= 1, not {self.scale}.")
        if not (0 < self.ratio[0] <= self.ratio[1]):
            raise UserError(f"The ratio of a crop is two positive numbers, low <= high, not {self.ratio}.")
        if self.tries < 1 or self.padding < 0 or self.resize not in ("auto", "margin"):
            raise UserError("An augmentation needs tries >= 1, padding >= 0 and resize 'auto' or 'margin'.")

    @property
    def flips(self) -> bool:
        return self.kind in ("crop", "pad") if self.flip is None else self.flip

    def __call__(self, images: Sequence[Tensor], *, image_size: int, generator: SampleGenerator) -> Tensor:
        """Return (B, C, image_size, image_size) for images (C, H_i, W_i), by their random numbers."""
        if self.kind == "crop":
            sizes = np.array([image.shape[1:] for image in images])
            boxes = crop_boxes(sizes, generator, scale=self.scale, ratio=self.ratio, tries=self.tries).tolist()
            views = [
                image[:, top : top + h, left : left + w] for image, (top, left, h, w) in zip(images, boxes, strict=True)
            ]
            batch = torch.stack([resize(view, image_size, image_size) for view in views])
        else:
            batch = torch.stack([self._middle(image, image_size) for image in images])
            if self.kind == "pad":
                batch = self._shift(batch, generator)
        if self.flips:
            chosen = generator.uniform("flip", 1)[:, 0] < 0.5
            batch[chosen] = batch[chosen].flip(-1)
        if self.rotate:
            turns = generator.integers("rotate", 4, 1)[:, 0]
            for turn in (1, 2, 3):
                batch[turns == turn] = batch[turns == turn].rot90(turn, (-2, -1))
        return batch

    def _middle(self, image: Tensor, image_size: int) -> Tensor:
        """Resize the shorter side, then cut the center square."""
        height, width = image.shape[1:]
        shorter = image_size
        if self.kind == "center":
            shorter = round(image_size * MARGIN)
            if self.resize == "auto":
                shorter = evaluation_side(height, width, image_size)
        return middle(image, image_size, shorter=shorter)

    def _shift(self, batch: Tensor, generator: SampleGenerator) -> Tensor:
        size = batch.shape[-1]
        padded = F.pad(batch, (self.padding,) * 4)
        corners = generator.integers("shift", 2 * self.padding + 1, 2).tolist()
        return torch.stack(
            [image[:, top : top + size, left : left + size] for image, (top, left) in zip(padded, corners, strict=True)]
        )


def crop_boxes(
    sizes: np.ndarray, generator: SampleGenerator, *, scale: tuple[float, float], ratio: tuple[float, float], tries: int
) -> np.ndarray:
    """Return boxes (B, 4) as (top, left, height, width) for sizes (B, 2) as (H, W), integers.

    Each try draws area = H W U(scale) and log aspect = U(log ratio); width = sqrt(area * aspect) and
    height = sqrt(area / aspect). The first that fits is used; otherwise the largest center box with an aspect in ratio.
    """
    H, W = sizes[:, :1].astype(np.float64), sizes[:, 1:].astype(np.float64)
    area_share, aspect_share = np.moveaxis(generator.uniform("crop", tries, 2).numpy().astype(np.float64), -1, 0)
    area = H * W * (scale[0] + (scale[1] - scale[0]) * area_share)
    aspect = np.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * aspect_share)
    widths, heights = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    widths, heights = np.maximum(widths, 1), np.maximum(heights, 1)
    if tries == 1:
        widths, heights = np.minimum(widths, W), np.minimum(heights, H)

    fits = (widths <= W) & (heights <= H)
    first = fits.argmax(axis=1)[:, None]
    width, height = np.take_along_axis(widths, first, 1)[:, 0], np.take_along_axis(heights, first, 1)[:, 0]
    place = generator.uniform("place", 2).numpy().astype(np.float64)
    top = np.floor(place[:, 0] * (H[:, 0] - height + 1))
    left = np.floor(place[:, 1] * (W[:, 0] - width + 1))

    never = ~fits.any(axis=1)
    if never.any():
        H, W = H[:, 0], W[:, 0]
        middle_width = np.where(ratio[1] < W / H, np.rint(H * ratio[1]), W)
        middle_height = np.where(ratio[0] > W / H, np.rint(W / ratio[0]), H)
        width, height = np.where(never, middle_width, width), np.where(never, middle_height, height)
        top = np.where(never, (H - height) // 2, top)
        left = np.where(never, (W - width) // 2, left)
    return np.stack([top, left, height, width], axis=1).astype(np.int64)
