"""How the cost of our training step grows: along the batch, the width, the depth, the tokens, and with more cores.

There is no peer. One setting at a time is changed in a small masked autoencoder with decayed shortcuts and skips. A
row reports how the seconds of a step grew from the row before it: the exponent e of cost ~ size^e, beside the
exponent of the plain algorithm's matrix products. The ratio of a row is the speed of a step beside the axis's first.
All axes but the last run on one thread, where nothing but the work itself can make a step slower.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from anechoic_lab.bench.contest import Entry, contest
from anechoic_lab.bench.timing import Options, gemm_flops, row

PEERS = ("torch",)
ALPHA_MIN = 0.6
HEAD = 64


@dataclass(frozen=True)
class Point:
    """One size on an axis: what it is called there, the network and batch, and the processes and threads."""

    value: float
    label: str
    dim: int = 192
    depth: int = 12
    image: int = 32
    batch: int = 32
    processes: int = 1
    threads: int = 1


BASE = Point(0, "")
BATCHES, WIDTHS, DEPTHS, SIDES = (8, 32, 128), (64, 128, 256, 512), (3, 6, 12, 24), (16, 32, 64, 96)


def axes() -> dict[str, list[Point]]:
    """Name of an axis -> its points, smallest first."""
    cores = os.cpu_count() or 1
    arrangements = sorted({(1, 1), (1, cores), (cores, 1)})
    return {
        "batch": [replace(BASE, value=b, label=f"{b} images", batch=b) for b in BATCHES],
        "width": [replace(BASE, value=d, label=f"width {d}", dim=d) for d in WIDTHS],
        "depth": [replace(BASE, value=d, label=f"{d} blocks", depth=d) for d in DEPTHS],
        "tokens": [replace(BASE, value=(s // 4) ** 2, label=f"{(s // 4) ** 2} patches", image=s) for s in SIDES],
        "cores": [
            replace(BASE, value=p * t, label=f"{p} processes of {t} threads", batch=128, processes=p, threads=t)
            for p, t in arrangements
        ],
    }


def run(options: Options) -> list[dict[str, Any]]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gemm = gemm_flops()
    torch.set_num_threads(threads)
    return [item for name, points in axes().items() for item in axis_rows(name, points, gemm, rounds=options.rounds)]


def axis_rows(name: str, points: list[Point], gemm: float, *, rounds: int) -> list[dict[str, Any]]:
    """A row per point; exponent and expected: from the point before, in time and in the plain algorithm's products.

    gemm: the limit of one thread.
    """
    from anechoic_lab.bench.train import ours

    entries = {
        point.label: Entry(
            ours,
            (work_of(point), {"alpha_min": ALPHA_MIN}, False),
            processes=point.processes,
            threads=point.threads,
        )
        for point in points
    }
    timing, memory = contest(entries, rounds=rounds, turn=0.3)
    rows = []
    for before, point in zip([None, *points], points, strict=False):
        found = row(
            f"{name}: {point.label}",
            timing,
            ours=point.label,
            peer=points[0].label,
            items=point.batch,
            flops=flops_of(point),
            gemm=gemm * point.processes * point.threads,
            memory_mb=memory[point.label],
        )
        extra: dict[str, Any] = {"axis": name, "value": point.value, "label": point.label}
        extra |= {"exponent": None, "expected": None}
        if before is not None and name != "cores":
            growth = math.log(point.value / before.value)
            extra["exponent"] = math.log(timing.median(point.label) / timing.median(before.label)) / growth
            extra["expected"] = math.log(flops_of(point) / flops_of(before)) / growth
        rows.append(found | extra)
    return rows


def work_of(point: Point) -> Any:
    from anechoic_lab.bench.train import Work

    heads = max(1, point.dim // HEAD)
    return Work(
        point.label,
        dim=point.dim,
        heads=heads,
        decoder_dim=point.dim // 2,
        decoder_heads=heads,
        batch=point.batch,
        depth=point.depth,
        image=point.image,
    )


def flops_of(point: Point) -> float:
    from anechoic.models import model_config
    from anechoic.training.cost import step_flops

    config: Any = model_config("mae_tiny_patch4", **work_of(point).model_options(alpha_min=ALPHA_MIN))
    return step_flops(config, point.batch)
