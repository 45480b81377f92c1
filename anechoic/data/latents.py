"""Latents of a frozen KL autoencoder: encoded once to moments on disk, drawn afresh at each visit, decoded to images.

The autoencoder is diffusers' `AutoencoderKL`, from a folder or the hub; nothing here trains it or the denoiser. The
cache holds the moments (mean, log variance) of every image and of its mirror image, and the factor that scales them.
Latent experiments of Table 4; Rombach et al. 2022.

B batch, C channels of a latent, h and w its height and width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.data.arrays import numpy_damage
from anechoic.data.preprocess import Preprocess
from anechoic.data.source import BadImage, Source, check_labels, digest
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator
from anechoic.storage.files import write_aside
from anechoic.storage.fingerprint import hash_tensors
from anechoic.storage.safe_io import of_kind, read_table, refuse_giants, refuse_odd_files, refuse_unbacked

FORMAT = "anechoic-latents-1"
CARD, MOMENTS, LABELS = "latents.json", "moments.f32", "labels.npy"


# ---- the autoencoder ------------------------------------------------------------------------------------------------


def load_vae(name: str, *, device: torch.device | str = "cpu") -> Any:
    """A frozen `AutoencoderKL` from a local folder, else from the hub."""
    try:
        from diffusers import AutoencoderKL
    except (ImportError, RuntimeError) as error:
        raise UserError(f'latents need diffusers ({first_line(error)}): pip install "anechoic[diffusion]".') from error
    local = Path(name).exists()
    if local:
        refuse_other_folder(Path(name))
    try:
        if local:
            with torch.device("meta"):
                skeleton = AutoencoderKL.from_config(AutoencoderKL.load_config(name, local_files_only=True))
            count = sum(parameter.numel() for parameter in skeleton.parameters())
            refuse_unbacked(count, Path(name), where=name)
        vae, told = AutoencoderKL.from_pretrained(name, local_files_only=local, output_loading_info=True)
    except UserError:
        raise
    # diffusers meets damaged folders with almost any exception.
    except Exception as error:
        remedy = "save it again" if local else "check the name, or give a local folder"
        raise UserError(f"no autoencoder could be loaded from {name} ({first_line(error)}); {remedy}.") from error
    lost = [*told["missing_keys"], *told["mismatched_keys"]]
    if lost:
        raise UserError(f"the weights in {name} do not fit its config.json ({lost[0]} and {len(lost) - 1} more).")
    return vae.eval().requires_grad_(False).to(device)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__


def refuse_other_folder(path: Path) -> None:
    """A folder of AutoencoderKL says so in its config.json."""
    card = path / "config.json"
    kind = None
    if card.is_file():
        refuse_odd_files(path)
        settings = read_table(card)
        kind = settings.get("_class_name")
        refuse_giants(settings, where=str(card))
    if kind != "AutoencoderKL":
        found = f"its config.json names {kind}" if kind else "it has no config.json that names one"
        raise UserError(
            f"{path} is not the folder of an AutoencoderKL ({found}); give one written by its save_pretrained."
        )


def downscaling(vae: Any) -> int:
    """How many pixels of an image's side make one place of a latent."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


@torch.inference_mode()
def encode_moments(vae: Any, images: Tensor) -> Tensor:
    """Images (B, C, H, W) in -1..1 -> moments (B, 2 C, h, w): means, then log variances."""
    return vae.encode(images).latent_dist.parameters


@torch.inference_mode()
def decode(vae: Any, latents: Tensor, *, scale: float) -> Tensor:
    """Scaled latents (B, C, h, w) -> images (B, 3, H, W) in -1..1."""
    return vae.decode(latents / scale).sample


def draw_latents(moments: Tensor, noise: Tensor, *, scale: float) -> Tensor:
    """Moments (B, 2 C, h, w) -> z = (mean + exp(logvar / 2) * noise) * scale (B, C, h, w), logvar within -30..20."""
    mean, log_variance = moments.chunk(2, dim=1)
    return (mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * noise) * scale


# ---- images for it --------------------------------------------------------------------------------------------------


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


# ---- the cache ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentCard:
    """What is known of a cache: which autoencoder, which images, and the factor latents are multiplied by."""

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


def write_latents(
    source: Source,
    out: Path,
    *,
    vae: Any,
    vae_name: str,
    image_size: int,
    scale: float | None = None,
    batch_size: int = 16,
    progress: Callable[[int], Any] = lambda count: None,
) -> LatentCard:
    """Encode every readable image and its mirror image to OUT, which appears whole or not at all.

    scale None takes the autoencoder's own factor.
    """
    factor = downscaling(vae)
    if image_size < factor or image_size % factor:
        raise UserError(f"this autoencoder reduces sides {factor}-fold: choose --image-size as a multiple of {factor}.")
    if out.exists():
        raise UserError(f"{out} exists already; choose another directory for the latents, or remove it first.")
    kept: list[int] = []
    with write_aside(out, folder=True) as temporary:
        with open(temporary / MOMENTS, "wb") as file:
            for start in range(0, len(source), batch_size):
                indices = range(start, min(start + batch_size, len(source)))
                found = source.read_many(indices)
                source.note_skipped((bad.name, bad.reason) for bad in found if isinstance(bad, BadImage))
                good = {
                    i: crop_square(image, image_size)
                    for i, image in zip(indices, found, strict=True)
                    if isinstance(image, Tensor)
                }
                if good:
                    file.write(mirrored_moments(vae, torch.stack(list(good.values()))).tobytes())
                kept += good
                progress(len(indices))
        if source.labels is not None:
            np.save(temporary / LABELS, np.asarray(source.labels, dtype=np.int64)[kept])
        side = image_size // factor
        card = LatentCard(
            scale=float(vae.config.scaling_factor if scale is None else scale),
            vae=vae_name,
            vae_hash=hash_tensors(vae.state_dict()),
            image_size=image_size,
            shape=(len(kept), 2, 2 * vae.config.latent_channels, side, side),
            source=source.fingerprint,
            classes=source.classes,
        )
        (temporary / CARD).write_text(json.dumps(asdict(card), indent=2) + "\n")
    return card


