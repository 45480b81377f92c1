"""The command `export`: a trained network in the format of another program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anechoic.choices import ExportTarget
from anechoic.cli._command import command
from anechoic.cli.options import Out, PathLike, RunDirectory, WeightsOption
from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from torch import Tensor


@command
def export(
    run: RunDirectory,
    /,
    *,
    to: ExportTarget,
    out: Out,
    check: PathLike | None = None,
    fold: bool = False,
    weights: WeightsOption = None,
) -> Outcome:
    """Write a trained network in the format of another program, and measure how well it agrees.

    Of a masked autoencoder the encoder is exported. The folder must not exist.

    Example: anechoic export runs/mine --to timm --out exported

    Args:
        to: timm, transformers and hub-folder get the network folded to plain shortcuts, with a final norm.
        check: images to compare on (default: the embedded scenes, for color networks, or digits).
        fold: fold the network also for safetensors, onnx and torch-export.
    """
    from anechoic.runtime.checkpoint import load
    from anechoic.surgery import fold as folded
    from anechoic.weights.exporting import export_model, exported_network, is_decayed

    started = time.perf_counter()
    out = Path(out)
    model = exported_network(load(run, weights=weights))
    if fold:
        preprocess = model.preprocess
        model = folded(model)
        model.preprocess = preprocess
    images, source = check_images(model, str(check or ""))
    exported = export_model(model, out, to=to, images=images)
    summary = f"Wrote {out}. {exported.compared[0].upper()}{exported.compared[1:]}."
    heading = f"Largest difference from the network here on {len(images)} images ({source}):"
    rows = [f"  {what}: {value:.2g}" for what, value in exported.differences.items()]
    advice = []
    if to in ("timm", "transformers", "hub-folder") and is_decayed(model):
        advice = [f"Its norms differ in eps, and {to} has one for all: {out / 'README.md'} shows how to set each."]
    return Outcome(
        config={"check": source},
        metrics={
            "differences": exported.differences,
            "compared": exported.compared,
            "files": sorted(file.name for file in out.iterdir()),
        },
        seconds=time.perf_counter() - started,
        text="\n".join([summary, heading, *rows, *advice]),
    )


def check_images(model: Any, source: str) -> tuple[Tensor, str]:
    """Return a few real images as the network wants them, and their source; of latents, random ones."""
    import torch

    from anechoic.data import Augment, Loader, open_source

    config, how = model.config, model.preprocess
    if how.channels not in (1, 3) or how.pixels.stored:
        if source and not how.pixels.stored:
            raise UserError(f"This network reads {how.channels} channels, and images have 1 or 3: omit --check.")
        if not source:
            generator = torch.Generator().manual_seed(0)
            return torch.randn(
                4, how.channels, *config.size, generator=generator
            ), "drawn numbers" if how.pixels.stored else "drawn latents"
    source = source or ("digits" if how.channels == 1 else "scenes:8")
    loader = Loader(
        open_source(source, channels=how.channels, pixels=how.pixels),
        image_size=how.image_size,
        batch_size=8,
        seed=0,
        augment=Augment(kind="center"),
        shuffle=False,
        drop_last=False,
    )
    batch = next(iter(loader))
    return how.apply(batch.images), source
