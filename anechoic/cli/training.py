"""The verbs that train: pretrain on any images, train a recipe."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from anechoic.config import Algorithm, Config, Options, budget, default_holdout, to_json
from anechoic.outcome import Outcome
from anechoic.recipes import recipe as recipe_by_name
from anechoic.recipes import table

if TYPE_CHECKING:
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


def pretrain(
    data: str,
    /,
    *,
    out: Path,
    image_size: int | None = None,
    channels: int = 3,
    model: str | None = None,
    model_options: Options = {},  # noqa: B006
    epochs: float | None = None,
    batch_size: int | None = None,
    algorithm: Algorithm | None = None,
    lr: float | None = None,
    alpha_min: float | Literal["auto"] | None = None,
    init_from: Path | None = None,
    knn: int = 0,
    workers: int | None = None,
    seed: int = 0,
    devices: int | None = None,
    verbose: bool = False,
    dry_run: bool = False,
) -> Outcome:
    """Train a masked autoencoder on images without labels; everything not said is chosen by the data and the machine.

    It ends with a verdict, without labels, on whether that worked. The same command again goes on where it stopped.
    SIGTERM and Ctrl-C save first (exit codes 143 and 130).

    Example: anechoic pretrain photos --out runs/photos --epochs 100

    Args:
        data: digits, scenes, emoji, a folder, list, zip, tar, parquet, npz, or hf:NAME.
        out: the run directory.
        image_size: side of the images the model sees; default by the images.
        channels: 3 for color, 1 for gray.
        model: a mae_ model that `anechoic models` lists; default by the number of images.
        model_options: options of the model, such as dim=48 depth=2.
        epochs: passes over the data.
        batch_size: samples per update.
        algorithm: adamw or muon, which learns faster at the size for processors; default muon there, else adamw.
        lr: peak learning rate; default by algorithm, length and batch.
        alpha_min: 1 for plain residual connections, auto for the decay that fits the depth; default by the length.
        init_from: a run or model directory to start from.
        knn: training samples that vote in a k-NN test on held-out ones, if there are labels; 0 makes none.
        workers: processes that decode images.
        seed: of weights, order, crops and masks.
        devices: processes that share each batch.
        verbose: show every setting before it starts.
        dry_run: print the config and stop.
    """
    config, size = pretrain_config_for(
        data,
        image_size=image_size,
        channels=channels,
        model=model,
        options=model_options,
        epochs=epochs,
        batch_size=batch_size,
        algorithm=algorithm,
        lr=lr,
        alpha_min=alpha_min,
        seed=seed,
        devices=devices,
    )
    config = replace(
        config,
        init_from=str(init_from or ""),
        validation=replace(config.validation, knn=knn),
        data=replace(config.data, workers=workers),
    )
    check_and_introduce(config, out, size=size, sized=model is None, chosen=alpha_min is None, dry_run=dry_run)
    found = _run(config, out, dry_run=dry_run, brief=not verbose)
    return found if dry_run else with_verdict(found, out)


def check_and_introduce(config: Config, out: Path, *, size: int, sized: bool, chosen: bool, dry_run: bool) -> None:
    """What is about to happen and why, in a few lines on the standard error stream; mistakes are told before them.

    sized and chosen: the model and alpha_min were chosen here. A run that is going on, or finished, was introduced when
    it began.
    """
    from anechoic.runtime.distributed import under_launcher
    from anechoic.training.build import check

    check(config)
    if under_launcher() or (out / "config.json").exists():
        return
    reason = f"Shortcuts: {alpha_min_reason(config)}" if chosen else ""
    lines = [reason] if dry_run else [*introduction(config, size=size, sized=sized), reason]
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


def introduction(config: Config, *, size: int, sized: bool) -> list[str]:
    """What is trained, why this model, and how long it will take. sized: the model was chosen here."""
    from anechoic.pages.tables import duration
    from anechoic.runtime.devices import accelerators
    from anechoic.training.cost import seconds_per_image

    held_out = default_holdout(size) if config.data.holdout is None else config.data.holdout
    samples = budget(config.optim, max(config.optim.batch_size, size - held_out))
    devices = config.devices or max(1, accelerators())
    seconds = seconds_per_image(config) * samples / devices
    options = ", ".join(f"{name} {value}" for name, value in config.model.options.items())
    machine = "a processor" if not accelerators() else "1 accelerator" if devices == 1 else f"{devices} accelerators"
    return [
        f"Pre-training on {config.data.source}: {size:,} images without labels, {held_out:,} of them held out.",
        f"Model: {config.model.name}{f' ({options})' if options else ''} on images of {config.data.image_size} pixels"
        + (f", a size for {machine} and as many images; --model chooses another." if sized else "."),
        f"Length: {samples:,} samples in {samples // config.optim.batch_size:,} updates of {config.optim.batch_size}, "
        f"about {duration(seconds)} here (timed on a few updates); --epochs changes it.",
    ]


def with_verdict(trained: Outcome, out: Path) -> Outcome:
    """The outcome of a training with the verdict on it, and the command for its page."""
    from anechoic.errors import UserError
    from anechoic.pages.runs import encoder_of, judge, open_run

    command = f"The whole report: anechoic report {shlex.quote(str(out))}"
    try:
        run = open_run(out)
        verdict = judge(run, encoder_of(run), seed=run.config.seed)
    except UserError as problem:
        return replace(trained, text=f"{trained.text}\nThere is no verdict: {problem}\n{command}")
    metrics = {**trained.metrics, "verdict": verdict.to_json()}
    return replace(trained, metrics=metrics, text=f"{trained.text}\n{verdict.text}\n{command}")


def alpha_min_reason(config: Config) -> str:
    """One line: which alpha_min was chosen and by what, and what to say for the other."""
    from anechoic.recipes.pretrain import CROSSOVER_UPDATES, LONG_ALPHA_MIN, SMALLEST_SIDE_TO_DECAY

    long, alpha_min = CROSSOVER_UPDATES[config.optim.algorithm], LONG_ALPHA_MIN[config.optim.algorithm]
    if config.shortcut.alpha_min == 1:
        return (
            f"alpha_min 1, plain residual connections: shortcuts decay only in runs of {long:,} updates and more, on "
            f"images of {SMALLEST_SIDE_TO_DECAY} pixels and more, with skips to the decoder; or with "
            f"--alpha-min {alpha_min}."
        )
    return f"alpha_min {alpha_min}, shortcuts decay with depth: the run has {long:,} updates or more."


def pretrain_config_for(data: str, **choices: Any) -> tuple[Config, int]:
    """The config that `pretrain` would train for this data on this machine, and the number of images."""
    import torch

    from anechoic.data import open_source
    from anechoic.recipes.pretrain import pretrain_config
    from anechoic.runtime.devices import accelerators

    source = open_source(data, channels=choices["channels"])
    sides = [
        min(image.shape[1:])
        for image in source.read_many(range(min(9, len(source))))
        if isinstance(image, torch.Tensor)
    ]
    side = sorted(sides)[len(sides) // 2] if sides else 64
    config = pretrain_config(data, size=len(source), side=side, accelerators=accelerators(), **choices)
    return config, len(source)


@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def train(recipe: Recipe, *, out: Path | None = None, dry_run: bool = False) -> Outcome:
    """Train a recipe, any of its settings overridden; `anechoic train RECIPE --help` lists them.

    The same command again goes on where it stopped. SIGTERM and Ctrl-C save first (exit codes 143 and 130).

    Example: anechoic train pocket_mae_digits --out runs/digits --shortcut.alpha-min 0.6 --model.options depth=6

    Args:
        recipe: a name that `anechoic recipes` lists.
        out: the run directory; default runs/RECIPE.
        dry_run: print the config and stop.
    """
    config: Config = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    config = with_recipe_options(config)
    return _run(config, out or Path("runs") / (config.recipe or "run"), dry_run=dry_run)


def with_recipe_options(config: Config) -> Config:
    """Options given on the command line add to the recipe's instead of replacing them all."""
    if config.recipe not in table():
        return config
    base = recipe_by_name(config.recipe)
    return replace(
        config,
        model=replace(config.model, options={**base.model.options, **config.model.options}),
        objective=replace(config.objective, options={**base.objective.options, **config.objective.options}),
    )


def _run(config: Config, out: Path, *, dry_run: bool, brief: bool = False) -> Outcome:
    """Check the config and train it, or only print it."""
    from anechoic.training.build import check
    from anechoic.training.loop import fit

    check(config)
    if dry_run:
        return Outcome(config=to_json(config), metrics={}, seed=config.seed, text=json.dumps(to_json(config), indent=2))
    before = (out / "results.json").exists()
    results = fit(config, out, verbose=True, brief=brief)
    metrics = results["metrics"]
    text = f"{out} {'was finished before' if before else 'is trained'}: {metrics['seen']:,} samples seen"
    text += f", loss {metrics['loss']:.4f}"
    if "held_out_loss" in metrics:
        text += f", held-out loss {metrics['held_out_loss']:.4f}"
    return Outcome(results["config"], metrics, seed=config.seed, seconds=results["seconds"], text=text + ".")
