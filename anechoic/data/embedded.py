"""Two data sets that need no download: scikit-learn's handwritten digits, and any number of procedural scenes.

A scene shows one textured shape of ten kinds with random position, size, angle and color on a textured background.
Colors and positions are independent of the kind, so comparing pixels does not help: only the outline does.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data.arrays import Array
from anechoic.data.pixels import luminance
from anechoic.data.source import BadImage, Source, digest
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

SPLITS = ("train", "test")
KINDS = ("disc", "ring", "square", "triangle", "bar", "cross", "star", "crescent", "half", "dots")
SCENES_VERSION = 3
TRAIN_SCENES, TEST_SCENES = 10_000, 2_000
# Test scenes are the same sequence from here on, beyond any number of training scenes.
TEST_OFFSET = 1 << 40
CHUNK = 64


def open_digits(rest: list[str], *, labels: bool, channels: int) -> Array:
    """Open `digits` (1,797 images of 8 x 8), `digits:test` (every fifth of each class) or `digits:train` (the rest)."""
    if rest not in ([], ["train"], ["test"]):
        raise UserError(f"There is no 'digits:{':'.join(rest)}'; say digits, digits:train or digits:test.")
    pixels, target = read_digits()
    # The number of earlier digits of the same class: the digits are nearly in the order 0 .. 9, so every fifth of all
    # would be unbalanced.
    before = (np.cumsum(np.eye(10, dtype=int)[target], axis=0) - 1)[np.arange(len(target)), target]
    chosen = {"": before >= 0, "train": before % 5 != 4, "test": before % 5 == 4}["".join(rest)]
    images = np.rint(pixels * (255 / 16)).astype(np.uint8)[chosen]
    return Array(
        images,
        channels=channels,
        labels=target[chosen] if labels else None,
        classes=tuple("0123456789") if labels else None,
        fingerprint=digest("digits", images),
        where="digits",
    )


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return (1797, 8, 8) in 0 .. 16 and their digits, from scikit-learn's file.

    Not by `load_digits`: importing scikit-learn takes longer than the rest of a short command.
    """
    spec = find_spec("sklearn")
    assert spec is not None, "scikit-learn is a requirement of this package"
    assert spec.origin is not None
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]


def open_scenes(rest: list[str], *, labels: bool, channels: int, size: int, seed: int) -> Scenes:
    """Open `scenes`, `scenes:train` (10,000) or `scenes:test` (2,000), each with `:NUMBER` for another number."""
    split = rest[0] if rest and rest[0] in SPLITS else "train"
    numbers = rest[1:] if rest and rest[0] in SPLITS else rest
    if len(numbers) > 1 or not all(text.isdecimal() and int(text) > 0 for text in numbers):
        raise UserError(
            f"There is no 'scenes:{':'.join(rest)}'; say scenes, scenes:train, scenes:test or, say, scenes:train:20000."
        )
    default = TRAIN_SCENES if split == "train" else TEST_SCENES
    return Scenes(
        int(numbers[0]) if numbers else default, split=split, labels=labels, channels=channels, size=size, seed=seed
    )


class Scenes(Source):
    """count scenes of size x size; scene i is a function of (seed, split, i, size), and kinds follow in turn."""

    def __init__(
        self, count: int, *, split: str = "train", labels: bool = True, channels: int = 3, size: int = 64, seed: int = 0
    ):
        super().__init__()
        if channels not in (1, 3):
            raise UserError(f"Scenes have 1 or 3 channels, not {channels}; ask for channels=3.")
        if size < 8:
            raise UserError(f"Scenes of {size} pixels a side show nothing; ask for a size of 8 or more.")
        self.count, self.offset, self.channels, self.size, self.seed = (
            count,
            TEST_OFFSET * (split == "test"),
            channels,
            size,
            seed,
        )
        self.labels = kind_of(np.arange(count, dtype=np.int64) + self.offset) if labels else None
        self.classes = KINDS if labels else None
        self.fingerprint = digest("scenes", SCENES_VERSION, count, split, size, seed)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"{index:06d}-{KINDS[kind_of(index + self.offset)]}"

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        return self._images([index])[0]

    def read_many(self, indices: Sequence[int], *, min_side: int | None = None) -> list[Tensor | BadImage]:
        chunks = [indices[k : k + CHUNK] for k in range(0, len(indices), CHUNK)]
        return [image for chunk in chunks for image in self._images(chunk)]

    def mask(self, index: int) -> Tensor:
        """Return uint8 (size, size): 0 on the background, 1 + kind on the shape."""
        number = index + self.offset
        _, cover = draw_scenes(torch.tensor([number]), size=self.size, seed=self.seed)
        return (cover[0] > 0.5).to(torch.uint8) * (1 + kind_of(number))

    def _images(self, indices: Sequence[int]) -> Sequence[Tensor]:
        ids = torch.as_tensor(list(indices), dtype=torch.int64) + self.offset
        images, _ = draw_scenes(ids, size=self.size, seed=self.seed)
        if self.channels == 1:
            images = torch.from_numpy(luminance(images.permute(0, 2, 3, 1).numpy())).permute(0, 3, 1, 2)
        return images.unbind(0)


