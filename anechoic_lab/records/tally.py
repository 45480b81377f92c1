"""The search for a setting in which decayed shortcuts pay: every pair that was run in one table, and what it cost.

A line here repeats what its own page shows in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from anechoic.pages.estimates import ENOUGH
from anechoic_lab.grids import Grid
from anechoic_lab.records.map_pages import baseline_of
from anechoic_lab.records.markdown_tables import line, signed
from anechoic_lab.records.scoreboard import cpu_minutes
from anechoic_lab.records.statistics import Estimate, Records

SEARCHED = ("table2", "table3b", "long-blocks", "early", "search", "axes", "remedies")
MEASURES = {
    "knn_mean": "k-NN, mean",
    "knn_class": "k-NN, class",
    "probe_mean": "probe, mean",
    "probe_class": "probe, class",
}
# Rows of these grids that change something else than the decay of shortcuts.
OTHERS = ("branch", "both")


class Pair(NamedTuple):
    """A decayed variant beside its residual baseline."""

    grid: Grid
    label: str
    records: Records
    decayed: str
    residual: str

    def lead(self, key: str) -> Estimate:
        return self.records.difference(self.decayed, self.residual, key)

    def leads_by_block(self) -> list[Estimate]:
        """Return the lead in k-NN of the mean token after every block."""
        depth = len(self.records.curve(self.decayed, "layers.mean.knn"))
        return [self.lead(f"layers.mean.knn.{block}") for block in range(1, depth)]

    def minutes(self) -> float:
        return cpu_minutes(self.records, (self.decayed, self.residual))


def pairs(grids: Sequence[Grid], results: Path) -> Iterator[Pair]:
    """Yield every pair that has a record on both sides, once."""
    seen = set()
    for grid in (grid for grid in grids if grid.name in SEARCHED):
        records = Records(results / grid.group)
        for row in grid.rows:
            residual = baseline_of(row) if grid.kind == "axes" else grid.baseline
            if f"residual-{row.variant}" in grid.needed():
                residual = f"residual-{row.variant}"
            if row.variant in (*OTHERS, residual) or row.variant.startswith("residual-"):
                continue
            if (grid.group, row.variant) in seen:
                continue
            pair = Pair(grid, row.label, records, row.variant, residual)
            if pair.lead("knn_mean").n:
                seen.add((grid.group, row.variant))
                yield pair


def write_tally(grids: Sequence[Grid], results: Path, out: Path) -> Path:
    found = list(pairs(grids, results))
    titles = [
        "decayed minus residual",
        "page",
        "seeds",
        *MEASURES.values(),
        "largest lead, k-NN of the mean",
        "CPU minutes",
    ]
    lines = [
        "# The search for a setting that profits",
        "",
        "Every masked autoencoder of the map with skips and decayed shortcuts, beside its residual baseline: "
        "the same skips, budget, data and seed. Percentage points of the last block, then the block after which the "
        "decayed network leads most. ± is half of a 95 % interval over seeds; a line with one seed has none. "
        "Minutes are CPU minutes (1 core) of both sides.",
        "",
        line(titles),
        line(["---"] * len(titles)),
    ]
    wins, compared = [], 0
    for pair in found:
        leads = {key: pair.lead(key) for key in MEASURES}
        blocks = pair.leads_by_block()
        best = max(range(len(blocks)), key=lambda i: blocks[i].mean)
        lines.append(
            line(
                [
                    pair.label,
                    f"[{pair.grid.name}]({pair.grid.name}.md)",
                    str(leads["knn_mean"].n),
                    *(signed(lead) for lead in leads.values()),
                    f"block {best + 1} of {len(blocks)}: {signed(blocks[best])}",
                    f"{pair.minutes():.0f}",
                ]
            )
        )
        named = {title: leads[key] for key, title in MEASURES.items()}
        named |= {f"k-NN, mean, after block {i + 1} of {len(blocks)}": lead for i, lead in enumerate(blocks[:-1])}
        compared += sum(lead.n >= ENOUGH for lead in named.values())
        wins += [
            f"{pair.label}, {title} ([{pair.grid.name}]({pair.grid.name}.md)): {signed(lead)}, {lead.n} seeds"
            for title, lead in named.items()
            if lead.n >= ENOUGH and lead.sign > 0
        ]
    lines += ["", f"Ahead by more than the interval, of {compared} comparisons with {ENOUGH} seeds or more:", ""]
    lines += [f"- {win}" for win in wins] or ["- none"]
    lines += [
        "",
        f"Of {compared} comparisons without any effect about {0.025 * compared:.0f} would show a lead by chance.",
        "",
        f"The whole search: {spent(found)} [The page of training length](length.md) extrapolates where the gap of the "
        "last block would close.",
    ]
    path = out / "tally.md"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def spent(found: Sequence[Pair]) -> str:
    """Return records and CPU hours of all pairs; a shared residual baseline counts once."""
    seconds = {
        (pair.grid.group, variant, seed): record["cpu_seconds"]
        for pair in found
        for variant in (pair.decayed, pair.residual)
        for seed, record in pair.records.by_variant[variant].items()
    }
    return f"{len(seconds)} networks trained and evaluated, {sum(seconds.values()) / 3600:.1f} CPU hours."
