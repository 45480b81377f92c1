"""Pages from records: a Markdown file and pictures for every grid, the same bytes whenever the records are the same.

Numbers come from statistics.py, tables from markdown_tables.py, pictures from anechoic.pages.figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from anechoic.eval.correlation import pearson
from anechoic.pages import figures
from anechoic_lab.grids import HELD_OUT_LOSS, Grid
from anechoic_lab.paper import pocket
from anechoic_lab.records.choices import own_lr_body
from anechoic_lab.records.map_pages import anatomy_body, axes_body, length_body, lengths_body
from anechoic_lab.records.markdown_tables import agreement, difference_table, line, measured_table, signed
from anechoic_lab.records.scoreboard import cpu_minutes, records_of, scoreboard
from anechoic_lab.records.statistics import Estimate, Records, dig, estimate, over_time, verdict
from anechoic_lab.studies import crossover


def write_page(grid: Grid, results: Path, out: Path, *, command: str) -> Path:
    """Write the page of one grid: claim, table, conclusion, picture, and provenance."""
    records = records_of(grid, results)
    out.mkdir(parents=True, exist_ok=True)
    parts = [f"# {grid.title}", ""]
    if grid.claim:
        parts += [f"The paper's claim: {grid.claim}", ""]
    parts += [*BODIES[grid.kind](grid, records, out), "", *provenance(grid, records, command)]
    path = out / f"{grid.name}.md"
    path.write_text("\n".join(parts).rstrip() + "\n")
    return path


def has_records(grid: Grid, results: Path) -> bool:
    records = records_of(grid, results)
    return any(records.count(name) for name in grid.needed())


def write_index(grids: Sequence[Grid], results: Path, out: Path, *, more: bool = False) -> Path:
    """Write the scoreboard and the list of all pages with their records; more: link tally.md and cost.md."""
    lines = ["# Evidence", "", INTRODUCTION, "", "## The paper's claims", "", *scoreboard(results), ""]
    short = pocket.GRIDS.keys() | crossover.GRIDS.keys()
    for title, shown in (
        ("Pages", [grid for grid in grids if grid.name not in short]),
        ("Appendix: short runs with AdamW", [grid for grid in grids if grid.name in short]),
    ):
        lines += [f"## {title}", "", "| page | trials with a record | CPU time |", "|---|---|---|"]
        for grid in shown:
            records = records_of(grid, results)
            count = sum(records.count(name) for name in grid.needed())
            minutes = cpu_minutes(records, grid.needed())
            lines.append(f"| [{grid.title}]({grid.name}.md) | {count} | {minutes:.0f} min |")
        lines.append("")
    if more:
        lines += [
            "[The lead against CPU minutes](cost.md) shows what a lead costs; "
            "[the search for a setting that profits](tally.md) has every pair of the map in one table."
        ]
    path = out / "README.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


INTRODUCTION = (
    "Every page here is written by `anechoic reproduce all --report docs/evidence` from the records in "
    "`results/evidence`, one JSON file for each trained and evaluated network with its config, seed, commit, machine "
    "and times. `anechoic reproduce NAME` runs what is missing; `anechoic reproduce --verify FILE` repeats one record. "
    "Accuracies are in %; ± is the half-width of a 95 % interval (Student's t over seeds); differences are formed "
    "seed by seed. [The protocol](../protocol.md) explains the settings and the scale."
)


# ---- the usual table


def table_body(grid: Grid, records: Records, out: Path) -> list[str]:
    lines = [*measured_table(grid, records), "", *difference_table(grid, records), ""]
    lines += [f"- {sentence}" for sentence in agreement(grid, records)]
    keys = list(grid.metrics)[:4]
    curves = {
        grid.metrics[key]: {"here": [records.mean(row.variant, key).at(row.label) for row in grid.rows]} for key in keys
    }
    figures.draw_estimates(curves, out / grid.name)
    return [*lines, "", f"![{grid.title}]({grid.name}.png)"]


# ---- over training, over depth


def dynamics_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return rank and accuracy at the kept checkpoints, and their correlation across alpha_min."""
    ranks, accuracies = (
        {row.label: over_time(records, row.variant, key) for row in grid.rows} for key in ("entropy_mean", "knn_mean")
    )
    curves = {
        title: {label: [e.at(float(seen)) for seen, e in points.items()] for label, points in lines}
        for title, lines in (
            ("rank (entropy), mean token", ranks.items()),
            ("k-NN, mean token (%)", accuracies.items()),
        )
    }
    figures.draw_estimates(curves, out / grid.name, xlabel="samples seen")
    lines = [line(["samples seen", *(row.label for row in grid.rows), "r (rank, k-NN)"])]
    lines.append(line(["---"] * (len(grid.rows) + 2)))
    for seen in sorted({seen for points in ranks.values() for seen in points}):
        pairs = {label: (ranks[label][seen], accuracies[label][seen]) for label in ranks if seen in ranks[label]}
        cells = [
            f"{pairs[row.label][0]}; {pairs[row.label][1].mean:.2f}" if row.label in pairs else "not run"
            for row in grid.rows
        ]
        lines.append(line([f"{seen:,}", *cells, correlation([(a.mean, b.mean) for a, b in pairs.values()])]))
    note = "Each entry: effective rank (entropy, centered rows) with its interval; k-NN. r: Pearson, across rows."
    return [
        *lines,
        "",
        note,
        "",
        *measured_table(grid, records),
        "",
        *difference_table(grid, records),
        "",
        f"![{grid.title}]({grid.name}.png)",
    ]


def correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Return Pearson's coefficient with its interval; two points always lie on a line, so three are needed."""
    if len(pairs) < 3:
        return "too few rows"
    found = pearson([x for x, _ in pairs], [y for _, y in pairs])
    low, high = (f"{x:.2f}" if not math.isnan(x) else "?" for x in (found.low, found.high))
    return f"{found.r:+.2f} ({low} to {high})"


def layers_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return rank over depth, a panel for each depth."""
    curves: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for row in grid.rows:
        panel, _, name = row.label.partition(", ")
        values = records.curve(row.variant, "layers.mean.entropy")
        curves.setdefault(panel, {})[name] = [e.at(float(i)) for i, e in enumerate(values)]
    figures.draw_estimates(curves, out / grid.name, xlabel="block", ylabel="rank (entropy)")
    lines = [*measured_table(grid, records), ""]
    lines += [
        line(["at equal depth, against alpha_min 1", *grid.metrics.values()]),
        line(["---"] * (len(grid.metrics) + 1)),
    ]
    for row in grid.rows:
        base = row.variant.split("-")[0] + "-alpha1"
        if row.variant != base:
            cells = [
                f"{signed(found)}, {verdict(found, None)}" if found.n else "not run"
                for found in (records.difference(row.variant, base, key) for key in grid.metrics)
            ]
            lines.append(line([row.label, *cells]))
    return [*lines, "", f"![{grid.title}]({grid.name}.png)"]


def blocks_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return accuracy after every block, and the lead of each row over the baseline at the same block."""
    panels = grid.panels
    curves = {
        title: {row.label: [e.at(float(i)) for i, e in enumerate(records.curve(row.variant, key))] for row in grid.rows}
        for key, title in panels.items()
    }
    figures.draw_estimates(curves, out / grid.name, xlabel="block (0: embedding)")
    depth = max(1, *(len(points) for lines in curves.values() for points in lines.values()))
    lines = []
    for key, title in panels.items():
        lines += [line([f"{title}, after block", *map(str, range(depth))]), line(["---"] * (depth + 1))]
        for row in grid.rows:
            cells = [str(e) for e in records.curve(row.variant, key)] or ["not run"] * depth
            lines.append(line([row.label, *cells]))
            if row.variant != grid.baseline:
                gaps = [records.difference(row.variant, grid.baseline, f"{key}.{i}") for i in range(depth)]
                lines.append(line(["its lead at the same block", *(f"{signed(e)}" if e.n else "" for e in gaps)]))
        lines.append("")
    return [*lines, f"![{grid.title}]({grid.name}.png)"]


def early_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return the layer that was chosen beforehand, then all layers."""
    return [
        *measured_table(grid, records),
        "",
        *difference_table(grid, records),
        "",
        *blocks_body(grid, records, out),
    ]


def losses_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return losses over the learning rate that ends each label; the smallest of each series is bold."""
    key, title = next(iter(grid.metrics.items()))
    series: dict[str, list[tuple[str, float, Estimate]]] = {}
    for row in grid.rows:
        name, _, lr = row.label.rpartition(", peak learning rate ")
        series.setdefault(name, []).append((row.label, float(lr), records.mean(row.variant, key)))
    lines = [line(["", title, "seeds"]), line(["---"] * 3)]
    for points in series.values():
        least = min((found.mean for _, _, found in points if found.n), default=math.nan)
        for label, _, found in points:
            shown = f"{found.mean:.4f}" if found.n else "not run"
            lines.append(line([label, f"**{shown}**" if found.mean == least else shown, str(found.n)]))
    arms, lengths = (list(dict.fromkeys(name.rpartition(", ")[i] for name in series)) for i in (0, 2))
    # Every panel has every arm, if need be without points, so that an arm looks the same in all.
    curves = {
        f"{title}, {length}": {
            arm: [y.at(math.log2(x)) for _, x, y in series.get(f"{arm}, {length}", []) if y.n] for arm in arms
        }
        for length in lengths
    }
    figures.draw_estimates(curves, out / grid.name, xlabel="peak learning rate, as a power of two")
    return [*lines, "", f"![{grid.title}]({grid.name}.png)"]


