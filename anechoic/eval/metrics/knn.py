"""Exact nearest neighbors by cosine similarity, and DINO's weighted k-NN vote on top of them.

It does not extract features and builds no index: products of chunks, so memory is bounded for any number of vectors.
Ties: the smaller train index among equal similarities, the smaller class among equal votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.errors import UserError
from anechoic.eval.feature_scaling import Scaling, apply_scaling, fit_scaling
from anechoic.eval.features import Rows
from anechoic.eval.tensors import as_tensor, check_finite

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

KS = (10, 20, 100, 200)
USUAL_K = 20
TEMPERATURE = 0.07
# exp of more is infinite in double precision, and of two infinite votes the smaller class would win.
LARGEST_EXPONENT = 600
# Similarities of a chunk of queries to a chunk of train vectors take 128 MB.
QUERY_CHUNK, TRAIN_CHUNK = 512, 65536
# The sieve computes them in tiles that are still in the cache when the largest entry of each block of BLOCK columns is
# taken. In full precision tiles gained nothing over torch.topk (0.96x), so only the sieve has them (1.5x).
TILE, BLOCK = 2048, 32


class Neighbors(NamedTuple):
    """similarities and train indices (Q, k), most similar first."""

    similarities: Tensor
    indices: Tensor


def nearest(train: np.ndarray | Tensor, queries: np.ndarray | Tensor, *, k: int) -> Neighbors:
    """The k train vectors (n, D) of largest cosine with each query (Q, D), exactly, on the features' device."""
    train, queries = unit_rows(train, name="train"), unit_rows(queries, name="test")
    if not 1 <= k <= len(train):
        raise UserError(
            f"k = {k} neighbors were asked for, but there are {len(train)} train samples; choose k up to that."
        )
    if train.shape[1] != queries.shape[1]:
        raise UserError(
            f"Train features have {train.shape[1]} channels, test features {queries.shape[1]}; use one encoder."
        )
    return nearest_units(train, queries, k=k)


def nearest_units(train: Tensor, queries: Tensor, *, k: int) -> Neighbors:
    """`nearest` of vectors that have length 1 already."""
    if half_is_fast(train.device) and Sieve.pays(len(train), k=k):
        return sieved(train, queries, k=k)
    found = [nearest_to_chunk(train, chunk, k=k) for chunk in queries.split(QUERY_CHUNK)]
    return Neighbors(torch.cat([f.similarities for f in found]), torch.cat([f.indices for f in found]))


def half_is_fast(device: torch.device) -> bool:
    """Whether products of bfloat16 are done in hardware. Versions of torch that cannot tell count as no."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def unit_rows(features: np.ndarray | Tensor, *, name: str) -> Tensor:
    x = as_tensor(features)
    if x.ndim != 2 or len(x) == 0:
        raise UserError(f"The {name} features must be a non-empty matrix (samples, channels), not {tuple(x.shape)}.")
    check_finite(x, f"of the {name} samples")
    return F.normalize(x.float(), dim=1)


# ---- in full precision


def nearest_to_chunk(train: Tensor, queries: Tensor, *, k: int) -> Neighbors:
    """Chunks of train in ascending order; concatenating best-so-far with the new ones keeps smaller indices first."""
    best: Neighbors | None = None
    for start in range(0, len(train), TRAIN_CHUNK):
        table = queries @ train[start : start + TRAIN_CHUNK].T
        values, indices = top_of_rows(table, k=min(k, table.shape[1]))
        indices += start
        if best is not None:
            values, order = torch.cat([best.similarities, values], dim=1).sort(dim=1, descending=True, stable=True)
            indices = torch.cat([best.indices, indices], dim=1).gather(1, order)
        best = Neighbors(values[:, :k], indices[:, :k])
    assert best is not None
    return best


def top_of_rows(table: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of table, ordered by value, then by smaller index."""
    # One more than asked for: where the last two are equal, which of the ties was taken is not decided yet.
    values, indices = table.topk(min(k + 1, table.shape[1]), dim=1)
    undecided = (values[:, k - 1] == values[:, -1]).nonzero()[:, 0]
    values, indices = values[:, :k], indices[:, :k]
    # Order by index, then stably by value.
    indices, by_index = indices.sort(dim=1)
    values, by_value = values.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    indices = indices.gather(1, by_value)
    for rows in undecided.split(32):  # a full sort needs room for its indices
        all_values, all_indices = table[rows].sort(dim=1, descending=True, stable=True)
        values[rows], indices[rows] = all_values[:, :k], all_indices[:, :k]
    return values, indices


