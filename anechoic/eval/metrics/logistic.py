"""Converged multinomial logistic regression on cached features, for many regularizers at once.

One pass over the samples computes the loss and gradient of a head as two matrix products; each head has its own L-BFGS,
and starts from the heads of stronger regularizers. It neither extracts features nor chooses a regularizer (probe.py).
Legend: n samples, D channels, C classes, R heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from anechoic.errors import UserError
from anechoic.eval.tensors import as_matrix, as_tensor

MEMORY = 10
# Logits of a chunk of samples for all heads together: half a megabyte, which stays in a core's cache from the product
# that makes them to the product that reads them.
CHUNK_LOGITS = 2**17
# An iteration that is expected to lower the loss by less is not worth making.
TOLERANCE = 5e-7
# How far along the tangent of the path of solutions the next head starts: the curve bends, so not all the way.
TANGENT = 0.8


@dataclass(frozen=True)
class LogisticFit:
    """weight (R, C, D), bias (R, C), loss (R,): mean cross-entropy plus regularizer; iterations (R,)."""

    weight: Tensor
    bias: Tensor
    loss: Tensor
    iterations: Tensor

    def predict(self, features: np.ndarray | Tensor) -> Tensor:
        """(n, D) -> the most likely class under each head, (R, n)."""
        x = as_tensor(features).to(self.weight.device).float()
        return torch.stack([(x @ w.T + b).argmax(dim=1) for w, b in zip(self.weight, self.bias, strict=True)])


def fit_logistic(
    features: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    *,
    regularizers: Sequence[float],
    num_classes: int | None = None,
    max_iterations: int = 1000,
    tolerance: float = TOLERANCE,
) -> LogisticFit:
    """Minimizes mean_i CE(W x_i + b, y_i) + r / 2 ||W||^2 over W and b, for each r > 0 (scikit-learn's C is 1 / (n r)).

    Solved in the basis of the features' principal components, where the curvature is nearly diagonal: about
    p (1 - p) e_j + r for a component of variance e_j. That diagonal is where each L-BFGS direction starts from.
    """
    if not regularizers or min(regularizers) <= 0:
        raise UserError("Regularizers must be positive: without one, separable features have no converged solution.")
    x, y = as_matrix(features), as_tensor(labels).long()
    if len(x) != len(y):
        raise UserError(f"There are {len(x)} feature vectors but {len(y)} labels; both must come from the same data.")
    if len(y.unique()) < 2:
        raise UserError(
            "All train samples carry the same label, so there is nothing to learn; give at least two classes."
        )
    y = y.to(x.device)
    mean = x.mean(dim=0)
    variances, basis = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    # The constant column, of variance 1, carries the bias; components are centered, so it is orthogonal to them.
    z = torch.cat([(x - mean) @ basis, torch.ones_like(x[:, :1])], dim=1).float()
    variances = torch.cat([variances.clamp(min=0), variances.new_ones(1)]).float()
    problem = Problem(z, y, num_classes or int(y.max()) + 1, variances, torch.tensor(regularizers, device=x.device))
    p, loss, iterations = follow_path(problem, max_iterations=max_iterations, tolerance=tolerance)
    weight = torch.einsum("dj,rjc->rcd", basis, p[:, :-1].double())
    bias = p[:, -1].double() - weight @ mean
    return LogisticFit(weight.float(), bias.float(), loss, iterations)


@dataclass(frozen=True)
class Problem:
    """R heads on the same samples. z (n, D + 1) with a constant last column; a head's parameters are (D + 1, C)."""

    z: Tensor
    labels: Tensor
    num_classes: int
    variances: Tensor
    regularizers: Tensor

    def evaluate(self, p: Tensor, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss (R,) in float64, gradient like p (R, D + 1, C), and the mean of p (1 - p) of each class (R, C)."""
        R, D, C = p.shape
        penalty = self.regularizers[heads][:, None, None].float() * p
        penalty[:, -1] = 0
        loss = (penalty.double() * p).sum(dim=(1, 2)) / 2
        gradient, curvature = p.new_zeros(D, R * C), p.new_zeros(R, C)
        table = p.permute(1, 0, 2).reshape(D, R * C)
        n = len(self.z)
        chunk = max(1, CHUNK_LOGITS // (R * C))
        sampled = sum(len(part[::8]) for part in self.labels.split(chunk))
        # Two buffers for all chunks: fresh memory would cost more than the sums made in it.
        space = p.new_empty(2, min(n, chunk), R * C)
        for z, labels in zip(self.z.split(chunk), self.labels.split(chunk), strict=True):
            logits, log_probabilities = (part.view(-1, R, C) for part in space[:, : len(z)])
            torch.mm(z, table, out=logits.flatten(1))
            torch.log_softmax(logits, dim=2, out=log_probabilities)
            own = labels[:, None, None].expand(-1, R, 1)
            loss -= log_probabilities.gather(2, own).double().sum(dim=(0, 2)) / n
            probabilities = log_probabilities.exp_()
            # The diagonal only has to be about right: every eighth sample suffices.
            some = probabilities[::8]
            curvature += (some - some.square()).sum(dim=0) / sampled
            residual = probabilities.scatter_add_(2, own, torch.full_like(own, -1.0, dtype=p.dtype))
            gradient.addmm_(z.T, residual.flatten(1), alpha=1 / n)
        return loss, penalty.add_(gradient.view(D, R, C).permute(1, 0, 2)), curvature

    def preconditioner(self, curvature: Tensor, heads: Tensor) -> Tensor:
        """1 / (p (1 - p) e_j + r), like the parameters: the inverse of the curvature's diagonal."""
        regularizers = self.regularizers[heads][:, None].float().repeat(1, len(self.variances))
        regularizers[:, -1] = 0
        # Where p has become 0 or 1 the loss is flat: without the floor the first step would be huge.
        return 1 / (self.variances[:, None] * curvature[:, None].clamp(min=1e-6) + regularizers[:, :, None])


def follow_path(problem: Problem, *, max_iterations: int, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """The heads from the strongest regularizer to the weakest, each starting where the two before it point to.

    In the logarithm of the regularizer the solutions lie on a smooth curve, and a point ahead on its tangent is so near
    the next solution that a third of the evaluations suffices. Every head is still minimized to the tolerance.
    """
    R = len(problem.regularizers)
    result = problem.z.new_zeros(R, problem.z.shape[1], problem.num_classes)
    losses, iterations = result.new_zeros(R, dtype=torch.float64), torch.zeros(R, dtype=torch.long)
    logarithms = problem.regularizers.double().log().tolist()
    order = sorted(range(R), key=lambda head: -logarithms[head])
    for k, head in enumerate(order):
        start = result[order[k - 1] : order[k - 1] + 1] if k else result[:1]
        if k > 1:
            before, last = order[k - 2], order[k - 1]
            gap = logarithms[before] - logarithms[last]
            ahead = (logarithms[last] - logarithms[head]) / gap if gap > 0 else 0.0
            start = start + TANGENT * min(ahead, 1.0) * (result[last] - result[before])
        one = replace(problem, regularizers=problem.regularizers[head : head + 1])
        found = minimize(one, start, max_iterations=max_iterations, tolerance=tolerance)
        result[head], losses[head], iterations[head] = (value[0] for value in found)
    return result, losses, iterations


def minimize(
    problem: Problem, start: Tensor, *, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """L-BFGS of every head side by side; a head leaves when its next step promises less than the tolerance."""
    R = len(problem.regularizers)
    heads = torch.arange(R, device=problem.z.device)
    p = start
    result, losses, iterations = p.clone(), p.new_zeros(R, dtype=torch.float64), heads.new_zeros(R)
    loss, gradient, curvature = problem.evaluate(p, heads)
    history: list[tuple[Tensor, Tensor]] = []
    stuck = torch.zeros_like(heads, dtype=torch.bool)
    for iteration in range(max_iterations + 1):
        diagonal = problem.preconditioner(curvature, heads)
        direction = -quasi_newton(gradient, history, diagonal)
        slope = dot(gradient, direction)
        going = (-slope / 2 > tolerance * loss.clamp(min=1)) & ~stuck & (iteration < max_iterations)
        result[heads], losses[heads], iterations[heads] = p, loss, iteration
        if not going.all():
            heads, p, direction, slope, loss = heads[going], p[going], direction[going], slope[going], loss[going]
            gradient, curvature = gradient[going], curvature[going]
            history = [(s[going], y[going]) for s, y in history]
        if not len(heads):
            break
        step, stuck, new = line_search(problem, p, direction, slope, loss, heads)
        history = [*history, (step, new[1] - gradient)][-MEMORY:]
        p = p + step
        loss, gradient, curvature = new
    return result, losses, iterations


def line_search(
    problem: Problem, p: Tensor, direction: Tensor, slope: Tensor, loss: Tensor, heads: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Steps that lower the loss enough (Armijo), halved per head until they do, and what is found there.

    A head for which none does is stuck: its loss cannot be lowered any further in this precision.
    """
    t = torch.ones_like(slope)
    new_loss, new_gradient, new_curvature = problem.evaluate(p + direction, heads)
    for _ in range(20):
        bad = (~(new_loss <= loss + 1e-4 * t * slope)).nonzero()[:, 0]
        if not len(bad):
            break
        t[bad] /= 2
        trial = problem.evaluate(p[bad] + t[bad, None, None].float() * direction[bad], heads[bad])
        new_loss[bad], new_gradient[bad], new_curvature[bad] = trial
    stuck = ~(new_loss <= loss)
    if stuck.any():
        t[stuck] = 0
        new_loss[stuck], new_gradient[stuck], new_curvature[stuck] = problem.evaluate(p[stuck], heads[stuck])
    return t[:, None, None].float() * direction, stuck, (new_loss, new_gradient, new_curvature)


def quasi_newton(gradient: Tensor, history: list[tuple[Tensor, Tensor]], start: Tensor) -> Tensor:
    """The two-loop recursion: Hessian^-1 gradient, estimated from past steps s, changes y and a diagonal start.

    Where rounding has left s . y without its sign, which is positive for a convex function, the pair is passed over.
    """
    q, coefficients = gradient.clone(), []
    for s, y in reversed(history):
        rho = reciprocal_of_positive(dot(s, y))
        a = rho * dot(s, q)
        q -= a[:, None, None].float() * y
        coefficients.append((rho, a))
    q = q * start
    if history:
        s, y = history[-1]
        scale = dot(s, y) * reciprocal_of_positive(dot(y, start * y))
        q *= torch.where(scale > 0, scale, 1.0)[:, None, None].float()
    for (s, y), (rho, a) in zip(history, reversed(coefficients), strict=True):
        b = rho * dot(y, q)
        q += (a - b)[:, None, None].float() * s
    return q


def reciprocal_of_positive(x: Tensor) -> Tensor:
    """1 / x, or 0 where x is not positive."""
    return torch.where(x > 0, 1 / x.clamp(min=1e-300), 0.0)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The scalar product of each head, (R,)."""
    return torch.bmm(a.flatten(1)[:, None], b.flatten(1)[:, :, None])[:, 0, 0].double()
