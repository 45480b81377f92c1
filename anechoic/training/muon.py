"""Muon: orthogonalized momentum for the matrices of the body, AdamW for the rest, in one optimizer.

optim.py decides which parameters are matrices of the body. (Jordan et al. 2024; update scale of Liu et al. 2025.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anechoic.runtime.fsdp import distribute, full_tensor, local
from anechoic.surgery.param_groups import HALVES

# The quintic a x + b x^3 + c x^5, five times, brings singular values from 0.01 .. 1 to about 0.7 .. 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
# An update of this times sqrt(max(rows, columns)) has the root mean square of AdamW's, so learning rates carry over.
UPDATE_SCALE = 0.2
# From this ratio of sides on, iterating on the small Gram matrix costs less than on the matrix itself.
GRAM_RATIO = 2
EPS = 1e-7
FUSED = ("cpu", "cuda", "mps", "xpu")
# The parameters of one matrix, from left to right, with their groups: one, or the two halves of a SplitLinear.
Matrix = list[tuple[Tensor, dict[str, Any]]]


def orthogonalize(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> about U V^T of each one's singular value decomposition U S V^T.

    On CPUs, where bfloat16 is often emulated, in float32 or the matrices' own float64; elsewhere in bfloat16.
    """
    on_cpu = matrices.device.type == "cpu"
    dtype = torch.promote_types(matrices.dtype, torch.float32) if on_cpu else torch.bfloat16
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    by_gram = on_cpu and x.shape[2] >= GRAM_RATIO * x.shape[1]
    x = _iterate_gram(x) if by_gram else _iterate(x)
    return (x.mT if tall else x).to(matrices.dtype)


def _iterate(x: Tensor) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _iterate_gram(x: Tensor) -> Tensor:
    """The same: each step multiplies x by a polynomial of x x^T, and these commute, so x itself is used only twice."""
    a, b, c = QUINTIC
    gram = x @ x.mT
    product = None
    for step in range(STEPS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
        if step + 1 < STEPS:
            gram = factor @ (factor @ gram)
    assert product is not None
    return product @ x


def adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """Return AdamW with one fused kernel per group, where the device has one."""
    fused = all(parameter.device.type in FUSED for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, fused=fused, **options)


class Muon(torch.optim.Optimizer):
    """Groups with "algorithm": "muon" hold matrices and move by orthogonalized Nesterov momentum; others by AdamW.

    m <- momentum m + (1 - momentum) g;  n = (1 - momentum) g + momentum m;  w <- (1 - lr weight_decay) w - lr 0.2
    sqrt(max(rows, columns)) orthogonalize(n). Matrices of one shape are orthogonalized together, whatever their groups.
    The halves of a SplitLinear are one matrix, if groups have "names" and "decay_factor": each counts times its factor.
    With FSDP n is gathered, because only the full matrix can be orthogonalized.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "algorithm": "adamw",
        }
        super().__init__(groups, defaults)
        rest = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        # It shares our groups and state, so that checkpoints and schedules see one optimizer.
        self.adamw = adamw(rest, lr=lr, betas=betas, eps=eps) if rest else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before the step"
        if self.adamw is not None:
            self.adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
            self.adamw.state = self.state
            self.adamw.step()
        by_shape: dict[tuple[Any, ...], list[Matrix]] = defaultdict(list)
        for matrix in self._matrices():
            first, columns = matrix[0][0], [parameter.shape[1] for parameter, _ in matrix]
            by_shape[first.shape[0], sum(columns), first.dtype, first.device].append(matrix)
        for members in by_shape.values():
            self._move(members)

    def _matrices(self) -> list[Matrix]:
        """Return the matrices that have gradients, each as its parameters from left to right."""
        found: dict[Any, dict[str, tuple[Tensor, dict[str, Any]]]] = defaultdict(dict)
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for name, parameter in zip(group.get("names", group["params"]), group["params"], strict=True):
                    matrix, _, half = name.rpartition(".") if isinstance(name, str) else (name, "", "")
                    key = (matrix, "") if half in HALVES else (matrix, half)
                    if parameter.grad is not None:
                        found[key][half] = (parameter, group)
        return [[parts[half] for half in sorted(parts)] for parts in found.values()]

    def _move(self, members: list[Matrix]) -> None:
        """One step of matrices of one shape."""
        blends = []
        for matrix in members:
            halves = []
            for parameter, group in matrix:
                state, gradient = self.state[parameter], parameter.grad
                assert gradient is not None, "members have gradients"
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                average = state["momentum"].lerp_(gradient, 1 - group["momentum"])
                halves.append(full_tensor(torch.lerp(gradient, average, group["momentum"])))
            if len(matrix) > 1:
                scales = [group.get("decay_factor", 1.0) for _, group in matrix]
                halves = [torch.cat([half * scale for half, scale in zip(halves, scales, strict=True)], dim=1)]
            blends += halves
        updates = orthogonalize(torch.stack(blends))
        size = UPDATE_SCALE * max(updates.shape[1:]) ** 0.5
        for matrix, update in zip(members, updates, strict=True):
            for (parameter, group), part in zip(
                matrix, update.split([parameter.shape[1] for parameter, _ in matrix], dim=1), strict=True
            ):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                local(parameter).add_(local(distribute(part, parameter)), alpha=-group["lr"] * size)
