"""Linear probes of frozen features: the paper's ImageNet-100 protocol, MAE's, and a converged logistic regression.

Many heads are trained at once: every (layer, pooling) and every setting is a slice of one batched product. It does not
read images; MAE's protocol, which augments, gets its features batch by batch. (Section 4, Tables 1 and 2.)
Legend: F feature sets (layer, pooling), H settings per set, n samples, B batch, D channels, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.eval.feature_scaling import apply_scaling, fit_scaling
from anechoic.eval.metrics.logistic import fit_logistic
from anechoic.eval.tensors import as_tensor, check_finite

REGULARIZERS = tuple(float(r) for r in np.logspace(-6, 0, 10))


class Setting(NamedTuple):
    """What distinguishes the heads on one set of features."""

    lr: float
    weight_decay: float


class Heads(nn.Module):
    """One linear layer per feature set and setting, with batch norm before it (no affine part) for MAE's protocol."""

    def __init__(self, num_sets: int, dim: int, num_classes: int, settings: Sequence[Setting], *, norm: bool) -> None:
        super().__init__()
        # A parameter per setting, so that the optimizer can treat them differently; a slice per feature set.
        self.weights = nn.ParameterList(torch.empty(num_sets, dim, num_classes) for _ in settings)
        self.biases = nn.ParameterList(torch.empty(num_sets, num_classes) for _ in settings)
        self.norm = nn.BatchNorm1d(num_sets * dim, affine=False, eps=1e-6) if norm else None

    @torch.no_grad()
    def initialize(self, generator: torch.Generator, *, std: float | None) -> None:
        """As a linear layer is born, uniform in ±1 / sqrt(D); or truncated normal weights and zero biases."""
        bound = 1 / math.sqrt(self.weights[0].shape[1])
        for weight, bias in zip(self.weights, self.biases, strict=True):
            if std is None:
                weight.uniform_(-bound, bound, generator=generator)
                bias.uniform_(-bound, bound, generator=generator)
            else:
                nn.init.trunc_normal_(weight, std=std, generator=generator)
                bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(F, B, D) -> logits (F, B, H, C)"""
        sets, B, D = x.shape
        if self.norm is not None:
            x = self.norm(x.transpose(0, 1).reshape(B, sets * D)).view(B, sets, D).transpose(0, 1)
        bias = torch.cat(list(self.biases), dim=1)
        return torch.baddbmm(bias[:, None], x, torch.cat(list(self.weights), dim=2)).view(
            sets, B, len(self.weights), -1
        )

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """The sum over heads of their mean cross-entropies: each head's gradient is that of training it alone."""
        logits = self(x)
        every = labels[None, :, None].expand(logits.shape[:3])
        return F.cross_entropy(logits.flatten(0, 2), every.flatten(), reduction="sum") / len(labels)

    @torch.inference_mode()
    def correct(self, x: Tensor, labels: Tensor) -> Tensor:
        """(F, H): how many of the samples each head gets right."""
        return (self(x).argmax(dim=-1) == labels[None, :, None]).sum(dim=1)


# ---- schedules and optimizer


def in100_lr(epoch: int, *, epochs: int = 200, peak: float = 1e-2) -> float:
    """peak (1 + cos(pi e' / epochs)) / 2 with e' = max(0, epoch - 1): the rate is set one epoch late, as published."""
    return peak * 0.5 * (1 + math.cos(math.pi * max(0, epoch - 1) / epochs))


def mae_lr(epoch: float, *, epochs: int = 90, warmup: int = 10, peak: float = 6.4) -> float:
    """Linear warm-up from 0, then half a cosine to 0; epoch is fractional."""
    if epoch < warmup:
        return peak * epoch / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


