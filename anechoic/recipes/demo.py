"""The recipe behind `anechoic demo`: small enough for two of them to train side by side in about a minute."""

from __future__ import annotations

from dataclasses import replace

from anechoic.config import Config, MonitorConfig, OptimConfig
from anechoic.recipes.pocket import pocket_mae_digits


def demo_mae() -> Config:
    """The masked autoencoder of `anechoic demo`, on the embedded digits.

    Command: anechoic train demo_mae --out runs/demo-mae
    Cost: under 90 seconds on one processor core.
    Expect: whatever `anechoic demo` reports for it on your machine; it prints the table.
    """
    base = pocket_mae_digits()
    return replace(
        base,
        optim=OptimConfig(batch_size=128, samples=76_800, lr=2e-3),
        monitor=MonitorConfig(),
        threads=1,
    )


RECIPES = (demo_mae,)
