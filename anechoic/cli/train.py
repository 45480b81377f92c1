"""The command `train`: a recipe, with any of its settings overridden."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from anechoic.choices import Tracker
from anechoic.cli._command import training_command
from anechoic.cli.options import DryRun, Log, OptionalOut, PathLike, ValidationLabels
from anechoic.config import Config, to_json
from anechoic.outcome import Outcome
from anechoic.recipes import recipe as recipe_by_name
from anechoic.recipes import table

if TYPE_CHECKING:
    from anechoic.data import Source

    Recipe = Config | str
else:
    # One sub-command per recipe, whose flags are the settings of its config.
    Recipe = Annotated[
        tyro.extras.subcommand_type_from_defaults(
            {name: recipe_by_name(name) for name in table()},
            {name: function.__doc__.split("\n", 1)[0] for name, function in table().items()},
            prefix_names=False,
        ),
        tyro.conf.arg(name=""),
    ]


@training_command
@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def train(
    recipe: Recipe,
    *,
    out: OptionalOut = None,
    log: Log = (),
    validation_labels: ValidationLabels = None,
    dry_run: DryRun = False,
) -> Outcome:
    """Train a recipe, any of its settings overridden; `anechoic train RECIPE --help` lists them.

    --out is the run directory, runs/RECIPE by default. The same command resumes. SIGTERM and Ctrl-C save first (exit
    codes 143 and 130).

    Example: anechoic train pocket_mae_digits --out runs/digits --shortcut.alpha-min 0.6 --model.options depth=6

    Args:
        recipe: a name that `anechoic list recipes` lists.
    """
    config: Config = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    config = with_recipe_options(config)
    out = Path(out or Path("runs") / (config.recipe or "run"))
    return train_config(config, out, dry_run=dry_run, log=log, validation_labels=validation_labels)


def with_recipe_options(config: Config) -> Config:
    """Return the config with the recipe's options, to which those of the command line add.

    optim.samples replaces the recipe's optim.epochs, and the other way around.
    """
    if config.recipe not in table():
        return config
    base = recipe_by_name(config.recipe)
    samples, epochs = config.optim.samples, config.optim.epochs
    if samples is not None and base.optim.samples is None and epochs == base.optim.epochs:
        epochs = None
    elif epochs is not None and base.optim.epochs is None and samples == base.optim.samples:
        samples = None
    return replace(
        config,
        optim=replace(config.optim, samples=samples, epochs=epochs),
        model=replace(config.model, options={**base.model.options, **config.model.options}),
        objective=replace(config.objective, options={**base.objective.options, **config.objective.options}),
    )


def train_config(
    config: Config,
    out: Path,
    *,
    dry_run: bool,
    brief: bool = False,
    source: Source | None = None,
    log: Sequence[Tracker] = (),
    validation_labels: PathLike | None = None,
) -> Outcome:
    """Check the config and train it, or only print it. source: its data, if it is open already."""
    from anechoic.training.build import check
    from anechoic.training.loop import fit

    check(config)
    if dry_run:
        return Outcome(config=to_json(config), metrics={}, seed=config.seed, text=json.dumps(to_json(config), indent=2))
    before = (out / "results.json").exists()
    labels = None if validation_labels is None else str(validation_labels)
    results = fit(config, out, verbose=True, brief=brief, source=source, log_to=log, validation_labels=labels)
    metrics = results["metrics"]
    text = f"{out} {'was finished before' if before else 'is trained'}: {metrics['seen']:,} samples seen"
    text += f", loss {metrics['loss']:.4f}"
    if "held_out_loss" in metrics:
        text += f", held-out loss {metrics['held_out_loss']:.4f}"
    return Outcome(results["config"], metrics, seed=config.seed, seconds=results["seconds"], text=text + ".")
