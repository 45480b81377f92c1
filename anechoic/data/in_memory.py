"""Samples in memory as the loader returns them: read once, used many times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anechoic.data.augment import Augment
from anechoic.data.loader import Loader
from anechoic.data.source import Source, digest
from anechoic.rng import SampleGenerator


class InMemory(Source):
    """images (n, C, H, W), cropped and resized, or latents; ids (n,) in the source they came from."""

    in_memory = True

    def __init__(self, images: Tensor, ids: Tensor, source: Source) -> None:
        super().__init__()
        self.images, self.ids, self.source = images, ids, source
        self.labels = None if source.labels is None else source.labels[ids.numpy()]
        self.classes, self.channels, self.transform = source.classes, images.shape[1], stack

    @classmethod
    def of(cls, source: Source, *, image_size: int, seed: int) -> InMemory:
        """Read the center crop of every readable image of a source; seed: for latents, which are drawn."""
        loader = Loader(source, image_size=image_size, batch_size=256, seed=seed, augment=Augment(kind="center"))
        batches = list(loader)
        return cls(torch.cat([b.images for b in batches]), torch.cat([b.ids for b in batches]), source)

    def compute_fingerprint(self) -> str:
        return digest("prepared", self.source.fingerprint, self.ids.numpy(), self.images.shape[-1])

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return str(int(self.ids[index]))

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        return self.images[index]


def stack(images: Sequence[Tensor], *, image_size: int, generator: SampleGenerator) -> Tensor:
    return torch.stack(list(images))
