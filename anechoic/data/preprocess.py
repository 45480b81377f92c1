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

from anechoic.config import OLD_LATENTS_STD
from anechoic.data.pixels import as_pixels
from anechoic.errors import UserError


@dataclass(frozen=True)
class Preprocess:
    """mean and std: one per channel, of pixel values in 0 .. 1; image_size: of the square images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int

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
            return cls(mean, std, int(values["image_size"]), int(values["channels"]))
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            if isinstance(problem, UserError):
                raise
            raise UserError(
                f"The model's config.json has no valid preprocessing ({problem!r}): export it again."
            ) from problem

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}

    def apply(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> float32 (images / 255 - mean) / std on their device.

        Floats are a network's input already (latents, for example) and are not normalized.
        """
        if images.dtype != torch.uint8:
            return images.float()
        if images.shape[1] != self.channels:
            raise UserError(
                f"The network takes images of {self.channels} channels and these have {images.shape[1]}: convert the "
                "images or train a model for them."
            )
        scale = _per_channel([1 / (255 * value) for value in self.std], images)
        shift = _per_channel([-m / s for m, s in zip(self.mean, self.std, strict=True)], images)
        # In place: a second array of floats would cost more than the arithmetic.
        return images.to(torch.float32).mul_(scale).add_(shift)

    def invert(self, x: Tensor) -> Tensor:
        """Undo `apply`: network input (B, C, H, W) -> pixel values in 0 .. 1, not clamped; latents as they are."""
        return x * _per_channel(self.std, x) + _per_channel(self.mean, x)

    def renormalize(self, pixels: Tensor) -> Tensor:
        """Pixel values (B, C, H, W) in 0 .. 1 -> network input: what `invert` undoes."""
        return normalize(pixels, self.mean, self.std)

    def __call__(self, images: Any) -> Tensor:
        """Images of any size -> network input (B, C, image_size, image_size), as in evaluation.

        A Pillow image, an array (H, W, C) or (B, H, W, C), a uint8 tensor (C, H, W) or (B, C, H, W), or a list of
        them. A float tensor is returned as it is.
        """
        if isinstance(images, Tensor) and images.dtype != torch.uint8:
            return self.apply(images)
        return self.apply(torch.stack([self.cut(pixels) for pixels in self.pixels(images)]))

    def pixels(self, images: Any) -> list[Tensor]:
        """Return each image as uint8 (C, H, W)."""
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        return [as_pixels(image, channels=self.channels) for image in (images if several else [images])]

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 (C, H, W) -> (C, image_size, image_size): the shorter side resized, then the middle."""
        height, width = pixels.shape[1:]
        return middle(pixels, self.image_size, shorter=evaluation_side(height, width, self.image_size))

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return (
            f"shorter side to {round(self.image_size * MARGIN)} (bicubic, antialiased; smaller images are enlarged to "
            f"{self.image_size} only), center {self.image_size} x {self.image_size}, {self.channels} channels, "
            f"divided by 255, minus ({mean}), divided by ({std})"
        )


MARGIN = 256 / 224


def evaluation_side(height: int, width: int, image_size: int) -> int:
    """Return the shorter side before the center crop: with a margin, but no image is enlarged for it."""
    return min(round(image_size * MARGIN), max(image_size, min(height, width)))


def middle(image: Tensor, image_size: int, *, shorter: int) -> Tensor:
    """uint8 (C, H, W): the shorter side resized, then the center square of image_size."""
    height, width = image.shape[1:]
    if min(height, width) != shorter:
        longer = int(shorter * max(height, width) / min(height, width))
        height, width = (shorter, longer) if height <= width else (longer, shorter)
        image = resize(image, height, width)
    top, left = round((height - image_size) / 2), round((width - image_size) / 2)
    return image[:, top : top + image_size, left : left + image_size]


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """uint8 (C, H, W) -> uint8 (C, height, width), bicubic, antialiased; the image itself if it has that size."""
    if image.shape[1:] == (height, width):
        return image
    return F.interpolate(image[None], size=(height, width), mode="bicubic", antialias=True)[0]


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pixels - mean) / std of float images (B, C, H, W); one mean and std a channel, or one for all."""
    return (pixels - _per_channel(mean, pixels)) / _per_channel(std, pixels)


def _per_channel(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)
