"""The exception for a user's mistake: its message is a sentence with the cause and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Characters.
LONGEST_WORD = 800


class UserError(ValueError):
    """A mistake that the caller can correct; the command line prints it and exits with code 2.

    What it quotes from a damaged file may have any length: words longer than any name or path of use are shortened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:100]}...", message))


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
