"""What a verb was asked for, as its receipt keeps it: every argument, in plain JSON values, so that it can be rerun."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The verb's `locals()` in its first line, before it imports anything."""
    return {name: plain(value) for name, value in arguments.items()}


def plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return value
