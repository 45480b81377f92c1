"""The search for the best peak learning rate by the loss on held-out images, for drawings and photographs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anechoic.config import Algorithm
from anechoic_lab.grids import HELD_OUT_LOSS, Grid, Row

# (algorithm, alpha_min, samples) -> peak learning rates that are tried.
LearningRates = Mapping[tuple[Algorithm, float, int], Sequence[float]]
VariantName = Callable[[Algorithm, float, int, float], str]
WORDS: dict[Algorithm, str] = {"muon": "Muon", "adamw": "AdamW"}
# Learning rates are chosen with the seeds below this one, claims tested with the others.
FIRST_FRESH_SEED = 10


def losses_grid(name: str, title: str, group: str, rows: Sequence[Row], *, baseline: str) -> Grid:
    """Return a grid of held-out losses; the label of a row ends in ", peak learning rate LR"."""
    return Grid(
        name=name,
        title=title,
        group=group,
        rows=rows,
        metrics={HELD_OUT_LOSS: "held-out loss"},
        baseline=baseline,
        kind="losses",
    )


def lr_search(name: str, title: str, lrs: LearningRates, *, group: str, variant: VariantName, baseline: str) -> Grid:
    """Return the grid of a search; variant(algorithm, alpha_min, samples, lr) is the name of a trial."""
    rows = [
        Row(
            f"{WORDS[algorithm]}, alpha_min {alpha:g}, {samples:,} samples, peak learning rate {lr:g}",
            variant(algorithm, alpha, samples, lr),
        )
        for (algorithm, alpha, samples), tried in lrs.items()
        for lr in tried
    ]
    return losses_grid(name, title, group, rows, baseline=baseline)
