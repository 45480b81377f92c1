"""Which peak rate is best: a search by the loss on held-out images, the same for drawings and photographs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anechoic.config import Algorithm
from anechoic_lab.grids import Grid, Row

# (algorithm, alpha_min, samples) -> peak rates that are tried.
Rates = Mapping[tuple[Algorithm, float, int], Sequence[float]]
WORDS: dict[Algorithm, str] = {"muon": "Muon", "adamw": "AdamW"}
# Rates are chosen with the first seeds, claims made with those from here on.
FIRST_FRESH_SEED = 10


def rate_search(
    name: str,
    title: str,
    rates: Rates,
    *,
    group: str,
    variant: Callable[[Algorithm, float, int, float], str],
    baseline: str,
) -> Grid:
    """variant: the name of the trial of (algorithm, alpha_min, samples, rate)."""
    return Grid(
        name=name,
        title=title,
        claim="",
        group=group,
        rows=[
            Row(
                f"{WORDS[algorithm]}, alpha_min {alpha:g}, {samples:,} samples, peak rate {lr:g}",
                variant(algorithm, alpha, samples, lr),
            )
            for (algorithm, alpha, samples), tried in rates.items()
            for lr in tried
        ],
        metrics={"training.-1.held_out_loss": "held-out loss"},
        baseline=baseline,
        kind="losses",
    )
