"""Vectors as files: what other programs load has the rows and names that were written."""

from __future__ import annotations

import json

import numpy as np
import pytest

from anechoic.errors import UserError
from anechoic.eval.export_features import write_vectors

VECTORS = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
NAMES = [f"a/{i}.png" for i in range(7)] + ["line\nbreak.png", "b/ü.png"]
ABOUT = {"layer": "2", "pooling": "mean"}


def write(path):
    write_vectors(path, VECTORS, names=NAMES, about=ABOUT)
    return path


def test_npy_has_its_names_beside_it(tmp_path):
    path = write(tmp_path / "vectors.npy")
    np.testing.assert_array_equal(np.load(path), VECTORS)
    beside = json.loads((tmp_path / "vectors.json").read_text())
    assert beside == {**ABOUT, "names": NAMES}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["vectors.json", "vectors.npy"]


def test_parquet_has_a_fixed_size_list_column(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pq.read_table(write(tmp_path / "vectors.parquet"))
    assert table.schema.field("features").type == pa.list_(pa.float32(), 6)
    np.testing.assert_array_equal(np.stack(table.column("features").to_pylist()), VECTORS)
    assert table.column("name").to_pylist() == NAMES


def test_lancedb_takes_the_parquet_file_as_it_is(tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="the hand-over to a vector database is tried with LanceDB")
    pq = pytest.importorskip("pyarrow.parquet")
    table = lancedb.connect(tmp_path / "lance").create_table("images", pq.read_table(write(tmp_path / "v.parquet")))
    found = table.search(VECTORS[3], vector_column_name="features").limit(2).to_list()
    assert found[0]["name"] == NAMES[3]


def test_unknown_ending_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"\.npz, \.npy, \.parquet, \.csv; 'vectors.xlsx'"):
        write(tmp_path / "vectors.xlsx")
    assert not any(tmp_path.iterdir())
