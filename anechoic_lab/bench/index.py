"""The approximate index beside exact search: build, open, query and neighbor graph, with recall and peak memory.

Vectors of 384 channels near a curved surface of 16 dimensions, since features fill few of their dimensions. They lie in
a file, as those of an index do; everything but embedding is measured, in a fresh process.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from anechoic_lab.bench.memory import peak_memory_mb
from anechoic_lab.bench.timing import Options, Timing, interleave, row, row_without_peer

PEERS = ("faiss-cpu",)
DIM, SURFACE, NOISE, K, QUERIES, GRAPH_ROWS = 384, 16, 0.02, 10, 200, 10_000
ROWS_AT_ONCE = 16384


def run(options: Options) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_vectors(folder / "vectors.npy", options.vectors)
        memory = peak_memory_mb(measure, str(folder), options.rounds)
        found = json.loads((folder / "found.json").read_text())
    size = f"{options.vectors:,} x {DIM}"
    timing = Timing(found["query"])
    work = f"{QUERIES} queries in {size}, k = {K}, {found['read']} of {found['lists']} lists"
    query = row(work, timing, peer="exact", items=QUERIES, memory_mb=memory)
    graph = row_without_peer(f"{found['graph_rows']:,} rows of the neighbor graph", found["graph"], memory_mb=memory)
    return [
        row_without_peer(f"build the index of {size}", found["build"], memory_mb=memory),
        row_without_peer("open it again", found["open"], memory_mb=memory),
        {**query, "recall": found["recall"]},
        graph,
    ]


def surface(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(SURFACE, 256)), rng.normal(size=(256, DIM))
    return (2 * first / np.sqrt(SURFACE)).astype(np.float32), (second / 16).astype(np.float32)


def draw(count: int, *, seed: int) -> np.ndarray:
    """Return float32 (count, DIM); the surface is the same for every seed."""
    first, second = surface(0)
    rng = np.random.default_rng(seed)
    bent = np.tanh(rng.standard_normal((count, SURFACE), np.float32) @ first) @ second
    return bent + NOISE * rng.standard_normal((count, DIM), np.float32)


def write_vectors(path: Path, count: int) -> None:
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, DIM))
    for number, start in enumerate(range(0, count, ROWS_AT_ONCE), 1):
        some = table[start : start + ROWS_AT_ONCE]
        some[:] = draw(len(some), seed=number)
    table.flush()


def measure(where: str, rounds: int) -> None:
    """Write what was found to found.json; queries are not in the collection, and recall is theirs."""
    from anechoic.eval.feature_scaling import unit_vectors
    from anechoic.index.index import SCALING, Searchable
    from anechoic.index.neighbors import nearest_in_file

    folder = Path(where)
    os.environ.update({"ANECHOIC_CACHE": str(folder / "cache"), "ANECHOIC_CACHE_LIMIT": "1TB"})
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    seconds = []
    for _ in range(2):  # the second time it is in the cache
        start = time.perf_counter()
        searchable = Searchable.of(vectors, SCALING, engine="approximate")
        seconds.append(time.perf_counter() - start)
    approximate, queries = searchable.approximate, draw(QUERIES, seed=0)
    assert approximate is not None
    units = unit_vectors(queries, searchable.change)
    timing = interleave(
        {
            "ours": lambda: searchable.nearest(queries, k=K),
            "exact": lambda: nearest_in_file(approximate.mapped, units, k=K),
        },
        rounds=rounds,
    )
    found, true = searchable.nearest(queries, k=K).indices, nearest_in_file(approximate.mapped, units, k=K).indices
    recall = float((found[:, :, None] == true[:, None, :]).any(dim=2).double().mean())
    rows = np.unique(np.linspace(0, len(vectors) - 1, min(len(vectors), GRAPH_ROWS)).astype(np.int64))
    start = time.perf_counter()
    searchable.nearest_others(rows, k=2 * K)
    made = {
        "graph": time.perf_counter() - start,
        "graph_rows": len(rows),
        "build": seconds[0],
        "open": seconds[1],
        "query": timing.seconds,
        "recall": recall,
        "lists": approximate.lists,
        "read": approximate.probes,
    }
    (folder / "found.json").write_text(json.dumps(made))