def norms_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return the norm of the last block's tokens over training, with and without zero-initialized branches."""
    curves: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for row in grid.rows:
        panel, _, name = row.label.partition(", ")
        tables = [metrics["training"] for metrics in records.metrics(row.variant).values()]
        points = []
        for validations in zip(*tables, strict=False):
            mean = estimate(one["token_norm"][-1] for one in validations)
            points.append(mean.at(float(validations[0]["seen"])))
        curves.setdefault(panel, {})[name] = points
    figures.draw_estimates(curves, out / grid.name, xlabel="samples seen", ylabel="token norm, last block")
    return [
        *measured_table(grid, records),
        "",
        *difference_table(grid, records),
        "",
        f"![{grid.title}]({grid.name}.png)",
    ]


# ---- pictures


def pictures_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return the pictures of the first seed, as its record keeps them."""
    lines = [*measured_table(grid, records), "", *picture_conclusion(grid, records)]
    for row in grid.rows:
        kept = {seed: metrics for seed, metrics in records.metrics(row.variant).items() if "pictures" in metrics}
        for seed, metrics in sorted(kept.items())[:1]:
            path = draw_kept(
                metrics["pictures"], pocket.SHOWN[grid.name], out / f"{grid.name}-{row.variant}", row.label
            )
            lines += [f"![{row.label}, seed {seed}]({path.name})", ""]
    return lines


def picture_conclusion(grid: Grid, records: Records) -> list[str]:
    """Return a sentence on which arm is ahead by k-NN, and one on the measure of the claim."""
    residual, decayed = (records.mean(row.variant, "knn_mean") for row in grid.rows)
    if not (residual.n and decayed.n):
        return []
    measured = ""
    if HELD_OUT_LOSS in grid.metrics:
        plain, ours = (records.mean(row.variant, HELD_OUT_LOSS).mean for row in grid.rows)
        word = "worse" if ours > plain else "better"
        measured = f" With decay hidden patches are predicted {word} (loss {ours:.2f} against {plain:.2f})."
    elif "same_shape" in grid.metrics:
        plain, ours = (records.mean(row.variant, "same_shape").mean for row in grid.rows)
        word = "less" if ours < plain else "more"
        measured = f" With decay patches of one shape are {word} alike ({ours:.1f} against {plain:.1f} %; 50: chance)."
    first, second = sorted((("residual", residual.mean), ("decayed", decayed.mean)), key=lambda arm: -arm[1])
    return [
        f"In these short runs with AdamW the {first[0]} network is ahead by k-NN "
        f"({first[1]:.1f} against {second[1]:.1f} %).{measured} Decay leads in longer runs: see the "
        "[scoreboard](README.md).",
        "",
    ]


def draw_kept(pictures: dict, kind: str, path: Path, title: str) -> Path:
    from anechoic.sweeps.evaluation import unpacked

    kept = pictures[kind]
    if kind == "map":
        points, labels = np.array(kept["points"]), np.array(kept["labels"])
        return figures.draw_tsne(points, labels, path, names=kept["names"], title=title)[0]
    arrays = {name: unpacked(value) for name, value in kept.items()}
    if kind == "colors":
        return figures.draw_maps(arrays["images"], arrays["colors"], path, title=title)[0]
    hidden = arrays["hidden"] > 0.5
    return figures.draw_reconstructions(arrays["images"], hidden, arrays["predictions"], path, title=title)[0]


BODIES = {
    "table": table_body,
    "dynamics": dynamics_body,
    "layers": layers_body,
    "norms": norms_body,
    "blocks": blocks_body,
    "losses": losses_body,
    "early": early_body,
    "length": length_body,
    "axes": axes_body,
    "lengths": lengths_body,
    "anatomy": anatomy_body,
    "own_lr": own_lr_body,
    "pictures": pictures_body,
}


def provenance(grid: Grid, records: Records, command: str) -> list[str]:
    shown = [r for name in grid.needed() for r in records.by_variant.get(name, {}).values()]
    if not shown:
        return [f"No trial of this page has a record yet. Run `{command}`."]
    minutes = sum(record["cpu_seconds"] for record in shown) / 60
    commits = ", ".join(sorted({(record["commit"] or "?")[:12] for record in shown}))
    machines = "; ".join(sorted({f"{r['machine']['cpu']}, torch {r['machine']['torch']}" for r in shown}))
    samples = sorted({dig(record, "config.optim.samples") for record in shown})
    length = " and ".join(f"{count:,}" for count in samples)
    folders = ", ".join(f"`results/evidence/{group}`" for group in (grid.group, *grid.others))
    return [
        f"{len(shown)} records in {folders}, {length} samples each, {minutes:.0f} CPU "
        f"minutes in total, evaluation included; commit {commits}; {machines}. `{command}` runs what is missing."
    ]
