"""Decay as a learning-rate profile: parameter groups that train a plain network as its decayed counterpart trains.

By the fold, a decayed network and a plain one compute the same function with W_plain = c * W_decayed, one number c per
tensor. An optimizer whose update ignores the scale of the gradient (AdamW, Muon, Lion) then takes the same path with
(lr * c, weight_decay / c, eps / c); for SGD it is (lr * c^2, weight_decay / c^2). So no surgery is needed: the network
stays plain, and learning-rate schedulers, torch.compile, DDP, FSDP2 and export work unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.adapters import blocks
from anechoic.choices import ProfileOptimizer as GroupsFor
from anechoic.errors import UserError, nearest_name
from anechoic.shortcut import AlphaMin, AnySchedule, Concatenate, Read
from anechoic.surgery.algebra import edits
from anechoic.surgery.decay import new_factors
from anechoic.surgery.streams import check_network, join_streams

ALGORITHMS = ("adamw", "muon", "sgd", "lion")
# Modules whose matrices Muon does not move: they embed or read out.
NOT_MUON = ("embed", "head", "classifier", "position", "cls_token", "mask_token", "register")


def param_groups(
    model: nn.Module,
    alpha_min: AlphaMin = 0.6,
    *,
    lr: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    algorithm: GroupsFor = "adamw",
    schedule: AnySchedule = "linear",
) -> list[dict[str, Any]]:
    """Return parameter groups with which a torch optimizer trains a plain model as if its shortcuts were decayed.

    Each group has `names`, `lr`, `weight_decay`, `eps` (not for SGD and Lion) and `decay_factor`, its c. Tensors of
    fewer than two dimensions have no weight decay. With algorithm="muon" a group also names its `algorithm`: "muon" for
    the matrices of the blocks, "adamw" for the rest. Clip gradients with `clip_grad_norm`, which measures them as the
    decayed network would. Exact against `decay(model, alpha_min, preserve=True)`; against `decay(model, alpha_min)`
    if branch outputs start at zero and the eps of the norms is negligible.
    """
    check_network(model, "param_groups")
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm is not {algorithm!r}; {nearest_name(str(algorithm), ALGORITHMS)}")
    factors = decay_factors(model, alpha_min, schedule=schedule)
    power = 2 if algorithm == "sgd" else 1
    groups: dict[tuple[float, bool, str], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor, decays = factors.get(name, 1.0), parameter.ndim >= 2
        mover = algorithm if algorithm != "muon" or is_muon_matrix(name, parameter) else "adamw"
        new: dict[str, Any] = {
            "params": [],
            "names": [],
            "lr": lr * factor**power,
            "weight_decay": weight_decay / factor**power if decays else 0.0,
            "decay_factor": factor,
            **({"eps": eps / factor} if algorithm in ("adamw", "muon") else {}),
            **({"algorithm": mover} if algorithm == "muon" else {}),
        }
        group = groups.setdefault((factor, decays, mover), new)
        group["params"].append(parameter)
        group["names"].append(name)
    if not groups:
        raise UserError("The model has no parameter to train: set requires_grad on some of its parameters.")
    return list(groups.values())


def is_muon_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not any(part in name.lower() for part in NOT_MUON)


def decay_factors(model: nn.Module, alpha_min: AlphaMin = 0.6, *, schedule: AnySchedule = "linear") -> dict[str, float]:
    """Return c by parameter name: weight of the plain model / weight of the decayed one. Absent names have 1."""
    sketch = without_storage(model)
    names = {id(parameter): name for name, parameter in sketch.named_parameters()}
    found: dict[str, float] = {}
    for stream, new in new_factors(join_streams(sketch), alpha_min, schedule=schedule, form="identity"):
        for slot, factor in edits(stream.describe(), new):
            part = slot.owner.part(slot.columns) if isinstance(slot.owner, SplitLinear) else slot.name
            name = names.get(id(getattr(slot.owner, part)))
            if name is None or factor == 1:
                continue
            if slot.columns is not None and not isinstance(slot.owner, SplitLinear):
                raise UserError(
                    f"{name} multiplies a long skip and another input, which need different learning rates, and one "
                    "tensor has one: call anechoic.surgery.split_skips(model) first, which keeps its state dict."
                )
            if name in found and abs(found[name] * factor - 1) > 1e-12:
                raise UserError(f"{name} is shared by several blocks, and no one learning rate suits them: untie them.")
            found[name] = 1 / factor
    return found


HALVES = ("left", "right")


class SplitLinear(nn.Module):
    """A linear map of concatenated inputs whose matrix is two parameters; its state dict is that of nn.Linear."""

    def __init__(self, linear: nn.Linear, boundary: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.boundary = linear.in_features, linear.out_features, boundary
        left, right = linear.weight.detach().split([boundary, linear.in_features - boundary], dim=1)
        self.left, self.right, self.bias = nn.Parameter(left.clone()), nn.Parameter(right.clone()), linear.bias

    @property
    def weight(self) -> Tensor:
        return torch.cat([self.left, self.right], dim=1)

    def part(self, columns: tuple[int, int] | None) -> str:
        return {(0, self.boundary): "left", (self.boundary, self.in_features): "right", None: "bias"}[columns]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        left, right = (destination.pop(f"{prefix}{name}") for name in HALVES)
        destination[f"{prefix}weight"] = torch.cat([left, right], dim=1)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state:
            whole = state.pop(f"{prefix}weight")
            state[f"{prefix}left"], state[f"{prefix}right"] = whole[:, : self.boundary], whole[:, self.boundary :]
        super()._load_from_state_dict(state, prefix, *rest)


def split_skips(model: nn.Module) -> nn.Module:
    """Return a copy in which every matrix that multiplies a long skip and another input is two parameters.

    Outputs and state dict stay the same. Elementwise optimizers (AdamW, SGD, Lion) and anechoic's Muon, which joins the
    halves, then train it as the decayed network. torch's Muon orthogonalizes the halves one by one: an approximation.
    """
    split = copy.deepcopy(model)
    boundaries: dict[nn.Module, int] = {}
    for stream in join_streams(split):
        for event in stream.describe().events:
            slots = event.maps if isinstance(event, Read) else ()
            boundaries |= {slot.owner: slot.columns[1] for slot in slots if slot.columns and slot.columns[0] == 0}
            if isinstance(event, Concatenate):
                boundaries[event.map] = event.map.out_features
    for name, module in list(split.named_modules()):
        if isinstance(module, nn.Linear) and module in boundaries:
            split.set_submodule(name, SplitLinear(module, boundaries[module]))
    blocks.release(split)
    return split


def without_storage(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters have shapes but no memory; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def clip_grad_norm(groups: Iterable[dict[str, Any]], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm, measured as the decayed network's, is at most max_norm; return that norm.

    groups: `optimizer.param_groups` made by `param_groups`. A gradient counts times its group's c.
    """
    members = [(p, group.get("decay_factor", 1.0)) for group in groups for p in group["params"] if p.grad is not None]
    if not members:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack([factor * torch.linalg.vector_norm(p.grad) for p, factor in members]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p, _ in members:
        p.grad.mul_(scale)
    return norm
