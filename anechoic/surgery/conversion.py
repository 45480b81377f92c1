"""Conversion of a network's shortcuts: decay(model), fold(model), shortcuts(model). Each returns something new.

How weights and eps follow the factors of the shortcuts is algebra.py's. Our networks describe their residual stream
themselves; blocks.py does it for the networks of other libraries.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anechoic.adapters import blocks
from anechoic.adapters.blocks import Found
from anechoic.errors import UserError, nearest_name
from anechoic.models import build
from anechoic.models.layers import zero_branch_outputs
from anechoic.models.network import MARKS, Network, NetworkConfig
from anechoic.shortcut import AlphaMin, Shortcut, Stream, shortcut_factors
from anechoic.surgery.algebra import Factors, edits, rescale

ONLY = ("attention", "mlp")


class ShortcutInfo(NamedTuple):
    """One place where two branches meet. gain: the product of alphas from the start of its stream up to here."""

    name: str
    kind: str
    alpha: float
    beta: float
    gain: float


def shortcuts(model: nn.Module) -> list[ShortcutInfo]:
    """Every shortcut of the residual stream, in execution order; in a network not yet decayed, where they would be."""
    check_network(model, "shortcuts")
    all_found = _find(model)
    if not all_found:
        model = copy.deepcopy(model)
        all_found = streams(model)
    names = {module: name for name, module in model.named_modules()}
    rows = []
    for found in all_found:
        gain = 1.0
        for shortcut in found.shortcuts:
            alpha, beta = shortcut.factors
            gain *= alpha
            rows.append(ShortcutInfo(names[shortcut], shortcut.kind, alpha, beta, gain))
    return rows


def fold(model: nn.Module) -> nn.Module:
    """A plain residual network with the same outputs: every shortcut becomes x + f(x), the factors move into weights.

    Hidden states inside the network differ from the original's by the gain. Forms with a learned alpha fold as long as
    every alpha is positive. Blocks of other libraries get their own class back.
    """
    for info in shortcuts(model):
        if not info.alpha > 0:
            raise UserError(
                f"{info.name} has learned the alpha {info.alpha:.4g}, and only positive alphas can be folded into "
                f"weights: export the network as it is."
            )
    if isinstance(model, Network):
        return _refactored(model, _plain(model.config))
    folded = copy.deepcopy(model)
    for found in streams(folded):
        refactor(found, [(1.0, 1.0)] * len(found.shortcuts))
    blocks.release(folded)
    return folded


def decay(
    model: nn.Module,
    alpha_min: AlphaMin = 0.6,
    *,
    schedule: str | Sequence[float] = "linear",
    only: Literal["attention", "mlp"] | None = None,
    preserve: bool = False,
    zero_init: bool | None = None,
) -> nn.Module:
    """A copy of a plain residual network, ours or another library's, whose shortcuts are decayed.

    preserve=False keeps the weights and replaces the shortcuts, so the function changes. preserve=True keeps the
    function (the inverse of fold) by moving the factors into the weights. zero_init=True also zeroes the branch
    outputs, for training from scratch. only restricts the decay to one kind of branch. A listed schedule has one alpha
    per branch.
    """
    check_network(model, "decay")
    if only not in (None, *ONLY):
        raise UserError(
            f"only restricts the decay to one kind of branch, not {only!r}; {nearest_name(str(only), ONLY)}"
        )
    if alpha_min != "auto" and (not isinstance(alpha_min, int | float) or isinstance(alpha_min, bool)):
        raise UserError(f"alpha_min is a number from 0 to 1 or 'auto', not {alpha_min!r}.")
    if preserve and zero_init:
        raise UserError("preserve=True keeps what the network computes and zero_init=True erases it: choose one.")
    if isinstance(model, Network):
        return _decayed_network(model, alpha_min, schedule=schedule, only=only, preserve=preserve, zero_init=zero_init)
    decayed = copy.deepcopy(model)
    all_found = streams(decayed)
    given = None if isinstance(schedule, str) else _split(schedule, all_found)
    for i, found in enumerate(all_found):
        _check_plain(found.shortcuts)
        factors = shortcut_factors(
            [shortcut.kind for shortcut in found.shortcuts],
            alpha_min=alpha_min,
            schedule=schedule if given is None else given[i],
            form=only or "identity",
        )
        if preserve:
            refactor(found, factors)
        else:
            set_factors(found.shortcuts, factors)
        if zero_init:
            zero_branch_outputs(found.describe().events)
    return decayed


def check_network(model: Any, verb: str) -> None:
    if not isinstance(model, nn.Module):
        by_name = f": anechoic.{verb}(anechoic.build_model({model!r}))" if isinstance(model, str) else ""
        raise UserError(f"{verb} takes a network (torch.nn.Module), not {type(model).__name__} {model!r:.60}{by_name}.")


def streams(model: nn.Module) -> list[Found]:
    """The residual streams of a model; known blocks of other libraries are joined by Shortcuts in place."""
    found = _find(model) if isinstance(model, Network) else blocks.join(model)
    if not found:
        raise UserError(
            f"Nothing in {type(model).__name__} was recognized as a residual branch; looked for: {blocks.KNOWN}."
        )
    inner = [
        type(each.module).__name__ for each in found if isinstance(each.module, Network) and each.module is not model
    ]
    if inner:
        # Its config and marks must follow its shortcuts, so it is rebuilt and not edited.
        raise UserError(f"{inner[0]} inside {type(model).__name__} is a network of ours: convert it, then put it back.")
    return found


def _find(model: nn.Module) -> list[Found]:
    """The residual streams as they are, without joining anything."""
    if isinstance(model, Network):
        return [Found(model, model.stream().shortcuts, model.stream)]
    return blocks.find(model)


def weight_factors(model: nn.Module) -> dict[str, float]:
    """Parameter name -> the factor by which it differs from that of the plain network which computes the same."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    factors: dict[str, float] = {}
    for found in _find(model):
        plain = [(1.0, 1.0)] * len(found.shortcuts)
        for edit in edits(found.describe(), plain):
            name = names.get(id(getattr(edit.slot.owner, edit.slot.name)))
            if name is not None:
                if edit.slot.columns is not None and edit.factor != 1:
                    raise UserError(f"Parts of {name} have different factors, so no learning rate fits all of it.")
                factors[name] = factors.get(name, 1.0) / edit.factor
    return factors


