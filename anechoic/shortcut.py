"""The idea: where two branches meet, x_{k+1} = alpha_k * x_k + f_k(x_k), alpha falling from 1 to alpha_min over depth.

Holds the schedules, the one operation that every model uses, and the vocabulary in which a model describes its residual
stream. It knows no model. (Section 3.1 of the paper; the named forms are those of its Table 3b.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anechoic.choices import AlphaMin
from anechoic.errors import UserError

Schedule = Callable[[int, float], Sequence[float]]
# What may be given as a schedule: its name, a function (n, alpha_min) -> n alphas, or the alphas themselves.
AnySchedule = str | Schedule | Sequence[float]

# The product of all alphas of the paper's best ViT-B (alpha_min 0.6, 24 branches); "auto" aims at it for any depth.
EFFECTIVE_DECAY = 3.6e-3
# Shallow networks would need an alpha_min that lets hardly anything through; "auto" never goes below this.
SMALLEST_AUTO = 0.5
SQRT_HALF = math.sqrt(0.5)


# ---- schedules: n factors, one per residual branch, in execution order


def linear(n: int, alpha_min: AlphaMin = 0.6) -> list[float]:
    """alpha_k = 1 - (1 - alpha_min) * k / (n - 1); the first is exactly 1 and the last exactly alpha_min."""
    return _between(n, alpha_min, linear, lambda k: 1 - k)


def cosine(n: int, alpha_min: AlphaMin = 0.6) -> list[float]:
    """alpha_k = alpha_min + (1 - alpha_min) * (1 + cos(pi * k / (n - 1))) / 2; endpoints exact."""
    return _between(n, alpha_min, cosine, lambda k: (1 + math.cos(math.pi * k)) / 2)


def constant(n: int, alpha_min: AlphaMin = 0.6) -> list[float]:
    """alpha_k = alpha_min for every branch."""
    return [resolve_alpha_min(alpha_min, n, schedule=constant)] * n


def stopped(n: int, alpha_min: AlphaMin = 0.6) -> list[float]:
    """As linear while the product of all alphas is at least 0.4, then 1. Only for records: it was of no use."""
    left, factors = 1.0, []
    for alpha in linear(n, alpha_min):
        factors.append(alpha if left * alpha >= 0.4 else 1.0)
        left *= factors[-1]
    return factors


SCHEDULES: dict[str, Schedule] = {"linear": linear, "cosine": cosine, "constant": constant}
# Not offered any more; a config that names one still builds its network.
RETIRED_SCHEDULES: dict[str, Schedule] = {"stopped": stopped}


def _between(n: int, alpha_min: AlphaMin, schedule: Schedule, weight: Callable[[float], float]) -> list[float]:
    """Return n factors from 1 to alpha_min; weight maps the relative depth 0..1 to the share of 1 in the mixture."""
    last = resolve_alpha_min(alpha_min, n, schedule=schedule)
    if n == 1:
        return [last]
    inner = [last + (1 - last) * weight(k / (n - 1)) for k in range(1, n - 1)]
    return [1.0, *inner, last]


def effective_decay(alphas: Iterable[float]) -> float:
    """Return the share of the input at the end of the stream: the product of all alphas."""
    return math.prod(alphas)


def alpha_min_for(n: int, *, effective_decay: float = EFFECTIVE_DECAY, schedule: Schedule = linear) -> float:
    """Return the alpha_min with which n branches multiply to this effective decay (by bisection)."""
    check_branches(n)
    if not 0 < effective_decay <= 1:
        raise UserError(f"effective_decay must lie in (0, 1], not {effective_decay}: it is what is left of the input.")
    low, high = 0.0, 1.0
    while high - low > 1e-15:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if math.prod(schedule(n, middle)) < effective_decay:
            low = middle
        else:
            high = middle
    if not math.isclose(math.prod(schedule(n, high)), effective_decay, rel_tol=1e-6):
        raise UserError(f"No alpha_min of this schedule leaves {effective_decay:g} of the input: ask for more of it.")
    return high


def resolve_alpha_min(alpha_min: AlphaMin, n: int, *, schedule: Schedule = linear) -> float:
    """Return alpha_min as a number: "auto" depends on the number of branches alone."""
    check_branches(n)
    if alpha_min == "auto":
        return max(SMALLEST_AUTO, alpha_min_for(n, schedule=linear if schedule is stopped else schedule))
    return check_alpha(alpha_min)


def check_branches(n: int) -> None:
    if n < 1:
        raise UserError(f"A schedule needs at least one residual branch, not {n}: choose a depth of 1 or more.")


def check_alpha(alpha: object) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise UserError(
            f'alpha must lie in (0, 1], not {alpha!r}: 1 is a plain residual connection, "auto" fits the depth.'
        )
    return float(alpha)


# ---- the operation


class Shortcut(nn.Module):
    """alpha * x + beta * f(x), in one fused multiply-add where one of the two factors is 1.

    alpha and beta are Python floats, part of the architecture. With learnable=True alpha is a parameter starting there.
    """

    alpha: float | nn.Parameter

    def __init__(self, alpha: float = 1.0, beta: float = 1.0, *, learnable: bool = False, kind: str = "branch") -> None:
        super().__init__()
        alpha = check_alpha(alpha)
        if not 0 < beta <= 1:
            raise UserError(f"beta must lie in (0, 1], not {beta}: it scales the branch that is added to the shortcut.")
        if learnable and beta != 1:
            raise UserError("A learnable alpha goes with an unscaled branch: leave beta at 1.")
        self.alpha = nn.Parameter(torch.tensor(alpha)) if learnable else alpha
        self.beta = float(beta)
        self.kind = kind

    @property
    def learnable(self) -> bool:
        return isinstance(self.alpha, nn.Parameter)

    @property
    def factors(self) -> tuple[float, float]:
        """(alpha, beta) as numbers"""
        return float(self.alpha.detach() if isinstance(self.alpha, Tensor) else self.alpha), self.beta

    def forward(self, x: Tensor, fx: Tensor) -> Tensor:
        if isinstance(self.alpha, Tensor):
            return torch.addcmul(fx, x, self.alpha.to(x.dtype))
        if self.beta == 1.0:
            return torch.add(fx, x, alpha=self.alpha)
        if self.alpha == 1.0:
            return torch.add(x, fx, alpha=self.beta)
        return torch.add(x, fx, alpha=self.beta / self.alpha).mul_(self.alpha)

    def extra_repr(self) -> str:
        alpha, beta = self.factors
        return f"{self.kind}, alpha={alpha:.4f}" + (f", beta={beta:.4f}" if beta != 1 else "")


class Annealing:
    """Lets every alpha fall from 1 to its own value over the first part of training, a little at each update.

    A function of progress alone, so that a resumed run decays as an uninterrupted one. (Not in the paper.)
    """

    def __init__(self, shortcuts: Iterable[Shortcut], *, share: float) -> None:
        """share: of the whole training, after which the alphas stay where the architecture puts them."""
        self.ends = [(shortcut, shortcut.factors[0]) for shortcut in shortcuts]
        self.share = share
        if any(shortcut.learnable for shortcut, _ in self.ends):
            raise UserError("A learnable alpha finds its own way: leave shortcut.anneal at 0 with the form learnable.")

    @classmethod
    def of(cls, *models: nn.Module, share: float) -> Annealing:
        found = {module: None for model in models for module in model.modules() if isinstance(module, Shortcut)}
        return cls(found, share=share)

    def set(self, progress: float) -> None:
        """progress: share of the training that is done."""
        part = min(1.0, progress / self.share)
        for shortcut, end in self.ends:
            shortcut.alpha = end if part == 1 else 1 + (end - 1) * part


FORMS: dict[str, str] = {
    "identity": "alpha_k x + f(x): the method",
    "branch": "x + sqrt(0.5) f(x)",
    "both": "sqrt(0.5) (x + f(x))",
    "attention": "alpha_k x + f(x) on attention branches, x + f(x) on the others",
    "mlp": "alpha_k x + f(x) on MLP branches, x + f(x) on the others",
    "learnable": "alpha_k x + f(x) with alpha_k trained, starting at the schedule",
    "plain": "x + f(x)",
}


def schedule_alphas(n: int, alpha_min: AlphaMin, schedule: AnySchedule) -> list[float]:
    """Return n alphas, checked: by the schedule's name, by a function of n and alpha_min, or the given ones."""
    if isinstance(schedule, str):
        schedule = schedule_by_name(schedule)
    if callable(schedule):
        schedule = _called(schedule, n, resolve_alpha_min(alpha_min, n, schedule=schedule))
    alphas = [check_alpha(alpha) for alpha in schedule]
    if len(alphas) != n:
        raise UserError(
            f"The schedule lists {len(alphas)} alphas, but the network has {n} residual branches: give one each."
        )
    return alphas


