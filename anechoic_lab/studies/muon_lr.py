"""Muon's best learning rate over width and batch, by held-out loss.

Short trainings of residual autoencoders on photographs, with the seed of the other searches; no label is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anechoic.config import Config
from anechoic.sweeps.trial import EvalPlan
from anechoic_lab.grids import Row, Variant
from anechoic_lab.paper.pocket import mae
from anechoic_lab.studies.lr_search import losses_grid

SAMPLES = 32_000
LRS = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
USUAL = 8e-3

# name -> (in words, settings of the autoencoder)
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("width 96, batch 128", {}),
    "width48": ("width 48, batch 128", {"dim": 48}),
    "width192": ("width 192, batch 128", {"dim": 192}),
    "batch32": ("width 96, batch 32", {"batch": 32}),
    "batch512": ("width 96, batch 512", {"batch": 512}),
}


def autoencoder(lr: float, **settings: Any) -> Config:
    config = mae(1.0, samples=SAMPLES, lr=lr, **settings)
    return replace(config, optim=replace(config.optim, algorithm="muon"))


def lr_name(name: str, lr: float) -> str:
    return f"{name}-lr{lr:g}"


def variants() -> dict[str, Variant]:
    return {
        lr_name(name, lr): Variant(autoencoder(lr, **settings), EvalPlan())
        for name, (_, settings) in SIZES.items()
        for lr in LRS
    }


LR_GRID = losses_grid(
    "muon-lr",
    "Muon's best learning rate over width and batch, by held-out loss",
    "muon-settings",
    [
        Row(f"{words}, {SAMPLES:,} samples, peak learning rate {lr:g}", lr_name(name, lr))
        for name, (words, _) in SIZES.items()
        for lr in LRS
    ],
    baseline=lr_name("base", USUAL),
)

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {"muon-settings": variants}
GRIDS = {LR_GRID.name: LR_GRID}
