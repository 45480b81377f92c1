"""The command `sample`: images from a trained diffusion or flow model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from anechoic.choices import GuidanceForm, Process, Sampler
from anechoic.cli._command import command
from anechoic.cli.options import BatchSize, Out, PathLike, RunDirectory, Seed, WeightsOption
from anechoic.outcome import Outcome, counted


@command
def sample(
    run: RunDirectory,
    /,
    *,
    out: Out = "samples.png",
    num: int = 64,
    sampler: Sampler | None = None,
    steps: int = 50,
    order: int = 3,
    guidance: float | None = None,
    guidance_form: GuidanceForm = "added",
    guided_channels: int | None = None,
    classes: Sequence[int] = (),
    seed: Seed = 0,
    process: Process | None = None,
    vae: PathLike | None = None,
    untrained: bool = False,
    weights: WeightsOption = None,
    batch_size: BatchSize = 64,
    devices: int = 1,
) -> Outcome:
    """Make images with a trained diffusion or flow model.

    It writes a .png picture of them all, an .npz file with images, labels and receipt, or a folder with a file each.
    Image i of a seed starts from the same noise for every batch size and
    number of processes.

    Example: anechoic sample runs/digits --num 100 --steps 50 --seed 0 --out digits.png

    Args:
        num: number of images.
        sampler: dpm-solver, dpm-solver++ and euler-maruyama serve diffusion models; heun, euler, dopri5 and sde flows.
            By default the first that fits the model.
        steps: network evaluations for an image (1000 is usual for euler-maruyama, 250 for sde; dopri5 chooses its own).
        order: of dpm-solver and dpm-solver++: 1, 2 or 3.
        guidance: strength of classifier-free guidance, for models trained with label dropout.
        guidance_form: added is conditional + s * (conditional - null), none at 0; scaled is null + w * (conditional -
            null), none at 1.
        guided_channels: number of channels to guide, from the first (SiT's samples guide 3 of 4); by default all.
        classes: classes to draw, in turn; by default all of them in turn.
        process: the forward process the model was trained with, where its directory does not record it.
        vae: folder or hub name of the autoencoder that turns latents into images; by default the one the run's latents
            were made with.
        untrained: initialize the network at random first, as a baseline.
        devices: number of processes that share the work.
    """
    from anechoic.diffusion.generate import Request, check_output, generate, write_images

    started = time.perf_counter()
    out = Path(out)
    check_output(out)
    request = Request(
        run=str(run),
        num=num,
        sampler=sampler,
        steps=steps,
        order=order,
        guidance=guidance,
        convention=guidance_form,
        guided_channels=guided_channels,
        classes=tuple(classes),
        seed=seed,
        process=process,
        vae=None if vae is None else str(vae),
        untrained=untrained,
        weights=weights,
        batch_size=batch_size,
    )
    images = generate(request, devices=devices)
    write_images(images, out)
    seconds = time.perf_counter() - started
    receipt = images.receipt
    return Outcome(
        config={},
        metrics={"images": len(images.pixels), "evaluations": receipt["evaluations"], "receipt": receipt},
        seed=seed,
        seconds=round(seconds, 3),
        text=f"{counted(len(images.pixels), 'image')} by {receipt['sampler']} with {receipt['evaluations']} network "
        f"evaluations each, in {seconds:.1f} s: {out}",
    )
