"""Masked autoencoders at the paper's scale, with their baselines: residual (alpha_min 1, with skips) and plain MAE.

Settings of the paper's appendix A where it states them. Recipes for a laptop are in pocket.py.
"""

from __future__ import annotations

from dataclasses import replace

from anechoic.config import Config, DataConfig, ModelConfig, ObjectiveConfig, OptimConfig, SaveConfig, ShortcutConfig


def mae_in1k() -> Config:
    """ViT-B/16 with decayed shortcuts on ImageNet-1K.

    Command: anechoic train mae_in1k --data.source imagenet/train --out runs/in1k
    Cost: about 200 hours on four A40 (the paper's).
    Expect: linear probe 72.7 % (the paper's).
    """
    return Config(
        data=DataConfig(image_size=224, augment="crop", scale=(0.2, 1.0), flip=True),
        model=ModelConfig("mae_base_patch16", {"skips": True, "mask_ratio": 0.75, "norm_pix": True}),
        shortcut=ShortcutConfig(alpha_min=0.6),
        objective=ObjectiveConfig("masked_reconstruction"),
        # 40 of 800 epochs of warm-up.
        optim=OptimConfig(
            batch_size=1024, epochs=800, base_lr=1.5e-4, warmup=0.05, betas=(0.9, 0.95), weight_decay=0.05
        ),
        save=SaveConfig(keep_last=2),
    )


def mae_in1k_residual() -> Config:
    """The same network with plain residual connections: alpha_min 1, skips kept.

    Command: anechoic train mae_in1k_residual --data.source imagenet/train --out runs/in1k-residual
    Cost: as mae_in1k.
    Expect: the paper has no number for it.
    """
    return residual(mae_in1k())


def mae_in1k_plain() -> Config:
    """The original masked autoencoder: no skips, plain residual connections, a norm after the encoder.

    Command: anechoic train mae_in1k_plain --data.source imagenet/train --out runs/in1k-plain
    Cost: somewhat less than mae_in1k.
    Expect: linear probe 67.8 % (its authors', after 1600 epochs at batch 4096).
    """
    return plain(mae_in1k())


def mae_in100() -> Config:
    """ViT-B/16 with decayed shortcuts on ImageNet-100.

    Command: anechoic train mae_in100 --data.source imagenet100/train --out runs/in100
    Cost: about 20 hours on four A40 (the paper's).
    Expect: linear probe 83.6 % (the paper's).
    """
    return mae_in1k()


def mae_in100_residual() -> Config:
    """The same network with plain residual connections: alpha_min 1, skips kept.

    Command: anechoic train mae_in100_residual --data.source imagenet100/train --out runs/in100-residual
    Cost: as mae_in100.
    Expect: linear probe 76.5 % (the paper's).
    """
    return residual(mae_in100())


def mae_in100_plain() -> Config:
    """The original masked autoencoder: no skips, plain residual connections, a norm after the encoder.

    Command: anechoic train mae_in100_plain --data.source imagenet100/train --out runs/in100-plain
    Cost: somewhat less than mae_in100.
    Expect: the paper has no number for it.
    """
    return plain(mae_in100())


def mae_cifar100() -> Config:
    """ViT-Ti/4 with decayed shortcuts on CIFAR-100 at 32 pixels: a full-length run for one GPU.

    Command: anechoic train mae_cifar100 --data.source cifar100/train.parquet --out runs/cifar100
    Cost: 20,000 updates of 1024 images.
    Expect: not measured; the paper has no masked autoencoder on CIFAR-100.
    """
    base = mae_in1k()
    small_decoder = {"decoder_dim": 192, "decoder_depth": 6, "decoder_num_heads": 3}
    return replace(
        base,
        data=replace(base.data, source="hf:cifar100:train", image_size=32),
        model=ModelConfig("mae_tiny_patch4", {**base.model.options, **small_decoder}),
        optim=replace(base.optim, epochs=400),
    )


def mae_cifar100_residual() -> Config:
    """The same network with plain residual connections: alpha_min 1, skips kept.

    Command: anechoic train mae_cifar100_residual --data.source cifar100/train.parquet --out runs/cifar100-residual
    Cost: as mae_cifar100.
    Expect: not measured.
    """
    return residual(mae_cifar100())


def residual(config: Config) -> Config:
    """alpha_min 1 and nothing else."""
    return replace(config, shortcut=ShortcutConfig(alpha_min=1.0))


def plain(config: Config) -> Config:
    """The original MAE: alpha_min 1 and no skips."""
    config = residual(config)
    return replace(config, model=replace(config.model, options={**config.model.options, "skips": False}))


RECIPES = (
    mae_in1k,
    mae_in1k_residual,
    mae_in1k_plain,
    mae_in100,
    mae_in100_residual,
    mae_in100_plain,
    mae_cifar100,
    mae_cifar100_residual,
)
