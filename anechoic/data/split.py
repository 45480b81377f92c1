"""Held-out samples: a choice that is a function of the seed and the samples' numbers."""

from __future__ import annotations

import numpy as np
import torch

from anechoic.errors import UserError
from anechoic.rng import SampleGenerator


def hold_out(size: int, count: int, *, seed: int = 0, group: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept, held-out) indices of `size` samples, each in order; `count` of them are held out.

    group: number of consecutive samples of one image (`Source.group_size`), which are held out together.
    """
    if group > 1:
        kept, held_out = hold_out(size // group, -(-count // group), seed=seed)
        members = np.arange(group)
        return (kept[:, None] * group + members).ravel(), (held_out[:, None] * group + members).ravel()
    generator = SampleGenerator(seed, torch.arange(size), torch.zeros(size, dtype=torch.int64))
    order = generator.words("holdout", 1)[:, 0].argsort(stable=True).numpy()
    return np.sort(order[count:]), np.sort(order[:count])


def draw(size: int, count: int, *, labels: np.ndarray | None = None, group: int = 1) -> np.ndarray:
    """Return `count` of `size` samples, in order, the same every time; with labels, the same share of every label.

    Shares are rounded by largest remainders. group: as for hold_out, without labels.
    """
    if labels is None or labels.ndim != 1 or group > 1:
        return hold_out(size, count, group=group)[1]
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    exact = [count * len(rows) / size for rows in members]
    quotas = np.floor(exact).astype(int)
    quotas[np.argsort(quotas - exact, kind="stable")[: count - quotas.sum()]] += 1
    chosen = [rows[hold_out(len(rows), quota)[1]] for rows, quota in zip(members, quotas, strict=True)]
    return np.sort(np.concatenate(chosen))


def hold_out_share(size: int, share: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) indices of `size` samples, with this fraction of them for testing."""
    if not 0 < share < 1:
        raise UserError(f"--holdout is the share of the data to test on, between 0 and 1, not {share}.")
    count = round(share * size)
    if not 0 < count < size:
        raise UserError(f"{size} samples cannot be split with a holdout of {share}; give more data or --test.")
    return hold_out(size, count, seed=seed)