def mirrored_moments(vae: Any, images: Tensor) -> np.ndarray:
    """uint8 images (B, 3, H, W) -> float32 (B, 2, 2 C, h, w): moments of each image and of its mirror image."""
    x = autoencoder_preprocess(vae, images.shape[-1]).apply(images.to(next(vae.parameters()).device))
    both = torch.stack([encode_moments(vae, x), encode_moments(vae, x.flip(-1))], dim=1)
    return both.to(torch.float32).numpy(force=True)


def autoencoder_preprocess(vae: Any, image_size: int) -> Preprocess:
    """An autoencoder takes images in -1 .. 1."""
    channels = int(vae.config.in_channels)
    return Preprocess((0.5,) * channels, (0.5,) * channels, image_size, channels)


def is_latents(path: str | Path) -> bool:
    return (Path(path) / CARD).is_file()


def read_card(path: str | Path) -> LatentCard:
    if not is_latents(path):
        raise UserError(f"{path} is not a directory of latents; write one with anechoic encode-latents.")
    where = str(Path(path) / CARD)
    values = read_table(where)
    if values.get("format") != FORMAT:
        raise UserError(f"{path} has latents of the format {values.get('format')!r:.60}; encode them again.")
    shape, classes = of_kind(values, "shape", list, where=where), values.get("classes")
    right = len(shape) == 5 and all(isinstance(size, int) and 0 < size < 1 << 40 for size in shape)
    if not right or shape[1] != 2 or shape[2] % 2:
        raise UserError(f"{where} says shape = {shape!r:.80}, which is not (images, 2, 2 C, h, w); encode them again.")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise UserError(f"{where} says classes = {classes!r:.60}, which are no names; encode the latents again.")
    scale = float(of_kind(values, "scale", (int, float), where=where))
    if not (math.isfinite(scale) and scale > 0):
        raise UserError(f"{where} says scale = {scale}, which no latents were multiplied by; encode them again.")
    texts = {name: of_kind(values, name, str, where=where) for name in ("vae", "vae_hash", "source")}
    size = of_kind(values, "image_size", int, where=where)
    return LatentCard(
        scale=scale, image_size=size, shape=tuple(shape), classes=tuple(classes) if classes else None, **texts
    )


class Latents(Source):
    """A cache on disk, memory-mapped, as a source of moments. Sample i is image i // 2, mirrored if i is odd."""

    resident = True
    group_size = 2

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
        self.fingerprint = digest(json.dumps(asdict(self.card), sort_keys=True))
        self.transform = DrawLatents(self.card.scale)
        self.moments = self.map()

    def read_labels(self) -> np.ndarray:
        with numpy_damage(self.path / LABELS):
            found = np.load(self.path / LABELS, mmap_mode="r", allow_pickle=False)
        if found.shape != self.card.shape[:1]:
            raise UserError(f"{self.path / LABELS} has the shape {found.shape} for {self.card.shape[0]} images.")
        return check_labels(found, where=str(self.path / LABELS))

    def map(self) -> np.memmap:
        return np.memmap(self.path / MOMENTS, dtype=np.float32, mode="r", shape=self.card.shape)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file again instead of receiving a copy.
        return {**self.__dict__, "moments": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.moments = self.map()

    def __len__(self) -> int:
        return 2 * self.card.shape[0]

    def name(self, index: int) -> str:
        return f"{index // 2}{' mirrored' if index % 2 else ''}"

    def read(self, index: int, *, min_side: int | None = None) -> Tensor:
        """Moments float32 (2 C, h, w)."""
        return torch.from_numpy(np.array(self.moments[index // 2, index % 2]))


@dataclass(frozen=True)
class DrawLatents:
    """Stands where images have their augmentation: moments become scaled latents, new at each visit of a sample."""

    scale: float

    def __call__(self, images: Sequence[Tensor], *, image_size: int, generator: SampleGenerator) -> Tensor:
        """B moments (2 C, h, w) -> (B, C, h, w) float32."""
        stacked = torch.stack(list(images))
        doubled, height, width = stacked.shape[1:]
        if (height, width) != (image_size, image_size):
            raise UserError(f"These latents are {height} x {width}: set the image size to {height}, not {image_size}.")
        return draw_latents(stacked, generator.normal("latent", doubled // 2, height, width), scale=self.scale)


def matching_scale(card: LatentCard, vae: Any, *, given: float | None = None) -> float:
    """The factor to decode with; the cache's, which another autoencoder's or the caller's must not contradict."""
    if given is not None and given != card.scale:
        raise UserError(f"these latents were scaled by {card.scale:g}, not {given:g}; leave --scale out.")
    if hash_tensors(vae.state_dict()) != card.vae_hash and float(vae.config.scaling_factor) != card.scale:
        raise UserError(
            f"the model was trained on latents scaled by {card.scale:g}, this autoencoder scales by "
            f"{vae.config.scaling_factor:g}; give the one they were encoded with ({card.vae})."
        )
    return card.scale
