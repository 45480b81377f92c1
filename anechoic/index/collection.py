"""The structure of a collection of images: near-duplicates, outliers, clusters and a map, from vectors alone.

Vectors of length 1 in, indices and numbers out, computed in blocks, so that memory grows linearly with the collection.
Images and pages are elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.errors import UserError
from anechoic.eval.metrics.knn import Neighbors, nearest_units
from anechoic.eval.projections import tsne
from anechoic.eval.tensors import as_tensor
from anechoic.index.neighbors import nearest_others, take
from anechoic.storage.files import release

# In memory, or a memory-mapped file.
Units = Tensor | np.ndarray
# Neighbors of each image that are computed; those that define outliers and are shown on a map.
NEIGHBORS, LIKE = 20, 10
# Rows of a block, and the maximum number of samples that clusters and maps are fitted to.
ROWS_AT_ONCE, CLUSTERED, MAPPED = 4096, 20_000, 2000
# Expected number of false duplicates in the whole collection; the cosine of equal vectors but for rounding; and the
# smallest reference distance of an image, as a fraction of the median.
FALSE_ALARMS, SAME, CROWD = 0.1, 1 - 1e-6, 0.25
# The neighbor, and the quantile of its distances, that measure how dense the collection is.
THIRD, QUANTILE = 3, 0.05
# Fewer clusters nearly always have the best silhouette, without being informative.
CLUSTERS = (4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Exploration:
    """Of n vectors: the neighbors of each, what follows from them, clusters, and a map of some."""

    near: Neighbors
    limit: Limit
    pairs: list[tuple[int, int, float]]
    groups: list[list[int]]
    likeness: np.ndarray
    clusters: Clusters
    map: Map

    @property
    def oddest(self) -> np.ndarray:
        """Return all images, the one least similar to its neighbors first."""
        return np.argsort(self.likeness, kind="stable")


class FindOthers(Protocol):
    """Find the k nearest of these rows of a collection among all others."""

    def __call__(self, rows: np.ndarray | Tensor, /, *, k: int) -> Neighbors: ...


def explored(
    units: Units, *, find: FindOthers | None = None, clusters: int | None = None, seed: int = 0
) -> Exploration:
    """Return neighbors, near-duplicates, clusters and a map of units (n, D) of length 1.

    find: instead of exact search, for which time grows with the square of n.
    """
    near = all_neighbors(units, find=find)
    limit = duplicate_limit(near)
    pairs = duplicate_pairs(near, limit)
    return Exploration(
        near,
        limit,
        pairs,
        groups_of(pairs, len(units)),
        near.similarities[:, :LIKE].mean(dim=1).numpy(),
        cluster(units, count=clusters, seed=seed),
        map_of(units, seed=seed),
    )


def sampled(count: int, wanted: int, *, seed: int) -> np.ndarray:
    """Return a maximum of `wanted` indices of `count`: a random one of each of `wanted` equal intervals."""
    wanted = min(count, wanted)
    ends = np.linspace(0, count, wanted + 1)
    share = np.random.default_rng(seed).random(wanted)
    return np.floor(ends[:-1] + share * np.diff(ends)).astype(np.int64)


def all_neighbors(units: Units, *, k: int = NEIGHBORS, find: FindOthers | None = None) -> Neighbors:
    """Return the k nearest others of every row (n, D), exactly unless `find` finds them."""
    find = find or partial(nearest_others, as_tensor(units))
    n = len(units)
    if n < 2:
        raise UserError(f"Neighbors need two images, and here is {'one' if n else 'none'}: give more.")
    k = min(k, n - 1)
    found = Neighbors(torch.empty(n, k), torch.empty(n, k, dtype=torch.int64))
    with tqdm(total=n, desc="comparing", unit=" images", delay=2, leave=False, disable=None) as bar:
        for start in range(0, n, ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + ROWS_AT_ONCE, n))
            found.similarities[rows], found.indices[rows] = find(rows, k=k)
            bar.update(len(rows))
    return found


# ---- near-duplicates


@dataclass(frozen=True)
class Limit:
    """Two images are near-duplicates up to this fraction of the distance to their K-th neighbors.

    dimension: of the collection around an image, fitted; reference (n,): that distance; ratio (n,): of the nearest
    image's distance to it.
    """

    share: float
    dimension: float
    reference: np.ndarray
    ratio: np.ndarray


def duplicate_limit(near: Neighbors, *, false_alarms: float = FALSE_ALARMS) -> Limit:
    """Return the limit, calibrated on the distribution of nearest-neighbor distances of the collection.

    If images are distributed around one as points in m dimensions, the j-th of its K neighbors is closer than the
    fraction r of the K-th with probability I(r^m; j, K - j), the incomplete beta function. m is fitted where the third
    neighbors are closest: most copies come in groups of two or three, which do not affect the third neighbor, and
    density varies within a collection. At the limit, fewer than `false_alarms` of all images have their nearest by
    chance. Distances are relative to each image's own neighborhood, so dense parts do not count as duplicates.
    """
    from scipy.special import betaincinv

    n, k = near.similarities.shape
    first, third, last = (distance(near.similarities[:, j]).numpy() for j in (0, min(THIRD, k) - 1, k - 1))
    # Of more than K copies even the K-th neighbor is one: then a fraction of the median distance is used.
    reference = np.maximum(last, CROWD * np.median(last))
    ratio = first / np.maximum(reference, 1e-9)
    if k < 2 * THIRD:  # too few neighbors: only equal vectors
        return Limit(0.0, math.inf, reference, ratio)
    low = np.quantile(third / np.maximum(reference, 1e-9), QUANTILE)
    expected = float(betaincinv(THIRD, k - THIRD, QUANTILE))
    dimension = math.log(expected) / math.log(float(np.clip(low, 1e-6, 1 - 1e-6)))
    return Limit((false_alarms / (n * (k - 1))) ** (1 / dimension), dimension, reference, ratio)


def distance(similarities: Tensor) -> Tensor:
    """Return the distance of two vectors of length 1, in double precision."""
    return (2 - 2 * similarities.double()).clamp(min=0).sqrt()


def duplicate_pairs(near: Neighbors, limit: Limit) -> list[tuple[int, int, float]]:
    """Return (i, j, similarity) with i < j, each pair once, most similar first: within the limits of both images."""
    reference = torch.from_numpy(limit.reference)
    pairs: dict[tuple[int, int], float] = {}
    for start in range(0, len(reference), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        similarities, others = near.similarities[rows], near.indices[rows]
        reach = limit.share * torch.minimum(reference[rows, None], reference[others])
        row, column = ((distance(similarities) <= reach) | (similarities >= SAME)).nonzero(as_tuple=True)
        found = zip(
            (row + start).tolist(), others[row, column].tolist(), similarities[row, column].tolist(), strict=True
        )
        pairs.update({(min(i, j), max(i, j)): s for i, j, s in found})
    return sorted(((i, j, s) for (i, j), s in pairs.items()), key=lambda pair: (-pair[2], pair[0], pair[1]))


def groups_of(pairs: Sequence[tuple[int, int, float]], count: int) -> list[list[int]]:
    """Return groups of images that are connected by pairs, in the order of their first pairs."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    if not pairs:
        return []
    i, j = np.array([pair[:2] for pair in pairs]).T
    _, label = connected_components(coo_matrix((np.ones(len(i)), (i, j)), shape=(count, count)), directed=False)
    members: dict[int, list[int]] = {int(label[first]): [] for first in i}
    for image in np.unique(np.concatenate([i, j])).tolist():
        members[int(label[image])].append(image)
    return list(members.values())


