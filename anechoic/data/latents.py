"""Latents on disk as a data source: moments of every image and its mirror image, sampled again at each visit.

diffusion/vae.py writes them. Latent experiments of Table 4; Rombach et al. 2022.
B batch, C channels of a latent, h and w its height and width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data.arrays import numpy_damage
from anechoic.data.content_checksums import FileHashes
from anechoic.data.source import Source, check_labels, digest
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator
from anechoic.storage.safe_io import of_kind, read_table

FORMAT = "anechoic-latents-1"
CARD, MOMENTS, LABELS = "latents.json", "moments.f32", "labels.npy"


def draw_latents(moments: Tensor, noise: Tensor, *, scale: float) -> Tensor:
    """Moments (B, 2 C, h, w) -> z = (mean + exp(logvar / 2) * noise) * scale (B, C, h, w), logvar within -30..20."""
    mean, log_variance = moments.chunk(2, dim=1)
    return (mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * noise) * scale


def crop_square(image: Tensor, size: int) -> Tensor:
    """uint8 (C, H, W), gray or color -> (C, size, size): halved (box) while twice as large, bicubic, then the center.

    The crop of Dhariwal & Nichol 2021, which the published latent models were trained on, done by the same library.
    """
    from PIL import Image

    array = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    factor = size / min(picture.size)
    picture = picture.resize((round(picture.width * factor), round(picture.height * factor)), Image.Resampling.BICUBIC)
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).view(size, size, -1).permute(2, 0, 1)


@dataclass(frozen=True)
class LatentSpace:
    """Which autoencoder latents come from and the factor they are multiplied by; a model's card keeps it."""

    scale: float
    vae: str
    vae_hash: str
    image_size: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, where: str) -> LatentSpace:
        scale = float(of_kind(values, "scale", (int, float), where=where))
        if not (math.isfinite(scale) and scale > 0):
            raise UserError(f"{where} has scale = {scale}, which must be positive; encode the latents again.")
        vae, vae_hash = (of_kind(values, name, str, where=where) for name in ("vae", "vae_hash"))
        return cls(scale, vae, vae_hash, of_kind(values, "image_size", int, where=where))


@dataclass(frozen=True)
class LatentCard:
    """`latents.json`: the latent space, the shape of the moments, and which images were encoded."""

    scale: float
    vae: str
    vae_hash: str
    image_size: int
    shape: tuple[int, int, int, int, int]
    """of the moments: images, image and mirror image, 2 C, h, w"""
    source: str
    """fingerprint of the images"""
    classes: tuple[str, ...] | None = None
    format: str = FORMAT

    @property
    def space(self) -> LatentSpace:
        return LatentSpace(self.scale, self.vae, self.vae_hash, self.image_size)


def is_latents(path: str | Path) -> bool:
    return (Path(path) / CARD).is_file()


def read_card(path: str | Path) -> LatentCard:
    if not is_latents(path):
        raise UserError(f"{path} is not a directory of latents; write one with anechoic tools encode-latents.")
    where = str(Path(path) / CARD)
    values = read_table(where)
    if values.get("format") != FORMAT:
        raise UserError(f"{path} has latents of the format {values.get('format')!r:.60}; encode them again.")
    shape, classes = of_kind(values, "shape", list, where=where), values.get("classes")
    right = len(shape) == 5 and all(isinstance(size, int) and 0 < size < 1 << 40 for size in shape)
    if not right or shape[1] != 2 or shape[2] % 2:
        raise UserError(f"{where} has shape = {shape!r:.80}, which is not (images, 2, 2 C, h, w); encode them again.")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise UserError(f"{where} has classes = {classes!r:.60}, which are not names; encode the latents again.")
    return LatentCard(
        **asdict(LatentSpace.from_json(values, where=where)),
        source=of_kind(values, "source", str, where=where),
        shape=tuple(shape),
        classes=tuple(classes) if classes else None,
    )


class Latents(Source):
    """Moments on disk, memory-mapped. Sample i is image i // 2, mirrored if i is odd."""

    in_memory = True
    group_size = 2
    labels_apart = True

    def __init__(self, path: str | Path, *, labels: bool = False) -> None:
        super().__init__()
        self.path = Path(path)
        self.card = read_card(path)
        file = self.path / MOMENTS
        expected = 4 * math.prod(self.card.shape)
        if not file.is_file() or file.stat().st_size != expected:
            raise UserError(f"{file} does not have the {expected} bytes its card promises; encode the latents again.")
        if labels and not (self.path / LABELS).is_file():
            raise UserError(f"The latents in {path} have no labels; encode data that has them.")
        self.labels = self.read_labels().repeat(2) if labels else None
        self.classes = self.card.classes if labels else None
        self.channels = self.card.shape[2] // 2
        self.earlier_fingerprint = digest(json.dumps(asdict(self.card), sort_keys=True))
        self.hashes = FileHashes(self.path, [MOMENTS])
        self.transform = DrawLatents(self.card.scale)
        self.moments = self.map()

    def compute_fingerprint(self) -> str:
        return digest(json.dumps(asdict(self.card), sort_keys=True), self.hashes.all)

    def read_labels(self) -> np.ndarray:
        with numpy_damage(self.path / LABELS):
            found = np.load(self.path / LABELS, mmap_mode="r", allow_pickle=False)
        if found.shape != self.card.shape[:1]:
            raise UserError(f"{self.path / LABELS} has the shape {found.shape} for {self.card.shape[0]} images.")
        return check_labels(found, where=str(self.path / LABELS))

    def map(self) -> np.memmap:
        return np.memmap(self.path / MOMENTS, dtype=np.float32, mode="r", shape=self.card.shape)

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the file again instead of receiving a copy.
        return {**self.__dict__, "moments": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.moments = self.map()

    def __len__(self) -> int:
        return 2 * self.card.shape[0]

    def name(self, index: int) -> str:
        return f"{index // 2}{' mirrored' if index % 2 else ''}"

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        """Return moments, float32 (2 C, h, w)."""
        self.hashes.check_file(0)
        return torch.from_numpy(np.array(self.moments[index // 2, index % 2]))


@dataclass(frozen=True)
class DrawLatents:
    """The transform of latents: moments become scaled latents, drawn again at each visit of a sample."""

    scale: float

    def __call__(self, images: Sequence[Tensor], *, image_size: int, generator: SampleGenerator) -> Tensor:
        """B moments (2 C, h, w) -> (B, C, h, w) float32."""
        stacked = torch.stack(list(images))
        doubled, height, width = stacked.shape[1:]
        if (height, width) != (image_size, image_size):
            raise UserError(f"These latents are {height} x {width}: set the image size to {height}, not {image_size}.")
        return draw_latents(stacked, generator.normal("latent", doubled // 2, height, width), scale=self.scale)