def kind_of(number: Any) -> Any:
    """Return the kind of the shape in a scene, by the scene's number in the sequence (an integer or an array)."""
    return number % len(KINDS)


def draw_scenes(ids: Tensor, *, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 (B, 3, size, size) for scene numbers (B,), and the shape's coverage (B, size, size)."""
    generator = SampleGenerator(seed, ids, torch.zeros_like(ids)).uniform("scene", 40)
    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    x, y = axis[None, None, :], axis[None, :, None]

    radius = 0.38 + 0.3 * generator[:, 0]
    turn = 2 * math.pi * generator[:, 1]
    # The shape may be cut a little by the edge, never at its center.
    reach = (1.12 - radius).clamp(max=0.7)
    left, top = reach * (2 * generator[:, 2] - 1), reach * (2 * generator[:, 3] - 1)
    dx, dy = (x - _each(left)) / _each(radius), (y - _each(top)) / _each(radius)
    cosine, sine = _each(torch.cos(turn)), _each(torch.sin(turn))
    cover = _cover(kind_of(ids), cosine * dx + sine * dy, cosine * dy - sine * dx, scale=_each(radius) * (size / 2))

    ground, shape = generator[:, 4:7], (generator[:, 4:7] + 0.5 + 0.3 * (generator[:, 7:10] - 0.5)) % 1
    images = torch.lerp(
        _texture(x, y, ground, generator[:, 10:25]), _texture(x, y, shape, generator[:, 25:40]), cover[:, None]
    )
    return (images * 255).round().clamp(0, 255).to(torch.uint8), cover


def _each(values: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, 1), for the pixel grid."""
    return values[:, None, None]


def _texture(x: Tensor, y: Tensor, color: Tensor, generator: Tensor) -> Tensor:
    """Return (B, 3, H, W): the color (B, 3), tinted by two random waves, from stripes to checks."""
    waves = []
    for k in (0, 3):
        angle, cycles, phase = (
            2 * math.pi * generator[:, k],
            1 + 2.5 * generator[:, k + 1],
            2 * math.pi * generator[:, k + 2],
        )
        along = _each(torch.cos(angle) * cycles * math.pi) * x + _each(torch.sin(angle) * cycles * math.pi) * y
        waves.append(torch.sin(along + _each(phase)))
    pattern = torch.lerp(waves[0], waves[0] * waves[1], _each(generator[:, 6]))
    tint = 0.75 * (generator[:, 7:10] - 0.5)
    return color[:, :, None, None] + tint[:, :, None, None] * pattern[:, None]


def _cover(kinds: Tensor, u: Tensor, v: Tensor, *, scale: Tensor) -> Tensor:
    """Return coverage in [0, 1] from the signed distance to the outline (negative inside), one pixel soft."""
    distance = torch.empty_like(u)
    for kind in kinds.unique().tolist():
        rows = (kinds == kind).nonzero()[:, 0]
        distance[rows] = OUTLINES[KINDS[kind]](u[rows], v[rows])
    return (0.5 - distance * scale).clamp(0, 1)


def _box(u: Tensor, v: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.maximum(u.abs() - half_width, v.abs() - half_height)


def _star(u: Tensor, v: Tensor) -> Tensor:
    """Fold the plane into one tenth of the star: one edge from the tip (1, 0) to the notch."""
    fold = 2 * math.pi / 5
    angle = torch.atan2(v, u)
    angle = (angle - fold * torch.round(angle / fold)).abs()
    length = torch.hypot(u, v)
    notch = (0.42 * math.cos(fold / 2), 0.42 * math.sin(fold / 2))
    normal = (notch[1], 1 - notch[0])
    norm = math.hypot(*normal)
    return (length * torch.cos(angle) - 1) * (normal[0] / norm) + length * torch.sin(angle) * (normal[1] / norm)


# Signed distance of the outline at (u, v), the shape's own coordinates: it fits the circle of radius 1.
OUTLINES = {
    "disc": lambda u, v: torch.hypot(u, v) - 0.8,
    "ring": lambda u, v: (torch.hypot(u, v) - 0.72).abs() - 0.2,
    "square": lambda u, v: _box(u, v, 0.7, 0.7),
    "triangle": lambda u, v: torch.maximum(math.sqrt(0.75) * u.abs() + 0.5 * v, -v) - 0.5,
    "bar": lambda u, v: _box(u, v, 0.95, 0.27),
    "cross": lambda u, v: torch.minimum(_box(u, v, 0.92, 0.28), _box(u, v, 0.28, 0.92)),
    "star": _star,
    "crescent": lambda u, v: torch.maximum(torch.hypot(u, v) - 0.9, 0.72 - torch.hypot(u - 0.42, v)),
    "half": lambda u, v: torch.maximum(torch.hypot(u, v + 0.4) - 0.9, -(v + 0.4)),
    "dots": lambda u, v: torch.minimum(torch.hypot(u - 0.56, v), torch.hypot(u + 0.56, v)) - 0.4,
}
