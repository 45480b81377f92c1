"""The paper's tables of masked autoencoders where decay leads: Muon and 1,024,000 samples.

The protocol is that of pocket.py, but for Muon at a peak learning rate of 2e-3, the length, one more alpha_min, and the
evaluation of cifar_length.py: 10,000 training and 5,000 test images, raw and whitened. A network takes about 17 CPU
minutes (1 core) on a fast machine. Measures were named before any of it was run: the linear probe and the whitened k-NN
of the mean token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from anechoic_lab.grids import Grid, Row, Variant
from anechoic_lab.paper import pocket
from anechoic_lab.paper.pocket import mae, mae_variants

SAMPLES, LR = 1_024_000, 2e-3
ALPHAS = (*pocket.ALPHAS, 0.4)
GROUP = "mae-muon"


def with_muon(grid: Grid) -> Grid:
    """Return the table of the same rows in this regime; a table of alphas has one more row."""
    more = [Row("alpha_min 0.4", "alpha0.4")] if grid.rows == pocket.TABLE2.rows else []
    return replace(
        grid,
        name=f"{grid.name}-muon",
        title=f"{grid.title} (Muon, {SAMPLES:,} samples)",
        group=GROUP,
        rows=[*grid.rows, *more],
        metrics=pocket.LONG_PROBES if grid.metrics == pocket.PROBES else grid.metrics,
    )


GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {
    GROUP: partial(mae_variants, partial(mae, algorithm="muon", samples=SAMPLES, lr=LR), pocket.LONG_EVALUATION, ALPHAS)
}
GRIDS = {
    grid.name: grid
    for grid in map(with_muon, (pocket.TABLE1, pocket.TABLE2, pocket.TABLE3A, pocket.TABLE3B, pocket.FIG5))
}
