"""Pages of the map: pairs that differ in alpha alone, over length and settings, and what their branches write.

pages.py has the other pages. Numbers come from statistics.py, tables from markdown_tables.py, pictures from
anechoic.pages.figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from anechoic.pages import figures
from anechoic.pages.estimates import ENOUGH, estimates_with_shared_spread
from anechoic_lab.grids import Grid, Row
from anechoic_lab.records.markdown_tables import difference_table, line, measured_table, signed
from anechoic_lab.records.statistics import (
    Estimate,
    Records,
    crossover,
    estimate,
    extrapolate,
    over_time,
    paired_over_time,
    verdict,
)


def length_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return decayed minus residual at every checkpoint of the long runs, and where the sign changes."""
    (residual, decayed) = (grid.rows[0].variant, grid.rows[1].variant)
    keys = {
        "knn_mean": "k-NN, mean token",
        "knn_class": "k-NN, class token",
        "knn_standardized_mean": "k-NN, mean token standardized",
        "knn_standardized_class": "k-NN, class token standardized",
    }
    curves: dict[str, dict[str, list[tuple[float, float, float]]]] = {"decayed minus residual (points)": {}}
    rows: dict[int, list[str]] = {}
    sentences = []
    for key, title in keys.items():
        seeds, per_seed, seen = paired_over_time(records, decayed, residual, key)
        if not seeds:
            continue
        found = [estimate(values) for values in zip(*per_seed, strict=True)]
        curves["decayed minus residual (points)"][title] = [e.at(float(x)) for x, e in zip(seen, found, strict=True)]
        for x, e in zip(seen, found, strict=True):
            rows.setdefault(x, []).append(f"{signed(e)}, {verdict(e, None)}")
        sentences.append(f"{title}: {onset_words(seen, per_seed, found)}")
    lines = [line(["samples seen", *keys.values()]), line(["---"] * (len(keys) + 1))]
    lines += [line([f"{seen:,}", *cells]) for seen, cells in rows.items()]
    figures.draw_estimates(curves, out / grid.name, xlabel="samples seen")
    return [
        *lines,
        "",
        *(f"- {sentence}" for sentence in sentences),
        "",
        *measured_table(grid, records),
        "",
        *difference_table(grid, records),
        "",
        f"![{grid.title}]({grid.name}.png)",
    ]


def onset_words(seen: Sequence[int], per_seed: Sequence[Sequence[float]], found: Sequence[Estimate]) -> str:
    if all(e.sign > 0 for e in found):
        return "decay is ahead at every length measured."
    if all(e.mean >= 0 for e in found):
        return "decay is ahead on average at every length measured, but not beyond the spread of seeds everywhere."
    turned = crossover([float(x) for x in seen], [e.mean for e in found])
    if turned is not None:
        return f"the mean difference turns positive at about {turned:,.0f} samples."
    onset = extrapolate([float(x) for x in seen], per_seed)
    if onset.slope <= 0 or onset.at is None:
        return f"no onset: the difference changes by {onset.slope:+.2f} points per doubling of the length."
    high = f"{onset.high:,.0f}" if onset.high is not None else "never"
    low = f"{onset.low:,.0f}" if onset.low is not None else "never"
    return (
        f"still behind; {onset.slope:+.2f} points per doubling of the length put the onset at about {onset.at:,.0f} "
        f"samples (95 % of resampled seeds: {low} to {high}), if the trend continues."
    )


def axes_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return decayed minus residual, each pair with its own residual baseline."""
    leads = leads_of(grid, records)
    curves = {
        grid.metrics[key]: {"difference": [e.at(row.label) for row, e in zip(grid.rows, found, strict=True) if e.n]}
        for key, found in list(leads.items())[:4]
    }
    figures.draw_estimates(curves, out / grid.name, zero=True)
    return pairs_and_figure(grid, records, leads)


def lengths_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return decayed minus residual over the length that ends each label; every length is a training of its own."""
    leads = leads_of(grid, records, shared_spread=True)
    curves = {f"{grid.metrics[key]}: lead": leads_over_length(grid, found) for key, found in list(leads.items())[:4]}
    figures.draw_estimates(curves, out / grid.name, xlabel="samples of the training", ylabel="points", log=True)
    return [*pairs_and_figure(grid, records, leads), "", SHARED_SPREAD]


def leads_over_length(grid: Grid, leads: Sequence[Estimate]) -> dict[str, list[tuple[float, float, float]]]:
    """Return arm -> (samples, lead, half of its interval); a row's label ends with its length."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for row, lead in zip(grid.rows, leads, strict=True):
        arm, _, length = row.label.rpartition(", ")
        points = curves.setdefault(arm, [])
        if lead.n:
            points.append(lead.at(float(length.removesuffix(" samples").replace(",", ""))))
    return curves


SHARED_SPREAD = (
    f"Lengths with fewer than {ENOUGH} seeds have too few differences to estimate a spread: their intervals use the "
    "spread of the differences at all lengths."
)


def leads_of(grid: Grid, records: Records, *, shared_spread: bool = False) -> dict[str, list[Estimate]]:
    """Return metric -> the difference of every row to its own baseline."""
    estimates = estimates_with_shared_spread if shared_spread else partial(map, estimate)
    return {
        key: list(estimates([records.differences(row.variant, baseline_of(row), key) for row in grid.rows]))
        for key in grid.metrics
        if key != "entropy"
    }


def pairs_and_figure(grid: Grid, records: Records, leads: Mapping[str, Sequence[Estimate]]) -> list[str]:
    """Return the difference of every row to its own baseline, what was measured, and the figure."""
    lines = [line(["decayed minus its residual baseline", *(grid.metrics[key] for key in leads), "seeds"])]
    lines.append(line(["---"] * (len(leads) + 2)))
    for i, row in enumerate(grid.rows):
        found = [of_key[i] for of_key in leads.values()]
        cells = (f"{signed(e)}, {verdict(e, None)}" if e.n else "not run" for e in found)
        lines.append(line([row.label, *cells, str(found[0].n)]))
    rows = [shown for row in grid.rows for shown in (row, Row("its residual baseline", baseline_of(row)))]
    measured = measured_table(replace(grid, rows=rows), records)
    return [*lines, "", *measured, "", f"![{grid.title}]({grid.name}.png)"]


def baseline_of(row: Row) -> str:
    """Return the residual variant that differs from the row in alpha alone."""
    name = row.variant.rpartition("-")[0]
    return f"{name}-alpha1"


def anatomy_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return what was measured at the end, then ranks of every branch at the end and of the last one over training."""
    names = {
        "writer_rank": "effective rank of the matrix that writes a branch",
        "output_rank": "effective rank of what a branch writes",
    }
    curves: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    lines = [*measured_table(grid, records), ""]
    for key, title in names.items():
        found = [(row, records.curve(row.variant, key)) for row in grid.rows]
        depth = max(len(values) for _, values in found) // 2
        branches = [f"{kind} {block + 1}" for block in range(depth) for kind in ("attention", "MLP")]
        lines += [line([f"{title}, at the end", *branches]), line(["---"] * (len(branches) + 1))]
        for row, values in found:
            lines.append(line([row.label, *([f"{e.mean:.1f}" for e in values] or ["not run"] * len(branches))]))
            points = over_time(records, row.variant, f"{key}.-1")
            curves.setdefault(title.replace("a branch", "the last MLP"), {})[row.label] = [
                e.at(float(seen)) for seen, e in points.items()
            ]
        lines.append("")
    figures.draw_estimates(curves, out / grid.name, xlabel="samples seen")
    return [*lines, f"![{grid.title}]({grid.name}.png)"]