# ---- clusters


@dataclass(frozen=True)
class Clusters:
    """label (n,): largest cluster first; similarity (n,): to the cluster's center (count, D); examples: nearest it."""

    label: np.ndarray
    similarity: np.ndarray
    centers: Tensor
    examples: list[list[int]]

    @property
    def sizes(self) -> list[int]:
        return np.bincount(self.label, minlength=len(self.centers)).tolist()


def cluster(units: Units, *, count: int | None = None, seed: int = 0, examples: int = 8) -> Clusters:
    """Return k-means clusters of a sample, and every image's nearest center; count None: the best silhouette."""
    if count is not None and not 1 <= count <= len(units):
        raise UserError(f"There are {len(units)} images, so they form 1 to {len(units)} clusters, not {count}.")
    sample = take(units, sampled(len(units), CLUSTERED, seed=seed))
    centers = k_means(sample, count, seed=seed) if count else best_clusters(sample, seed=seed)
    near = []
    for start in range(0, len(units), ROWS_AT_ONCE):
        near.append(nearest_units(centers, as_tensor(units[start : start + ROWS_AT_ONCE]), k=1))
        release(units)
    label = torch.cat([part.indices[:, 0] for part in near]).numpy()
    similarity = torch.cat([part.similarities[:, 0] for part in near]).numpy()
    sizes = np.bincount(label, minlength=len(centers))
    order = np.array([i for i in np.argsort(-sizes, kind="stable") if sizes[i]])
    place = np.zeros(len(centers), np.int64)
    place[order] = np.arange(len(order))
    label = place[label]
    best = np.lexsort((-similarity, label))
    starts = np.searchsorted(label[best], np.arange(len(order) + 1))
    shown = [best[a : min(b, a + examples)].tolist() for a, b in itertools.pairwise(starts)]
    return Clusters(label, similarity, centers[torch.from_numpy(order)], shown)


def k_means(sample: Tensor, count: int, *, seed: int) -> Tensor:
    """Return centers (count, D) of length 1."""
    from sklearn.cluster import KMeans

    fit = KMeans(count, n_init=3, random_state=seed).fit(sample.numpy())
    return torch.nn.functional.normalize(torch.from_numpy(fit.cluster_centers_).float(), dim=1)


def best_clusters(sample: Tensor, *, seed: int) -> Tensor:
    """Return the centers whose number has the largest silhouette on a part of the sample."""
    from sklearn.metrics import silhouette_score

    part = sample[sampled(len(sample), MAPPED, seed=seed)]
    scores: dict[float, int] = {}
    most = min(len(part) / 4, len(torch.unique(part, dim=0)))
    for count in (count for count in CLUSTERS if count < most):
        centers = k_means(part, count, seed=seed)
        label = (part @ centers.T).argmax(dim=1).numpy()
        if 1 < len(np.unique(label)) < len(part):
            scores.setdefault(float(silhouette_score(part.numpy(), label)), count)
    return k_means(sample, scores[max(scores)] if scores else 1, seed=seed)


# ---- map


@dataclass(frozen=True)
class Map:
    """rows: images on the map; places (m, 2); neighbors: of each, the nearest others on the map."""

    rows: np.ndarray
    places: np.ndarray
    neighbors: list[list[int]]


def map_of(units: Units, *, points: int = MAPPED, seed: int = 0) -> Map:
    """Return a t-SNE map of points spread evenly over the collection."""
    chosen = sampled(len(units), points, seed=seed)
    shown = take(units, chosen)
    k = min(LIKE, len(chosen) - 1)
    neighbors = nearest_others(shown, np.arange(len(chosen)), k=k).indices.tolist()
    if len(chosen) < 4:
        return Map(chosen, np.stack([np.arange(len(chosen)), np.zeros(len(chosen))], axis=1), neighbors)
    return Map(chosen, np.asarray(tsne(shown, seed=seed), np.float64), neighbors)
