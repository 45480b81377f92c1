"""Every model family at a size that runs in milliseconds, with its inputs: shared by many tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anechoic import build_model

TINY = {"dim": 48, "depth": 4, "num_heads": 3, "image_size": 16}
DECODER = {"decoder_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2}
LABELS = {"num_classes": 5, "label_dropout": 0.1}

# Case -> (name, options that make it tiny); decay is added by the caller.
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch4", TINY),
    "vit-raw": ("vit_tiny_patch4", {**TINY, "norm": False}),
    "vit-learned": ("vit_tiny_patch4", {**TINY, "positions": "learned"}),
    "vit-raw-learned": ("vit_tiny_patch4", {**TINY, "positions": "learned", "norm": False}),
    "vit-class-head": ("vit_tiny_patch4", {**TINY, "num_classes": 7}),
    "vit-mean-head": ("vit_tiny_patch4", {**TINY, "num_classes": 7, "pool": "mean", "norm": False}),
    "mae": ("mae_tiny_patch4", {**TINY, **DECODER}),
    "mae-without-skips": ("mae_tiny_patch4", {**TINY, **DECODER, "skips": False}),
    "mae-without-norm-pix": ("mae_tiny_patch4", {**TINY, **DECODER, "norm_pix": False, "encoder_norm": True}),
    "uvit": ("uvit_small", {**TINY, "num_heads": 4, "in_channels": 4}),
    "uvit-conditional": ("uvit_small", {**TINY, **LABELS, "final_conv": False}),
    "sit": ("sit_s_patch2", {**TINY, **LABELS}),
    "sit-with-skips": ("sit_s_patch2", {**TINY, **LABELS, "skips": True}),
    "sit-unconditional": ("sit_s_patch2", {**TINY, "num_classes": None, "skips": True}),
    "resnet": ("resnet18", {"image_size": 16, "width": 8, "num_blocks": 9, "num_classes": 10}),
    "resnet-imagenet-stem": ("resnet18", {"image_size": 48, "width": 8, "stem": "imagenet", "num_classes": 10}),
}


def make(case: str, **options: Any) -> Any:
    """Return a tiny network whose weights all differ from their (often zero) initial values."""
    name, tiny = ZOO[case]
    torch.manual_seed(0)
    model = build_model(name, **{**tiny, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 0:  # a learnable alpha stays in its range
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def inputs(model: nn.Module, *, dtype: torch.dtype = torch.float32, batch: int = 3) -> tuple[Tensor, ...]:
    """Return the arguments of the forward, the same for every network of the same shape."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, config.in_channels, *config.size, generator=generator, dtype=torch.float64).to(dtype)
    family = type(model).__name__
    if family == "MaskedAutoencoder":
        return images, torch.rand(batch, config.grid_size[0] * config.grid_size[1], generator=generator)
    if family in ("UViT", "SiT"):
        t = torch.rand(batch, generator=generator, dtype=torch.float64).to(dtype)
        labels = (torch.arange(batch) % 5,) if config.num_classes else ()
        return images, t, *labels
    return (images,)


def outputs(model: nn.Module, *arguments: Tensor) -> Tensor:
    """Return all outputs of the network, flattened into one vector."""
    out = model(*arguments)
    parts = list(out) if isinstance(out, tuple) else [out]
    return torch.cat([part.flatten() for part in parts])


def tiny_vae(**options):
    """Return diffusers' autoencoder with a few random weights: 16 pixels to 4 channels of 8 x 8 latents."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        **options,
    )
