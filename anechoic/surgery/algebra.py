"""The algebra of the fold: how weights and eps change with the factors of every shortcut while the function stays.

One function, `edits`, walks a described residual stream; it knows neither networks nor libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.shortcut import Add, Branch, Concatenate, Read, Restart, Slot, Stream, Tap, Write

Factors = Sequence[tuple[float, float]]


class Edit(NamedTuple):
    """A tensor or number, and what it is to be multiplied by."""

    slot: Slot
    factor: float


@torch.no_grad()
def rescale(stream: Stream, factors: Factors) -> None:
    """Edit weights and eps in place so that, with the new (alpha, beta) per branch, the outputs stay the same."""
    todo = [edit for edit in edits(stream, factors) if edit.factor != 1]
    _check_editable(todo)
    for edit in todo:
        multiply(*edit)


def edits(stream: Stream, factors: Factors) -> Iterator[Edit]:
    """Yield what changes with the factors.

    Let ratio = old stream / new stream, a number at every point. From alpha x + beta f to alpha' x' + beta' f':
    a branch takes ratio to ratio * alpha / alpha' and its output is multiplied by beta / (that * beta').
    A norm that reads the stream gets eps / ratio^2, a linear reader weight * ratio; what is written is divided by it.
    """
    remaining = iter(zip((shortcut.factors for shortcut in stream.shortcuts), factors, strict=True))
    ratio = starting_ratio(stream, factors)
    taps: dict[str, float] = {}
    for event in stream.events:
        match event:
            case Write(slots):
                for slot in slots:
                    yield Edit(slot, 1 / ratio)
            case Read():
                yield from rescale_readers(event, ratio)
            case Branch(_, reads, writer, projection):
                (alpha, beta), (new_alpha, new_beta) = next(remaining)
                yield from rescale_readers(reads, ratio)
                if projection is not None:
                    # alpha P(x) = ratio' alpha' P'(x'), and ratio' alpha' = ratio alpha.
                    yield Edit(projection[0], ratio)
                    yield from scale_output(projection[1], 1 / ratio)
                ratio *= alpha / new_alpha
                yield from scale_output(writer, beta / (ratio * new_beta))
            case Restart(reads):
                yield from rescale_readers(reads, ratio)
                ratio = 1.0
            case Tap(name):
                taps[name] = ratio
            case Concatenate(linear, name):
                width = linear.out_features
                yield Edit(Slot(linear, "weight", columns=(0, width)), ratio)
                yield Edit(Slot(linear, "weight", columns=(width, linear.in_features)), taps[name])
                ratio = 1.0
            case Add(linear, name):
                yield Edit(Slot(linear, "weight"), taps[name] / ratio)
                if linear.bias is not None:
                    yield Edit(Slot(linear, "bias"), 1 / ratio)
    if stream.ends_raw and abs(ratio - 1) > 1e-9:
        raise UserError(
            "The end of this residual stream is read by something unknown, so weights cannot make up for other "
            "shortcuts: describe the network with anechoic.surgery.describe."
        )


def starting_ratio(stream: Stream, factors: Factors) -> float:
    """Return 1, or what makes the ratio 1 at the end, where the stream is the output and all of it can be rescaled."""
    through = not any(isinstance(event, Restart | Concatenate) for event in stream.events)
    if not (stream.ends_raw and through and stream.events and isinstance(stream.events[0], Write)):
        return 1.0
    ratio = 1.0
    for shortcut, (new_alpha, _) in zip(stream.shortcuts, factors, strict=True):
        ratio *= new_alpha / shortcut.factors[0]
    return ratio


def rescale_readers(reads: Read, ratio: float) -> Iterator[Edit]:
    for norm in reads.norms:
        yield Edit(Slot(norm, "eps"), ratio**-2)
    for slot in reads.maps:
        yield Edit(slot, ratio)


def scale_output(module: nn.Module, factor: float) -> Iterator[Edit]:
    """Multiply the output of an affine module."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if factor != 1 and not {"weight"} <= names <= {"weight", "bias"}:
        raise UserError(
            f"A branch that ends in {type(module).__name__} cannot be rescaled, because its weight is no parameter of "
            f"its own: decay it without preserve."
        )
    for name in sorted(names, reverse=True):
        yield Edit(Slot(module, name), factor)


def _check_editable(todo: Sequence[Edit]) -> None:
    """Require that every tensor is stored in its owner, not computed on access, and is edited once."""
    seen: set[tuple[int, str, object]] = set()
    for slot, _ in todo:
        value = getattr(slot.owner, slot.name)
        where = f"{type(slot.owner).__name__}.{slot.name}"
        if isinstance(value, Tensor) and slot.name not in (*slot.owner._parameters, *slot.owner._buffers):
            raise UserError(f"{where} is computed from other tensors: remove its parametrization first.")
        key = (id(value), "", slot.columns) if isinstance(value, Tensor) else (id(slot.owner), slot.name, None)
        if key in seen:
            raise UserError(
                f"{where} serves in several places of the stream, and no one factor suits them all: untie the blocks "
                f"first."
            )
        seen.add(key)


def multiply(slot: Slot, factor: float) -> None:
    value = getattr(slot.owner, slot.name)
    if value is None:  # an RMSNorm without eps uses that of its dtype
        value = torch.finfo(next(slot.owner.parameters()).dtype).eps
    if not isinstance(value, Tensor):
        setattr(slot.owner, slot.name, value * factor)
    elif slot.columns is None:
        value.mul_(factor)
    else:
        value[:, slot.columns[0] : slot.columns[1]].mul_(factor)
