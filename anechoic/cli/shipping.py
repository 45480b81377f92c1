"""The verbs that move weights: export hands a network to other programs, import-weights takes one over from them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from torch import Tensor

Target = Literal["timm", "transformers", "hub-folder", "safetensors", "onnx", "torch-export"]


def export(run: Path, /, *, to: Target, out: Path, check: str = "", fold: bool = False) -> Outcome:
    """Write a trained network in the format of another program, and measure how well it agrees.

    Example: anechoic export runs/mine --to timm --out exported

    Args:
        run: run, model or checkpoint directory; of a masked autoencoder the encoder is exported.
        to: timm, transformers and hub-folder get the network folded to plain shortcuts, with a final norm.
        out: the folder to write; it must not exist.
        check: images to compare on (default: the embedded scenes, for color networks, or digits).
        fold: fold the network also for safetensors, onnx and torch-export.
    """
    from anechoic.runtime.checkpoint import load
    from anechoic.surgery import fold as folded
    from anechoic.weights.exporting import encoder_of, export_model, is_decayed

    started = time.perf_counter()
    model = encoder_of(load(run))
    if fold:
        preprocess = model.preprocess
        model = folded(model)
        model.preprocess = preprocess
    images, source = check_images(model, check)
    exported = export_model(model, out, to=to, images=images)
    told = f"Largest difference from the network here on {len(images)} images ({source}):"
    rows = [f"  {what}: {value:.2g}" for what, value in exported.differences.items()]
    advice = []
    if to in ("timm", "transformers", "hub-folder") and is_decayed(model):
        advice = [f"Its norms differ in eps, and {to} keeps one for all: {out / 'README.md'} shows how to set each."]
    return Outcome(
        config={"check": source},
        metrics={
            "differences": exported.differences,
            "compared": exported.compared,
            "files": sorted(file.name for file in out.iterdir()),
        },
        seconds=time.perf_counter() - started,
        text="\n".join([f"Wrote {out}. {exported.compared[0].upper()}{exported.compared[1:]}.", told, *rows, *advice]),
    )


def check_images(model: Any, source: str) -> tuple[Tensor, str]:
    """A few real images as the network wants them, and where they come from. Latents are drawn, for want of any."""
    import torch

    from anechoic.data import Augment, Loader, open_source

    config, how = model.config, model.preprocess
    if how.channels not in (1, 3):
        if source:
            raise UserError(f"This network reads {how.channels} channels, and images have 1 or 3: leave --check out.")
        generator = torch.Generator().manual_seed(0)
        return torch.randn(4, how.channels, *config.size, generator=generator), "drawn latents"
    source = source or ("digits" if how.channels == 1 else "scenes:8")
    loader = Loader(
        open_source(source, channels=how.channels),
        image_size=how.image_size,
        batch_size=8,
        seed=0,
        augment=Augment(kind="center"),
        shuffle=False,
        drop_last=False,
    )
    batch = next(iter(loader))
    return how.apply(batch.images), source


def import_weights(
    checkpoint: Path,
    /,
    *,
    out: Path,
    alpha_min: float | None = None,
    num_heads: int | None = None,
    decoder_num_heads: int | None = None,
    norm_pix: bool | None = None,
    mask_ratio: float | None = None,
    num_classes: int | None = None,
) -> Outcome:
    """Take over a checkpoint of MAE, SiT (also the authors' decayed ones), U-ViT, or a ViT of timm or transformers.

    Example: anechoic import-weights mae_pretrain_vit_base.pth --out models/mae-base

    Args:
        checkpoint: .pth, .pt, .bin or .safetensors file, or a folder of transformers or timm. Code in it is never run.
        out: the model directory to write; anechoic.load and every verb that takes a RUN open it.
        alpha_min: what a decayed network was trained with, where its file does not say.
        num_heads: heads of the attention, where the size is not a published one.
        decoder_num_heads: heads of the decoder of a masked autoencoder (16 unless told).
        norm_pix: whether a masked autoencoder predicts normalized patches (true unless told).
        mask_ratio: share of the patches it hides (0.75 unless told).
        num_classes: classes of a SiT or U-ViT, without the null label.
    """
    from anechoic.runtime.checkpoint import model_card, write_model
    from anechoic.weights.checkpoint_metadata import Choices
    from anechoic.weights.importing import import_checkpoint

    started = time.perf_counter()
    if out.exists():
        raise UserError(f"{out} exists already: choose another --out.")
    choices = Choices(alpha_min, num_heads, decoder_num_heads, norm_pix, mask_ratio, num_classes)
    imported = import_checkpoint(checkpoint, choices)
    network = imported.network
    tensors = network.state_dict()
    write_model(out, tensors, model_card(network, imported.preprocess))
    count = sum(parameter.numel() for parameter in network.parameters())
    metrics = {
        "kind": imported.kind,
        "tensors": len(tensors),
        "parameters": count,
        "missing": [],
        "unexpected": [],
        "left_out": imported.left_out,
        "taken_from": imported.wrapper,
        "assumed": imported.assumed,
    }
    lines = [
        f"{checkpoint} is a {imported.kind}: {len(tensors)} tensors, {count:,} parameters; none missing or unexpected.",
        f"Left out, because the network needs no copy of it: {', '.join(imported.left_out) or 'nothing'}.",
        f"Wrote {out}.",
    ]
    if imported.assumed:
        guesses = ", ".join(f"{name} {value}" for name, value in imported.assumed.items())
        lines.insert(2, f"Assumed, because neither the file nor an option says: {guesses}.")
    if imported.wrapper is not None:
        lines.insert(1, f"Taken from the entry {imported.wrapper!r} of the file.")
    return Outcome(
        config={},
        metrics=metrics,
        seconds=time.perf_counter() - started,
        text="\n".join(lines),
    )
