"""The command `embed`: feature vectors of images."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tyro import MISSING

from anechoic.cli._command import command
from anechoic.cli._shared import check_workers, refuse_swapped, skipped_text
from anechoic.cli.options import Data, Device, ImageSize, Layer, OnePooling, Out, Run, WeightsOption, Workers
from anechoic.errors import UserError
from anechoic.outcome import Outcome, counted

if TYPE_CHECKING:
    from anechoic.eval.embedding import Vectors


@overload
def embed(
    run: Run,
    data: Any,
    /,
    *,
    layer: Layer = -1,
    pooling: OnePooling = None,
    image_size: ImageSize = None,
    weights: WeightsOption = None,
    device: Device = "auto",
    workers: Workers = None,
) -> Vectors: ...
@overload
def embed(
    run: Run,
    data: Data,
    /,
    *,
    out: Out,
    layer: Layer = -1,
    pooling: OnePooling = None,
    image_size: ImageSize = None,
    weights: WeightsOption = None,
    device: Device = "auto",
    workers: Workers = None,
    part_size: int = 8192,
) -> Outcome: ...
@command
def embed(
    run: Run,
    data: Data,
    /,
    *,
    out: Out = MISSING,
    layer: Layer = -1,
    pooling: OnePooling = None,
    image_size: ImageSize = None,
    weights: WeightsOption = None,
    device: Device = "auto",
    workers: Workers = None,
    part_size: int = 8192,
) -> Any:
    """Write one feature vector per image, with the images' names, to a .npz, .npy, .parquet or .csv file, or a folder.

    The ending of the file chooses the format; the names for an .npy are in a .json beside it. Without an ending, --out
    is a folder of parquet parts, which several ranks (torchrun, tools slurm) write together; the same command resumes.
    In Python, without `out`, the vectors are returned: an array with `.names` and `.skipped`. The data may then also be
    Pillow images, arrays, tensors (uint8, or floats 0 .. 1) or a list of these or of paths.

    Example: anechoic embed runs/mine photos/ -o vectors.npz

    Args:
        part_size: number of images of a part, if --out is a folder; a multiple of 256.
    """
    started = time.perf_counter()
    from anechoic.data import open_source
    from anechoic.eval.encoders import open_encoder
    from anechoic.eval.export_features import check_format, embed_source
    from anechoic.eval.feature_parts import embed_parts
    from anechoic.runtime.distributed import alone

    if out is MISSING:
        from anechoic.eval import embedding

        encoder = open_encoder(run, image_size=image_size, weights=weights)
        return embedding.embed(
            encoder, data, layer=layer, pooling=pooling, device=device, workers=check_workers(workers)
        )
    out, world = Path(out), alone()
    in_parts = not out.suffix or out.is_dir()
    if not in_parts:
        check_format(out)
        if world.size > 1:
            raise UserError(f"{world.size} ranks write a folder of parts: omit the ending of --out {out.name}.")
    how: dict[str, Any] = {"layer": layer, "pooling": pooling, "device": device, "workers": check_workers(workers)}
    refuse_swapped(run, data)
    encoder = open_encoder(run, image_size=image_size, weights=weights)
    source = open_source(data, channels=encoder.channels, pixels=encoder.pixels)
    about = {"encoder": str(run)}
    if in_parts:
        ranks: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
        metrics = embed_parts(encoder, source, out, part_size=part_size, about=about, **ranks, **how)
        text = parts_text(metrics, out)
    else:
        metrics = embed_source(encoder, source, out, about=about, **how)
        text = f"Wrote {vectors_text(metrics)} to {out}."
    return Outcome({}, metrics, seconds=time.perf_counter() - started, text=text + skipped_text(metrics["skipped"]))


def parts_text(metrics: dict[str, Any], out: Path) -> str:
    text = "Rank {rank} of {world_size}: ".format(**metrics) if metrics["world_size"] > 1 else ""
    text += "Wrote {computed} parts. {finished} of {parts} are in ".format(**metrics) + f"{out}: "
    return f"{text}{vectors_text(metrics)}."


def vectors_text(metrics: dict[str, Any]) -> str:
    """Return how many vectors of which kind were written, in words."""
    return f"{counted(metrics['vectors'], 'vector')} of {{dim}} channels (layer {{layer}}, {{pooling}})".format(
        **metrics
    )
