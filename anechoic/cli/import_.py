"""The command `import`: the network of a foreign checkpoint as a model directory of ours."""

from __future__ import annotations

import time
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import Out, PathLike
from anechoic.errors import UserError
from anechoic.outcome import Outcome


@command
def import_weights(
    checkpoint: PathLike,
    /,
    *,
    out: Out,
    alpha_min: float | None = None,
    num_heads: int | None = None,
    decoder_num_heads: int | None = None,
    norm_pix: bool | None = None,
    mask_ratio: float | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
) -> Outcome:
    """Convert a checkpoint of MAE, SiT (also the authors' decayed ones), U-ViT, or a ViT of timm or transformers.

    --out is the model directory to write; anechoic.load and every command that takes a RUN open it.

    Example: anechoic import mae_pretrain_vit_base.pth --out models/mae-base

    Args:
        checkpoint: .pth, .pt, .bin or .safetensors file, or a folder of transformers or timm. Code in it is never run.
        alpha_min: what a decayed network was trained with, where its file does not record it.
        num_heads: heads of the attention, where the size is not a published one.
        decoder_num_heads: heads of the decoder of a masked autoencoder (default 16).
        norm_pix: whether a masked autoencoder predicts normalized patches (default true).
        mask_ratio: share of the patches it masks (default 0.75).
        num_classes: classes of a SiT or U-ViT, without the null label.
        channels: make a network for RGB one for this many channels: each gets the mean of the color filters.
    """
    from anechoic.runtime.checkpoint import model_card, write_model
    from anechoic.weights.importing import Choices, import_checkpoint
    from anechoic.weights.inflate import inflate

    started = time.perf_counter()
    out, checkpoint = Path(out), Path(checkpoint)
    if out.exists():
        raise UserError(f"{out} exists already: choose another --out.")
    choices = Choices(alpha_min, num_heads, decoder_num_heads, norm_pix, mask_ratio, num_classes)
    imported = import_checkpoint(checkpoint, choices)
    network, preprocess = imported.network, imported.preprocess
    if channels is not None:
        network, preprocess = inflate(network, preprocess, channels)
    tensors = network.state_dict()
    write_model(out, tensors, model_card(network, preprocess))
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
        f"Wrote {out}.",
    ]
    if imported.left_out:
        lines.insert(1, f"Skipped, because the network needs no copy of it: {', '.join(imported.left_out)}.")
    if imported.assumed:
        guesses = ", ".join(f"{name} {value}" for name, value in imported.assumed.items())
        lines.insert(-1, f"Assumed, because neither the file nor an option has it: {guesses}.")
    if channels is not None:
        lines.insert(
            -1,
            f"Inflated from 3 to {channels} channels: each gets the mean of the color filters times 3 / {channels}.",
        )
    if imported.wrapper is not None:
        lines.insert(1, f"Taken from the entry {imported.wrapper!r} of the file.")
    return Outcome(
        config={},
        metrics=metrics,
        seconds=time.perf_counter() - started,
        text="\n".join(lines),
    )
