"""Conversion of a network's shortcuts: decay(model), fold(model), shortcuts(model). Each returns a new model.

The algebra is one function, `rescale`: it changes the factors of every shortcut and moves the difference into the
weights, so that the function the network computes stays the same. Models describe their residual stream themselves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.layers import MARKS, Network, NetworkConfig, zero_branch_outputs
from anechoic.shortcut import (
    Add,
    AlphaMin,
    Branch,
    Concatenate,
    Read,
    Slot,
    Stream,
    Tap,
    Write,
)

Factors = Sequence[tuple[float, float]]


class ShortcutInfo(NamedTuple):
    """One place where two branches meet. gain: the product of alphas from the start of the stream up to here."""

    name: str
    kind: str
    alpha: float
    beta: float
    gain: float


def shortcuts(model: nn.Module) -> list[ShortcutInfo]:
    """Every shortcut of the residual stream, in execution order."""
    names = {module: name for name, module in model.named_modules()}
    rows, gain = [], 1.0
    for shortcut in stream_of(model).shortcuts:
        alpha, beta = shortcut.factors
        gain *= alpha
        rows.append(ShortcutInfo(names[shortcut], shortcut.kind, alpha, beta, gain))
    return rows


def fold(model: nn.Module) -> nn.Module:
    """A plain residual network with the same outputs: every shortcut becomes x + f(x), the factors move into weights.

    Hidden states inside the network differ from the original's by the gain. Forms with a learned alpha fold as long as
    every alpha is positive.
    """
    network = own(model)
    for index, shortcut in enumerate(network.stream().shortcuts):
        if not shortcut.factors[0] > 0:
            raise UserError(
                f"Shortcut {index} has learned the alpha {shortcut.factors[0]:.4g}, and only positive alphas can be folded "
                f"into weights: export the network as it is."
            )
    plain = dataclasses.replace(network.config, alpha_min=1.0, schedule="linear", form="identity")
    return _refactored(network, plain)


def decay(
    model: nn.Module,
    alpha_min: AlphaMin = 0.6,
    *,
    schedule: str | Sequence[float] = "linear",
    only: Literal["attention", "mlp"] | None = None,
    preserve: bool = False,
    zero_init: bool | None = None,
) -> nn.Module:
    """A copy of a plain residual network whose shortcuts are decayed.

    preserve=False keeps the weights and replaces the shortcuts, so the function changes. preserve=True keeps the
    function (the inverse of fold) by moving the factors into the weights. zero_init=True also zeroes the branch outputs, for
    training from scratch. only restricts the decay to one kind of branch.
    """
    network = own(model)
    if any(factor != (1.0, 1.0) for factor in network.config.factors) or network.config.form == "learnable":
        raise UserError(
            "This network's shortcuts are not plain: fold it first, or decay the plain network it came from."
        )
    if preserve and zero_init:
        raise UserError("preserve=True keeps what the network computes and zero_init=True erases it: choose one.")
    given = schedule if isinstance(schedule, str) else tuple(schedule)
    config = dataclasses.replace(network.config, alpha_min=alpha_min, schedule=given, form=only or "identity")
    if preserve:
        return _refactored(network, config)
    decayed = _rebuilt(network, config, network.state_dict())
    if zero_init:
        zero_branch_outputs(decayed.stream().events)
    return decayed


def own(model: nn.Module) -> Network:
    if not isinstance(model, Network):
        raise UserError(f"{type(model).__name__} describes no residual stream; build it with anechoic.build_model.")
    return model


def stream_of(model: nn.Module) -> Stream:
    return own(model).stream()


# ---- rebuilding


def _refactored(network: Network, config: NetworkConfig) -> Network:
    """The same function with the factors of config."""
    edited = copy.deepcopy(network)
    rescale(edited.stream(), config.factors)
    changed = edited.current_config()
    kept = {name: getattr(changed, name) for name in ("norm_eps", "position_scale") if name in _field_names(changed)}
    return _rebuilt(network, dataclasses.replace(config, **kept), edited.state_dict())


def _field_names(config: NetworkConfig) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _rebuilt(network: Network, config: NetworkConfig, state: dict[str, Tensor]) -> Any:
    """A network of this config with these weights and its own marks, on the original's device and in its mode."""
    reference = next(network.parameters())
    with torch.random.fork_rng(devices=[]):  # initialising the copy must not advance the caller's random numbers
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


# ---- the algebra


@torch.no_grad()
def rescale(stream: Stream, factors: Factors) -> None:
    """Edit weights and eps in place so that, with the new (alpha, beta) per branch, the outputs stay the same.

    Let ratio = old stream / new stream, a number at every point. From alpha x + beta f to alpha' x' + beta' f':
    a branch takes ratio to ratio * alpha / alpha' and its output is multiplied by beta / (that * beta').
    A norm that reads the stream gets eps / ratio^2, a linear reader weight * ratio; what is written is divided by it.
    """
    old = [shortcut.factors for shortcut in stream.shortcuts]
    remaining = iter(zip(old, factors, strict=True))
    ratio = 1.0
    if stream.ends_raw:
        for (alpha, _), (new_alpha, _) in zip(old, factors, strict=True):
            ratio *= new_alpha / alpha
    taps: dict[str, float] = {}
    for event in stream.events:
        match event:
            case Write(slots):
                for slot in slots:
                    multiply(slot, 1 / ratio)
            case Read():
                read(event, ratio)
            case Branch(_, reads, writer, projection):
                (alpha, beta), (new_alpha, new_beta) = next(remaining)
                read(reads, ratio)
                if projection is not None:
                    # alpha P(x) = ratio' alpha' P'(x'), and ratio' alpha' = ratio alpha.
                    multiply(projection[0], ratio)
                    scale_output(projection[1], 1 / ratio)
                ratio *= alpha / new_alpha
                scale_output(writer, beta / (ratio * new_beta))
            case Tap(name):
                taps[name] = ratio
            case Concatenate(linear, name):
                width = linear.out_features
                multiply(Slot(linear, "weight", columns=(0, width)), ratio)
                multiply(Slot(linear, "weight", columns=(width, linear.in_features)), taps[name])
                ratio = 1.0
            case Add(linear, name):
                multiply(Slot(linear, "weight"), taps[name])
                scale_output(linear, 1 / ratio)


def read(reads: Read, ratio: float) -> None:
    for norm in reads.norms:
        norm.eps = norm.eps / ratio**2  # type: ignore[operator, assignment]
    for slot in reads.maps:
        multiply(slot, ratio)


def scale_output(module: nn.Module, factor: float) -> None:
    """Multiply what an affine module puts out."""
    for name, _ in module.named_parameters(recurse=False):
        multiply(Slot(module, name), factor)


def multiply(slot: Slot, factor: float) -> None:
    value = getattr(slot.owner, slot.name)
    if not isinstance(value, Tensor):
        setattr(slot.owner, slot.name, value * factor)
    elif slot.columns is None:
        value.mul_(factor)
    else:
        value[:, slot.columns[0] : slot.columns[1]].mul_(factor)
