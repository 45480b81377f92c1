"""The exception for a user's mistake: its message is a sentence that names the cause and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the caller can put right; the command line prints it and exits with code 2."""


class NotFiniteError(UserError):
    """Features that are no longer numbers: to whoever looks at them a mistake, to a sweep a run that diverged."""


def nearest_name(name: str, choices: Iterable[str], *, offered: int = 1, listed: int = 12) -> str:
    """The end of a sentence about a name that does not exist: the nearest ones that do, or the first of all."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=offered)
    if near:
        return f"did you mean {' or '.join(near)}?"
    more = f" and {len(choices) - listed} more" if len(choices) > listed else ""
    return f"there are {', '.join(choices[:listed]) or 'none'}{more}."
