"""Fair timing on a machine that is not quiet: contestants take turns, and ratios are formed within a round.

It knows nothing of what is measured; each benchmark module has `run(options) -> rows` and names its peers' packages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

GEMM_SIDE = 2048


@dataclass(frozen=True)
class Options:
    """The options of every benchmark. images: a folder of JPEGs; small: a source of small images; "" takes embedded
    ones; fused: train on the fused path; vectors: number of them for index."""

    rounds: int = 5
    images: str = ""
    small: str = ""
    workers: int = 0
    fused: bool = True
    vectors: int = 50_000


@dataclass(frozen=True)
class Timing:
    """Seconds of each contestant, one entry a round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, peer: str, *, ours: str = "ours") -> tuple[float, float, float]:
        """How many times faster ours is than the peer: median, lowest and highest over the rounds."""
        ratios = [b / a for a, b in zip(self.seconds[ours], self.seconds[peer], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def interleave(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int = 5, warm: Collection[str] = ()
) -> Timing:
    """Run each once to warm up, then all of them in turn, `rounds` times; a busy moment then hits everybody.

    warm: names of those that have run in this process before and need no warming up."""
    for name, run in contestants.items():
        if name not in warm:
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return Timing(seconds)


def gemm_flops() -> float:
    """The machine's limit, FLOP/s: the best of five float32 products of 2048 x 2048 matrices with torch's threads."""
    import torch

    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE).unbind(0)
    seconds = interleave({"gemm": lambda: a @ b}, rounds=5).seconds["gemm"]
    return 2 * GEMM_SIDE**3 / min(seconds)


def row(
    work: str,
    timing: Timing,
    *,
    peer: str,
    ours: str = "ours",
    items: int | None = None,
    flops: float | None = None,
    gemm: float | None = None,
    memory_mb: float | None = None,
) -> dict[str, Any]:
    """One line of a benchmark's table. ours and peer are median seconds for the work; items, if given, how many images,
    queries or steps the work has; flops those of the plain algorithm, gemm the limit of `gemm_flops`."""
    ratio, low, high = timing.ratio(peer, ours=ours)
    seconds = timing.median(ours)
    return {
        "work": work,
        "ours": seconds,
        "peer": timing.median(peer),
        "peer_name": peer,
        "items": items,
        "ratio": ratio,
        "low": low,
        "high": high,
        "fraction_of_gemm": flops / seconds / gemm if flops is not None and gemm is not None else None,
        "memory_mb": memory_mb,
    }


def row_without_peer(work: str, seconds: float, *, memory_mb: float) -> dict[str, Any]:
    """A line of the table where there is nothing to compare with."""
    nothing = dict.fromkeys(("peer", "peer_name", "items", "ratio", "low", "high", "fraction_of_gemm"))
    return {"work": work, "ours": seconds, **nothing, "memory_mb": memory_mb}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a person: times, rates where there are items, the ratio with its range."""
    lines = []
    for item in rows:
        rate = (
            f" ({item['items'] / item['ours']:,.0f}/s against {item['items'] / item['peer']:,.0f}/s)"
            if item["items"]
            else ""
        )
        gemm = f", {item['fraction_of_gemm']:.0%} of the GEMM peak" if item["fraction_of_gemm"] is not None else ""
        memory = f", {item['memory_mb']:,.0f} MB" if item["memory_mb"] is not None else ""
        memory += f", recall {item['recall']:.3f}" if item.get("recall") is not None else ""
        if item["peer"] is None:
            lines.append(f"{item['work']}: {item['ours']:,.1f} s{memory}")
            continue
        lines.append(
            f"{item['work']}: {1000 * item['ours']:,.1f} ms, {item['peer_name']} {1000 * item['peer']:,.1f} ms{rate}, "
            f"ratio {item['ratio']:.2f} ({item['low']:.2f} to {item['high']:.2f}){gemm}{memory}"
        )
    return "\n".join(lines)
