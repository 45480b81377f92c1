"""What a checkpoint states about its network beside the tensors, the user's options, and whether the two agree.

The file's statement is the command line of its training (MAE, SiT) or the config.json beside it (transformers, timm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anechoic.errors import UserError
from anechoic.models.layers import Gelu


@dataclass(frozen=True)
class Choices:
    """The user's options, for what shapes leave no trace of: the decay, heads, the loss, and the number of classes."""

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
class CheckpointMetadata:
    """arguments: the command line of the training. settings: the config.json beside the file. used: the options that
    the network has. assumed: defaults where neither the file nor the user states a value."""

    choices: Choices
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    used: set[str] = field(default_factory=set)
    assumed: dict[str, Any] = field(default_factory=dict)

    def in_file(self, kind: type, *names: str) -> tuple[str, Any] | None:
        """Return (name, value) of the first of these names with a value in the file. "a.b" is b inside of a."""
        for name in names:
            outer, _, inner = name.rpartition(".")
            tables = [self.arguments, self.settings] if not outer else [self._table(outer)]
            for table in tables:
                if table.get(inner) is not None:
                    return name, checked_value(name, table[inner], kind)
        return None

    def _table(self, name: str) -> Mapping[str, Any]:
        found = self.settings.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise UserError(f"The config.json beside the weights has no table {name}, but {found!r:.40}.")
        return found or {}

    def value(self, option: str, kind: type, *names: str) -> Any:
        """Return the option, or the file's value under these names, or None. They must not contradict each other."""
        self.used.add(option)
        given, found = getattr(self.choices, option), self.in_file(kind, *names)
        if found is None:
            return given
        if given is not None and given != found[1]:
            raise UserError(
                f"The file has {found[0]} = {found[1]}, but {flag(option)} is {given}: omit the option, or give the "
                f"file it belongs to."
            )
        return found[1]

    def value_or(self, default: Any, option: str, kind: type, *names: str) -> Any:
        """As value, with a default, which is recorded as assumed."""
        found = self.value(option, kind, *names)
        if found is None:
            self.assumed[option] = found = default
        return found

    def gelu(self) -> Gelu:
        found = self.in_file(str, "hidden_act", "model_args.act_layer")
        if found is None:
            return "none"
        if found[1] not in ACTIVATIONS:
            raise UserError(
                f"This network was trained with the activation {found[1]!r} ({found[0]}), and ours compute "
                f"{', '.join(ACTIVATIONS)} only: its outputs would be wrong."
            )
        return ACTIVATIONS[found[1]]

    def eps(self, default: float) -> float:
        found = self.in_file(float, "layer_norm_eps")
        if found is None:
            return default
        if not 0 < found[1] < 1:
            raise UserError(f"The file has {found[0]} = {found[1]}, which is no eps of a norm.")
        return found[1]

    def refuse_unused(self, kind: str) -> None:
        for option in vars(self.choices):
            if getattr(self.choices, option) is not None and option not in self.used:
                raise UserError(f"A {kind} has no {option.replace('_', ' ')}: omit {flag(option)}.")


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def checked_value(name: str, value: Any, kind: type) -> Any:
    """Return the value if it is of this kind; whole numbers are numbers too, and truth values are neither."""
    right = isinstance(value, (int, float) if kind is float else kind)
    if kind in (int, float):
        right = right and not isinstance(value, bool) and math.isfinite(value) and (kind is float or value > 0)
    if not right:
        raise UserError(f"The file has {name} = {value!r:.40}, which is not {KINDS[kind]}: it is damaged or foreign.")
    return kind(value)


def checked_numbers(name: str, values: Any, count: int) -> Sequence[float]:
    """Return a list of this many numbers, such as a mean per channel."""
    if not isinstance(values, list | tuple) or len(values) != count:
        raise UserError(f"The file has {name} = {values!r:.60}, which is no list of {count} numbers.")
    return [checked_value(name, value, float) for value in values]
