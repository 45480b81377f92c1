"""anechoic: generative representation learners whose identity shortcuts decay with depth."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Public name -> the module it lives in; resolved on first use, so that `import anechoic` does not load torch.
_HOME = {
    "linear": "shortcut",
    "constant": "shortcut",
    "cosine": "shortcut",
    "stopped": "shortcut",
    "Shortcut": "shortcut",
    "effective_decay": "shortcut",
    "alpha_min_for": "shortcut",
    "shortcuts": "surgery",
    "decay": "surgery",
    "fold": "surgery",
    "param_groups": "surgery",
    "clip_grad_norm": "surgery",
    "build_model": "models",
    "load": "eval.embedding",
    "Metric": "eval.metrics.registry",
    "register_metric": "eval.metrics.registry",
    "effective_rank": "eval.metrics.rank",
    "UserError": "errors",
}
# Rooms of the package that share their name with a verb: `anechoic.training` is both, so the room can be called.
_ROOMS = ("models", "recipes")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"anechoic.{_HOME[name]}"), name)
    if name in _ROOMS:
        return import_module(f"anechoic.{name}")
    return _verb(name)


def _verb(name: str) -> Any:
    from anechoic.cli import VERBS, verb
    from anechoic.cli.arguments import coerce_arguments

    typed = name.replace("_", "-")
    if typed in VERBS:
        return coerce_arguments(verb(typed))
    raise AttributeError(f"module 'anechoic' has no attribute {name!r}")


def __dir__() -> list[str]:
    from anechoic.cli import VERBS

    return sorted([*_HOME, "__version__", *(name.replace("-", "_") for name in VERBS)])


class _Room(ModuleType):
    """A room that is called as the verb of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _verb(self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """Python sets a room as an attribute of its package once it is imported; from then on it must be callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
