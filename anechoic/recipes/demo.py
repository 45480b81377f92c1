"""The recipe behind `anechoic demo`: small enough for two of them to train side by side in two minutes."""

from __future__ import annotations

from dataclasses import replace

from anechoic.config import Config, ValidationConfig
from anechoic.recipes.pocket import pocket_mae_emoji


def demo_mae() -> Config:
    """The masked autoencoder of `anechoic demo`, on the embedded emoji.

    Command: anechoic train demo_mae --out runs/demo-mae
    Cost: 64,000 samples, two minutes on one CPU core.
    Expect: whatever `anechoic demo` reports for it on your machine; it prints the table.
    """
    base = pocket_mae_emoji()
    return replace(
        base,
        optim=replace(base.optim, samples=64_000),
        validation=ValidationConfig(every=6_400),
        threads=1,
    )


RECIPES = (demo_mae,)
