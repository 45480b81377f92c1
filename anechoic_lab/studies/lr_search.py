"""The search for the best peak learning rate by the loss on held-out images, for drawings and photographs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anechoic.config import Algorithm
from anechoic_lab.grids import Grid, Row

# (algorithm, alpha_min, samples) -> peak learning rates that are tried.
LearningRates = Mapping[tuple[Algorithm, float, int], Sequence[float]]
WORDS: dict[Algorithm, str] = {"muon": "Muon", "adamw": "AdamW"}
# Learning rates are chosen with the seeds below this one, claims tested with the others.
FIRST_FRESH_SEED = 10


def lr_search(
    name: str,
    title: str,
    lrs: LearningRates,
    *,
    group: str,
    variant: Callable[[Algorithm, float, int, float], str],
    baseline: str,
) -> Grid:
    """Return the grid of a search; variant(algorithm, alpha_min, samples, lr) is the name of a trial."""
    return Grid(
        name=name,
        title=title,
        claim="",
        group=group,
        rows=[
            Row(
                f"{WORDS[algorithm]}, alpha_min {alpha:g}, {samples:,} samples, peak learning rate {lr:g}",
                variant(algorithm, alpha, samples, lr),
            )
            for (algorithm, alpha, samples), tried in lrs.items()
            for lr in tried
        ],
        metrics={"training.-1.held_out_loss": "held-out loss"},
        baseline=baseline,
        kind="losses",
    )