def _called(schedule: Schedule, n: int, alpha_min: float) -> list[float]:
    try:
        return [float(alpha) for alpha in schedule(n, alpha_min)]
    except (TypeError, ValueError) as problem:
        raise UserError(
            f"A schedule is a function (n, alpha_min) that returns n numbers, and this one does not ({problem})."
        ) from problem


def schedule_by_name(name: str) -> Schedule:
    found = SCHEDULES.get(name) or RETIRED_SCHEDULES.get(name)
    if found is None:
        raise UserError(f"There is no schedule {name!r:.60}; choose one of {', '.join(SCHEDULES)} or list the alphas.")
    return found


def shortcut_factors(
    kinds: Sequence[str],
    *,
    alpha_min: AlphaMin = 0.6,
    schedule: AnySchedule = "linear",
    form: str = "identity",
) -> list[tuple[float, float]]:
    """Return (alpha, beta) per residual branch, in execution order; kinds: "attention", "mlp", ... of each."""
    check_branches(len(kinds))
    if form not in FORMS:
        raise UserError(f"There is no form {form!r} of the shortcut; choose one of {', '.join(FORMS)}.")
    alphas = schedule_alphas(len(kinds), alpha_min, schedule)
    if form in ("branch", "both", "plain"):
        if any(alpha != 1 for alpha in alphas):
            raise UserError(f"The form {form!r} has fixed factors and takes no decay: leave alpha_min at 1.")
        return [{"branch": (1.0, SQRT_HALF), "both": (SQRT_HALF, SQRT_HALF), "plain": (1.0, 1.0)}[form]] * len(kinds)
    if form in ("attention", "mlp"):
        if form not in kinds:
            raise UserError(
                f"This network has no {form} branches, so the form {form!r} would decay nothing: use 'identity'."
            )
        return [(alpha if kind == form else 1.0, 1.0) for alpha, kind in zip(alphas, kinds, strict=True)]
    return [(alpha, 1.0) for alpha in alphas]


