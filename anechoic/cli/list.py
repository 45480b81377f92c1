"""The command `list`: what can be named in other commands."""

from __future__ import annotations

from collections.abc import Callable

from anechoic.choices import Listed
from anechoic.cli._command import command
from anechoic.errors import UserError
from anechoic.outcome import Outcome

COLUMNS = ("Cost", "Expect")
WIDTH = 58


@command
def listing(what: Listed, name: str | None = None, /, *, filter: str = "") -> Outcome:
    """List models with their number of parameters, recipes with their cost, metrics or data sources.

    Example: anechoic list recipes --filter pocket

    Args:
        what: models, recipes, metrics or sources.
        name: one of them, to read all about it.
        filter: only names that contain this text.
    """
    if name is not None and what == "recipes":
        return one_recipe(name)
    found = LISTS[what]()
    chosen = {entry: row for entry, row in found.items() if filter in entry and name in (None, entry)}
    if not chosen:
        wanted = f"is named {name!r}" if name is not None else f"has {filter!r} in its name"
        raise UserError(f"None of the {what} {wanted}: anechoic list {what} lists them all.")
    if what == "models":
        return models_outcome(list(chosen))
    from anechoic.pages.tables import text_table

    columns = ["recipe", "trains", "cost", "expect"] if what == "recipes" else [what[:-1], "description"]
    rows = [[entry, *(summary(doc) if what == "recipes" else [doc])] for entry, doc in chosen.items()]
    text = text_table(columns, rows)
    if what == "recipes":
        text += "\n\nanechoic list recipes NAME prints all settings of one of them."
    return Outcome(config={}, metrics={what: chosen}, text=text)


def models() -> dict[str, str]:
    from anechoic.models import MODELS

    return {name: family for name, (family, _) in MODELS.items()}


def models_outcome(names: list[str]) -> Outcome:
    """Count the parameters on the meta device, which allocates none."""
    import torch

    from anechoic.models import build_model

    counts = {}
    for name in names:
        with torch.device("meta"):
            counts[name] = sum(parameter.numel() for parameter in build_model(name).parameters())
    width = max(map(len, names))
    text = "\n".join(f"{name:<{width}}  {count:>13,}" for name, count in counts.items())
    return Outcome(config={}, metrics={"trainable": counts}, text=text)


def recipes() -> dict[str, str]:
    import inspect

    from anechoic.recipes import table

    return {name: inspect.getdoc(function) or "" for name, function in table().items()}


def one_recipe(name: str) -> Outcome:
    import json

    from anechoic.config import to_json
    from anechoic.recipes import recipe

    config = to_json(recipe(name))
    doc = recipes()[name]
    text = f"{name}: {doc}\n\n{json.dumps(config, indent=2)}"
    return Outcome(config={}, metrics={"recipes": {name: doc}, "settings": config}, text=text)


def metrics() -> dict[str, str]:
    from anechoic.cli.evaluate import metric_descriptions

    return metric_descriptions()


def sources() -> dict[str, str]:
    return {
        "digits[:train|:test]": "8 x 8 handwritten digits with labels, embedded",
        "scenes[:train|:test][:NUMBER]": "drawn color scenes with labels, embedded",
        "emoji[:train|:test][:style=NAME][:label=object]": "emoji in several styles with labels, embedded",
        "FOLDER": "images at any depth; the name of a sub-folder is the label",
        "LIST.txt|.lst|.list|.tsv": "one path per line, with an optional label",
        "FILE.zip, FILE.tar": "an archive of images",
        "NAME-{000..127}.tar": "WebDataset shards, local or by URL",
        "SHARDS": "a folder that anechoic tools shard wrote, or its URL",
        "FILE.parquet": "columns image and label, or a folder of such files",
        "FILE.npz, FILE.npy": "arrays images and labels",
        "LATENTS": "a folder that anechoic tools encode-latents wrote",
        "hf:NAME[:SPLIT]": "a data set of the Hugging Face hub",
    }


LISTS: dict[Listed, Callable[[], dict[str, str]]] = {
    "models": models,
    "recipes": recipes,
    "metrics": metrics,
    "sources": sources,
}


def summary(doc: str) -> list[str]:
    """Return what a recipe trains, its cost and the number to expect, each short enough for a line."""
    lines = [line.strip() for line in doc.splitlines()]
    values = [next((line.partition(":")[2] for line in lines if line.startswith(f"{word}:")), "") for word in COLUMNS]
    return [shortened(text.strip().rstrip(".")) for text in (lines[0], *values)]


def shortened(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1].rsplit(" ", 1)[0] + " …"
