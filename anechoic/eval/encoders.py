"""Encoders to evaluate: a run of ours, a model of another library, and the baselines that show what "poor" means.

Each becomes an Encoder: a module with `blocks` and `num_prefix_tokens`, and how its images are prepared. Nothing is
trained here. Models of other libraries come from adapters. Denoisers, whose features depend on the noise, are in
denoisers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.adapters.registry import ADAPTERS
from anechoic.choices import Weights
from anechoic.config import PixelConfig
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval.features import Pooling, layer_widths, poolings_of, prefix_tokens, trunk
from anechoic.storage.fingerprint import hash_network
from anechoic.storage.safe_io import reason

# Raw pixels are compared at this side at most; more would only repeat themselves.
PIXEL_SIDE = 32
Made = TypeVar("Made")


@dataclass(frozen=True)
class Encoder:
    """name: for tables. untrained: makes the same network with fresh weights, where there is such a thing."""

    name: str
    model: nn.Module
    preprocess: Preprocess
    untrained: Callable[[], nn.Module] | None = field(default=None, repr=False)
    # Images of a batch. A GPU wants many; a CPU computes them in small groups.
    batch_size: ClassVar[int] = 256
    batch_size_on_cores: ClassVar[int] = 64

    def batch_size_on(self, device: str) -> int:
        """On devices of this type."""
        return self.batch_size_on_cores if device == "cpu" else self.batch_size

    @property
    def image_size(self) -> int:
        return self.preprocess.image_size

    @property
    def channels(self) -> int:
        return self.preprocess.channels

    @property
    def pixels(self) -> PixelConfig:
        return self.preprocess.pixels

    @property
    def forward(self) -> Callable[[Tensor], object] | None:
        """What runs the network on prepared images, where that is not the plain call of its trunk."""
        return None

    def prepare(self, images: Tensor, ids: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) of the samples `ids` (B,), on the device -> the network's input."""
        return self.preprocess.apply(images)

    def embed(self, images: Any, **options: Any) -> Any:
        """Vectors (n, D) of paths, Pillow images, arrays or a folder; options: see evals/embedding.py."""
        from anechoic.eval.embedding import embed

        return embed(self, images, **options)

    def for_part(self, part: int) -> Encoder:
        """The encoder for one part of the data (0: train, 1: test), where what it draws depends on that."""
        return self

    @cached_property
    def widths(self) -> list[int]:
        """Channels of every layer."""
        # Noise, because a norm may leave the stream of a black image as it is and would not be seen.
        shape = (1, self.channels, self.image_size, self.image_size)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return layer_widths(self.model, noise.to(next(self.model.parameters(), noise).device))

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        return poolings_of(self.model)

    @property
    def about(self) -> str:
        """What features depend on besides the network and its weights."""
        return repr(self.preprocess)

    @property
    def fingerprint(self) -> str:
        """Hex; changes with the architecture, the weights or the preparation of images."""
        return hash_network(trunk(self.model), self.about)


@runtime_checkable
class SetsImageSize(Protocol):
    """A network that must be prepared for another image size; the others adapt to their input."""

    def set_image_size(self, image_size: int) -> None: ...


def open_encoder(spec: str | Path, *, image_size: int | None = None, weights: Weights | None = None) -> Encoder:
    """Open a run, model or checkpoint directory; timm:NAME, timm:NAME:random; transformers:FOLDER."""
    prefix, _, rest = str(spec).partition(":")
    adapter = ADAPTERS.get(prefix)
    if rest and prefix == "hf":
        raise UserError(f"hf: names data sets. For a model write transformers:{rest}.")
    if rest and adapter is not None and adapter.encoder:
        if weights is not None:
            raise UserError(f"{spec} has one set of weights: omit --weights.")
        encoder = Encoder(*seeded(lambda: adapter.load().open_encoder(rest)))
    else:
        encoder = run_encoder(spec, weights=weights)
    return encoder if image_size is None else resized(encoder, image_size)


