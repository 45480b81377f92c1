"""The command `embed`: feature vectors of images."""

from __future__ import annotations

import time
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli._shared import check_workers, refuse_swapped, skipped_text
from anechoic.cli.options import Data, Device, ImageSize, Layer, OnePooling, Out, Run, Workers
from anechoic.outcome import Outcome


@command
def embed(
    run: Run,
    data: Data,
    /,
    *,
    out: Out,
    layer: Layer = -1,
    pooling: OnePooling = None,
    image_size: ImageSize = None,
    device: Device = "auto",
    workers: Workers = None,
) -> Outcome:
    """Write one feature vector per image, with the images' names, to a .npz, .parquet or .csv file.

    The ending of the file chooses the format. For vectors in memory use `anechoic.load(run).embed(images)`.

    Example: anechoic embed runs/mine photos/ -o vectors.npz
    """
    started = time.perf_counter()
    from anechoic.data import open_source
    from anechoic.eval.encoders import open_encoder
    from anechoic.eval.export_features import check_format, embed_source

    out = Path(out)
    check_format(out)
    workers = check_workers(workers)
    refuse_swapped(run, data)
    encoder = open_encoder(run, image_size=image_size)
    source = open_source(data, channels=encoder.channels)
    metrics = embed_source(
        encoder,
        source,
        out,
        layer=layer,
        pooling=pooling,
        device=device,
        workers=workers,
        about={"encoder": str(run)},
    )
    text = "Wrote {vectors} vectors of {dim} channels (layer {layer}, {pooling}) to ".format(**metrics) + f"{out}."
    return Outcome({}, metrics, seconds=time.perf_counter() - started, text=text + skipped_text(metrics["skipped"]))
