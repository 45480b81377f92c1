"""Retrieval across styles: is the nearest drawing in another style the same object, or the same kind of object?

A drawing has an object, a style and a group (the kind of object), the facets of its source. A drawing is never compared
with others of its own style, so features that encode the style score lower. Features in, shares in 0 .. 1 out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from anechoic.errors import UserError
from anechoic.eval.feature_scaling import Scaling, rescaled
from anechoic.eval.features import Rows
from anechoic.eval.metrics.knn import Neighbors, unit_rows, vote
from anechoic.eval.tensors import as_tensor

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

NEIGHBORS = 20
CHUNK = 2048  # drawings whose similarities are held at once


def retrieval_matrix(features: np.ndarray | Tensor, objects: np.ndarray, styles: np.ndarray) -> np.ndarray:
    """Return (S, S) for S styles: of the row style's drawings whose object the column style has too, the share whose
    nearest drawing (cosine) in the column style is that object; NaN on the diagonal and where no object is common.

    Ties: the smaller index.
    """
    x, (objects, styles) = unit_rows(features, name="test"), matching_labels(features, objects, styles)
    names = np.unique(styles)
    rows = [np.flatnonzero(styles == name) for name in names]
    found = np.full((len(names), len(names)), np.nan)
    for i, query in enumerate(rows):
        for j, bank in enumerate(rows):
            asked = query[np.isin(objects[query], objects[bank])]
            if i != j and len(asked):
                best = torch.cat([(part @ x[bank].T).argmax(dim=1) for part in x[asked].split(CHUNK)]).numpy(force=True)
                found[i, j] = np.mean(objects[bank][best] == objects[asked])
    return found


def retrieval_accuracy(features: np.ndarray | Tensor, objects: np.ndarray, styles: np.ndarray) -> float:
    """The mean of `retrieval_matrix` over ordered pairs of styles."""
    found = retrieval_matrix(features, objects, styles)
    if np.isnan(found).all():
        raise UserError("Retrieval across styles needs an object that is drawn in two styles: choose more styles.")
    return float(np.nanmean(found))


def retrieval_ranks(
    features: np.ndarray | Tensor, objects: np.ndarray, styles: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays (S, S, T) for S styles of the same T objects: the column style's drawing nearest to the row
    style's drawing of each object, and the rank (1 is the nearest) of the column style's drawing of the same object; -1
    and 0 on the diagonal. Objects are in ascending order.
    """
    x, (objects, styles) = unit_rows(features, name="test"), matching_labels(features, objects, styles)
    numbers = np.unique(objects)
    rows = [np.flatnonzero(styles == name) for name in np.unique(styles)]
    rows = [row[np.argsort(objects[row], kind="stable")] for row in rows]
    if any(not np.array_equal(objects[row], numbers) for row in rows):
        raise UserError("Ranks across styles need every object once in every style: choose whole styles.")
    best = np.full((len(rows), len(rows), len(numbers)), -1)
    rank = np.zeros_like(best)
    before = torch.ones(len(numbers), len(numbers), device=x.device).tril(-1).bool()
    for i, query in enumerate(rows):
        for j, bank in enumerate(rows):
            if i != j:
                similar = x[query] @ x[bank].T
                own = similar.diagonal()[:, None]
                ahead = (similar > own) | ((similar == own) & before)
                best[i, j] = similar.argmax(dim=1).numpy(force=True)
                rank[i, j] = 1 + ahead.sum(dim=1).numpy(force=True)
    return best, rank


def group_accuracy(
    features: np.ndarray | Tensor,
    groups: np.ndarray,
    objects: np.ndarray,
    styles: np.ndarray,
    *,
    k: int = NEIGHBORS,
) -> float:
    """Return the share of drawings whose group wins the vote of the k nearest other objects in other styles.

    Votes are weighted as in `knn`; the mean over styles.
    """
    x, (groups, objects, styles) = unit_rows(features, name="test"), matching_labels(features, groups, objects, styles)
    classes = int(groups.max()) + 1
    shares = []
    for name in np.unique(styles):
        query, bank = np.flatnonzero(styles == name), np.flatnonzero(styles != name)
        if len(bank) <= k:
            raise UserError(f"There are {len(bank)} drawings in other styles, too few for {k} neighbors: lower k.")
        similarities = x[query] @ x[bank].T
        same = torch.from_numpy(objects[query][:, None] == objects[bank][None]).to(similarities.device)
        found = similarities.masked_fill_(same, -torch.inf).topk(k, dim=1)
        won = vote(Neighbors(found.values, found.indices), groups[bank], k=k, num_classes=classes).argmax(dim=1)
        shares.append(float((won.numpy(force=True) == groups[query]).mean()))
    return float(np.mean(shares))


def matching_labels(features: np.ndarray | Tensor, *numbers: np.ndarray) -> list[np.ndarray]:
    for column in numbers:
        if len(column) != len(features):
            raise UserError(f"There are {len(features)} features but {len(column)} labels: give one to each.")
    return [np.asarray(column) for column in numbers]


# ---- as metrics


def retrieval_metric(subject: Subject, *, scaling: Scaling = "raw") -> Rows:
    """retrieval (or retrieval_SCALING): across all ordered pairs of styles."""
    objects, styles = (facet(subject, name) for name in ("object", "style"))
    name = "retrieval" if scaling == "raw" else f"retrieval_{scaling}"
    return {
        key: {name: retrieval_accuracy(rescaled(as_tensor(x).to(subject.measuring), scaling), objects, styles)}
        for key, x in subject.sets.items()
    }


def group_metric(subject: Subject) -> Rows:
    """group_vote: the kind of object, voted by other objects in other styles."""
    groups, objects, styles = (facet(subject, name) for name in ("group", "object", "style"))
    k = (subject.spec.neighbors or (NEIGHBORS,))[0]
    return {
        key: {"group_vote": group_accuracy(as_tensor(features).to(subject.measuring), groups, objects, styles, k=k)}
        for key, features in subject.sets.items()
    }


def facet(subject: Subject, name: str) -> np.ndarray:
    """Return the number of each test drawing's object, style or group."""
    assert subject.test is not None, "a metric of features"
    return subject.eval_data.test.facets[name][subject.test.ids]
