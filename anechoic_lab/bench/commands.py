"""Peak memory of the commands that read or make images, each with its pocket model in a fresh process.

There is no peer. Seconds are those of one call, with everything it opens; training has its own benchmark.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from anechoic.cli import find_command
from anechoic_lab.bench.memory import peak_memory_mb
from anechoic_lab.bench.timing import Options, row_without_peer

PEERS = ("torch",)
SCENES, SAMPLES = 2000, 512


def run(options: Options) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        encoder, denoiser = folder / "encoder", folder / "denoiser"
        make_run("pocket_mae_cifar100", "scenes:train:256", encoder)
        make_run("pocket_uvit_digits", "digits:train", denoiser)
        train, test = f"scenes:train:{SCENES}", f"scenes:test:{SCENES // 4}"
        parts = (str(encoder), train)
        pictures = folder / "samples.npz"
        calls: dict[str, tuple[str, tuple, dict]] = {
            f"embed: {SCENES} images": ("embed", parts, {"out": folder / "vectors.npz"}),
            f"knn: {SCENES} images, with baselines": ("evaluate", parts, {"test": test, "metrics": ("knn",)}),
            f"probe: {SCENES} images, with baselines": ("evaluate", parts, {"test": test, "metrics": ("probe",)}),
            f"sample: {SAMPLES} digits in 50 evaluations": ("sample", (denoiser,), {"num": SAMPLES, "out": pictures}),
            f"frechet: {SAMPLES} digits": ("frechet", (str(pictures), "digits:train"), {"extractor": "digits"}),
        }
        rows = []
        for name, (command, arguments, options_of_command) in calls.items():
            start = time.perf_counter()
            memory = peak_memory_mb(call, command, arguments, options_of_command, str(folder / "cache"))
            rows.append(row_without_peer(name, time.perf_counter() - start, memory_mb=memory))
        return rows


def make_run(recipe_name: str, source: str, folder: Path) -> None:
    """A run of two updates: what is read and computed later does not depend on how good the weights are."""
    from dataclasses import replace

    from anechoic.recipes import recipe
    from anechoic.training.loop import fit

    config = recipe(recipe_name)
    batch_size = 32
    optim = replace(config.optim, batch_size=batch_size, samples=2 * batch_size, epochs=None)
    fit(replace(config, data=replace(config.data, source=source), optim=optim), folder)


def call(command: str, arguments: tuple, options: dict, cache: str) -> None:
    """Run a command with a cache of its own."""
    os.environ["ANECHOIC_CACHE"] = cache
    find_command(command)(*arguments, **options)
