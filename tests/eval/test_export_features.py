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


@pytest.mark.slow
def test_qdrant_takes_the_vectors_of_the_parquet_file(tmp_path):
    qdrant = pytest.importorskip("qdrant_client", reason="the hand-over to a vector database is tried with Qdrant")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(write(tmp_path / "v.parquet"))
    vectors = np.stack(table.column("features").to_pylist())
    client = qdrant.QdrantClient(path=str(tmp_path / "vectors.qdrant"))
    how = qdrant.models.VectorParams(size=vectors.shape[1], distance=qdrant.models.Distance.COSINE)
    client.create_collection("images", how)
    client.upload_collection("images", vectors, payload=[{"name": name} for name in table.column("name").to_pylist()])
    units = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    near = client.query_points("images", VECTORS[3], limit=len(NAMES)).points
    assert [point.payload["name"] for point in near] == [NAMES[i] for i in np.argsort(-units @ units[3])]
    client.close()


def test_unknown_ending_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"\.npz, \.npy, \.parquet, \.csv; 'vectors.xlsx'"):
        write(tmp_path / "vectors.xlsx")
    assert not any(tmp_path.iterdir())
