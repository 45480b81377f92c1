"""The command `tools plan`: memory, operations and hours of a training before it starts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anechoic.choices import Gpu, Precision
from anechoic.cli._command import command
from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.config import Config

# Training images of the data sets that recipes are named after.
IMAGES = {"in1k": 1_281_167, "in100": 126_689, "cifar": 50_000}


@command
def plan(
    recipe: str,
    /,
    *,
    gpus: int = 8,
    gpu: Gpu = "a100",
    images: int | None = None,
    batch_size: int | None = None,
    accumulate: int | None = None,
    fsdp: bool = False,
    recompute: bool = False,
    precision: Precision = "bfloat16",
    decoded_per_second: float | None = None,
) -> Outcome:
    """Estimate what a training will cost: parameters, memory by part, operations, hours and what bounds them.

    Nothing is run or measured: it counts the operations of one update and reads the GPU's data sheet.

    Example: anechoic tools plan mae_in1k --gpus 4 --gpu a40

    Args:
        recipe: a name that `anechoic list recipes` lists.
        gpus: number of GPUs that share each batch.
        gpu: the model of the GPUs.
        images: number of images of the data set, where the recipe counts epochs and its name does not name the data.
        batch_size: samples per update; default: the recipe's.
        accumulate: number of micro-batches per update; default: the recipe's.
        fsdp: shard weights, gradients and optimizer over the GPUs.
        recompute: keep only each block's input for the backward pass.
        precision: of the matrix products.
        decoded_per_second: images that all processes decode per second, to see whether decoding is the bottleneck.
    """
    from anechoic.recipes import recipe as recipe_by_name
    from anechoic.training.cost import DEVICES, passes_of
    from anechoic.training.cost import plan as planned

    started = time.perf_counter()
    config = recipe_by_name(recipe)
    optim = replace(
        config.optim,
        batch_size=batch_size or config.optim.batch_size,
        accumulate=accumulate or config.optim.accumulate,
    )
    config = replace(config, optim=optim, recompute=recompute, precision=precision)
    samples = budget_of(config, recipe, images)
    passes, device = passes_of(config), DEVICES[gpu]
    found = planned(
        config,
        passes,
        gpus=gpus,
        device=device,
        samples=samples,
        fsdp=fsdp,
        images_per_second=decoded_per_second,
    )
    lines = [
        f"{recipe}: {found.parameters:,} parameters, {samples:,} samples in {samples // optim.batch_size:,} updates.",
        f"Memory of each {gpu} ({device.memory:g} GB), {found.batch_per_device} samples at once:",
        *(f"  {name:<16} {size / 1e9:8.2f} GB" for name, size in found.memory.items()),
        f"  {'together':<16} {sum(found.memory.values()) / 1e9:8.2f} GB{'' if found.fits else ', which does not fit'}",
        *([] if found.fits else [remedy(config, passes, gpus=gpus, device=device, fsdp=fsdp)]),
        f"Operations: {found.flops_per_sample / 1e9:.1f} GFLOP a sample, {found.flops / 1e18:.2f} exaFLOP in all.",
        "Seconds of an update (communication and decoding overlap with the rest):",
        *(f"  {name:<26} {seconds:8.3f} s" for name, seconds in found.seconds.items()),
        f"Time: {found.hours:,.1f} hours on {gpus} x {gpu}, most of it {found.bound}; {found.use_of_peak:.0%} of peak.",
    ]
    return Outcome(
        config={"batch_size": optim.batch_size, "accumulate": optim.accumulate},
        metrics=vars(found),
        seconds=time.perf_counter() - started,
        text="\n".join(lines),
    )


def budget_of(config: Config, recipe: str, images: int | None) -> int:
    """Return the number of samples of the whole training."""
    if config.optim.samples is not None:
        return config.optim.samples
    images = images or next((count for name, count in IMAGES.items() if name in recipe), None)
    if images is None or config.optim.epochs is None:
        raise UserError(f"{recipe} counts epochs, and its name does not name the data: give the number of --images.")
    # An epoch of latents visits every image and its mirror image.
    return int(config.optim.epochs * images * (2 if "latent" in recipe else 1))


def remedy(config: Config, passes: Any, *, gpus: int, device: Any, fsdp: bool) -> str:
    """Return what makes it fit, the cheapest option first."""
    from anechoic.training.cost import parts_needed

    for recompute, sharded, words in (
        (config.recompute, fsdp, ""),
        (True, fsdp, " with --recompute"),
        (True, True, " with --recompute and --fsdp"),
    ):
        parts = parts_needed(replace(config, recompute=recompute), passes, gpus=gpus, device=device, fsdp=sharded)
        if parts is not None:
            return f"It fits{words} with {parts} micro-batch{'es' * (parts > 1)}: --accumulate {parts}."
    return "Not even one sample at a time fits: use GPUs with more memory, or more of them."
