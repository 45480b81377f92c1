"""Parameter groups, the learning rate as a function of samples seen, and the gradient norm. (Appendix A.)

Of the models only the names of parameters are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.choices import LearningRateSchedule, WeightDecayOn
from anechoic.config import Algorithm
from anechoic.errors import UserError
from anechoic.runtime.fsdp import full_tensor

FIRST_LAYER = ("class_token", "positions", "patch_embed")
BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
# Blocks of encoders, decoders and U-shaped networks, and the skips.
BODY = re.compile(r"(?:^|\.)(?:\w+_)?(?:blocks?|skips)\.")


def has_weight_decay(
    name: str, parameter: Tensor, *, weight_decay_on: WeightDecayOn = "matrices", exempt: Sequence[str] = ()
) -> bool:
    """Tensors of two or more dimensions (tokens included), or all; never those whose name, or its end, is exempt."""
    if name in exempt or name.rpartition(".")[2] in exempt:
        return False
    return weight_decay_on == "all" or (parameter.ndim >= 2 and not name.endswith(".bias"))


def layer_of(name: str, depth: int) -> int:
    """Return 0 for embeddings, i + 1 for block i, depth + 1 for everything after the blocks."""
    if name.split(".")[0] in FIRST_LAYER:
        return 0
    block = BLOCK.search(name)
    return depth + 1 if block is None else int(block[1]) + 1


def is_body_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates it: a matrix of a block or skip, not an embedding, token, head, norm or bias."""
    return parameter.ndim == 2 and BODY.search(name) is not None


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    algorithm: Algorithm = "adamw",
    weight_decay_on: WeightDecayOn = "matrices",
    exempt: Sequence[str] = (),
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Group parameters by algorithm, weight decay and learning-rate scale, layer_decay^(depth + 1 - layer)."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UserError("The model has no parameter to train.")
    depth = max((int(found[1]) + 1 for name, _ in named if (found := BLOCK.search(name))), default=0)
    if algorithm == "muon" and not any(is_body_matrix(name, parameter) for name, parameter in named):
        raise UserError(
            "Muon updates matrices of transformer blocks and this model has none: set optim.algorithm to adamw."
        )
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for name, parameter in named:
        scale = layer_decay ** (depth + 1 - layer_of(name, depth))
        decay = (
            weight_decay if has_weight_decay(name, parameter, weight_decay_on=weight_decay_on, exempt=exempt) else 0.0
        )
        mover = "muon" if algorithm == "muon" and is_body_matrix(name, parameter) else "adamw"
        new = {"params": [], "names": [], "weight_decay": decay, "lr_scale": scale, "algorithm": mover}
        group = groups.setdefault((mover, scale, decay), new)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def match_scales(
    groups: Iterable[Mapping[str, Any]], factors: Mapping[str, float], *, eps: float = 1e-8
) -> list[dict[str, Any]]:
    """Split the groups so that a parameter which is c times another network's moves c times as far.

    Its gradient is 1 / c of the other's, so the step is the same with lr * c, eps / c and weight_decay / c. factors
    maps names to c (1 where absent), as surgery.weight_factors returns for a network converted with preserve=True.
    """
    split: list[dict[str, Any]] = []
    for group in groups:
        by_factor: dict[float, dict[str, Any]] = {}
        for name, parameter in zip(group["names"], group["params"], strict=True):
            factor = factors.get(name, 1.0)
            scaled = {
                "weight_decay": group["weight_decay"] / factor,
                "lr_scale": group["lr_scale"] * factor,
                "eps": eps / factor,
                "decay_factor": factor,
            }
            part = by_factor.setdefault(factor, {**group, **scaled, "params": [], "names": []})
            part["params"].append(parameter)
            part["names"].append(name)
        split += by_factor.values()
    return split


def learning_rate(
    seen: int, *, samples: int, lr: float, warmup: float, schedule: LearningRateSchedule, min_lr: float = 0.0
) -> float:
    """Return a linear warm-up from 0 to lr over warmup * samples, then half a cosine to min_lr, or lr."""
    rising = warmup * samples
    if seen < rising:
        return lr * seen / rising
    if schedule == "constant":
        return lr
    progress = min(1.0, (seen - rising) / max(1.0, samples - rising))
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def gradient_norm(named: Iterable[tuple[str, Tensor]], *, clip: float, factors: Mapping[str, float]) -> Tensor:
    """Return the L2 norm of all gradients, each times its factor, then scale them to norm `clip` (0: no clipping)."""
    parameters = dict(named)
    gradients = [
        p.grad * factors[name] if name in factors else p.grad for name, p in parameters.items() if p.grad is not None
    ]
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    if clip > 0:
        nn.utils.clip_grads_with_norm_(parameters.values(), clip, norm)
    return norm