# ---- networks of other libraries


def _check_plain(shortcuts: Sequence[Shortcut]) -> None:
    if any(shortcut.factors != (1.0, 1.0) or shortcut.learnable for shortcut in shortcuts):
        raise UserError(
            "This network's shortcuts are not plain: fold it first, or decay the plain network it came from."
        )


def _split(schedule: Sequence[float], all_found: list[Found]) -> list[list[float]]:
    """A listed schedule, one part per stream."""
    counts = [len(found.shortcuts) for found in all_found]
    if len(schedule) != sum(counts):
        raise UserError(
            f"The schedule lists {len(schedule)} alphas, but the network has {sum(counts)} residual branches: give one "
            f"each."
        )
    remaining = iter(schedule)
    return [[next(remaining) for _ in range(count)] for count in counts]


def set_factors(shortcuts: Sequence[Shortcut], factors: Factors) -> None:
    for shortcut, (alpha, beta) in zip(shortcuts, factors, strict=True):
        if shortcut.learnable:
            del shortcut.alpha
        shortcut.alpha, shortcut.beta = alpha, beta


def refactor(found: Found, factors: Factors) -> None:
    """Give the shortcuts new factors and move the difference into the weights, in place."""
    stream = found.describe()
    if [id(shortcut) for shortcut in stream.shortcuts] != [id(shortcut) for shortcut in found.shortcuts]:
        raise UserError(
            f"{type(found.module).__name__} runs its blocks in another order than it lists them: describe its stream "
            f"with anechoic.surgery.describe."
        )
    rescale(stream, factors)
    set_factors(found.shortcuts, factors)


# ---- our own networks


def _decayed_network(
    network: Network,
    alpha_min: AlphaMin,
    *,
    schedule: str | Sequence[float],
    only: Literal["attention", "mlp"] | None,
    preserve: bool,
    zero_init: bool | None,
) -> Network:
    _check_plain(network.stream().shortcuts)
    given = schedule if isinstance(schedule, str) else tuple(schedule)
    config = dataclasses.replace(network.config, alpha_min=alpha_min, schedule=given, form=only or "identity")
    if preserve:
        return _refactored(network, config)
    decayed = _rebuilt(network, config, network.state_dict())
    if zero_init:
        zero_branch_outputs(decayed.stream().events)
    return decayed


def fold_along(network: Network, stream: Stream) -> Network:
    """Fold one of our networks along another telling of its stream: fewer outputs, say, and so more freedom."""
    edited, told = copy.deepcopy((network, stream))
    rescale(told, _plain(network.config).factors)
    return _rebuilt_as(network, edited, _plain(network.config))


def _plain(config: NetworkConfig) -> NetworkConfig:
    return dataclasses.replace(config, alpha_min=1.0, schedule="linear", form="identity")


def _refactored(network: Network, config: NetworkConfig) -> Network:
    """The same function with the factors of config."""
    edited = copy.deepcopy(network)
    rescale(edited.stream(), config.factors)
    return _rebuilt_as(network, edited, config)


def _rebuilt_as(network: Network, edited: Network, config: NetworkConfig) -> Network:
    """A network of config with the weights, eps and position scale of the edited copy."""
    changed = edited.current_config()
    kept = {name: getattr(changed, name) for name in ("norm_eps", "position_scale") if name in _field_names(changed)}
    return _rebuilt(network, dataclasses.replace(config, **kept), edited.state_dict())


def _field_names(config: NetworkConfig) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _rebuilt(network: Network, config: NetworkConfig, state: dict[str, Tensor]) -> Any:
    """A network of this config with these weights and its own marks, on the original's device and in its mode."""
    reference = next(network.parameters())
    with torch.random.fork_rng(devices=[]):  # initializing the copy must not advance the caller's random numbers
        rebuilt = build(config).to(device=reference.device, dtype=reference.dtype)
    shortcut_keys = {f"{info.name}.alpha" for info in shortcuts(network)}
    weights = {
        key: value for key, value in state.items() if key.rpartition(".")[2] not in MARKS and key not in shortcut_keys
    }
    marks = {key: value for key, value in rebuilt.state_dict().items() if key.rpartition(".")[2] in MARKS}
    rebuilt.load_state_dict({**weights, **marks}, strict=True)
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    for name, parameter in rebuilt.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return rebuilt.train(network.training)
