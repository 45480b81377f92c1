"""What a checkpoint's file says of its network beside the tensors, what the options say, and whether the two agree.

A file tells by the command line of its training (MAE, SiT) or the config.json beside it (transformers, timm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anechoic.errors import UserError
from anechoic.models.layers import Gelu
from anechoic.weights.read_checkpoint import Checkpoint


@dataclass(frozen=True)
class Choices:
    """What the user says because shapes leave no trace of it: the decay, heads, the loss, and the number of classes."""

    alpha_min: float | None = None
    num_heads: int | None = None
    decoder_num_heads: int | None = None
    norm_pix: bool | None = None
    mask_ratio: float | None = None
    num_classes: int | None = None


# The activations of transformers and timm that our networks compute. Those of the second row are one formula.
ACTIVATIONS: dict[str, Gelu] = {
    **dict.fromkeys(("gelu", "gelu_python"), "none"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_tanh"), "tanh"),
}
KINDS = {bool: "true or false", int: "a positive whole number", float: "a number", str: "a name"}


@dataclass
class Told:
    """Answers from the file and the options; notes which options had a question, and what nobody said."""

    choices: Choices
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)
    assumed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def by(cls, checkpoint: Checkpoint, choices: Choices) -> Told:
        return cls(choices, checkpoint.arguments, checkpoint.settings)

    def file(self, kind: type, *names: str) -> tuple[str, Any] | None:
        """(name, value) of the first of these names that the file has a value for. "a.b" is b inside of a."""
        for name in names:
            outer, _, inner = name.rpartition(".")
            places = [self.arguments, self.settings] if not outer else [self.part(outer)]
            for place in places:
                if place.get(inner) is not None:
                    return name, checked(name, place[inner], kind)
        return None

    def part(self, name: str) -> Mapping[str, Any]:
        found = self.settings.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise UserError(f"The config.json beside the weights has no table {name}, but {found!r:.40}.")
        return found or {}

    def answer(self, option: str, kind: type, *names: str) -> Any:
        """What the option says, or the file under these names; None if neither does. They may not contradict."""
        self.asked.add(option)
        given, told = getattr(self.choices, option), self.file(kind, *names)
        if told is None:
            return given
        if given is not None and given != told[1]:
            raise UserError(
                f"The file says {told[0]} = {told[1]}, and {flag(option)} says {given}: leave the option out, or give "
                f"the file it belongs to."
            )
        return told[1]

    def answer_or(self, default: Any, option: str, kind: type, *names: str) -> Any:
        """As answer, and the default where nobody says anything, which is noted."""
        found = self.answer(option, kind, *names)
        if found is None:
            self.assumed[option] = found = default
        return found

    def gelu(self) -> Gelu:
        told = self.file(str, "hidden_act", "model_args.act_layer")
        if told is None:
            return "none"
        if told[1] not in ACTIVATIONS:
            raise UserError(
                f"This network was trained with the activation {told[1]!r} ({told[0]}), and ours compute "
                f"{', '.join(ACTIVATIONS)} only: its outputs would be wrong."
            )
        return ACTIVATIONS[told[1]]

    def eps(self, default: float) -> float:
        told = self.file(float, "layer_norm_eps")
        if told is None:
            return default
        if not 0 < told[1] < 1:
            raise UserError(f"The file says {told[0]} = {told[1]}, which is no eps of a norm.")
        return told[1]

    def refuse_unasked(self, kind: str) -> None:
        for option in vars(self.choices):
            if getattr(self.choices, option) is not None and option not in self.asked:
                raise UserError(f"A {kind} has no {option.replace('_', ' ')}: leave {flag(option)} out.")


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def checked(name: str, value: Any, kind: type) -> Any:
    """The value if it is of this kind; whole numbers are numbers too, and truth values are neither."""
    right = isinstance(value, (int, float) if kind is float else kind)
    if kind in (int, float):
        right = right and not isinstance(value, bool) and math.isfinite(value) and (kind is float or value > 0)
    if not right:
        raise UserError(f"The file says {name} = {value!r:.40}, which is not {KINDS[kind]}: it is damaged or foreign.")
    return kind(value)


def numbers(name: str, values: Any, count: int) -> Sequence[float]:
    """A list of so many numbers, such as a mean per channel."""
    if not isinstance(values, list | tuple) or len(values) != count:
        raise UserError(f"The file says {name} = {values!r:.60}, which is no list of {count} numbers.")
    return [checked(name, value, float) for value in values]
