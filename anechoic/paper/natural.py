"""Photographs with Muon at a fair rate: CIFAR-100, the pocket protocol, each arm at its own best of five peak rates.

The rates are chosen by the loss on 256 held-out images, never by a label; the claim is made with seeds that no choice
had seen, on 10,000 images to fit and vote and 5,000 to test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anechoic.config import Config
from anechoic.paper.grids import Grid, Row, Variant
from anechoic.paper.pocket import PAIR, mae
from anechoic.paper.trial import EvalPlan

SAMPLES = 96_000
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)


def photographs(alpha_min: float, lr: float) -> Config:
    config = mae(alpha_min, samples=SAMPLES, lr=lr)
    return replace(config, optim=replace(config.optim, algorithm="muon"))


def rate_name(alpha: float, lr: float) -> str:
    return f"muon-lr{lr:g}-alpha{alpha:g}"


def rate_variants() -> dict[str, Variant]:
    return {rate_name(alpha, lr): Variant(photographs(alpha, lr), EvalPlan()) for alpha in PAIR for lr in RATES}


SEARCH = Grid(
    name="natural-search",
    title="Photographs with Muon: peak rates by held-out loss",
    claim="",
    group="natural-rates",
    rows=[
        Row(f"Muon, alpha_min {alpha:g}, {SAMPLES:,} samples, peak rate {lr:g}", rate_name(alpha, lr))
        for alpha in PAIR
        for lr in RATES
    ],
    metrics={"training.-1.held_out_loss": "held-out loss"},
    baseline=rate_name(1.0, RATES[0]),
    kind="losses",
)

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {"natural-rates": rate_variants}
GRIDS = {grid.name: grid for grid in (SEARCH,)}