# ---- the residual stream of a model, described in execution order (anechoic.surgery reads it)


@dataclass(frozen=True)
class Slot:
    """A tensor or number by its owner, such as (patch_embed.proj, "weight"); columns narrows a matrix's input side."""

    owner: nn.Module
    name: str
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Write:
    """Tensors that are added to the stream, or start it: embeddings, positions, tokens."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Read:
    """Norms and linear maps that read the stream without writing to it."""

    norms: tuple[nn.Module, ...] = ()
    maps: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Branch:
    """shortcut(x, writer(... reader(x))). A projection on the shortcut has a reading map and a writer of its own."""

    shortcut: Shortcut
    reads: Read
    writer: nn.Module
    projection: tuple[Slot, nn.Module] | None = None


@dataclass(frozen=True)
class Tap:
    """The stream is stored here under a name, for a long skip."""

    name: str


@dataclass(frozen=True)
class Concatenate:
    """x = map([x, tap]): a long skip by concatenation; a new stream starts behind it."""

    map: nn.Linear
    tap: str


@dataclass(frozen=True)
class Add:
    """x = x + map(tap): a long skip by addition."""

    map: nn.Linear
    tap: str


@dataclass(frozen=True)
class Restart:
    """x = reads(x): a norm in the stream itself (post-norm), or a norm and a map between two stages."""

    reads: Read


Event = Write | Read | Branch | Tap | Concatenate | Add | Restart


@dataclass(frozen=True)
class Stream:
    """A model's residual stream. ends_raw: the stream itself is an output, not only the input of a norm or head."""

    events: tuple[Event, ...]
    ends_raw: bool

    @property
    def shortcuts(self) -> list[Shortcut]:
        return [event.shortcut for event in self.events if isinstance(event, Branch)]
