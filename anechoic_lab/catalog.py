"""Which grid is behind a name, at which scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anechoic.errors import UserError, nearest_name
from anechoic_lab.grids import Grid, Variant
from anechoic_lab.paper import full, muon_tables, pocket
from anechoic_lab.studies import anatomy, cifar_length, crossover, emoji_styles, muon_lr

# Scale -> the modules whose GRIDS and GROUPS it has.
SCALES: dict[str, tuple[Any, ...]] = {
    "pocket": (pocket, muon_tables, crossover, emoji_styles, cifar_length, muon_lr, anatomy),
    "full": (full,),
}


def choose(what: str, scale: str) -> list[Grid]:
    """One grid, or all of a scale in the paper's order."""
    grids = {name: grid for module in SCALES[scale] for name, grid in module.GRIDS.items()}
    if what == "all":
        return list(grids.values())
    if what not in grids:
        raise UserError(f"There is no {what} at {scale} scale; {nearest_name(what, [*grids, 'all'], listed=99)}")
    return [grids[what]]


def variants(grid: Grid, scale: str) -> Mapping[str, Variant]:
    return next(module.GROUPS[grid.group] for module in SCALES[scale] if grid.group in module.GROUPS)()
