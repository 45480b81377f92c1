"""The residual streams of a network, ours or another library's: their shortcuts, and new factors for them.

Our networks describe their stream themselves; adapters do it for other libraries. How weights and eps follow the
factors is in algebra.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anechoic.adapters import blocks
from anechoic.adapters.blocks import ResidualStream
from anechoic.adapters.registry import known_blocks
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.network import MARKS, Network, NetworkConfig
from anechoic.shortcut import Shortcut, Stream
from anechoic.surgery.algebra import Factors, edits, rescale


class ShortcutInfo(NamedTuple):
    """One sum of two branches. gain: the product of alphas from the start of its stream up to here."""

    name: str
    kind: str
    alpha: float
    beta: float
    gain: float


def shortcuts(model: nn.Module) -> list[ShortcutInfo]:
    """Return every shortcut of the residual stream, in execution order; of a plain network, where they would be."""
    check_network(model, "shortcuts")
    all_found = joined_streams(model)
    if not all_found:
        model = copy.deepcopy(model)
        all_found = join_streams(model)
    names = {module: name for name, module in model.named_modules()}
    rows = []
    for found in all_found:
        gain = 1.0
        for shortcut in found.shortcuts:
            alpha, beta = shortcut.factors
            gain *= alpha
            rows.append(ShortcutInfo(names[shortcut], shortcut.kind, alpha, beta, gain))
    return rows


def weight_factors(model: nn.Module) -> dict[str, float]:
    """Return parameter name -> its factor relative to the plain network that computes the same."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    factors: dict[str, float] = {}
    for found in joined_streams(model):
        for slot, factor in edits(found.describe(), [(1.0, 1.0)] * len(found.shortcuts)):
            name = names.get(id(getattr(slot.owner, slot.name)))
            if name is None:
                continue
            if slot.columns is not None and factor != 1:
                raise UserError(f"Parts of {name} have different factors, so no learning rate fits all of it.")
            factors[name] = factors.get(name, 1.0) / factor
    return factors


def check_network(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        by_name = f": anechoic.{function}(anechoic.build_model({model!r}))" if isinstance(model, str) else ""
        kind = type(model).__name__
        raise UserError(f"{function} takes a network (torch.nn.Module), not {kind} {model!r:.60}{by_name}.")


def joined_streams(model: nn.Module) -> list[ResidualStream]:
    """Return the residual streams whose branches meet in Shortcuts already."""
    if isinstance(model, Network):
        return [ResidualStream(model, model.stream().shortcuts, model.stream)]
    return blocks.find(model)


def join_streams(model: nn.Module) -> list[ResidualStream]:
    """Return the residual streams of a model; known blocks of other libraries are joined by Shortcuts in place."""
    found = joined_streams(model) if isinstance(model, Network) else blocks.join_blocks(model)
    if not found:
        raise UserError(
            f"Nothing in {type(model).__name__} was recognized as a residual branch; looked for: {known_blocks()}. "
            f"docs/your-model.md lists the versions of these libraries."
        )
    for each in found:
        if isinstance(each.module, Network) and each.module is not model:
            # Its config and marks must follow its shortcuts, so it is rebuilt and not edited.
            inner, outer = type(each.module).__name__, type(model).__name__
            raise UserError(f"{inner} inside {outer} is a network of ours: convert it, then put it back.")
    return found


# ---- other libraries' networks, changed in place


def set_factors(shortcuts: Sequence[Shortcut], factors: Factors) -> None:
    for shortcut, (alpha, beta) in zip(shortcuts, factors, strict=True):
        if shortcut.learnable:
            del shortcut.alpha
        shortcut.alpha, shortcut.beta = alpha, beta


def refactor(found: ResidualStream, factors: Factors) -> None:
    """Give the shortcuts new factors and move the difference into the weights, in place."""
    stream = found.describe()
    if [id(shortcut) for shortcut in stream.shortcuts] != [id(shortcut) for shortcut in found.shortcuts]:
        raise UserError(
            f"{type(found.module).__name__} runs its blocks in another order than it lists them: describe its stream "
            f"with anechoic.surgery.describe."
        )
    rescale(stream, factors)
    set_factors(found.shortcuts, factors)


# ---- our own networks, built again


def refactored(network: Network, config: NetworkConfig, *, stream: Stream | None = None) -> Network:
    """Return a network with the factors of config that computes the same along the given description of its stream."""
    edited, description = copy.deepcopy((network, stream))
    rescale(description or edited.stream(), config.factors)
    changed = edited.current_config()
    fields = {field.name for field in dataclasses.fields(changed)} & {"norm_eps", "position_scale"}
    config = dataclasses.replace(config, **{name: getattr(changed, name) for name in fields})
    return rebuilt(network, config, edited.state_dict())


def rebuilt(network: Network, config: NetworkConfig, state: dict[str, Tensor]) -> Any:
    """Return a network of this config with these weights and its own marks, on the original's device, in its mode."""
    reference = next(network.parameters())
    with torch.random.fork_rng(devices=[]):  # initializing the copy must not advance the caller's random numbers
        copied = build(config).to(device=reference.device, dtype=reference.dtype)
    learned = {f"{info.name}.alpha" for info in shortcuts(network)}
    weights = {key: value for key, value in state.items() if key.rpartition(".")[2] not in MARKS and key not in learned}
    marks = {key: value for key, value in copied.state_dict().items() if key.rpartition(".")[2] in MARKS}
    copied.load_state_dict({**weights, **marks}, strict=True)
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    for name, parameter in copied.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return copied.train(network.training)
