"""The usual tables of a grid, in Markdown: what was measured, every row against the baseline, and the paper's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anechoic_lab.grids import HELD_OUT_LOSS, Grid
from anechoic_lab.records.statistics import Estimate, Records, order_agreement, verdict


def measured_table(grid: Grid, records: Records) -> list[str]:
    """Means over seeds, with the paper's numbers beside those it has."""
    papers = [key for key in grid.metrics if any(key in row.paper for row in grid.rows)]
    titles = [title + (" (paper)" if key in papers else "") for key, title in grid.metrics.items()]
    lines = [line(["", *titles, "seeds"]), line(["---"] * (len(titles) + 2))]
    for row in grid.rows:
        cells = [cell(records.mean(row.variant, key), key, row.paper.get(key)) for key in grid.metrics]
        diverged = records.diverged(row.variant)
        seeds = f"{records.count(row.variant)}" + (f", {diverged} diverged" if diverged else "")
        lines.append(line([row.label, *cells, seeds]))
    return lines


def cell(found: Estimate, key: str, paper: float | None) -> str:
    text = "not run" if found.n == 0 else found.text(digits=digits_of(key))
    return text if paper is None else f"{text} ({paper:g})"


def difference_table(grid: Grid, records: Records) -> list[str]:
    """Every row minus the baseline, and whether the sign is the paper's."""
    label = next((row.label for row in grid.rows if row.variant == grid.baseline), grid.baseline)
    base = next((row.paper for row in grid.rows if row.variant == grid.baseline), {})
    lines = [line([f"minus *{label}*", *grid.metrics.values()]), line(["---"] * (len(grid.metrics) + 1))]
    for row in grid.rows:
        if row.variant == grid.baseline:
            continue
        cells = []
        for key in grid.metrics:
            found = records.difference(row.variant, grid.baseline, key)
            paper = row.paper[key] - base[key] if key in row.paper and key in base else None
            shown = "not run" if found.n == 0 else f"{signed(found, key)}, {verdict(found, paper)}"
            cells.append(shown + (f" (paper {paper:+.1f})" if paper is not None else ""))
        lines.append(line([row.label, *cells]))
    return lines


def signed(found: Estimate, key: str = "") -> str:
    return found.text(digits=digits_of(key), sign="+")


def digits_of(key: str) -> int:
    """Return the decimals of a measure: losses differ in the third one."""
    return 4 if key == HELD_OUT_LOSS else 2


def agreement(grid: Grid, records: Records) -> Iterator[str]:
    """One sentence per metric the paper has: does the order of the rows agree?"""
    for key, title in grid.metrics.items():
        rows = [row for row in grid.rows if key in row.paper and records.mean(row.variant, key).n]
        tau = order_agreement([records.mean(row.variant, key).mean for row in rows], [row.paper[key] for row in rows])
        if tau is not None:
            word = "the paper's" if tau > 0.5 else "the reverse of the paper's" if tau < -0.5 else "neither"
            yield f"Order of the rows by {title}: {word} (Kendall's tau {tau:+.2f} over {len(rows)} rows)."


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
