"""The command `bench`: speed and memory beside other libraries on this machine."""

from __future__ import annotations

import time
from importlib import import_module

from anechoic.cli import command
from anechoic.cli.options import PathLike, Workers
from anechoic.errors import UserError, nearest_name
from anechoic.outcome import Outcome, package_version

# What can be measured -> the module that does: `run(options) -> rows`, and `PEERS`, the packages it compares with.
BENCHMARKS = {
    "train": "anechoic_lab.bench.train",
    "data": "anechoic_lab.bench.data",
    "embed": "anechoic_lab.bench.embed",
    "sample": "anechoic_lab.bench.sample",
    "knn": "anechoic_lab.bench.knn",
    "index": "anechoic_lab.bench.index",
    "probe": "anechoic_lab.bench.probe",
    "memory": "anechoic_lab.bench.commands",
    "growth": "anechoic_lab.bench.growth",
    "quality": "anechoic_lab.bench.quality",
}


@command
def bench(
    what: str = "all",
    /,
    *,
    rounds: int = 5,
    images: PathLike | None = None,
    small: PathLike = "",
    workers: Workers = None,
    fused: bool = True,
    vectors: int = 50_000,
) -> Outcome:
    """Measure speed against other libraries, alternating with them on this machine.

    Example: anechoic bench data --images imagenette/train --small cifar100/train.parquet

    Args:
        what: train, data, embed, sample, knn, index, probe, memory (of the commands), growth (of the training step),
            quality (time until a network is as good as the peer's), or all.
        rounds: number of measurements of each contestant, which alternate; shown are median and range of the ratios.
        images: for data and embed, a folder of JPEGs; JPEGs are made from the embedded scenes if it is not given.
        small: for data and quality, a source of small images, labeled for quality; embedded ones if it is not given.
        fused: for train, the fused path (--no-fused: module by module).
        vectors: for index, the number of vectors of 384 channels.
    """
    if what not in (*BENCHMARKS, "all"):
        raise UserError(f"There is no benchmark {what!r}; {nearest_name(what, [*BENCHMARKS, 'all'])}")
    workers = workers or 0
    if rounds < 1 or workers < 0 or vectors < 1000:
        raise UserError("A benchmark needs at least one round, workers of 0 or more, and 1,000 vectors or more.")
    from anechoic_lab.bench.timing import Options, table

    start = time.perf_counter()
    options = Options(rounds, str(images or ""), str(small), workers, fused, vectors)
    rows, peers, failed = [], {}, {}
    for name in BENCHMARKS if what == "all" else [what]:
        module = import_module(BENCHMARKS[name])
        try:
            rows += [{"benchmark": name, **row} for row in module.run(options)]
        except Exception as problem:  # of several, the rows measured so far are kept, and the text ends with this
            if what != "all":
                raise
            failed[name] = f"{type(problem).__name__}: {problem}"
            continue
        peers.update({package: package_version(package) for package in module.PEERS})
    return Outcome(
        config={},
        metrics={"rows": rows, "peers": peers, "failed": failed},
        seconds=time.perf_counter() - start,
        text="\n".join([table(rows), *(f"{name} failed: {reason}" for name, reason in failed.items())]),
    )
