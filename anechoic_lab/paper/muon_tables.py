"""The paper's tables of masked autoencoders where decay leads: Muon and 512,000 samples.

The protocol is that of pocket.py, but for Muon at the peak learning rate that k-NN on held-out training images chooses
for both arms among those that were run (cifar-short-lr), the length, one more alpha_min, and the evaluation of
cifar_length.py: 10,000 training and 5,000 test images, raw and whitened. A network takes about 6 CPU minutes (1 core).
Measures were named before any of it was run: k-NN and linear probe with token, layer and scaling chosen on held-out
training images, and the linear probe and the whitened k-NN of the mean token. Seeds are those that no choice used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from anechoic_lab.grids import CHOSEN, Grid, Row, Variant
from anechoic_lab.paper import pocket
from anechoic_lab.paper.pocket import mae, mae_variants

SAMPLES, LR = 512_000, 2e-3
ALPHAS = (*pocket.ALPHAS, 0.4)
GROUP = "mae-muon"
FIRST_SEED = 40
EVALUATION = replace(pocket.LONG_EVALUATION, selection=True)
MEASURES = CHOSEN | pocket.LONG_PROBES


def with_muon(grid: Grid) -> Grid:
    """Return the table of the same rows in this regime; a table of alphas has one more row."""
    more = [Row("alpha_min 0.4", "alpha0.4")] if grid.rows == pocket.TABLE2.rows else []
    return replace(
        grid,
        name=f"{grid.name}-muon",
        title=f"{grid.title} (Muon, {SAMPLES:,} samples)",
        group=GROUP,
        rows=[*grid.rows, *more],
        metrics=MEASURES if grid.metrics == pocket.PROBES else grid.metrics,
        first_seed=FIRST_SEED,
    )


# The headline: `reproduce cifar-fresh --seeds 5`.
FRESH = replace(
    with_muon(pocket.TABLE2),
    name="cifar-fresh",
    title=f"CIFAR-100: decayed against residual after {SAMPLES:,} samples, fresh seeds",
    rows=[Row(f"Muon, alpha_min {alpha:g}", f"alpha{alpha:g}") for alpha in pocket.PAIR],
)
# Held-out loss chooses another rate for the residual arm, and the same for the decayed one.
LR_BY_LOSS = 4e-3
RESIDUAL_BY_LOSS = f"alpha1-lr{LR_BY_LOSS:g}"
FRESH_BY_LOSS = replace(
    FRESH,
    name="cifar-fresh-loss",
    title="CIFAR-100: the same seeds, each arm at the learning rate that held-out loss chooses",
    rows=[
        Row(f"Muon, alpha_min 1, peak learning rate {LR_BY_LOSS:g}", RESIDUAL_BY_LOSS),
        Row(f"Muon, alpha_min 0.6, peak learning rate {LR:g}", "alpha0.6"),
    ],
    baseline=RESIDUAL_BY_LOSS,
)


def variants() -> dict[str, Variant]:
    make = partial(mae, algorithm="muon", samples=SAMPLES)
    by_loss = Variant(make(1.0, lr=LR_BY_LOSS), EVALUATION)
    return {**mae_variants(partial(make, lr=LR), EVALUATION, ALPHAS), RESIDUAL_BY_LOSS: by_loss}


GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {GROUP: variants}
GRIDS = {
    grid.name: grid
    for grid in (
        FRESH,
        FRESH_BY_LOSS,
        *map(with_muon, (pocket.TABLE1, pocket.TABLE2, pocket.TABLE3A, pocket.TABLE3B, pocket.FIG5)),
    )
}
