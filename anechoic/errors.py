"""The exception for a user's mistake: its message is a sentence with the cause and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the caller can correct; the command line prints it and exits with code 2."""


class NotFiniteError(UserError):
    """Features that are not finite: a mistake for a user, a diverged run for a sweep."""


def nearest_name(name: str, choices: Iterable[str], *, offered: int = 1, listed: int = 12) -> str:
    """Return the end of a sentence about an unknown name: the nearest known names, or the first of all."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=offered)
    if near:
        return f"did you mean {' or '.join(near)}?"
    more = f" and {len(choices) - listed} more" if len(choices) > listed else ""
    return f"there are {', '.join(choices[:listed]) or 'none'}{more}."
