"""The command `pretrain`: a masked autoencoder on any images, without labels."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anechoic.choices import Algorithm, AlphaMin, Stretch
from anechoic.cli._command import training_command
from anechoic.cli.options import Data, Devices, DryRun, ImageSize, Log, Out, PathLike, Seed, ValidationLabels, Workers
from anechoic.cli.train import train_config
from anechoic.config import Config, Options, budget, default_holdout, from_json
from anechoic.outcome import Outcome, counted, rough_duration

if TYPE_CHECKING:
    from anechoic.data import Source


@training_command
def pretrain(
    data: Data,
    /,
    *,
    out: Out,
    image_size: ImageSize = None,
    channels: int | str | None = None,
    clip_percentiles: tuple[float, float] | None = None,
    stretch: Stretch = "linear",
    tile: int = 0,
    overlap: int = 0,
    rotate: bool = False,
    model: str | None = None,
    model_options: Options = {},  # noqa: B006
    epochs: float | None = None,
    batch_size: int | None = None,
    algorithm: Algorithm | None = None,
    lr: float | None = None,
    alpha_min: AlphaMin | None = None,
    init_from: PathLike | None = None,
    knn: int = 0,
    workers: Workers = None,
    seed: Seed = 0,
    devices: Devices = None,
    log: Log = (),
    validation_labels: ValidationLabels = None,
    verbose: bool = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Train a masked autoencoder on images without labels; defaults are chosen by the data and the machine.

    It ends with a verdict, without labels, on whether that worked. The same command resumes.
    SIGTERM and Ctrl-C save first (exit codes 143 and 130).

    Example: anechoic pretrain photos --out runs/photos --epochs 100

    Args:
        channels: 3 for color, 1 for gray; or those to read by number or name, such as 0,1,3 or DAPI,GFP. Default color;
            all channels at full precision for files that are no 8-bit pictures (TIFF, DICOM, npy, 16-bit PNG).
        clip_percentiles: two percentiles per channel, such as 0.5 99.5; values beyond them are clipped.
        stretch: log or asinh for values that span decades.
        tile: cut large images into tiles of this size, read from the file one by one; empty ones are skipped.
        overlap: pixels that neighboring tiles share.
        rotate: turn by 0, 90, 180 or 270 degrees at random, for images without an up.
        model: a mae_ model that `anechoic list models` lists; default by the number of images.
        model_options: options of the model, such as dim=48 depth=2.
        epochs: passes over the data.
        batch_size: samples per update.
        algorithm: adamw or muon, which learns faster at the size for CPUs; default muon there, else adamw.
        lr: peak learning rate; default by algorithm, length and batch.
        alpha_min: 1 for plain residual connections, auto for the decay that fits the depth; default by the length.
        init_from: a run or model directory to start from.
        knn: number of training samples for k-NN validation on held-out ones, if there are labels; 0 is off.
        verbose: show every setting before it starts.
    """
    out = Path(out)
    config, source, pixels_text = pretrain_config_for(
        str(data),
        out,
        labels=knn > 0,
        reading={
            "channels": channels,
            "tile": tile,
            "overlap": overlap,
            "stretch": stretch,
            "clip_percentiles": clip_percentiles,
        },
        image_size=image_size,
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
        data=replace(config.data, workers=workers, rotate=rotate),
    )
    check_and_introduce(
        config, out, source, sized=model is None, chosen=alpha_min is None, dry_run=dry_run, notes=pixels_text
    )
    # The size of scenes depends on the config, so they are drawn again.
    opened = None if str(data).startswith("scenes") else source
    found = train_config(
        config, out, dry_run=dry_run, brief=not verbose, source=opened, log=log, validation_labels=validation_labels
    )
    return found if dry_run else with_verdict(found, out, opened)


def check_and_introduce(
    config: Config, out: Path, source: Source, *, sized: bool, chosen: bool, dry_run: bool, notes: str = ""
) -> None:
    """Check the config, then print to stderr what is trained and why. notes: about the pixels.

    sized and chosen: the model and alpha_min were chosen here. A run that resumes was introduced when it began.
    """
    from anechoic.runtime.distributed import under_launcher
    from anechoic.training.build import check

    check(config)
    if under_launcher() or (out / "config.json").exists():
        return
    reason = f"Shortcuts: {alpha_min_reason(config)}" if chosen else ""
    lines = [notes, reason] if dry_run else [*introduction(config, source, sized=sized), notes, reason]
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


