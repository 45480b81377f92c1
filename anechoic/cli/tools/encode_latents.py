"""The command `tools encode-latents`: latents of images, encoded once for training."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import BatchSize, Data, ImageSize, Out, PathLike
from anechoic.errors import UserError
from anechoic.outcome import Outcome


@command
def encode_latents(
    data: Data,
    /,
    *,
    out: Out,
    vae: PathLike,
    image_size: ImageSize = 256,
    labels: bool = False,
    scale: float | None = None,
    batch_size: BatchSize = 16,
) -> Outcome:
    """Encode images once with a frozen autoencoder, so that a denoiser can be trained on its latents.

    The folder gets the moments of every image and of its mirror image, and the factor that scales them.

    Example: anechoic tools encode-latents imagenet100/train -o in100-latents --vae stabilityai/sd-vae-ft-ema --labels

    Args:
        vae: local folder or hub name of a diffusers AutoencoderKL.
        labels: keep the labels too, for class-conditional training.
        scale: factor of the latents; by default the autoencoder's own.
    """
    from tqdm.auto import tqdm

    from anechoic.data import open_source
    from anechoic.diffusion.vae import load_vae, write_latents
    from anechoic.runtime.devices import current_device

    started = time.perf_counter()
    out, vae = Path(out), str(vae)
    if batch_size < 1:
        raise UserError("--batch-size must be at least 1.")
    network = load_vae(vae, device=current_device())
    source = open_source(data, labels=labels, channels=network.config.in_channels)
    with tqdm(total=len(source), unit="img", desc="encoding", disable=None) as bar:
        card = write_latents(
            source,
            out,
            vae=network,
            vae_name=str(Path(vae).absolute()) if Path(vae).exists() else vae,
            image_size=image_size or 256,
            scale=scale,
            batch_size=batch_size,
            progress=bar.update,
        )
    count, _, channels, height, width = card.shape
    return Outcome(
        config={},
        metrics={"images": count, "skipped": len(source.skipped), "card": asdict(card)},
        seconds=round(time.perf_counter() - started, 3),
        text=f"{count} images and their mirror images as latents of {channels // 2} x {height} x {width}, scaled by "
        f"{card.scale:g}: {out}",
    )
