"""What a table or figure is made of: named variants of configs, the rows that show them, and the paper's numbers.

A grid is data. It knows no runner, no page and no measurement; pocket.py and full.py fill it in for their scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anechoic.config import Config
from anechoic.sweeps.sweep import seeded
from anechoic.sweeps.trial import EvalPlan, Trial

# Of the last validation.
HELD_OUT_LOSS = "training.-1.held_out_loss"
# Token, layer and scaling chosen on held-out training images (records/choices.py).
CHOSEN = {
    "chosen.knn.held_out": "best k-NN of held-out training images",
    "chosen.knn.test": "its k-NN of test images",
    "chosen.probe.held_out": "best linear probe of held-out training images",
    "chosen.probe.test": "its linear probe of test images",
}
KNN_PANELS = {"layers.mean.knn": "k-NN, mean token (%)", "layers.class.knn": "k-NN, class token (%)"}


@dataclass(frozen=True)
class Variant:
    """A config with its evaluation; it is run once for every seed."""

    config: Config
    evaluation: EvalPlan


@dataclass(frozen=True)
class Row:
    """One line of a table: what it is called, which variant it shows, and what the paper found (metric -> number)."""

    label: str
    variant: str
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A table or figure. group: the folder its records share with grids of the same variants."""

    name: str
    title: str
    group: str
    rows: Sequence[Row]
    metrics: Mapping[str, str]
    """key in a record -> what the table calls it"""
    baseline: str
    """the variant that every other row is compared with"""
    claim: str = ""
    """the paper's claim in our words"""
    kind: str = "table"
    """how its page draws it"""
    baselines: Sequence[str] = ()
    """variants that have no row of their own but that rows are compared with"""
    others: Sequence[str] = ()
    """groups with other seeds of the same variants, whose records its page shows too"""
    first_seed: int = 0
    """the first seed: a claim is tested with seeds that no choice used"""
    panels: Mapping[str, str] = field(default_factory=lambda: KNN_PANELS)
    """lists of numbers, one per layer, that a page of kind blocks or early draws: key in a record -> title"""

    def needed(self) -> list[str]:
        """Return every variant of its page, once."""
        return list(dict.fromkeys([self.baseline, *(row.variant for row in self.rows), *self.baselines]))

    def trials(self, variants: Mapping[str, Variant], count: int) -> list[Trial]:
        """Return `count` trials of every variant."""
        seeds = range(self.first_seed, self.first_seed + count)
        return [
            trial
            for name in self.needed()
            for trial in seeded(name, variants[name].config, variants[name].evaluation, seeds)
        ]
