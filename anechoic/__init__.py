"""anechoic: generative representation learners whose identity shortcuts decay with depth."""

from __future__ import annotations

from importlib import import_module
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
    "build_model": "models",
    "load": "runtime.checkpoint",
    "effective_rank": "evals.analysis",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"anechoic.{_HOME[name]}"), name)
    if name in ("models", "recipes"):  # packages; the verbs of that name only list them
        return import_module(f"anechoic.{name}")
    from anechoic.api import VERBS, verb

    typed = name.replace("_", "-")
    if typed in VERBS:
        return verb(typed)
    raise AttributeError(f"module 'anechoic' has no attribute {name!r}")


def __dir__() -> list[str]:
    from anechoic.api import VERBS

    return sorted([*_HOME, "__version__", *(name.replace("-", "_") for name in VERBS)])