class LARS(torch.optim.Optimizer):
    """m <- momentum m + q g;  w <- w - lr m, where q = trust ||w|| / ||g|| for matrices, 1 for vectors and zero norms.

    The first axis of every parameter counts heads: each head has its own norms.
    """

    def __init__(
        self, params: Iterable, *, lr: float, momentum: float = 0.9, trust: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                g = w.grad
                if w.ndim > 2:
                    g = g + group["weight_decay"] * w
                    norms = w.flatten(1).norm(dim=1), g.flatten(1).norm(dim=1)
                    q = torch.where((norms[0] > 0) & (norms[1] > 0), group["trust"] * norms[0] / norms[1], 1.0)
                    g = g * q.view(-1, 1, 1)
                momentum = self.state[w].setdefault("momentum", torch.zeros_like(w))
                momentum.mul_(group["momentum"]).add_(g)
                w.sub_(group["lr"] * momentum)


def param_groups(heads: Heads, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    return [
        {"params": [weight, bias], "lr": lr, "weight_decay": decay}
        for weight, bias, (lr, decay) in zip(heads.weights, heads.biases, settings, strict=True)
    ]


# ---- protocols


@dataclass(frozen=True)
class ProbeResult:
    """accuracy: feature set -> a top-1 per setting after the last epoch; best: the largest over epochs; curve: all."""

    accuracy: dict[Any, list[float]]
    best: dict[Any, list[float]]
    curve: dict[int, dict[Any, list[float]]]


def in100_probe(
    train: Mapping[Any, np.ndarray | Tensor],
    train_labels: np.ndarray,
    test: Mapping[Any, np.ndarray | Tensor],
    test_labels: np.ndarray,
    *,
    settings: Sequence[Setting] = (Setting(1e-2, 0.01),),
    epochs: int = 200,
    batch_size: int = 1024,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ProbeResult:
    """The authors' probe: a linear layer on raw features, AdamW, cosine per epoch, no augmentation, last epoch counts.

    Feature sets (n, D) of equal width are trained together. Incomplete batches are dropped; fewer samples than a batch
    make one batch.
    """
    x, y = stack(train, device), check_labels(train_labels, test_labels, len(next(iter(train.values()))), device)
    x_test, y_test = stack(test, device), as_tensor(test_labels).long().to(device)
    num_classes = int(max(y.max(), y_test.max())) + 1
    generator = torch.Generator().manual_seed(seed)
    heads = Heads(len(x), x.shape[2], num_classes, settings, norm=False)
    heads.initialize(generator, std=None)
    heads.to(device)
    optimizer = torch.optim.AdamW(param_groups(heads, settings), betas=(0.9, 0.999))
    batch_size = min(batch_size, len(y))
    curve = {}
    for epoch in range(epochs):
        for group, (peak, _) in zip(optimizer.param_groups, settings, strict=True):
            group["lr"] = in100_lr(epoch, epochs=epochs, peak=peak)
        order = torch.randperm(len(y), generator=generator).to(device)
        for rows in order[: len(y) // batch_size * batch_size].split(batch_size):
            optimizer.zero_grad()
            heads.loss(x[:, rows], y[rows]).backward()
            optimizer.step()
        if epoch % 50 == 0 or epoch == epochs - 1:
            curve[epoch] = accuracies(heads, [(x_test, y_test)], list(train))
    return ProbeResult(curve[epochs - 1], maxima(curve), curve)


def mae_probe(
    train: Callable[[int], Iterator[tuple[Mapping[Any, Tensor], Tensor]]],
    test: Mapping[Any, np.ndarray | Tensor],
    test_labels: np.ndarray,
    *,
    num_classes: int,
    batches_per_epoch: int,
    batch_size: int,
    base_lrs: Sequence[float] = (0.1,),
    epochs: int = 90,
    warmup: int = 10,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ProbeResult:
    """MAE's probe: batch norm without affine part, a linear layer, LARS, lr = base * batch / 256, cosine per iteration.

    train(epoch) yields that epoch's batches of (feature set -> (B, D), labels), freshly augmented.
    """
    settings = [Setting(base * batch_size / 256, 0.0) for base in base_lrs]
    x_test, y_test = stack(test, device), as_tensor(test_labels).long().to(device)
    heads = Heads(len(x_test), x_test.shape[2], num_classes, settings, norm=True)
    heads.initialize(torch.Generator().manual_seed(seed), std=0.01)
    heads.to(device)
    optimizer = LARS(param_groups(heads, settings), lr=0.0)
    curve = {}
    for epoch in range(epochs):
        heads.train()
        for i, (features, labels) in enumerate(train(epoch)):
            for group, (peak, _) in zip(optimizer.param_groups, settings, strict=True):
                group["lr"] = mae_lr(
                    epoch + i / batches_per_epoch, epochs=epochs, warmup=min(warmup, epochs - 1), peak=peak
                )
            optimizer.zero_grad()
            heads.loss(torch.stack([features[key] for key in test]).to(device), labels.to(device)).backward()
            optimizer.step()
        heads.eval()
        curve[epoch] = accuracies(heads, [(x_test, y_test)], list(test))
    return ProbeResult(curve[epochs - 1], maxima(curve), curve)


class LogisticResult(NamedTuple):
    """accuracy on test; the regularizer chosen, and the held-out accuracy of each one tried."""

    accuracy: float
    regularizer: float
    held_out: dict[float, float]


def logistic_probe(
    train: np.ndarray | Tensor,
    train_labels: np.ndarray,
    test: np.ndarray | Tensor,
    test_labels: np.ndarray,
    *,
    regularizers: Sequence[float] = REGULARIZERS,
    holdout: float = 0.1,
    seed: int = 0,
) -> LogisticResult:
    """Logistic regression on standardized features (n, D), to convergence.

    The regularizer is the one that is best on a held-out part of train (the strongest among equals); the head that is
    tested is then fitted to all of train.
    """
    change = fit_scaling(train, "standardized")
    x, x_test = apply_scaling(train, change), apply_scaling(test, change)
    y = check_labels(train_labels, test_labels, len(x), x.device)
    y_test = as_tensor(test_labels).long().to(x.device)
    num_classes = int(max(y.max(), y_test.max())) + 1
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(x.device)
    num_held = max(1, round(holdout * len(y)))
    held, kept = order[:num_held], order[num_held:]
    strongest_first = sorted(regularizers, reverse=True)
    if len(y[kept].unique()) < 2:
        raise UserError(
            f"{len(y)} train samples are too few: those held out to choose the regularizer leave one class to fit. "
            "Give more samples of each class."
        )
    tried = fit_logistic(x[kept], y[kept], regularizers=strongest_first, num_classes=num_classes)
    held_out = (tried.predict(x[held]) == y[held]).double().mean(dim=1)
    chosen = strongest_first[int(held_out.argmax())]
    final = fit_logistic(x, y, regularizers=[chosen], num_classes=num_classes)
    accuracy = (final.predict(x_test)[0] == y_test).double().mean().item()
    return LogisticResult(accuracy, chosen, dict(zip(strongest_first, held_out.tolist(), strict=True)))


# ---- shared pieces


def stack(features: Mapping[Any, np.ndarray | Tensor], device: torch.device | str) -> Tensor:
    """(F, n, D); all sets must have one width and be finite."""
    tensors = [as_tensor(value).float() for value in features.values()]
    if len({tensor.shape for tensor in tensors}) != 1:
        raise UserError("These layers have different widths and cannot be probed together; choose one with --layers.")
    stacked = torch.stack(tensors)
    check_finite(stacked)
    return stacked.to(device)


def check_labels(train: np.ndarray, test: np.ndarray, count: int, device: torch.device | str) -> Tensor:
    y = as_tensor(train).long()
    if len(y) != count:
        raise UserError(f"There are {count} feature vectors but {len(y)} labels; both must come from the same data.")
    if len(y.unique()) < 2:
        raise UserError(
            "All train samples carry the same label, so there is nothing to learn; give at least two classes."
        )
    if len(test) == 0:
        raise UserError("There are no test samples; give a larger --holdout or another --test.")
    return y.to(device)


def accuracies(heads: Heads, batches: Iterable[tuple[Tensor, Tensor]], keys: Sequence[Any]) -> dict[Any, list[float]]:
    correct, total = torch.zeros(()), 0
    for x, y in batches:
        for rows in torch.arange(len(y), device=y.device).split(4096):
            correct = correct + heads.correct(x[:, rows], y[rows]).cpu()
            total += len(rows)
    return {key: (row.double() / total).tolist() for key, row in zip(keys, correct, strict=True)}


def maxima(curve: Mapping[int, Mapping[Any, list[float]]]) -> dict[Any, list[float]]:
    keys = next(iter(curve.values()))
    return {key: [max(values) for values in zip(*(at[key] for at in curve.values()), strict=True)] for key in keys}
