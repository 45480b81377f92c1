"""Which grid is behind a name, at which scale."""

from __future__ import annotations

from collections.abc import Mapping

from anechoic.errors import UserError, nearest_name
from anechoic.paper import crossover, full, pocket
from anechoic.paper.grids import Grid, Variant

SCALES = {
    "pocket": ({**pocket.GRIDS, **crossover.GRIDS}, {**pocket.GROUPS, **crossover.GROUPS}),
    "full": (full.GRIDS, full.GROUPS),
}


def choose(what: str, scale: str) -> list[Grid]:
    """One grid, or all of a scale in the paper's order."""
    grids, _ = SCALES[scale]
    if what == "all":
        return list(grids.values())
    if what not in grids:
        raise UserError(f"There is no {what} at {scale} scale; {nearest_name(what, [*grids, 'all'], listed=99)}")
    return [grids[what]]


def variants(grid: Grid, scale: str) -> Mapping[str, Variant]:
    return SCALES[scale][1][grid.group]()