# ---- sieved in half precision


def sieved(train: Tensor, queries: Tensor, *, k: int) -> Neighbors:
    """As `nearest_to_chunk`, but only what a sieve cannot decide is computed in full precision."""
    sieve = Sieve.of(train)
    similarities = queries.new_empty(len(queries), k)
    indices = torch.empty(len(queries), k, dtype=torch.int64, device=queries.device)
    # Reused by every chunk: fresh memory of this size costs more than filling it.
    table = rough_table(queries, len(train))
    undecided: list[Tensor] = []
    for number, chunk in enumerate(queries.split(QUERY_CHUNK)):
        rows = torch.arange(len(chunk), device=queries.device) + number * QUERY_CHUNK
        if 2 * sum(len(part) for part in undecided) > number * QUERY_CHUNK > 0:
            undecided.append(rows)  # these vectors are too much alike for a sieve
            continue
        best, certain = sieve.nearest(chunk, k=k, table=table[: len(chunk)])
        similarities[rows], indices[rows] = best
        undecided.append(rows[~certain])
    for rows in torch.cat(undecided).split(QUERY_CHUNK):
        similarities[rows], indices[rows] = nearest_to_chunk(train, queries[rows], k=k)
    return Neighbors(similarities, indices)


def padded(columns: int) -> int:
    return -(-columns // TILE) * TILE


def fill(table: Tensor, queries: Tensor, train: Tensor) -> Tensor:
    """queries @ train.T into table (Q, padded n), -inf where there is no train vector; returns the blocks' maxima.

    A block holds every (TILE / BLOCK)-th column of a tile, so that the maximum runs over whole rows of memory.
    """
    table[:, len(train) :] = -torch.inf
    per_tile = TILE // BLOCK
    maxima = table.new_empty(len(table), table.shape[1] // BLOCK)
    for i, start in enumerate(range(0, len(train), TILE)):
        vectors = train[start : start + TILE]
        torch.mm(queries, vectors.T, out=table[:, start : start + len(vectors)])
        tile = table[:, start : start + TILE].unflatten(1, (BLOCK, per_tile))
        torch.amax(tile, dim=1, out=maxima[:, i * per_tile : (i + 1) * per_tile])
    return maxima


def top_by_blocks(table: Tensor, maxima: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """torch.topk in two levels: k largest values are found in the k blocks with the largest maxima."""
    per_tile = TILE // BLOCK
    blocks = maxima.topk(k, dim=1, sorted=False).indices
    first = blocks // per_tile * TILE + blocks % per_tile
    columns = (first[:, :, None] + per_tile * torch.arange(BLOCK, device=blocks.device)).flatten(1)
    values, where = table.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, where)


def rough_table(queries: Tensor, n: int) -> Tensor:
    """Room for approximate similarities of a chunk of queries to n train vectors."""
    return torch.empty(min(QUERY_CHUNK, len(queries)), padded(n), dtype=torch.bfloat16, device=queries.device)


class Sieve(NamedTuple):
    """Finds candidates in bfloat16 with a bound on its error, then ranks them in full precision.

    With c the mean of the train vectors, q . t = q . c + c . (t - c) + (q - c) . (t - c). The first term is the same
    for every t, the second is one exact number per t, kept as two columns that add up to it; so vectors that share a
    large common part lose nothing by rounding. For rounded factors q' = (q - c) + dq and t' = (t - c) + dt the third
    is wrong by at most ||dq|| ||t'|| + ||q - c|| ||dt||, and rounding the result adds 2^-9 of it. Whatever is further
    below the k-th best than twice that bound cannot be among the best k.
    """

    train: Tensor
    center: Tensor
    rounded: Tensor
    largest: float
    largest_error: float

    @classmethod
    def of(cls, train: Tensor) -> Sieve:
        center = train.mean(dim=0)
        centered = train - center
        rounded = centered.bfloat16()
        again = rounded.float()
        largest, error = again.norm(dim=1).max().item(), again.sub_(centered).norm(dim=1).max().item()
        offset = centered @ center
        high = offset.bfloat16()
        low = (offset - high.float()).bfloat16()
        columns = torch.cat([rounded, high[:, None], low[:, None]], dim=1)
        return cls(train, center, columns, largest, error)

    @staticmethod
    def width(k: int) -> int:
        """How many candidates are looked at to find k."""
        return 2 * k + 16

    @staticmethod
    def pays(n: int, *, k: int) -> bool:
        return 4 * Sieve.width(k) < padded(n) // BLOCK and n <= TRAIN_CHUNK

    def nearest(self, queries: Tensor, *, k: int, table: Tensor) -> tuple[Neighbors, Tensor]:
        """The k nearest of each query, and (Q,) whether they certainly are."""
        centered = queries - self.center
        rough = centered.bfloat16()
        maxima = fill(table, F.pad(rough, (0, 2), value=1.0), self.rounded)
        values, columns = top_by_blocks(table, maxima, k=self.width(k))
        values = values.float()
        bound = (rough.float() - centered).norm(dim=1) * self.largest + centered.norm(dim=1) * self.largest_error
        # The last term covers the second half of the offset and the rounding of sums in float32.
        bound = bound + 2.0**-9 * values.abs().amax(dim=1) * 1.01 + 2e-5
        lowest = values[:, k - 1] - 2 * bound
        candidate = values >= lowest[:, None]
        certain = ~candidate[:, -1]
        # By index, so that the stable sort below keeps equal similarities in order.
        columns, order = columns.sort(dim=1)
        row, place = candidate.gather(1, order).nonzero(as_tuple=True)
        exact = torch.full_like(values, -torch.inf)
        exact[row, place] = torch.linalg.vecdot(self.train[columns[row, place]], queries[row])
        best, order = exact.sort(dim=1, descending=True, stable=True)
        return Neighbors(best[:, :k], columns.gather(1, order)[:, :k]), certain


def vote(
    neighbors: Neighbors, labels: np.ndarray | Tensor, *, k: int, num_classes: int, temperature: float = TEMPERATURE
) -> Tensor:
    """Votes (Q, num_classes): each of the first k neighbors adds exp(similarity / temperature) to its class."""
    if temperature <= 0:
        raise UserError(f"The temperature of the vote must be positive, not {temperature}.")
    labels = as_tensor(labels).to(neighbors.indices.device)
    exponents = neighbors.similarities[:, :k].double() / temperature
    if 1 / temperature > LARGEST_EXPONENT:
        exponents = exponents - exponents[:, :1]  # the nearest votes with 1, and the order of classes stays
    weights = exponents.exp()
    votes = weights.new_zeros(len(weights), num_classes)
    return votes.scatter_add_(1, labels[neighbors.indices[:, :k]], weights)


def knn_accuracy(
    train: np.ndarray | Tensor,
    train_labels: np.ndarray | Tensor,
    test: np.ndarray | Tensor,
    test_labels: np.ndarray | Tensor,
    *,
    ks: Sequence[int] = KS,
    temperature: float = TEMPERATURE,
) -> dict[int, float]:
    """Top-1 accuracy in 0 .. 1 for every k; features (n, D), labels (n,) from 0."""
    train_labels, test_labels = as_tensor(train_labels), as_tensor(test_labels)
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    if len(train_labels.unique()) < 2:
        raise UserError("All train samples carry the same label, so there is nothing to vote about; give two classes.")
    found = nearest(train, test, k=max(ks))
    test_labels = test_labels.to(found.indices.device)
    correct: dict[int, int] = dict.fromkeys(ks, 0)
    for start in range(0, len(test_labels), QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        part = Neighbors(found.similarities[rows], found.indices[rows])
        for k in ks:
            # argmax returns the first of equal votes: the smaller class.
            winner = vote(part, train_labels, k=k, num_classes=num_classes, temperature=temperature).argmax(dim=1)
            correct[k] += int((winner == test_labels[rows]).sum())
    return {k: correct[k] / len(test_labels) for k in ks}


# ---- as a metric


def knn_metric(subject: Subject, *, scaling: Scaling = "raw") -> Rows:
    """knn (or knn_SCALING): top-1 in 0 .. 1 at the spec's first k; knn_by_k: at each of them. The scaling is fitted to
    the train split."""
    split, rows = subject.split(), {}
    name = "knn" if scaling == "raw" else f"knn_{scaling}"
    if len(np.unique(split.train_labels)) < 2 and subject.held_out:
        return {key: {name: None} for key in split.train}  # the held-out part left one class to vote
    ks = subject.spec.neighbors or (min(USUAL_K, len(split.train_labels)),)
    for key, features in split.train.items():
        change = fit_scaling(features, scaling)
        train, test = (apply_scaling(x, change).to(subject.measuring) for x in (features, split.test[key]))
        found = knn_accuracy(
            train, split.train_labels, test, split.test_labels, ks=ks, temperature=subject.spec.temperature
        )
        rows[key] = {name: found[ks[0]], f"{name}_by_k": found}
    return rows