def introduction(config: Config, source: Source, *, sized: bool) -> list[str]:
    """Return what is trained, why this model, and how long it will take. sized: the model was chosen here."""
    from anechoic.data import described
    from anechoic.runtime.devices import num_gpus
    from anechoic.training.timing import training_seconds

    size = len(source)
    held_out = default_holdout(size) if config.data.holdout is None else config.data.holdout
    samples = budget(config.optim, max(config.optim.batch_size, size - held_out))
    devices = config.devices or max(1, num_gpus())
    seconds = training_seconds(config, source, samples=samples) / devices
    options = ", ".join(f"{name} {value}" for name, value in config.model.options.items())
    machine = "a CPU" if not num_gpus() else "1 GPU" if devices == 1 else f"{devices} GPUs"
    return [
        f"Pre-training on {described(config.data.source)}: {counted(size, 'image')} without labels, {held_out:,} of "
        "them held out.",
        f"Model: {config.model.name}{f' ({options})' if options else ''} on images of {config.data.image_size} pixels"
        + (f", a size for {machine} and as many images; --model chooses another." if sized else "."),
        f"Length: {counted(samples, 'sample')} in {counted(samples // config.optim.batch_size, 'update')} of "
        f"{config.optim.batch_size}, about {rough_duration(seconds)} with the machine as busy as it is now; --epochs "
        "changes it.",
    ]


def with_verdict(trained: Outcome, out: Path, source: Source | None) -> Outcome:
    """Return the outcome of a training with the verdict on it, and the command for its page."""
    from anechoic.errors import UserError
    from anechoic.pages.runs import encoder_of, open_run, verdict_on

    command = f"The whole report: anechoic report {shlex.quote(str(out))}"
    try:
        run = open_run(out)
        verdict = verdict_on(run, encoder_of(run), source=source, seed=run.config.seed)
    except UserError as problem:
        return replace(trained, text=f"{trained.text}\nThere is no verdict: {problem}\n{command}")
    metrics = {**trained.metrics, "verdict": verdict.to_json()}
    return replace(trained, metrics=metrics, text=f"{trained.text}\n{verdict.text}\n{command}")


def alpha_min_reason(config: Config) -> str:
    """Return in one line which alpha_min was chosen and why, and the option for the other."""
    from anechoic.recipes.pretrain import CROSSOVER_UPDATES, LONG_ALPHA_MIN, SMALLEST_SIDE_TO_DECAY

    long, alpha_min = CROSSOVER_UPDATES[config.optim.algorithm], LONG_ALPHA_MIN[config.optim.algorithm]
    if config.shortcut.alpha_min == 1:
        return (
            f"alpha_min 1, plain residual connections: shortcuts decay only in runs of {long:,} updates and more, on "
            f"images of {SMALLEST_SIDE_TO_DECAY} pixels and more, with skips to the decoder; or with "
            f"--alpha-min {alpha_min}."
        )
    return f"alpha_min {alpha_min}, shortcuts decay with depth: the run has {long:,} updates or more."


def pretrain_config_for(
    data: str, out: Path, *, labels: bool, reading: dict[str, Any], **choices: Any
) -> tuple[Config, Source, str]:
    """Return the config that `pretrain` would train for this data on this machine, the opened data, and a line about
    its pixels. reading: options of `measure`, whose results are those of the run where `out` has one."""
    import torch

    from anechoic.data.measure import measure, reopened
    from anechoic.recipes.pretrain import pretrain_config
    from anechoic.runtime.devices import num_gpus
    from anechoic.runtime.run import read_frozen_config

    before = read_frozen_config(out)
    if before is not None:
        measured = reopened(data, from_json(before).data, labels=labels, **reading)
    else:
        measured = measure(data, labels=labels, **reading)
    source = measured.source
    sides = [
        min(image.shape[1:])
        for image in source.read_many(range(min(9, len(source))))
        if isinstance(image, torch.Tensor)
    ]
    side = sorted(sides)[len(sides) // 2] if sides else 64
    config = pretrain_config(data, size=len(source), side=side, gpus=num_gpus(), channels=measured.channels, **choices)
    pixels = replace(config.data, mean=measured.mean, std=measured.std, pixels=measured.pixels)
    return replace(config, data=pixels), source, measured.text
