"""What a user who has a few labels would report: token, layer, scaling and learning rate chosen on held-out images.

Choices are made on held-out training images, by the table `selection` of a record, never on test labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anechoic.pages import figures
from anechoic_lab.grids import HELD_OUT_LOSS, Grid, Row
from anechoic_lab.records.markdown_tables import line, measured_table, signed
from anechoic_lab.records.statistics import Records

# What an arm's learning rate may be chosen by: key -> (words, sign of a better number).
RULES = {HELD_OUT_LOSS: ("held-out loss", -1), "chosen.knn.held_out": ("k-NN of held-out training images", 1)}


def add_choices(records: Records) -> Records:
    """Add `chosen` to the metrics of every record that has a selection."""
    for by_seed in records.by_variant.values():
        for record in by_seed.values():
            if "selection" in record["metrics"]:
                record["metrics"]["chosen"] = {name: choose(record["metrics"], name) for name in ("knn", "probe")}
    return records


def choose(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    """Return token, kind and layer of the best k-NN or probe on held-out training images, and its test accuracy."""
    selection = metrics["selection"]
    if name == "probe":
        rows = [(kinds["probe"], metrics[f"probe_{token}"], token, "probe", -1) for token, kinds in selection.items()]
    else:
        rows = [
            (held_out[layer], metrics["layers"][token][kind][layer], token, kind, layer)
            for token, kinds in selection.items()
            for kind, held_out in kinds.items()
            if kind != "probe"
            for layer in range(len(held_out))
        ]
    return dict(zip(("held_out", "test", "token", "kind", "layer"), max(rows), strict=True))


def own_lr_body(grid: Grid, records: Records, out: Path) -> list[str]:
    """Return every arm at every learning rate, and the lead with each arm at its best one, by each rule."""
    arms: dict[str, list[Row]] = {}
    for row in grid.rows:
        arms.setdefault(row.label.partition(", peak learning rate ")[0], []).append(row)
    curves = {
        title: {
            arm: [records.mean(row.variant, key).at(float(lr_of(row))) for row in by_lr(rows, records, key)]
            for arm, rows in arms.items()
        }
        for key, title in grid.metrics.items()
        if key in RULES or key.endswith(".test")
    }
    figures.draw_estimates(curves, out / grid.name, xlabel="peak learning rate", log=True)
    residual, decayed = arms.values()
    titles = ["learning rates chosen by", "residual", "decayed", *grid.metrics.values(), "pairs"]
    lines = [*measured_table(grid, records), "", line(titles), line(["---"] * len(titles))]
    for key, (words, sign) in RULES.items():
        chosen = [best(rows, records, key, sign) for rows in (residual, decayed)]
        if not all(chosen):
            lines.append(line([words, *["not run"] * (len(titles) - 1)]))
            continue
        base, ours = (row for row in chosen if row)
        leads = {measure: records.difference(ours.variant, base.variant, measure) for measure in grid.metrics}
        cells = (signed(lead, measure) for measure, lead in leads.items())
        lines.append(line([words, lr_of(base), lr_of(ours), *cells, str(max(lead.n for lead in leads.values()))]))
    return [*lines, "", "Leads are decayed minus residual.", "", f"![{grid.title}]({grid.name}.png)"]


def lr_of(row: Row) -> str:
    return row.label.rpartition(", peak learning rate ")[2]


def by_lr(rows: Sequence[Row], records: Records, key: str) -> list[Row]:
    return sorted((row for row in rows if records.mean(row.variant, key).n), key=lambda row: float(lr_of(row)))


def best(rows: Sequence[Row], records: Records, key: str, sign: int) -> Row | None:
    """Return the row of the best mean, None if none was run."""
    return max(by_lr(rows, records, key), key=lambda row: sign * records.mean(row.variant, key).mean, default=None)
