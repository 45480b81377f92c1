"""The benchmark of the approximate index: what it measures, not how fast it is."""

from __future__ import annotations

import pytest

from anechoic.errors import UserError
from anechoic_lab.bench import index
from anechoic_lab.bench.timing import Options, table
from anechoic_lab.cli.bench import bench

pytest.importorskip("faiss", reason="the approximate index is faiss's")


def test_rows_name_work_recall_and_memory(monkeypatch, own_cache):
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "1TB")  # restored afterwards, as the cache is
    monkeypatch.setattr(index, "GRAPH_ROWS", 50)
    monkeypatch.setattr(index, "QUERIES", 20)
    monkeypatch.setattr(index, "peak_memory_mb", lambda work, *words: work(*words) or 100.0)
    build, again, query, graph = rows = index.run(Options(rounds=1, vectors=2000))
    assert build["work"] == "build the index of 2,000 x 384"
    assert query["work"].startswith("20 queries in 2,000 x 384, k = 10, ")
    assert (query["peer_name"], query["items"], graph["work"]) == ("exact", 20, "50 rows of the neighbor graph")
    assert 0.5 < query["recall"] <= 1
    assert all(item["ours"] > 0 and item["memory_mb"] == 100 for item in (build, again, query, graph))
    assert f"recall {query['recall']:.3f}" in table(rows)


def test_too_few_vectors_are_refused():
    with pytest.raises(UserError, match="1,000 vectors or more"):
        bench("index", vectors=10)
