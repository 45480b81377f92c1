"""The verb that packs images for training on many machines: shard."""

from __future__ import annotations

import time
from pathlib import Path

from anechoic.outcome import Outcome


def shard(data: str, out: Path, /, *, labels: bool = False, shard_bytes: int = 1 << 28, channels: int = 3) -> Outcome:
    """Write images as WebDataset shards with an index, to be read in any order from a disk or a server.

    Example: anechoic shard photos/train photos-shards --labels

    Args:
        data: images, as for pretrain.
        out: the new folder; give it, or its URL (s3://..., https://...), wherever images are asked for.
        labels: also write the classes.
        shard_bytes: size up to which a shard is filled.
        channels: of images that are arrays and are written as PNG: 3 color, 1 gray.
    """
    from tqdm.auto import tqdm

    from anechoic.data import open_source
    from anechoic.data.shards import write_shards

    started = time.perf_counter()
    source = open_source(data, labels=labels, channels=channels)
    with tqdm(total=len(source), unit=" images", delay=2, leave=False, disable=None) as bar:
        written = write_shards(source, out, shard_bytes=shard_bytes, progress=bar.update)
    lines = [
        f"{out} holds {written.images:,} images in {written.shards} shards, {written.size:,} bytes with the index."
    ]
    if written.skipped:
        name, why = written.skipped[0]
        lines.append(f"{len(written.skipped)} images could not be read and are left out; the first is {name} ({why}).")
    return Outcome(
        config={},
        metrics={
            "images": written.images,
            "shards": written.shards,
            "bytes": written.size,
            "fingerprint": open_source(out, channels=channels).fingerprint,
            "skipped": [{"name": name, "reason": why} for name, why in written.skipped],
        },
        seconds=time.perf_counter() - started,
        text="\n".join(lines),
    )