def resized(encoder: Encoder, image_size: int) -> Encoder:
    """Return the encoder for another image size, its positions interpolated where each patch has one of its own."""

    def prepared(model: nn.Module) -> nn.Module:
        if isinstance(model, SetsImageSize):
            model.set_image_size(image_size)
        return model

    untrained = encoder.untrained
    fresh = None if untrained is None else lambda: prepared(untrained())
    preprocess = replace(encoder.preprocess, image_size=image_size)
    try:
        found = replace(encoder, model=prepared(encoder.model), preprocess=preprocess, untrained=fresh)
        assert found.widths
    except UserError:
        raise
    except Exception as problem:  # each library refuses a size in its own way
        raise UserError(
            f"{encoder.name} takes no images of {image_size} pixels ({reason(problem)}): choose another --image-size, "
            "such as a multiple of its patches, or omit it."
        ) from problem
    return found


def run_encoder(path: str | Path, *, weights: Weights | None = None) -> Encoder:
    from anechoic.runtime.checkpoint import load

    return encoder_of(load(path, weights=weights), name=Path(path).name or str(path))


def encoder_of(model: Any, *, name: str) -> Encoder:
    """A network of ours that knows its preprocess."""
    from anechoic.models import build, family_of

    if family_of(model.config) in ("uvit", "sit"):
        raise UserError(f"{name} is a diffusion model, whose features depend on the noise: give levels with --noise.")
    return Encoder(name, model, model.preprocess, untrained=lambda: build(model.config).eval())


# ---- baselines


class RawPixels(nn.Module):
    """The image itself as one token (B, 1, C * s * s), averaged down to s = 32 at most."""

    num_prefix_tokens = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity()])

    def forward(self, images: Tensor) -> Tensor:
        if min(images.shape[2:]) > PIXEL_SIDE:
            images = F.adaptive_avg_pool2d(images, PIXEL_SIDE)
        return self.blocks[0](images.flatten(1)[:, None])


class FlatTokens(nn.Module):
    """The patch tokens of an encoder's output as one token (B, 1, N * D): unlike a mean, it keeps the layout.

    width: N * D channels are summed with random signs into width, which keeps cosines up to noise of about
    1 / sqrt(width) (a count sketch; the same signs and places every time). None keeps them all.
    """

    num_prefix_tokens = 0

    def __init__(self, model: nn.Module, *, channels: int, width: int | None = None) -> None:
        super().__init__()
        self.network = trunk(model)
        self.blocks = nn.ModuleList([nn.Identity()])
        self.width = width if width is not None and width < channels else None
        if self.width is not None:
            generator = torch.Generator().manual_seed(0)
            self.register_buffer("places", torch.randint(self.width, (channels,), generator=generator))
            self.register_buffer("signs", torch.randint(2, (channels,), generator=generator) * 2.0 - 1.0)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.network(images)
        if tokens.ndim == 4:
            tokens = tokens.flatten(2).transpose(1, 2)
        x = tokens[:, prefix_tokens(self.network) :].flatten(1)
        if self.width is not None:
            x = x.new_zeros(len(x), self.width).index_add_(1, self.places, x * self.signs)
        return self.blocks[0](x[:, None])


def flat(encoder: Encoder, *, width: int | None = None) -> Encoder:
    """The encoder whose only vector is all of its patches side by side."""
    shape = (1, encoder.channels, encoder.image_size, encoder.image_size)
    with torch.inference_mode():
        tokens = trunk(encoder.model)(torch.zeros(shape, device=next(encoder.model.parameters()).device))
    channels = tokens[0].numel() - prefix_tokens(encoder.model) * (tokens.shape[-1] if tokens.ndim == 3 else 0)
    wrapped = FlatTokens(encoder.model, channels=channels, width=width)
    return replace(encoder, name="flat tokens", model=wrapped, untrained=None)


class ConstantEncoder(nn.Module):
    """The same token for every image: what a collapsed encoder looks like to each measure."""

    num_prefix_tokens = 0

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ModuleList([nn.Identity()])

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks[0](images.new_ones(len(images), 1, self.dim))

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def baselines(encoder: Encoder, *, seed: int = 0) -> list[Encoder]:
    """The same network untrained, the raw pixels, and a constant."""
    found = []
    if encoder.untrained is not None:
        found.append(replace(encoder, name="untrained", model=seeded(encoder.untrained, seed=seed), untrained=None))
    found.append(replace(encoder, name="raw pixels", model=RawPixels(), untrained=None))
    found.append(replace(encoder, name="constant", model=ConstantEncoder(encoder.widths[-1]), untrained=None))
    return found


def seeded(make: Callable[[], Made], *, seed: int = 0) -> Made:
    """Return fresh weights that are the same every time, leaving the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
