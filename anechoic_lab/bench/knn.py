"""Exact nearest neighbors against faiss's flat index: 50,000 train vectors of 384 channels, 10,000 queries, k = 20.

Both get the same vectors and the same number of threads, and both normalize them: faiss inside the measured time too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.errors import UserError
from anechoic.eval.metrics.knn import nearest
from anechoic_lab.bench.memory import peak_memory_mb
from anechoic_lab.bench.timing import Options, gemm_flops, interleave, row

PEERS = ("faiss-cpu",)
TRAIN, QUERIES, DIM, K = 50_000, 10_000, 384, 20


def vectors(*, common: float) -> tuple[Tensor, Tensor]:
    """Random train and query vectors; common: how far their common part exceeds what distinguishes them."""
    generator = torch.Generator().manual_seed(0)
    train, queries = (torch.randn(n, DIM, generator=generator) for n in (TRAIN, QUERIES))
    shared = common * torch.randn(DIM, generator=generator)
    return train + shared, queries + shared


def run(options: Options) -> list[dict[str, Any]]:
    try:
        import faiss
    except ImportError as error:
        raise UserError('This benchmark needs an extra package: pip install "anechoic[bench]".') from error
    faiss.omp_set_num_threads(torch.get_num_threads())
    gemm = gemm_flops()
    memory = peak_memory_mb(search)
    rows = []
    for name, common in (("isotropic vectors", 0.0), ("vectors with a common part", 3.0)):
        train, queries = vectors(common=common)

        def theirs(train: Tensor = train, queries: Tensor = queries) -> object:
            index = faiss.IndexFlatIP(DIM)
            index.add(F.normalize(train, dim=1).numpy())
            return index.search(F.normalize(queries, dim=1).numpy(), K)

        def ours(train: Tensor = train, queries: Tensor = queries) -> object:
            return nearest(train, queries, k=K)

        timing = interleave({"ours": ours, "faiss": theirs}, rounds=options.rounds)
        work = f"{QUERIES:,} queries in {TRAIN:,} x {DIM}, k = {K}, {name}"
        flops = 2.0 * TRAIN * QUERIES * DIM
        rows.append(row(work, timing, peer="faiss", items=QUERIES, flops=flops, gemm=gemm, memory_mb=memory))
    return rows


def search() -> None:
    train, queries = vectors(common=0.0)
    nearest(train, queries, k=K)
