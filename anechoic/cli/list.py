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


def recipes(name: str | None = None, /, *, filter: str = "") -> Outcome:
    """List every recipe with its cost and the number to expect; with a name, all about that one.

    Example: anechoic recipes --filter pocket

    Args:
        name: a recipe, to read its command and all its settings.
        filter: only names that contain this text.
    """
    import inspect
    import json

    from anechoic.config import to_json
    from anechoic.errors import UserError
    from anechoic.pages.tables import text_table
    from anechoic.recipes import recipe, table

    if name is not None:
        config = to_json(recipe(name))
        doc = inspect.getdoc(table()[name]) or ""
        text = f"{name}: {doc}\n\n{json.dumps(config, indent=2)}"
        return Outcome(config={}, metrics={"recipes": {name: doc}, "settings": config}, text=text)
    chosen = {name: inspect.getdoc(function) or "" for name, function in table().items() if filter in name}
    if not chosen:
        raise UserError(f"No recipe's name contains {filter!r}: anechoic recipes lists them all.")
    rows = [[name, *described(doc)] for name, doc in chosen.items()]
    text = text_table(["recipe", "trains", "cost", "expect"], rows)
    return Outcome(
        config={}, metrics={"recipes": chosen}, text=f"{text}\n\nanechoic recipes NAME tells all about one of them."
    )


def described(doc: str) -> list[str]:
    """What a recipe trains, its cost and what to expect, from its docstring; each short enough for a line."""
    lines = [line.strip() for line in doc.splitlines()]
    told = [next((line.partition(":")[2] for line in lines if line.startswith(f"{word}:")), "") for word in WORDS]
    return [shortened(text.strip().rstrip(".")) for text in (lines[0], *told)]


WORDS = ("Cost", "Expect")
WIDTH = 58


def shortened(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1].rsplit(" ", 1)[0] + " …"
