"""The frozen KL autoencoder (VAE) between images and latents: load, encode to moments on disk, decode.

It is diffusers' `AutoencoderKL`, from a folder or the hub; nothing here trains it. data/latents.py reads what
`write_latents` writes. B batch, C channels of a latent, h and w its height and width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.adapters.torchvision_operators import import_library
from anechoic.data.latents import CARD, LABELS, MOMENTS, LatentCard, LatentSpace, crop_square, is_latents, read_card
from anechoic.data.preprocess import Preprocess
from anechoic.data.source import BadImage, Source
from anechoic.errors import UserError
from anechoic.storage.files import write_aside
from anechoic.storage.fingerprint import hash_tensors
from anechoic.storage.safe_io import read_table, reason, refuse_giants, refuse_odd_files, refuse_unbacked


def load_vae(name: str, *, device: torch.device | str = "cpu") -> Any:
    """Return a frozen `AutoencoderKL` from a local folder, else from the hub."""
    AutoencoderKL = import_library("diffusers", extra="diffusion").AutoencoderKL
    local = Path(name).exists()
    if local:
        refuse_other_folder(Path(name))
    try:
        if local:
            with torch.device("meta"):
                skeleton = AutoencoderKL.from_config(AutoencoderKL.load_config(name, local_files_only=True))
            count = sum(parameter.numel() for parameter in skeleton.parameters())
            refuse_unbacked(count, Path(name), where=name)
        vae, info = AutoencoderKL.from_pretrained(name, local_files_only=local, output_loading_info=True)
    except UserError:
        raise
    # diffusers meets damaged folders with almost any exception.
    except Exception as error:
        remedy = "save it again" if local else "check the name, or give a local folder"
        raise UserError(f"No autoencoder could be loaded from {name} ({reason(error)}); {remedy}.") from error
    lost = [*info["missing_keys"], *info["mismatched_keys"]]
    if lost:
        raise UserError(f"The weights in {name} do not fit its config.json ({lost[0]} and {len(lost) - 1} more).")
    return vae.eval().requires_grad_(False).to(device)


def refuse_other_folder(path: Path) -> None:
    """Raise UserError unless the folder's config.json names AutoencoderKL."""
    card = path / "config.json"
    kind = None
    if card.is_file():
        refuse_odd_files(path)
        settings = read_table(card)
        kind = settings.get("_class_name")
        refuse_giants(settings, where=str(card))
    if kind != "AutoencoderKL":
        found = f"its config.json names {kind!r:.80}" if kind else "it has no config.json that names one"
        raise UserError(
            f"{path} is not the folder of an AutoencoderKL ({found}); give one written by its save_pretrained."
        )


def downscaling(vae: Any) -> int:
    """Return the factor between the image size and the latent size."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


@torch.inference_mode()
def encode_moments(vae: Any, images: Tensor) -> Tensor:
    """Images (B, C, H, W) in -1..1 -> moments (B, 2 C, h, w): means, then log variances."""
    return vae.encode(images).latent_dist.parameters


@torch.inference_mode()
def decode(vae: Any, latents: Tensor, *, scale: float) -> Tensor:
    """Scaled latents (B, C, h, w) -> images (B, 3, H, W) in -1..1."""
    return vae.decode(latents / scale).sample


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
    """Encode every readable image and its mirror image to OUT, atomically. scale: default the autoencoder's own."""
    factor = downscaling(vae)
    if image_size < factor or image_size % factor:
        raise UserError(f"This autoencoder divides sizes by {factor}: choose --image-size as a multiple of {factor}.")
    if out.exists():
        raise UserError(f"{out} exists already; choose another directory for the latents, or remove it first.")
    kept: list[int] = []
    with write_aside(out, folder=True) as temporary:
        with open(temporary / MOMENTS, "wb") as file:
            for start in range(0, len(source), batch_size):
                indices = range(start, min(start + batch_size, len(source)))
                found = source.read_many(indices)
                source.add_skipped((bad.name, bad.reason) for bad in found if isinstance(bad, BadImage))
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
    """Return the preprocessing of an autoencoder, whose images are in -1 .. 1."""
    channels = int(vae.config.in_channels)
    return Preprocess((0.5,) * channels, (0.5,) * channels, image_size, channels)


def latent_space(model: Any, config: Mapping[str, Any]) -> LatentSpace | None:
    """Return the space a model's latents are in: by its own card, else by the data folder of its run's config."""
    source = config.get("data", {}).get("source", "")
    if model.latents is None and source and is_latents(source):
        return read_card(source).space
    return model.latents


def matching_scale(space: LatentSpace, vae: Any) -> float:
    """Return the factor to decode with; UserError if another autoencoder contradicts it."""
    if hash_tensors(vae.state_dict()) != space.vae_hash and float(vae.config.scaling_factor) != space.scale:
        raise UserError(
            f"The model was trained on latents scaled by {space.scale:g}, this autoencoder scales by "
            f"{vae.config.scaling_factor:g}: use the one they were encoded with ({space.vae})."
        )
    return space.scale
