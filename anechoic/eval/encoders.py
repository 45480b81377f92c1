"""Encoders to evaluate: a run of ours, a timm or transformers model, and the baselines that show what "poor" means.

Each becomes an Encoder: a module with `blocks` and `num_prefix_tokens`, and how its images are prepared. Nothing is
trained here. One small adapter per foreign library; adapters know classes, not names of modules. Denoisers, whose
features depend on the noise, are denoisers.py's.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval.features import Pooling, layer_widths, poolings_of, prefix_tokens, trunk
from anechoic.storage.fingerprint import hash_tensors
from anechoic.storage.safe_io import of_kind, read_table, reason, refuse_giants, refuse_odd_files, refuse_unbacked

# Raw pixels are compared at this side at most; more would only repeat themselves.
PIXEL_SIDE = 32


@dataclass(frozen=True)
class Encoder:
    """name: for tables. untrained: makes the same network with fresh weights, where there is such a thing."""

    name: str
    model: nn.Module
    preprocess: Preprocess
    untrained: Callable[[], nn.Module] | None = field(default=None, repr=False)
    # Images of a batch. An accelerator wants many; cores compute them in small groups and only have to be kept busy.
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

    @cached_property
    def fingerprint(self) -> str:
        """Hex; changes with the architecture, the weights or the preparation of images."""
        network = trunk(self.model)
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", f"{network!r} {self.about}")  # functions print their address
        rest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return rest + hash_tensors(network.state_dict())


def open_encoder(spec: str | Path, *, image_size: int | None = None) -> Encoder:
    """A run, model or checkpoint directory; timm:NAME, timm:NAME:random; transformers:FOLDER."""
    family, _, rest = str(spec).partition(":")
    if family == "timm" and rest:
        encoder = timm_encoder(rest)
    elif family == "transformers" and rest:
        encoder = transformers_encoder(rest)
    elif family == "hf" and rest:
        raise UserError(f"hf: names data sets. For a model write transformers:{rest}.")
    else:
        encoder = run_encoder(spec)
    return encoder if image_size is None else resized(encoder, image_size)


def resized(encoder: Encoder, image_size: int) -> Encoder:
    """The encoder for images of another side, its positions interpolated where it has a place for each patch."""
    untrained = encoder.untrained
    fresh = None if untrained is None else lambda: prepared_for(untrained(), image_size)
    preprocess = replace(encoder.preprocess, image_size=image_size)
    try:
        found = replace(encoder, model=prepared_for(encoder.model, image_size), preprocess=preprocess, untrained=fresh)
        assert found.widths
    except UserError:
        raise
    except Exception as problem:  # each library refuses a size in its own way
        raise UserError(
            f"{encoder.name} takes no images of {image_size} pixels ({reason(problem)}): choose another --image-size, "
            "such as a multiple of its patches, or leave it out."
        ) from problem
    return found


def prepared_for(model: nn.Module, image_size: int) -> nn.Module:
    """timm's transformers are told of the side; the others see it."""
    if isinstance(model, TimmTransformer):
        model.model.set_input_size(img_size=image_size)
    return model


def run_encoder(path: str | Path) -> Encoder:
    from anechoic.runtime.checkpoint import load

    return encoder_of(load(path), name=Path(path).name or str(path))


def encoder_of(model: Any, *, name: str) -> Encoder:
    """A network of ours that knows its preprocess."""
    from anechoic.models import build, family_of

    if family_of(model.config) in ("uvit", "sit"):
        raise UserError(f"{name} is a diffusion model, whose features depend on the noise: give levels with --noise.")
    return Encoder(name, model, model.preprocess, untrained=lambda: build(model.config).eval())


# ---- other people's models


