"""Diffusion and flow models: U-ViT and SiT at the paper's scale (Table 4 and the released code), and pocket sizes.

Each recipe of the paper comes at its four values of alpha_min; `NAME` has the one the paper found best, `NAME_residual`
is plain (alpha_min 1), `NAME_alpha08` and the like are the others. Everything else is the same for all four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anechoic.config import Config, DataConfig, ModelConfig, ObjectiveConfig, OptimConfig, SaveConfig, ShortcutConfig

UVIT_OPTIM = OptimConfig(
    lr=2e-4, betas=(0.99, 0.99), weight_decay=0.03, weight_decay_on="all", schedule="constant", ema=0.9999, epochs=None
)


def pixels(source: str, *, size: int, channels: int, flip: bool, labels: bool = False) -> DataConfig:
    """Return the data of whole images, normalized to -1..1."""
    half = (0.5,) * channels
    return DataConfig(
        source, image_size=size, channels=channels, mean=half, std=half, augment="none", flip=flip, labels=labels
    )


def latents(*, labels: bool = False) -> DataConfig:
    """Latents that `anechoic tools encode-latents` wrote: four channels of 32 x 32, a network's input as they are."""
    mean, std = (0.0,) * 4, (1.0,) * 4
    return DataConfig(
        image_size=32, channels=4, mean=mean, std=std, augment="none", flip=False, labels=labels, holdout=1024
    )


def updates(optim: OptimConfig, count: int, *, batch_size: int, warmup: int) -> OptimConfig:
    """Set the budget in updates, the first `warmup` of them with a rising learning rate."""
    return replace(optim, batch_size=batch_size, samples=count * batch_size, warmup=warmup / count)


# ---- the paper's ----------------------------------------------------------------------------------------------------


def uvit_cifar100() -> Config:
    """U-ViT-S/2 on CIFAR-100 pixels, unconditional, continuous VP noise prediction.

    Command: anechoic train uvit_cifar100 --data.source cifar100/train.parquet --out runs/uvit-cifar100
    Cost: 500,000 updates of 128 images; 44 M parameters.
    Expect: FID 14.34, 11.65, 8.99, 11.71 and linear probe 62.47, 63.58, 66.86, 64.63 % at alpha_min 1, 0.8, 0.7, 0.6
        (the paper's).
    """
    return Config(
        data=pixels("hf:cifar100:train", size=32, channels=3, flip=True),
        model=ModelConfig("uvit_small", {"patch_size": 2}),
        shortcut=ShortcutConfig(alpha_min=0.7),
        objective=ObjectiveConfig("noise_prediction", {"process": "vp"}),
        optim=updates(replace(UVIT_OPTIM, betas=(0.99, 0.999)), 500_000, batch_size=128, warmup=2500),
        save=SaveConfig(keep_last=2, keep_every=50_000 * 128),
        seed=1234,
    )


def uvit_in100_latent() -> Config:
    """U-ViT-M/2 on ImageNet-100 latents, unconditional, continuous VP noise prediction.

    Command: anechoic train uvit_in100_latent --data.source in100-latents --out runs/uvit-in100
    Cost: 300,000 updates of 1024 latents; 130 M parameters.
    Expect: FID 44.40, 40.96, 41.17, 43.51 and linear probe 72.8, 74.5, 76.1, 75.8 % at alpha_min 1, 0.8, 0.7, 0.6
        (the paper's).
    """
    return Config(
        data=latents(),
        model=ModelConfig("uvit_mid", {"patch_size": 2}),
        shortcut=ShortcutConfig(alpha_min=0.7),
        objective=ObjectiveConfig("noise_prediction", {"process": "vp"}),
        optim=updates(UVIT_OPTIM, 300_000, batch_size=1024, warmup=5000),
        save=SaveConfig(keep_last=2, keep_every=50_000 * 1024),
        seed=1234,
    )


def uvit_in100_latent_cond() -> Config:
    """U-ViT-M/2 on ImageNet-100 latents, class-conditional; 15 % of the labels are dropped for guidance.

    Command: anechoic train uvit_in100_latent_cond --data.source in100-latents --out runs/uvit-in100-cond
    Cost: as uvit_in100_latent.
    Expect: FID 6.93, 5.75, 5.11, 4.98 at alpha_min 1, 0.8, 0.7, 0.6 (the paper's).
    """
    base = uvit_in100_latent()
    return replace(
        base,
        data=latents(labels=True),
        model=replace(base.model, options={**base.model.options, "num_classes": 100, "label_dropout": 0.15}),
        shortcut=ShortcutConfig(alpha_min=0.6),
    )


