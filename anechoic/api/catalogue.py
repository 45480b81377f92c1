"""What there is: the verbs that list models and recipes."""

from __future__ import annotations

from anechoic.outcome import Outcome


def models(*, filter: str = "") -> Outcome:
    """List every model by name with its number of trainable parameters, without allocating one.

    Example: anechoic models --filter mae_

    Args:
        filter: only names that contain this text.
    """
    import torch

    from anechoic.errors import UserError
    from anechoic.models import MODELS, build_model

    names = [name for name in MODELS if filter in name]
    if not names:
        raise UserError(f"No model's name contains {filter!r}: anechoic models lists them all.")
    counts = {}
    for name in names:
        with torch.device("meta"):
            counts[name] = sum(parameter.numel() for parameter in build_model(name).parameters())
    width = max(map(len, names))
    text = "\n".join(f"{name:<{width}}  {count:>13,}" for name, count in counts.items())
    return Outcome(config={}, metrics={"trainable": counts}, text=text)


def recipes(*, filter: str = "") -> Outcome:
    """List every recipe with what it trains, its cost and the number to expect.

    Example: anechoic recipes --filter pocket

    Args:
        filter: only names that contain this text.
    """
    import inspect

    from anechoic.errors import UserError
    from anechoic.recipes import table

    chosen = {name: inspect.getdoc(function) or "" for name, function in table().items() if filter in name}
    if not chosen:
        raise UserError(f"No recipe's name contains {filter!r}: anechoic recipes lists them all.")
    text = "\n\n".join(f"{name}: " + doc.replace("\n\n", "\n").replace("\n", "\n    ") for name, doc in chosen.items())
    return Outcome(config={}, metrics={"recipes": chosen}, text=text)
