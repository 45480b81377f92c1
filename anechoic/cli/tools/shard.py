"""The command `tools shard`: images packed for training on many machines."""

from __future__ import annotations

import time
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import Data, Out
from anechoic.outcome import Outcome, counted, printable


@command
def shard(data: Data, /, *, out: Out, labels: bool = False, shard_bytes: int = 1 << 28, channels: int = 3) -> Outcome:
    """Write images as WebDataset shards with an index, to be read in any order from a disk or a server.

    The folder, or its URL (s3://..., https://...), is DATA for every other command.

    Example: anechoic tools shard photos/train -o photos-shards --labels

    Args:
        labels: also write the classes.
        shard_bytes: maximum size of a shard.
        channels: of images that are arrays and are written as PNG: 3 color, 1 gray.
    """
    from tqdm.auto import tqdm

    from anechoic.data import open_source
    from anechoic.data.shards import write_shards

    started = time.perf_counter()
    out = Path(out)
    source = open_source(data, labels=labels, channels=channels)
    with tqdm(total=len(source), unit=" images", delay=2, leave=False, disable=None) as bar:
        written = write_shards(source, out, shard_bytes=shard_bytes, progress=bar.update)
    lines = [
        f"{out} holds {counted(written.images, 'image')} in {counted(written.shards, 'shard')}, {written.size:,} bytes "
        "with the index."
    ]
    if written.skipped:
        name, why = written.skipped[0]
        lines.append(
            f"{counted(len(written.skipped), 'image')} could not be read; the first is {printable(name)} ({why})."
        )
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
