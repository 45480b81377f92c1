"""Preprocess: the only place that crops images to a network's size and normalizes pixels, and the inverse.

A model directory stores it in its config.json, so that weights are used with the preprocessing they were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anechoic.config import EIGHT_BIT, OLD_LATENTS_STD, PixelConfig, from_mapping, to_json
from anechoic.data.pixels import as_pixels
from anechoic.data.stored import as_stored
from anechoic.errors import UserError


@dataclass(frozen=True)
class Preprocess:
    """mean and std: one per channel, of pixel values in 0 .. 1; image_size: of the square images.

    pixels: for stored values, which channels are read, and what is done before mean and std, which are then in units of
    the values or of their stretch.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int
    pixels: PixelConfig = EIGHT_BIT

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels or not all(math.isfinite(value) for value in values):
                raise UserError(f"{name} needs one number for each of the {self.channels} channels, not {values}.")
        if not all(value > 0 for value in self.std) or self.image_size < 1:
            raise UserError("std and image_size must be positive.")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocess:
        try:
            mean, std = (tuple(float(x) for x in values[name]) for name in ("mean", "std"))
            if list(std) == OLD_LATENTS_STD:
                std = (1.0,) * 4
            pixels = from_mapping(PixelConfig, values.get("pixels", {}))
            return cls(mean, std, int(values["image_size"]), int(values["channels"]), pixels)
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            if isinstance(problem, UserError):
                raise
            raise UserError(
                f"The model's config.json has no valid preprocessing ({problem!r}): export it again."
            ) from problem

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name != "pixels"}
        stored = {"pixels": to_json(self.pixels)} if self.pixels.stored else {}
        return {**plain, "mean": list(self.mean), "std": list(self.std), **stored}

    def __repr__(self) -> str:
        # The text is part of what features are cached by, so pictures keep the one they always had.
        stored = f", pixels={self.pixels!r}" if self.pixels.stored else ""
        return (
            f"Preprocess(mean={self.mean!r}, std={self.std!r}, image_size={self.image_size!r}, "
            f"channels={self.channels!r}{stored})"
        )

    def apply(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> float32 (images / 255 - mean) / std on their device.

        Stored values of any type are clipped and stretched instead of divided by 255. Other floats are a network's
        input already (latents, for example) and are not normalized.
        """
        if images.dtype != torch.uint8 and not self.pixels.stored:
            return images.float()
        if images.shape[1] != self.channels:
            raise UserError(
                f"The network takes images of {self.channels} channels and these have {images.shape[1]}: convert the "
                "images or train a model for them."
            )
        if self.pixels.stored:
            return normalize(curve(images.to(torch.float32), self.pixels), self.mean, self.std)
        scale = _per_channel([1 / (255 * value) for value in self.std], images)
        shift = _per_channel([-m / s for m, s in zip(self.mean, self.std, strict=True)], images)
        # In place: a second array of floats would cost more than the arithmetic.
        return images.to(torch.float32).mul_(scale).add_(shift)

    def invert(self, x: Tensor) -> Tensor:
        """Undo `apply`: network input (B, C, H, W) -> pixel values in 0 .. 1, not clamped; latents as they are.

        Stored values are for viewing: SHOWN_STDS deviations around the mean of each channel become 0 .. 1.
        """
        if self.pixels.stored:
            return x / (2 * SHOWN_STDS) + 0.5
        return x * _per_channel(self.std, x) + _per_channel(self.mean, x)

    def renormalize(self, pixels: Tensor) -> Tensor:
        """Pixel values (B, C, H, W) in 0 .. 1 -> network input: what `invert` undoes."""
        if self.pixels.stored:
            return (pixels - 0.5) * (2 * SHOWN_STDS)
        return normalize(pixels, self.mean, self.std)

    def __call__(self, images: Any) -> Tensor:
        """Images of any size -> network input (B, C, image_size, image_size), as in evaluation.

        A Pillow image, an array (H, W, C) or (B, H, W, C), a uint8 tensor (C, H, W) or (B, C, H, W), or a list of
        them. A float tensor is returned as it is.
        """
        if isinstance(images, Tensor) and images.dtype != torch.uint8 and not self.pixels.stored:
            return self.apply(images)
        return self.apply(torch.stack([self.cut(pixels) for pixels in self.as_tensors(images)]))

    def as_tensors(self, images: Any) -> list[Tensor]:
        """Return each image as (C, H, W): uint8, or stored values."""
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        listed = images if several else [images]
        if self.pixels.stored:
            return [as_stored(image, pixels=self.pixels, channels=self.channels) for image in listed]
        return [as_pixels(image, channels=self.channels) for image in listed]

    def cut(self, pixels: Tensor) -> Tensor:
        """(C, H, W) -> (C, image_size, image_size): the shorter side resized, then the middle."""
        height, width = pixels.shape[1:]
        return middle(pixels, self.image_size, shorter=evaluation_side(height, width, self.image_size))

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return (
            f"shorter side to {round(self.image_size * MARGIN)} (bicubic, antialiased; smaller images are enlarged to "
            f"{self.image_size} only), center {self.image_size} x {self.image_size}, {self.channels} channels, "
            f"{curve_text(self.pixels)}, minus ({mean}), divided by ({std})"
        )


MARGIN = 256 / 224
# Pages show values this far from the mean, in standard deviations.
SHOWN_STDS = 3.0


def evaluation_side(height: int, width: int, image_size: int) -> int:
    """Return the shorter side before the center crop: with a margin, but no image is enlarged for it."""
    return min(round(image_size * MARGIN), max(image_size, min(height, width)))


def middle(image: Tensor, image_size: int, *, shorter: int) -> Tensor:
    """(C, H, W): the shorter side resized, then the center square of image_size."""
    height, width = image.shape[1:]
    image = computable(image)
    if min(height, width) != shorter:
        longer = int(shorter * max(height, width) / min(height, width))
        height, width = (shorter, longer) if height <= width else (longer, shorter)
        image = resize(image, height, width)
    top, left = round((height - image_size) / 2), round((width - image_size) / 2)
    return image[:, top : top + image_size, left : left + image_size]


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """(C, H, W) -> (C, height, width), bicubic, antialiased: uint8 as uint8, other types as float32.

    The values themselves if the image has that size.
    """
    image = computable(image)
    if image.shape[1:] == (height, width):
        return image
    return F.interpolate(image[None], size=(height, width), mode="bicubic", antialias=True)[0]


def curve(values: Tensor, pixels: PixelConfig) -> Tensor:
    """Clip stored values (B, C, H, W), then log(1 + u) or asinh(u) of u = (value - center) / spread, if chosen."""
    if pixels.clip_low:
        values = values.clamp(_per_channel(pixels.clip_low, values), _per_channel(pixels.clip_high, values))
    if pixels.stretch == "linear":
        return values
    u = normalize(values, pixels.center, pixels.spread)
    return u.clamp(min=0).log1p() if pixels.stretch == "log" else u.asinh()


def curve_text(pixels: PixelConfig) -> str:
    """Return what `apply` does before mean and std."""
    if not pixels.stored:
        return "divided by 255"
    clipped = "clipped per channel, " if pixels.clip_low else ""
    return f"{pixels.type} values as stored, {clipped}{pixels.stretch}"


def computable(image: Tensor) -> Tensor:
    """Return uint8 as it is and other types as float32, which holds them exactly; torch resizes no other."""
    return image if image.dtype == torch.uint8 else image.to(torch.float32)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pixels - mean) / std of float images (B, C, H, W); one mean and std a channel, or one for all."""
    return (pixels - _per_channel(mean, pixels)) / _per_channel(std, pixels)


def _per_channel(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)
