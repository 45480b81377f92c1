"""Fine-tuning of a pre-trained encoder on labels, at the paper's scale (Table 1, "FT"; He et al. 2022, Table 9).

`anechoic finetune RUN` fills in the encoder's sizes, the labels' number and the weights to start from.
"""

from __future__ import annotations

from dataclasses import replace

from anechoic.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    ShortcutConfig,
)


def finetune_base_in1k() -> Config:
    """ViT-B/16 with decayed shortcuts, fine-tuned on ImageNet-1K from a run of mae_in1k.

    Command: anechoic train finetune_base_in1k --init-from runs/in1k --data.source imagenet/train --out runs/in1k-ft
    Cost: 100 epochs of ImageNet-1K, forward and backward of all patches.
    Expect: 82.9 % with alpha_min 0.6, 83.6 % with the original masked autoencoder (the paper's).
    """
    return Config(
        data=DataConfig(image_size=224, augment="crop", scale=(0.08, 1.0), flip=True, labels=True),
        model=ModelConfig(
            "vit_base_patch16",
            # Pooled patches through a norm of their own make the encoder's final norm needless; positions are trained.
            {"num_classes": 1000, "pool": "mean", "norm": False, "positions": "learned", "drop_path": 0.1},
        ),
        shortcut=ShortcutConfig(alpha_min=0.6),
        objective=ObjectiveConfig("finetuning", {"num_classes": 1000}),
        optim=OptimConfig(
            batch_size=1024,
            epochs=100,
            base_lr=5e-4,
            min_lr=1e-6,
            warmup=0.05,
            betas=(0.9, 0.999),
            weight_decay=0.05,
            exempt=("positions", "class_token"),
            layer_decay=0.65,
        ),
    )


def finetune_large_in1k() -> Config:
    """ViT-L/16, as the base recipe but for 50 epochs, with a layer decay of 0.75 and a drop path of 0.2.

    Command: anechoic train finetune_large_in1k --init-from runs/large --data.source imagenet/train --out runs/large-ft
    Cost: 50 epochs of ImageNet-1K with three times the base model's work.
    Expect: the paper has no number for it.
    """
    base = finetune_base_in1k()
    return replace(
        base,
        model=ModelConfig("vit_large_patch16", {**base.model.options, "drop_path": 0.2}),
        optim=replace(base.optim, epochs=50, base_lr=1e-3, layer_decay=0.75),
    )


RECIPES = (finetune_base_in1k, finetune_large_in1k)
