"""Neighbors in a collection: exact, or approximate by an inverted file of product-quantized codes (faiss's IVF-PQ).

The approximate index is trained on a sample. Its codes take D / 8 bytes per vector. The vectors themselves are
memory-mapped, and candidates are ranked by them: similarities are exact, only the choice of candidates is not. The
recall is measured against exact search when the index is built. Vectors have length 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from xxhash import xxh3_128

from anechoic.data.source import digest
from anechoic.errors import UserError
from anechoic.eval.feature_cache import create_table
from anechoic.eval.feature_scaling import CHUNK, Affine, unit_chunks
from anechoic.eval.metrics.knn import Neighbors, nearest_units
from anechoic.eval.tensors import as_tensor
from anechoic.storage.cache import open_entry
from anechoic.storage.files import release, write_aside

UNITS, CODES, FORMAT = "units.npy", "codes.faiss", 1
# Training vectors of each list, iterations of k-means, and the queries whose recall at RECALL_AT is measured.
TRAIN_PER_LIST, ITERATIONS, QUERIES, RECALL_AT = 64, 10, 200, 10
# Lists are added to a query, in powers of two, until this recall is reached or this share of them is read.
ENOUGH, MOST_LISTS = 0.95, 0.25
# Candidates ranked exactly per neighbor wanted, at least; queries ranked, rows compared and rows taken at once.
PER_NEIGHBOR, CANDIDATES, QUERIES_AT_ONCE, ROWS_AT_ONCE, ROWS_TAKEN = 5, 100, 256, 65536, 4096


def load_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError('faiss is an extra package: pip install "anechoic[search]", or omit --engine.') from error
    return faiss


def nearest_others(units: Tensor, rows: np.ndarray | Tensor, *, k: int) -> Neighbors:
    """Return the k nearest of these rows among all others; a row is never its own neighbor."""
    rows = torch.as_tensor(rows)
    return without_itself(nearest_units(units, units[rows], k=k + 1), rows)


def without_itself(found: Neighbors, rows: Tensor) -> Neighbors:
    """Return one neighbor less of each row, itself if it is among them."""
    itself = found.indices == rows[:, None]
    # Where k + 1 others are equal to it, it may not be among them.
    itself[~itself.any(dim=1), -1] = True
    shape = (len(rows), found.indices.shape[1] - 1)
    return Neighbors(found.similarities[~itself].view(shape), found.indices[~itself].view(shape))


def take(units: Tensor | np.ndarray, rows: np.ndarray | Tensor) -> Tensor:
    """Return these rows; of a mapped file, few pages are in memory at once, although the system maps many per row."""
    if isinstance(units, Tensor):
        return units[rows]
    rows = np.asarray(rows)
    found = np.empty((len(rows), units.shape[1]), np.float32)
    for start in range(0, len(rows), ROWS_TAKEN):
        found[start : start + ROWS_TAKEN] = units[rows[start : start + ROWS_TAKEN]]
        release(units)
    return torch.from_numpy(found)


@dataclass(frozen=True)
class Approximate:
    """mapped (n, D): unit vectors in a file; codes: of faiss; probes: lists read per query; recall: at 10, measured."""

    mapped: np.ndarray
    codes: Any
    probes: int
    recall: float

    @property
    def lists(self) -> int:
        return int(self.codes.nlist)

    def nearest(self, queries: Tensor, *, k: int) -> Neighbors:
        """Return about the k nearest of each query (Q, D), their similarities exact."""
        self.codes.nprobe = self.probes
        found = [self._nearest(some, k) for some in queries.split(QUERIES_AT_ONCE)]
        return Neighbors(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _nearest(self, queries: Tensor, k: int) -> Neighbors:
        wanted = min(len(self.mapped), max(CANDIDATES, PER_NEIGHBOR * k))
        _, found = self.codes.search(for_codes(queries), wanted)
        # By index, so that the stable sort below keeps equal similarities in order; -1 is no candidate.
        columns = torch.from_numpy(found).sort(dim=1).values
        vectors = take(self.mapped, columns.clamp(min=0).flatten()).view(*columns.shape, -1)
        exact = torch.einsum("qcd,qd->qc", vectors, queries)
        best, order = exact.masked_fill(columns < 0, -torch.inf).sort(dim=1, descending=True, stable=True)
        similarities, indices = best[:, :k].contiguous(), columns.gather(1, order)[:, :k].contiguous()
        few = (similarities[:, -1] == -torch.inf).nonzero()[:, 0]  # its lists have fewer than k vectors
        if len(few):
            similarities[few], indices[few] = nearest_in_file(self.mapped, queries[few], k=k)
        return Neighbors(similarities, indices)

    def nearest_others(self, rows: np.ndarray | Tensor, *, k: int) -> Neighbors:
        rows = torch.as_tensor(rows)
        return without_itself(self.nearest(take(self.mapped, rows), k=k + 1), rows)


def nearest_in_file(mapped: np.ndarray, queries: Tensor, *, k: int) -> Neighbors:
    """Return the k nearest of each query exactly, with few rows of the file in memory at once."""
    best = Neighbors(torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64))
    for start in range(0, len(mapped), ROWS_AT_ONCE):
        block = as_tensor(mapped[start : start + ROWS_AT_ONCE])
        found = nearest_units(block, queries, k=min(k, len(block)))
        values = torch.cat([best.similarities, found.similarities], dim=1)
        values, order = values.sort(dim=1, descending=True, stable=True)
        indices = torch.cat([best.indices, found.indices + start], dim=1).gather(1, order)
        best = Neighbors(values[:, :k], indices[:, :k])
        release(mapped)
    return best


# ---- making it


def open_approximate(vectors: np.ndarray, change: Affine | None, *, about: str = "") -> Approximate:
    """Read the approximate index of these vectors (n, D) under this change from the cache, or build it there.

    It is of exactly these vectors: their mean and deviation are part of every unit vector, so one more image changes
    all. OSError if the cache cannot be written.
    """
    faiss = load_faiss()
    parts = () if change is None else (change.mean.numpy(), change.matrix.numpy())
    key = digest("approximate", FORMAT, content(vectors), *parts)
    with open_entry("index", key, about=about or f"approximate index of {len(vectors):,} vectors") as entry:
        if entry.intact([UNITS, CODES]) == {UNITS, CODES}:
            codes = faiss.deserialize_index(np.fromfile(entry.path / CODES, np.uint8))
            card = entry.card()
            return Approximate(np.load(entry.path / UNITS, mmap_mode="r"), codes, card["probes"], card["recall"])
        with write_aside(entry.path / UNITS) as path:
            write_units(path, vectors, change)
        mapped = np.load(entry.path / UNITS, mmap_mode="r")
        codes = build_codes(faiss, mapped)
        with write_aside(entry.path / CODES) as path:
            faiss.serialize_index(codes).tofile(path)
        made = tune(mapped, codes)
        entry.commit(entry.hashes([UNITS, CODES]), probes=made.probes, recall=made.recall)
        return made


def content(vectors: np.ndarray) -> bytes:
    """Return a hash of the vectors, read a chunk at a time."""
    state = xxh3_128(repr(vectors.shape).encode())
    for start in range(0, len(vectors), CHUNK):
        state.update(np.ascontiguousarray(vectors[start : start + CHUNK]).data)
        release(vectors)
    return state.digest()


def write_units(path: Path, vectors: np.ndarray, change: Affine | None) -> None:
    create_table(path, len(vectors), vectors.shape[1], np.float32)
    table, start = np.lib.format.open_memmap(path, mode="r+"), 0
    for part in unit_chunks(vectors, change):
        table[start : start + len(part)] = part.numpy()
        start += len(part)
        table.flush()
        release(table)


def channels_per_code(width: int) -> int:
    """Return the number of channels of a 4-bit code; a narrow vector would have too few codes of four."""
    return 4 if width >= 128 else 1


def for_codes(units: Tensor) -> np.ndarray:
    """Return the vectors, with zeros behind them if codes do not divide them."""
    width = units.shape[1]
    return F.pad(units, (0, -width % channels_per_code(width))).contiguous().numpy()


def build_codes(faiss: Any, mapped: np.ndarray) -> Any:
    """Return about 2 sqrt(n) lists of codes, trained on a sample."""
    n, each = len(mapped), channels_per_code(mapped.shape[1])
    number = -(-mapped.shape[1] // each)
    lists = max(1, min(2 ** round(math.log2(2 * math.sqrt(n))), n // TRAIN_PER_LIST))
    codes = faiss.index_factory(number * each, f"IVF{lists},PQ{number}x4fs", faiss.METRIC_INNER_PRODUCT)
    for parameters in (codes.cp, codes.pq.cp):
        parameters.niter, parameters.min_points_per_centroid = ITERATIONS, 1  # fewer points are no reason to warn
    rows = np.unique(np.linspace(0, n - 1, TRAIN_PER_LIST * max(lists, 16)).astype(np.int64))
    codes.train(for_codes(take(mapped, rows)))
    for start in range(0, n, CHUNK):
        codes.add(for_codes(as_tensor(mapped[start : start + CHUNK])))
        release(mapped)
    return codes


def tune(mapped: np.ndarray, codes: Any) -> Approximate:
    """Return the index that reads as few lists per query as reach the recall."""
    rows = torch.from_numpy(np.unique(np.linspace(0, len(mapped) - 1, QUERIES).astype(np.int64)))
    k = min(RECALL_AT, len(mapped) - 1)
    true = without_itself(nearest_in_file(mapped, take(mapped, rows), k=k + 1), rows)
    probes, most = 1, max(1, int(codes.nlist * MOST_LISTS))
    while True:
        found = Approximate(mapped, codes, probes, 0.0).nearest_others(rows, k=k)
        # A neighbor as near as the k-th is as good as it.
        recall = float((found.similarities >= true.similarities[:, -1:] - 1e-6).double().mean())
        if recall >= ENOUGH or probes >= most:
            return Approximate(mapped, codes, probes, recall)
        probes = min(2 * probes, most)
