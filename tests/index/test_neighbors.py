"""The approximate index: exact similarities, a recall that is the one reported, and a file that is read again."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest
import torch
from damage import flip_a_bit
from tiny_pages import picture
from tiny_runs import write_run

from anechoic.cli.main import main
from anechoic.errors import UserError
from anechoic.eval.feature_scaling import fit_scaling, unit_vectors
from anechoic.eval.metrics.knn import nearest_units
from anechoic.index import index, neighbors
from anechoic.index.collection import all_neighbors, cluster, duplicate_limit, duplicate_pairs
from anechoic.index.index import Searchable
from anechoic.index.neighbors import nearest_in_file, nearest_others, open_approximate
from anechoic.storage.cache import cache_dir
from anechoic.storage.files import release

pytest.importorskip("faiss", reason="the approximate index is faiss's")
pytestmark = pytest.mark.usefixtures("own_cache")


def collection(count=3000, width=24, *, seed=0):
    """Points near a surface of four dimensions, as features are, and an almost equal copy of every hundredth."""
    rng = np.random.default_rng(seed)
    bent = np.tanh(rng.normal(size=(count, 4)) @ rng.normal(size=(4, 2 * width)))
    vectors = bent @ rng.normal(size=(2 * width, width)) + 0.1 * rng.normal(size=(count, width))
    vectors[1::100] = vectors[0::100] + 1e-3 * rng.normal(size=vectors[0::100].shape)
    return vectors.astype(np.float32)


def entry_files(name):
    return list((cache_dir() / "index").glob(f"*/{name}"))


@pytest.mark.parametrize("width", [24, 10])
def test_approximate_neighbors_have_exact_similarities_and_the_recall_that_is_reported(width):
    vectors = collection(width=width)
    change = fit_scaling(vectors, "standardized")
    found = open_approximate(vectors, change)
    units = unit_vectors(vectors, change)
    np.testing.assert_allclose(found.mapped, units, atol=1e-6)
    rows = torch.arange(0, 3000, 7)
    near, true = found.nearest_others(rows, k=10), nearest_others(units, rows, k=10)
    given = (units[near.indices] * units[rows][:, None]).sum(dim=2)
    np.testing.assert_allclose(near.similarities, given, atol=1e-5)
    assert (near.similarities.diff(dim=1) <= 0).all()
    assert (near.indices != rows[:, None]).all()
    assert all(len(set(row)) == 10 for row in near.indices.tolist())
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(near.indices.tolist(), true.indices.tolist(), strict=True)]
    assert found.recall >= neighbors.ENOUGH
    assert abs(np.mean(shared) - found.recall) < 0.05
    assert found.probes < found.lists


def test_search_in_a_file_equals_search_in_memory(monkeypatch):
    monkeypatch.setattr(neighbors, "ROWS_AT_ONCE", 300)
    units = unit_vectors(collection(1000), None)
    found, expected = nearest_in_file(units.numpy(), units[:50], k=7), nearest_units(units, units[:50], k=7)
    np.testing.assert_allclose(found.similarities, expected.similarities, atol=1e-6)
    np.testing.assert_array_equal(found.indices, expected.indices)


def test_query_whose_lists_are_too_short_is_searched_exactly(capfd):
    vectors = collection(300)
    found = open_approximate(vectors, None)
    near = found.nearest(unit_vectors(vectors[:5], None), k=250)
    np.testing.assert_array_equal(near.indices.sort(dim=1).values.diff(dim=1) > 0, True)
    assert torch.isfinite(near.similarities).all()
    assert capfd.readouterr().err == ""  # faiss warns on its own about small training sets


def test_index_is_read_again_and_made_again_for_other_vectors_or_a_damaged_file(monkeypatch, caplog):
    built, real = [], neighbors.build_codes
    monkeypatch.setattr(neighbors, "build_codes", lambda *words: built.append(1) or real(*words))
    vectors = collection()
    first, again = open_approximate(vectors, None), open_approximate(vectors.copy(), None)
    assert len(built) == 1
    assert (again.probes, again.recall) == (first.probes, first.recall)
    queries = unit_vectors(vectors[:20], None)
    np.testing.assert_array_equal(first.nearest(queries, k=5).indices, again.nearest(queries, k=5).indices)
    (file,) = entry_files(neighbors.CODES)
    flip_a_bit(file)
    open_approximate(vectors, None)
    assert len(built) == 2
    assert "is damaged; it is made again" in caplog.text
    open_approximate(collection(seed=1), None)
    assert len(built) == 3


def test_search_is_exact_if_the_index_cannot_be_written(monkeypatch, caplog):
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(neighbors, "create_table", full)
    found = Searchable.of(collection(500), "raw", engine="approximate")
    assert found.described() == {"engine": "torch", "exact": True}
    assert "cannot be cached (No space left on device): search is exact" in caplog.text
    assert not entry_files("*.npy")


def test_engine_is_chosen_by_size_and_by_what_is_installed(monkeypatch):
    vectors = collection(500)
    assert Searchable.of(vectors, "raw").engine == "torch"
    monkeypatch.setattr(index, "EXACT", 499)
    assert Searchable.of(vectors, "raw").engine == "approximate"
    monkeypatch.setattr(index, "find_spec", lambda name: None)
    assert Searchable.of(vectors, "raw").engine == "torch"


def test_missing_faiss_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "faiss":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install \"anechoic\[search\]\""):
        Searchable.of(collection(500), "raw", engine="approximate")


def test_neighbor_graph_has_the_duplicates_and_outliers_of_exact_search():
    vectors = collection(2000)
    exact, found = (Searchable.of(vectors, "standardized", engine=engine) for engine in ("torch", "approximate"))
    graphs = [all_neighbors(s.units, find=s.nearest_others) for s in (exact, found)]
    pairs = [{(i, j) for i, j, _ in duplicate_pairs(near, duplicate_limit(near))} for near in graphs]
    assert {(i, i + 1) for i in range(0, 2000, 100)} <= pairs[0] & pairs[1]
    oddest = [set(near.similarities[:, :10].mean(dim=1).argsort()[:50].tolist()) for near in graphs]
    assert len(oddest[0] & oddest[1]) >= 45
    labels = [cluster(s.units, count=4).label for s in (exact, found)]
    np.testing.assert_array_equal(*labels)


def test_released_pages_keep_what_is_in_the_file_and_what_was_written(tmp_path):
    values = np.arange(4096, dtype=np.float32).reshape(64, 64)
    np.save(tmp_path / "x.npy", values)
    for mode in ("r", "r+", "c"):
        mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
        if mode != "r":
            mapped[3] = 7
        before = np.array(mapped)
        release(mapped)
        release(mapped[5:])
        np.testing.assert_array_equal(mapped, before)
    release(values)


@pytest.mark.slow
def test_commands_print_the_recall_of_an_approximate_search(tmp_path, capsys):
    run, folder = write_run(tmp_path / "run"), tmp_path / "photos"
    folder.mkdir()
    for i in range(60):
        picture(i).save(folder / f"{i:02d}.png")
    words = (str(run), str(folder))
    assert main(["search", *words, "3", "-k", "4", "--engine", "approximate"]) == 0
    printed = capsys.readouterr().out
    assert "Search is approximate: recall at 10 is" in printed
    assert "rebuilt when images are added or removed" in printed
    assert main(["search", *words, "3", "-k", "4"]) == 0
    assert "approximate" not in capsys.readouterr().out
    page = tmp_path / "all.html"
    assert main(["explore", *words, "--engine", "approximate", "-o", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert (found["search"]["engine"], found["search"]["exact"]) == ("approximate", False)
    assert 0 <= found["search"]["recall"] <= 1
    assert "recall at 10" in page.read_text()
