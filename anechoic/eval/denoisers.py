"""Denoisers as encoders: a U-ViT or SiT has no single representation, its features depend on how noisy its input is.

`Denoiser.at(level)` is an Encoder like any other; the noise of a sample is a function of (seed, sample, part of the
data). A denoiser that reads latents gets its images through the autoencoder that its latents were made with. (Table 4.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anechoic.choices import Weights
from anechoic.config import PixelConfig
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion import vae as vae_module
from anechoic.diffusion.generate import find_process, open_denoiser
from anechoic.diffusion.process import Process, encode
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.features import Pooling, layer_widths
from anechoic.rng import SampleGenerator
from anechoic.storage.fingerprint import hash_tensors


@dataclass(frozen=True)
class NoisyEncoder(Encoder):
    """A denoiser at one noise level: 0 is the image, 1 pure noise.

    to_input: prepares images for a denoiser of latents; autoencoder: what its result depends on, for the cache.
    """

    process: Process | None = None
    level: float = 0.0
    seed: int = 0
    part: int = 0
    to_input: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    autoencoder: str = ""
    batch_size_on_cores: ClassVar[int] = 256  # it has no packed forward, so small groups gain nothing

    @property
    def forward(self) -> Callable[[Tensor], object]:
        assert self.process is not None
        return partial(encode, self.model, process=self.process, level=self.level)

    def prepare(self, images: Tensor, ids: Tensor) -> Tensor:
        assert self.process is not None
        x = self.preprocess.apply(images) if self.to_input is None else self.to_input(images)
        if self.level == 0:
            return x
        generator = SampleGenerator(self.seed, ids.to(x.device), torch.full_like(ids, self.part).to(x.device))
        t = self.process.time_of_noise(torch.tensor(self.level, device=x.device))
        return self.process.mix(x, generator.normal("probe", *x.shape[1:]), t)

    def for_part(self, part: int) -> NoisyEncoder:
        return replace(self, part=part)

    @cached_property
    def widths(self) -> list[int]:
        config: Any = self.model.config
        device = next(self.model.parameters()).device
        return layer_widths(
            self.model, torch.zeros(1, config.in_channels, *config.size, device=device), forward=self.forward
        )

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        return ("mean",)

    @property
    def about(self) -> str:
        drawn = "clean" if self.level == 0 else f"{self.level!r} of seed {self.seed} for part {self.part}"
        return f"{self.preprocess!r} {self.process!r} {drawn} {self.autoencoder}".rstrip()


@dataclass(frozen=True)
class Denoiser:
    """A trained denoiser; `encoder.preprocess` describes its images, which an autoencoder may encode first."""

    encoder: NoisyEncoder

    @property
    def name(self) -> str:
        return self.encoder.name

    @property
    def channels(self) -> int:
        return self.encoder.channels

    @property
    def pixels(self) -> PixelConfig:
        return self.encoder.pixels

    def at(self, level: float, *, seed: int) -> NoisyEncoder:
        if not 0 <= level < 1:
            raise UserError(f"A noise level lies between 0 (the image) and 1 (pure noise), not at {level:g}.")
        return replace(self.encoder, level=level, seed=seed)


def denoiser_of(model: nn.Module, process: Process, preprocess: Preprocess, *, name: str = "denoiser") -> Denoiser:
    """A network in memory that reads images, or latents as they are."""
    return Denoiser(NoisyEncoder(name, model, preprocess, process=process))


def open_noisy(path: str | Path, *, device: torch.device, weights: Weights | None = None) -> Denoiser:
    """The denoiser of a run, model or checkpoint directory, on the device."""
    model, config = open_denoiser(Path(path), weights=weights)
    model.to(device)
    process = find_process(model, config, asked=None)
    name = Path(path).name or str(path)
    space = vae_module.latent_space(model, config)
    if space is None:
        return denoiser_of(model, process, model.preprocess, name=name)
    vae = vae_module.load_vae(space.vae, device=device)
    scale = vae_module.matching_scale(space, vae)
    of_images = vae_module.autoencoder_preprocess(vae, space.image_size)

    def to_latents(images: Tensor) -> Tensor:
        moments = vae_module.encode_moments(vae, of_images.apply(images.to(device)))
        return moments.chunk(2, dim=1)[0] * scale

    key = f"{hash_tensors(vae.state_dict())} {scale!r}"
    return Denoiser(NoisyEncoder(name, model, of_images, process=process, to_input=to_latents, autoencoder=key))
