"""Complete configs by name. A recipe is a function without arguments that returns a Config; `anechoic train` runs it.

A module of this package lists its recipes in RECIPES; add the module's name here and they are found. Recipes know the
config alone: neither torch nor data nor models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module

from anechoic.config import Config
from anechoic.errors import UserError, nearest_name

MODULES = ("mae", "pocket", "demo", "diffusion", "transfer", "supervised")


@cache
def table() -> dict[str, Callable[[], Config]]:
    """Return every recipe's function by name."""
    found: dict[str, Callable[[], Config]] = {}
    for module in MODULES:
        for recipe in import_module(f"anechoic.recipes.{module}").RECIPES:
            assert recipe.__name__ not in found, f"two recipes are called {recipe.__name__}"
            found[recipe.__name__] = recipe
    return found


def recipe(name: str) -> Config:
    """Return the config of this name; UserError for an unknown name, with the nearest one."""
    if name not in table():
        raise UserError(f"There is no recipe {name!r}; {nearest_name(name, table())}")
    return replace(table()[name](), recipe=name)
