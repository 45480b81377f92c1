"""Choose model, patch, batch, length and alpha_min of `anechoic pretrain` from the data and the machine.

Rules of thumb by the number of images, their size and the GPU; every choice can be overridden.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from anechoic.choices import AlphaMin
from anechoic.config import (
    Algorithm,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ShortcutConfig,
    budget,
    default_holdout,
)
from anechoic.errors import UserError

# When decayed shortcuts pay (docs/when-does-it-pay.md), in updates. With Muon they are level or behind after 4,000 in
# unscaled vectors, and ahead in most after 16,000. With AdamW they are behind after 4,000, and the paper gained after
# 98,000; half of that is, by order of magnitude, the crossover.
CROSSOVER_UPDATES: dict[Algorithm, int] = {"adamw": 50_000, "muon": 16_000}
# With Muon the measured value, which is also the paper's best at its depth; with AdamW the value for the depth.
LONG_ALPHA_MIN: dict[Algorithm, AlphaMin] = {"adamw": "auto", "muon": 0.6}
# Raw pixels of smaller images predict their class well, so an echo of the input helps.
SMALLEST_SIDE_TO_DECAY = 16
# A masked autoencoder learns for hundreds of epochs; on a CPU the budget is an afternoon.
GPU_EPOCHS, CPU_SAMPLES = 800, 500_000
MAX_SIZE_ON_GPU, MAX_SIZE_ON_CPU = 224, 64
# (minimum number of images, model, its decoder) on a GPU.
SIZES: tuple[tuple[int, str, dict[str, int]], ...] = (
    (500_000, "base", {}),
    (50_000, "small", {}),
    (0, "tiny", {"decoder_dim": 192, "decoder_depth": 6, "decoder_num_heads": 3}),
)
POCKET = {"dim": 96, "depth": 8, "num_heads": 3, "decoder_dim": 96, "decoder_depth": 2, "decoder_num_heads": 3}
# Peak learning rates of larger models per 256 samples of the batch: AdamW's is the paper's, and Muon's has the same
# ratio to it as in long runs of the pocket size.
BASE_LR: dict[Algorithm, float] = {"adamw": 1.5e-4, "muon": 6e-4}


def choose_image_size(side: int, *, gpus: int) -> int:
    """Return the images' shorter side, at most what the machine can train, rounded down to a multiple for patches."""
    side = min(side, MAX_SIZE_ON_GPU if gpus else MAX_SIZE_ON_CPU)
    step = 2 if side < 16 else 4 if side < 48 else 8 if side < 128 else 16
    return max(step, side // step * step)


def choose_patch(image_size: int) -> int:
    """Return the patch size that divides the side into 8 to 16 patches, or comes nearest."""
    fitting = [patch for patch in (2, 4, 8, 14, 16) if image_size % patch == 0 and image_size // patch >= 2]
    if not fitting:
        raise UserError(f"Images of {image_size} pixels cannot be divided into patches: choose a multiple of 4.")
    return min(fitting, key=lambda patch: (abs(image_size / patch - 10), patch))


def choose_batch(size: int, *, gpus: int) -> int:
    """Return a power of two with at least eight updates per epoch where possible, at most 1024 (CPU: 128)."""
    batch = 1024 if gpus else 128
    while batch > 16 and size < 8 * batch:
        batch //= 2
    return min(batch, max(1, size))


def pretrain_config(
    source: str,
    *,
    size: int,
    side: int,
    gpus: int,
    image_size: int | None = None,
    channels: int = 3,
    model: str | None = None,
    options: dict[str, Any] | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    algorithm: Algorithm | None = None,
    lr: float | None = None,
    alpha_min: AlphaMin | None = None,
    seed: int = 0,
    devices: int | None = None,
) -> Config:
    """Return the config for `size` images whose shorter side is about `side` pixels; None is chosen."""
    if image_size is None:
        image_size = choose_image_size(side, gpus=gpus)
    trained_on = size - default_holdout(size)
    if batch_size is None:
        batch_size = choose_batch(trained_on, gpus=gpus)
    if epochs is None:
        epochs = float(GPU_EPOCHS if gpus else max(1, min(800, CPU_SAMPLES // max(1, size))))
    algorithm = algorithm or ("adamw" if gpus else "muon")
    optim = OptimConfig(algorithm, batch_size=batch_size, epochs=epochs, lr=lr, base_lr=BASE_LR[algorithm])
    samples = budget(optim, max(batch_size, trained_on))
    if lr is None and model is None and not gpus:
        optim = replace(optim, lr=choose_pocket_lr(algorithm, batch_size=batch_size, samples=samples))
    chosen_model = ModelConfig(model, options or {}) if model else choose_model(size, image_size, gpus=gpus)
    if alpha_min is None:
        updates = samples // batch_size
        skips = bool((options or {}).get("skips", True))
        alpha_min = choose_alpha_min(updates, algorithm=algorithm, image_size=image_size, skips=skips)
    return Config(
        recipe="pretrain",
        data=DataConfig(source=source, image_size=image_size, channels=channels),
        model=ModelConfig(chosen_model.name, {**chosen_model.options, **(options or {})}),
        shortcut=ShortcutConfig(alpha_min=alpha_min),
        optim=optim,
        seed=seed,
        devices=devices,
    )


def choose_model(size: int, image_size: int, *, gpus: int) -> ModelConfig:
    """Return a model by the number of images on a GPU; on a CPU always the pocket size."""
    patch = choose_patch(image_size)
    name, decoder = next((name, decoder) for least, name, decoder in SIZES if size >= least)
    if not gpus:
        name, decoder = "tiny", POCKET
    options: dict[str, Any] = {**decoder, "patch_size": 2} if patch == 2 else dict(decoder)
    return ModelConfig(f"mae_{name}_patch{max(4, patch)}", options)


def choose_pocket_lr(algorithm: Algorithm, *, batch_size: int, samples: int) -> float:
    """Return the peak learning rate of the pocket size.

    Muon's best one by held-out loss (docs/protocol.md) falls from 8e-3 for 32,000 and 96,000 samples to 4e-3 for
    512,000. One seed has it rise with the batch (docs/evidence/muon-lr.md), which is not in the rule.
    """
    if algorithm == "adamw":
        return 1e-3 * batch_size / 128
    return float(f"{8e-3 * min(1.0, math.sqrt(100_000 / samples)):.2g}")


def choose_alpha_min(updates: int, *, algorithm: Algorithm, image_size: int, skips: bool) -> AlphaMin:
    """Decayed shortcuts for long runs on images worth abstracting from, plain ones otherwise.

    Without skips to the decoder the deepest layer must reconstruct the image, and decay never helps.
    """
    pays = updates >= CROSSOVER_UPDATES[algorithm] and image_size >= SMALLEST_SIDE_TO_DECAY and skips
    return LONG_ALPHA_MIN[algorithm] if pays else 1.0