class TimmTransformer(nn.Module):
    """A timm vision transformer, read without its head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_prefix_tokens: int = model.num_prefix_tokens

    @property
    def blocks(self) -> nn.Module:
        return self.model.blocks

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)


class TimmStages(nn.Module):
    """A timm network of maps (B, C, H, W), read after each of its stages."""

    num_prefix_tokens = 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.stages: list[str] = [info["module"] for info in model.feature_info]

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self.stages]

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)


def timm_encoder(name: str) -> Encoder:
    try:
        import timm
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise UserError('timm models need an extra package: pip install "anechoic[families]".') from error
    name, _, weights = name.partition(":")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        raise UserError(f"timm has no model {name!r}; it has {', '.join(near) or 'others, see timm.list_models()'}.")

    def create(pretrained: bool) -> Any:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0).eval()
        return TimmTransformer(model) if isinstance(model, VisionTransformer) else TimmStages(model)

    if weights not in ("", "random"):
        raise UserError(f"After timm:{name} only :random may follow, not {weights!r}.")
    try:
        model: Any = seeded(lambda: create(weights != "random"))
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"The weights of timm:{name} cannot be had here ({error}); timm:{name}:random needs none."
        ) from error
    config = model.model.pretrained_cfg
    if isinstance(model, TimmStages):
        check_maps(model, name, config["input_size"])
    channels, size, _ = config["input_size"]
    preprocess = Preprocess(tuple(config["mean"]), tuple(config["std"]), size, channels)
    return Encoder(f"timm:{name}", model, preprocess, lambda: create(False))


@torch.inference_mode()
def check_maps(model: TimmStages, name: str, input_size: tuple[int, int, int]) -> None:
    channels_first = getattr(model.model, "output_fmt", "NCHW") == "NCHW"
    if not channels_first or model(torch.zeros(1, *input_size)).ndim != 4:
        raise UserError(f"timm:{name} is neither a plain vision transformer nor a network of (B, C, H, W) maps.")


class TransformersEncoder(nn.Module):
    """A transformers vision model, read without its head and without masking."""

    def __init__(self, model: Any, num_prefix_tokens: int, block_path: str) -> None:
        super().__init__()
        self.model = model
        self.num_prefix_tokens = num_prefix_tokens
        self.block_path = block_path

    @property
    def blocks(self) -> nn.Module:
        return self.model.get_submodule(self.block_path)

    def forward(self, images: Tensor) -> Tensor:
        return call_transformers(self.model, images).last_hidden_state


def call_transformers(model: Any, images: Tensor) -> Any:
    from transformers import ViTMAEModel

    own_side = images.shape[-1] == model.config.image_size
    other: dict[str, Any] = {} if own_side or not interpolates(model) else {"interpolate_pos_encoding": True}
    if not isinstance(model, ViTMAEModel):
        return model(pixel_values=images, **other)
    # This class shuffles patches by noise even when it drops none: ascending noise leaves them in place.
    side: Any = model.config.patch_size
    patches = (images.shape[2] // side) * (images.shape[3] // side)
    noise = torch.arange(patches, device=images.device).expand(len(images), -1)
    return model(pixel_values=images, noise=noise, **other)


def interpolates(model: nn.Module) -> bool:
    """Whether its positions can be asked to fit images of another side; some do so by themselves."""
    return "interpolate_pos_encoding" in inspect.signature(model.forward).parameters


def transformers_encoder(folder: str) -> Encoder:
    try:
        from transformers import AutoConfig, AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise UserError('transformers models need an extra package: pip install "anechoic[families]".') from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # weights of a decoder or head are left out on purpose
    refuse_code(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type == "vit_mae":
            config.mask_ratio = 0.0
        if Path(folder).is_dir():
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
            refuse_unbacked(count, Path(folder), where=f"transformers:{folder}")
        model, told = AutoModel.from_pretrained(
            folder, config=config, trust_remote_code=False, output_loading_info=True, weights_only=True
        )
    except UserError:
        raise
    # transformers meets damaged folders with almost any exception.
    except Exception as error:
        raise UserError(f"transformers:{folder} cannot be loaded: {reason(error)}.") from error
    finally:
        logging.set_verbosity(verbosity)
    refuse_misfit(folder, told)
    model.eval()
    size, patch, channels = (getattr(config, name, None) for name in ("image_size", "patch_size", "num_channels"))
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    paths = [name for name, part in lists.items() if len(part) == getattr(config, "num_hidden_layers", None)]
    if not isinstance(size, int) or not isinstance(patch, int) or not channels or not paths:
        raise UserError(f"transformers:{folder} holds a {type(model).__name__}, which is no plain vision transformer.")
    try:
        with torch.inference_mode():
            tokens = call_transformers(model, torch.zeros(1, channels, size, size)).last_hidden_state
    except Exception as error:  # as above
        raise UserError(
            f"transformers:{folder} cannot be used: its config does not describe a working model ({reason(error)})."
        ) from error
    prefix = tokens.shape[1] - (size // patch) ** 2
    mean, std = transformers_statistics(folder, channels)

    def fresh() -> nn.Module:
        return TransformersEncoder(AutoModel.from_config(config).eval(), prefix, paths[0])

    wrapped = TransformersEncoder(model, prefix, paths[0])
    return Encoder(f"transformers:{Path(folder).name}", wrapped, Preprocess(mean, std, size, channels), fresh)


def transformers_statistics(folder: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that come with the model, or ImageNet's."""
    path = Path(folder) / "preprocessor_config.json"
    if not path.exists():
        return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    found = read_table(path)
    mean, std = (of_kind(found, f"image_{name}", list, where=str(path)) for name in ("mean", "std"))
    numbers = [*mean, *std]
    if not (
        len(mean) == len(std) == channels and all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
    ):
        raise UserError(f"{path} says image_mean = {mean!r:.60} and image_std = {std!r:.60} for {channels} channels.")
    if min(std) <= 0:
        raise UserError(f"{path} says image_std = {std!r:.60}, and images cannot be divided by it.")
    return tuple(mean), tuple(std)


def refuse_code(folder: str) -> None:
    """A folder may ask for Python files of its own to be run, or for a network of any size."""
    path = Path(folder)
    if not path.is_dir():
        return  # a name on the hub: transformers reads it as data
    if not (path / "config.json").is_file():
        raise UserError(f"transformers:{folder} has no config.json: give a folder written by save_pretrained.")
    refuse_odd_files(path)
    card = read_table(path / "config.json")
    refuse_giants(card, where=str(path / "config.json"))
    if "auto_map" in card:
        raise UserError(
            f"transformers:{folder} asks for code of its own to be run (auto_map in its config.json), which is "
            f"refused: give a model of a class that transformers has."
        )


def refuse_misfit(folder: str, told: Mapping[str, Any]) -> None:
    """Weights that the network wants and the folder has not would be random. A pooler is never used."""
    lost = [str(name) for name in told.get("missing_keys", ()) if "pooler" not in str(name)]
    lost += [str(item[0] if isinstance(item, tuple) else item) for item in told.get("mismatched_keys", ())]
    if lost:
        raise UserError(
            f"The weights in transformers:{folder} do not fit the network its config.json describes: {min(lost)} is "
            f"missing or of another shape{f', and {len(lost) - 1} more' if len(lost) > 1 else ''}."
        )


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

    width: N * D channels are summed with random signs into so many, which keeps cosines but for noise of about
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


def seeded(make: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    """Fresh weights that are the same every time, leaving the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
