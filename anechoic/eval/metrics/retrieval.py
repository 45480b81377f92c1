"""Retrieval across hands: is the nearest drawing by another hand one of the same thing? Or of the same kind of thing?

A drawing has a thing, a style (the hand) and a group (the kind), the facets of its source. A style's own drawings never
answer for it, so what features keep of the style counts against them. Features in, shares in 0 .. 1 out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anechoic.errors import UserError
from anechoic.eval.feature_scaling import Scaling, rescaled
from anechoic.eval.features import Key
from anechoic.eval.metrics.analysis import as_tensor
from anechoic.eval.metrics.knn import Neighbors, unit_rows, vote

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

NEIGHBORS = 20
CHUNK = 2048  # drawings whose similarities are held at once


def retrieval_matrix(features: np.ndarray | Tensor, things: np.ndarray, styles: np.ndarray) -> np.ndarray:
    """(S, S) for S styles: of the drawings of the row's style whose thing the column's has too, the share whose nearest
    one by cosine among the column's drawings is that thing; NaN on the diagonal and where there is none to find.

    Ties go to the drawing that comes first.
    """
    x, (things, styles) = unit_rows(features, name="test"), checked(features, things, styles)
    names = np.unique(styles)
    rows = [np.flatnonzero(styles == name) for name in names]
    found = np.full((len(names), len(names)), np.nan)
    for i, query in enumerate(rows):
        for j, bank in enumerate(rows):
            asked = query[np.isin(things[query], things[bank])]
            if i != j and len(asked):
                best = torch.cat([(part @ x[bank].T).argmax(dim=1) for part in x[asked].split(CHUNK)]).numpy(force=True)
                found[i, j] = np.mean(things[bank][best] == things[asked])
    return found


def retrieval_accuracy(features: np.ndarray | Tensor, things: np.ndarray, styles: np.ndarray) -> float:
    """The mean of `retrieval_matrix` over ordered pairs of styles."""
    found = retrieval_matrix(features, things, styles)
    if np.isnan(found).all():
        raise UserError("Retrieval across hands needs a thing that is drawn in two styles: choose more styles.")
    return float(np.nanmean(found))


def places(features: np.ndarray | Tensor, things: np.ndarray, styles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(S, S, T) for S styles that all draw the same T things: the column's drawing nearest to the row's drawing of
    each thing, and at which place (1 is the nearest) the column's drawing of the same thing comes; -1 and 0 on the
    diagonal. Things are numbered in the order of their numbers.
    """
    x, (things, styles) = unit_rows(features, name="test"), checked(features, things, styles)
    numbers = np.unique(things)
    rows = [np.flatnonzero(styles == name) for name in np.unique(styles)]
    rows = [row[np.argsort(things[row], kind="stable")] for row in rows]
    if any(not np.array_equal(things[row], numbers) for row in rows):
        raise UserError("Places across hands need every thing drawn once in every style: choose whole styles.")
    best = np.full((len(rows), len(rows), len(numbers)), -1)
    place = np.zeros_like(best)
    before = torch.ones(len(numbers), len(numbers), device=x.device).tril(-1).bool()
    for i, query in enumerate(rows):
        for j, bank in enumerate(rows):
            if i != j:
                similar = x[query] @ x[bank].T
                own = similar.diagonal()[:, None]
                ahead = (similar > own) | ((similar == own) & before)
                best[i, j] = similar.argmax(dim=1).numpy(force=True)
                place[i, j] = 1 + ahead.sum(dim=1).numpy(force=True)
    return best, place


def group_accuracy(
    features: np.ndarray | Tensor,
    groups: np.ndarray,
    things: np.ndarray,
    styles: np.ndarray,
    *,
    k: int = NEIGHBORS,
) -> float:
    """The share of drawings whose group wins the vote of the k nearest drawings of other things by other hands.

    Votes are weighted as in `knn`; the mean over styles.
    """
    x, (groups, things, styles) = unit_rows(features, name="test"), checked(features, groups, things, styles)
    classes = int(groups.max()) + 1
    shares = []
    for name in np.unique(styles):
        query, bank = np.flatnonzero(styles == name), np.flatnonzero(styles != name)
        if len(bank) <= k:
            raise UserError(f"There are {len(bank)} drawings by other hands, too few for {k} neighbors: lower k.")
        similarities = x[query] @ x[bank].T
        same = torch.from_numpy(things[query][:, None] == things[bank][None]).to(similarities.device)
        found = similarities.masked_fill_(same, -torch.inf).topk(k, dim=1)
        won = vote(Neighbors(found.values, found.indices), groups[bank], k=k, num_classes=classes).argmax(dim=1)
        shares.append(float((won.numpy(force=True) == groups[query]).mean()))
    return float(np.mean(shares))


def checked(features: np.ndarray | Tensor, *numbers: np.ndarray) -> list[np.ndarray]:
    for column in numbers:
        if len(column) != len(features):
            raise UserError(f"There are {len(features)} features but {len(column)} labels: give one to each.")
    return [np.asarray(column) for column in numbers]


# ---- as metrics


def retrieval_metric(subject: Subject) -> dict[Key, dict[str, Any]]:
    """retrieval: across all ordered pairs of styles, on features as they are."""
    return _retrieval(subject, "raw")


def standardized_retrieval_metric(subject: Subject) -> dict[Key, dict[str, Any]]:
    """retrieval_standardized: every channel to mean 0 and deviation 1 first."""
    return _retrieval(subject, "standardized")


def whitened_retrieval_metric(subject: Subject) -> dict[Key, dict[str, Any]]:
    """retrieval_whitened: every direction to the same variance first; slow beyond a thousand channels."""
    return _retrieval(subject, "whitened")


def _retrieval(subject: Subject, scaling: Scaling) -> dict[Key, dict[str, Any]]:
    things, styles = (facet(subject, name) for name in ("thing", "style"))
    name = "retrieval" if scaling == "raw" else f"retrieval_{scaling}"
    return {
        key: {name: retrieval_accuracy(rescaled(as_tensor(x).to(subject.measuring), scaling), things, styles)}
        for key, x in subject.sets.items()
    }


def group_metric(subject: Subject) -> dict[Key, dict[str, Any]]:
    """group_vote: the kind of thing, voted by other things of other hands."""
    groups, things, styles = (facet(subject, name) for name in ("group", "thing", "style"))
    k = (subject.spec.neighbors or (NEIGHBORS,))[0]
    return {
        key: {"group_vote": group_accuracy(as_tensor(features).to(subject.measuring), groups, things, styles, k=k)}
        for key, features in subject.sets.items()
    }


def facet(subject: Subject, name: str) -> np.ndarray:
    """The tested drawings' numbers under this name."""
    facets = subject.eval_data.test.facets
    if name not in facets:
        raise UserError(f"Retrieval across hands needs data that knows the {name} of each image, as emoji does.")
    assert subject.test is not None, "a metric of features"
    return facets[name][subject.test.ids]
