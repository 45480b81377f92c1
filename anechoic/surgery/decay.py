"""decay(model): a residual network with decayed shortcuts, with or without a change of what it computes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from anechoic.adapters.blocks import ResidualStream
from anechoic.choices import BranchKind
from anechoic.errors import UserError, nearest_name
from anechoic.models.layers import zero_branch_outputs
from anechoic.models.network import Network
from anechoic.shortcut import AlphaMin, AnySchedule, Shortcut, shortcut_factors
from anechoic.surgery.streams import check_network, join_streams, rebuilt, refactor, refactored, set_factors

ONLY = ("attention", "mlp")


def decay(
    model: nn.Module,
    alpha_min: AlphaMin = 0.6,
    *,
    schedule: AnySchedule = "linear",
    only: BranchKind | None = None,
    preserve: bool = False,
    zero_init: bool | None = None,
) -> nn.Module:
    """Return a copy of a plain residual network, ours or another library's, whose shortcuts are decayed.

    preserve=False keeps the weights and replaces the shortcuts, so the function changes. preserve=True keeps the
    function (the inverse of fold) by moving the factors into the weights. zero_init=True also zeroes the branch
    outputs, for training from scratch. only restricts the decay to one kind of branch. schedule: a name, one alpha per
    branch, or a function (n, alpha_min) that returns the n alphas of a stream.
    """
    check_network(model, "decay")
    if only not in (None, *ONLY):
        raise UserError(
            f"only restricts the decay to one kind of branch, not {only!r}; {nearest_name(str(only), ONLY)}"
        )
    check_alpha_min(alpha_min)
    if preserve and zero_init:
        raise UserError("preserve=True keeps what the network computes and zero_init=True erases it: choose one.")
    if isinstance(model, Network):
        _check_plain(model.stream().shortcuts)
        listed: Any = schedule if isinstance(schedule, str) or callable(schedule) else tuple(schedule)
        config = dataclasses.replace(model.config, alpha_min=alpha_min, schedule=listed, form=only or "identity")
        if preserve:
            return refactored(model, config)
        network = rebuilt(model, config, model.state_dict())
        if zero_init:
            zero_branch_outputs(network.stream().events)
        return network
    decayed = copy.deepcopy(model)
    for found, factors in new_factors(join_streams(decayed), alpha_min, schedule=schedule, form=only or "identity"):
        if preserve:
            refactor(found, factors)
        else:
            set_factors(found.shortcuts, factors)
        if zero_init:
            zero_branch_outputs(found.describe().events)
    return decayed


def check_alpha_min(alpha_min: object) -> None:
    if alpha_min != "auto" and (not isinstance(alpha_min, int | float) or isinstance(alpha_min, bool)):
        raise UserError(f"alpha_min is a number from 0 to 1 or 'auto', not {alpha_min!r}.")


def new_factors(
    streams: list[ResidualStream], alpha_min: AlphaMin, *, schedule: AnySchedule, form: str
) -> list[tuple[ResidualStream, list[tuple[float, float]]]]:
    """Return each plain stream with the (alpha, beta) of its branches; a listed schedule is split among the streams."""
    counts = [len(found.shortcuts) for found in streams]
    listed = None if isinstance(schedule, str) or callable(schedule) else list(schedule)
    if listed is not None and len(listed) != sum(counts):
        raise UserError(
            f"The schedule lists {len(listed)} alphas, but the network has {sum(counts)} residual branches: give one "
            f"each."
        )
    pairs = []
    for i, found in enumerate(streams):
        _check_plain(found.shortcuts)
        start = sum(counts[:i])
        part = schedule if listed is None else listed[start : start + counts[i]]
        kinds = [shortcut.kind for shortcut in found.shortcuts]
        pairs.append((found, shortcut_factors(kinds, alpha_min=alpha_min, schedule=part, form=form)))
    return pairs


def _check_plain(shortcuts: Sequence[Shortcut]) -> None:
    if any(shortcut.factors != (1.0, 1.0) or shortcut.learnable for shortcut in shortcuts):
        raise UserError(
            "This network's shortcuts are not plain: fold it first, or decay the plain network it came from."
        )
