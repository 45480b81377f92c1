"""The law of caches in a few random cases; `make cache-law` runs hundreds."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("datasets", reason="one kind of source is a folder of datasets")
pytest.importorskip("pyarrow", reason="some kinds of source are parquet files")

from cache_law import run_cases

from anechoic.data.content_checksums import ROW, FileHashes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_warm_cold_and_no_cache_make_no_difference(seed: int) -> None:
    assert [f"{case}: {case.problems}" for _, case in run_cases(14, seed) if case.problems] == []


@pytest.mark.slow
def test_law_is_broken_by_an_identity_of_names_sizes_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases can find what they are for: files known by size and time only."""

    def rows(self: FileHashes) -> np.ndarray:
        found = np.zeros(len(self.names), ROW)
        stats = [os.stat(self.path(k)) for k in range(len(found))]
        found["hash"] = [np.void(b"%8d%8d" % (stat.st_size, stat.st_mtime_ns % 10**8)) for stat in stats]
        return found

    monkeypatch.setattr(FileHashes, "rows", property(rows))
    monkeypatch.setattr(FileHashes, "check_data", lambda *_: None)
    monkeypatch.setattr(FileHashes, "check_file", lambda *_: None)
    assert any(case.problems for _, case in run_cases(16, 1))
