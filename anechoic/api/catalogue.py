"""What there is: the verbs that list models and recipes."""

from __future__ import annotations

from anechoic.outcome import Outcome


def models(*, filter: str = "") -> Outcome:
    """List every model by name with its number of trainable parameters, without allocating one.

    Example: anechoic models --filter mae_

    Args:
        filter: only names that contain this text.
    """
    return Outcome(config={"filter": filter}, metrics={}, text="x")
