"""Time and peak memory of search and explore in a large collection of random vectors.

    python tools/finding_memory.py results/finding-memory.json [--count 100000] [--width 512]

Vectors are in a file, as those of an index: a thousand clusters of different sizes, and one image in a hundred twice.
Everything but reading images is measured.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.index.collection import explored
from anechoic.index.index import SCALING, Searchable
from anechoic.outcome import Outcome
from anechoic.storage.files import write_json


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def drawn(path: Path, count: int, width: int) -> np.ndarray:
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, width))
    rng = np.random.default_rng(0)
    centers = 3 * rng.normal(size=(1000, width)).astype(np.float32)
    for start in range(0, count, 4096):
        rows = np.arange(start, min(start + 4096, count))
        which = (rng.random(len(rows)) ** 2 * 1000).astype(int)
        table[rows] = centers[which] * rng.random((len(rows), 1)) + rng.normal(size=(len(rows), width))
    copies = np.arange(0, count - 1, 100)
    table[copies + 1] = table[copies] + 0.01 * rng.normal(size=(len(copies), width))
    table.flush()
    return np.load(path, mmap_mode="r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=512)
    asked = parser.parse_args()
    metrics: dict[str, Any] = {"images": asked.count, "width": asked.width, "before_megabytes": peak_megabytes()}
    with tempfile.TemporaryDirectory() as folder:
        vectors = drawn(Path(folder) / "vectors.npy", asked.count, asked.width)
        started = time.perf_counter()
        searchable = Searchable.of(vectors, SCALING, engine="torch")
        opened = time.perf_counter()
        searchable.nearest(np.array(vectors[:10]), k=12)
        searched = time.perf_counter()
        metrics |= {"search_megabytes": peak_megabytes()}
        found = explored(searchable.units)
        ended = time.perf_counter()
    expected = len(range(0, asked.count - 1, 100))
    metrics |= {
        "peak_megabytes": peak_megabytes(),
        "seconds": {"open": opened - started, "ten_queries": searched - opened, "explore": ended - searched},
        "cpu_seconds": time.process_time(),
        "planted_pairs": expected,
        "pairs_found": len(found.pairs),
        "planted_found": sum(j == i + 1 and i % 100 == 0 for i, j, _ in found.pairs),
        "clusters": found.clusters.sizes,
    }
    done = Outcome(config=vars(asked) | {"output": str(asked.output)}, metrics=metrics, seed=0, seconds=ended - started)
    write_json(asked.output, done.to_json())
    print(metrics)


if __name__ == "__main__":
    main()