def sit_xl_in1k_latent() -> Config:
    """SiT-XL/2 with long skips on ImageNet-1K latents, class-conditional flow matching.

    Command: anechoic train sit_xl_in1k_latent --data.source in1k-latents --out runs/sit-in1k
    Cost: 1400 epochs at batch 256; 694 M parameters.
    Expect: the paper's code has this recipe at alpha_min 0.8 but no number for it; plain SiT-XL/2 reaches FID 2.06
        with guidance (its authors').
    """
    return Config(
        data=latents(labels=True),
        model=ModelConfig("sit_xl_patch2", {"skips": True, "num_classes": 1000, "label_dropout": 0.1}),
        shortcut=ShortcutConfig(alpha_min=0.8),
        objective=ObjectiveConfig("flow_matching"),
        # An image and its mirror image are two samples, so 700 passes are 1400 epochs.
        optim=OptimConfig(
            batch_size=256,
            epochs=700,
            lr=1e-4,
            warmup=0.0,
            schedule="constant",
            betas=(0.9, 0.999),
            weight_decay=0.0,
            ema=0.9999,
        ),
        save=SaveConfig(keep_last=2, keep_every=50_000 * 256),
    )


# ---- pocket ---------------------------------------------------------------------------------------------------------


def pocket_uvit_digits() -> Config:
    """A small U-ViT that draws handwritten digits.

    Command: anechoic train pocket_uvit_digits --out runs/digits
    Cost: 239 CPU seconds (measured, one thread).
    Expect: 1,000 samples in 50 evaluations: fd-digits 0.91 (28.8 untrained), all ten digits, mean confidence 0.886 of
        the digit classifier (measured).
    """
    return Config(
        data=pixels("digits:train", size=8, channels=1, flip=False),
        model=ModelConfig("uvit_small", {"patch_size": 4, "dim": 128, "depth": 4, "num_heads": 4}),
        shortcut=ShortcutConfig(alpha_min=0.8),
        objective=ObjectiveConfig("noise_prediction", {"process": "vp"}),
        optim=replace(
            updates(UVIT_OPTIM, 2400, batch_size=128, warmup=100),
            lr=2e-3,
            betas=(0.9, 0.99),
            schedule="cosine",
            ema=0.995,
        ),
    )


def pocket_uvit_digits_cond() -> Config:
    """The same U-ViT, conditioned on the digit; one label in ten is dropped for guidance.

    Command: anechoic train pocket_uvit_digits_cond --out runs/digits-cond
    Cost: 269 CPU seconds (measured, one thread).
    Expect: 96.8 % of 1,000 samples show the given digit, 99.9 % at guidance 1; fd-digits 0.39 and 1.86 (measured).
    """
    base = pocket_uvit_digits()
    return replace(
        base,
        data=replace(base.data, labels=True),
        model=replace(base.model, options={**base.model.options, "num_classes": 10, "label_dropout": 0.1}),
    )


def pocket_sit_digits_cond() -> Config:
    """A small SiT with skips that draws a given digit, by flow matching.

    Command: anechoic train pocket_sit_digits_cond --out runs/digits-flow
    Cost: 184 CPU seconds (measured, one thread).
    Expect: 97.7 % of 1,000 samples show the given digit, 100 % at guidance 1; fd-digits 0.19 and 0.89 (measured).
    """
    base = pocket_uvit_digits_cond()
    options = {"dim": 128, "depth": 4, "num_heads": 4, "skips": True, "num_classes": 10, "label_dropout": 0.1}
    return replace(base, model=ModelConfig("sit_s_patch4", options), objective=ObjectiveConfig("flow_matching"))


def pocket_uvit_cifar100() -> Config:
    """A small U-ViT on CIFAR-100 for less than an hour on two cores.

    Command: anechoic train pocket_uvit_cifar100 --data.source cifar100/train.parquet --out runs/pocket-cifar100
    Cost: 1.2 CPU seconds per update (measured over 10 updates), so about 40 minutes on two cores for all 4,000.
    Expect: not measured; the paper has nothing of this size.
    """
    base = uvit_cifar100()
    return replace(
        base,
        model=ModelConfig("uvit_small", {"patch_size": 4, "dim": 128, "depth": 6, "num_heads": 4}),
        optim=replace(updates(UVIT_OPTIM, 4000, batch_size=128, warmup=200), lr=1e-3, schedule="cosine", ema=0.999),
        save=SaveConfig(keep_last=2),
        seed=0,
    )


# ---- all values of alpha_min ----------------------------------------------------------------------------------------


def with_alpha(recipe: Callable[[], Config], alpha_min: float) -> Callable[[], Config]:
    """The same recipe at another alpha_min, under its own name."""
    suffix = "residual" if alpha_min == 1 else f"alpha{alpha_min:.1f}".replace(".", "")

    def variant() -> Config:
        return replace(recipe(), shortcut=ShortcutConfig(alpha_min=alpha_min))

    name = f"{recipe.__name__}_{suffix}"
    summary, _, rest = (recipe.__doc__ or "").partition("\n")
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = f"{summary[:-1]}; alpha_min {alpha_min:g}.\n{rest}".replace(
        f"train {recipe.__name__} ", f"train {name} "
    )
    return variant


PAPER = (uvit_cifar100, uvit_in100_latent, uvit_in100_latent_cond, sit_xl_in1k_latent)
ALPHAS = (1.0, 0.8, 0.7, 0.6)
RECIPES = (
    *PAPER,
    *(with_alpha(recipe, alpha) for recipe in PAPER for alpha in ALPHAS if alpha != recipe().shortcut.alpha_min),
    pocket_uvit_digits,
    pocket_uvit_digits_cond,
    pocket_sit_digits_cond,
    pocket_uvit_cifar100,
)
