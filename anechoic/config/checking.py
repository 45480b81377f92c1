"""Frozen dataclasses whose names, types and ranges are checked when they are made, with a sentence for what is wrong.

It knows the annotations that settings have, and no setting.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import textwrap
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import tyro

from anechoic.errors import UserError, nearest_name


class Range(NamedTuple):
    """Metadata of a number's type: low <= value <= high, or value < high if `below`."""

    low: float
    high: float = math.inf
    below: bool = False

    def __str__(self) -> str:
        if self.below:
            return f"at least {self.low:g} and below {self.high:g}"
        return f"at least {self.low:g}" if self.high == math.inf else f"between {self.low:g} and {self.high:g}"


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Positive = Annotated[float, Range(1e-30)]
NotNegative = Annotated[float, Range(0.0)]
Share = Annotated[float, Range(0.0, 1.0)]
BelowOne = Annotated[float, Range(0.0, 1.0, below=True)]


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def parse_options(words: list[str]) -> dict[str, Any]:
    """["dim=48", "skips=false"] -> {"dim": 48, "skips": False}; a value that is not JSON is text."""
    options = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise ValueError(f"{word!r} is not of the form NAME=VALUE")
        try:
            options[name.replace("-", "_")] = json.loads(PYTHON_WORDS.get(text, text))
        except json.JSONDecodeError:
            options[name.replace("-", "_")] = text
    return options


# build_model and the objective, which know the names, check options.
Options = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=parse_options,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda options: [f"{name}={json.dumps(value)}" for name, value in options.items()],
    ),
]


@dataclass(frozen=True)
class Section:
    """A frozen dataclass that checks every field against its annotation."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            object.__setattr__(self, name, checked(getattr(self, name), hint, name))


@cache
def _hints(section: Hashable) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def hints(section: type) -> dict[str, Any]:
    """Field name -> annotation, with its range."""
    return _hints(cast(Hashable, section))


def descriptions(section: type) -> dict[str, str]:
    """Field name -> the sentence below it in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


SectionT = TypeVar("SectionT", bound=Section)


def from_mapping(section: type[SectionT], values: Mapping[str, Any], *, where: str = "") -> SectionT:
    """Build the dataclass from plain JSON values; UserError for unknown names, with the nearest known one."""
    known = hints(section)
    for name in values:
        if name not in known:
            names = [where + other for other in known]
            raise UserError(f"There is no setting {where}{name}; {nearest_name(where + name, names, listed=99)}")
    return section(**{name: checked(value, known[name], where + name) for name, value in values.items()})


def checked(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it (a whole number as float, a list as tuple), or a UserError that names it."""
    try:
        return _fit(value, hint, where)
    except TypeError as problem:
        raise UserError(f"The setting {where} must be {problem}, not {value!r:.100}.") from None


def _fit(value: Any, hint: Any, where: str) -> Any:
    """As `checked`, but a mismatch is a TypeError whose text describes what is wanted."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fit_range(_fit(value, arguments[0], where), arguments[1])
    if origin in (Union, UnionType):
        return _fit_any(value, arguments, where)
    if origin is Literal:
        if value not in arguments:
            raise TypeError("one of " + ", ".join(map(str, arguments)))
        return value
    if origin is tuple:
        return _fit_tuple(value, arguments, where)
    if is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(hint, value, where=f"{where}.")  # type: ignore[type-var, arg-type]
    if origin is dict:
        return _fit_json(value)
    plain: Any = origin or hint
    # Python counts True as an int; a setting does not.
    fits = isinstance(value, (float, int) if plain is float else plain)
    if not fits or (isinstance(value, bool) and plain is not bool):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "none"}
        wanted = "a group of settings, of which to name one" if is_dataclass(plain) else plain.__name__
        raise TypeError(names.get(plain, wanted))
    return _finite(value) if plain is float else value


def _finite(value: float) -> float:
    try:
        value = float(value)
    except OverflowError:  # a whole number beyond all floats
        value = math.inf
    if not math.isfinite(value):
        raise TypeError("a finite number")
    return value


def _fit_range(value: Any, metadata: Any) -> Any:
    if isinstance(metadata, Range):
        inside = metadata.low <= value <= metadata.high
        if not inside or (metadata.below and value == metadata.high):
            raise TypeError(str(metadata))
    return value


def _fit_any(value: Any, choices: tuple, where: str) -> Any:
    problems = []
    for choice in choices:
        try:
            return _fit(value, choice, where)
        except TypeError as problem:
            problems.append(str(problem))
    raise TypeError(" or ".join(problems))


def _fit_json(value: Any) -> dict[str, Any]:
    """As it will be read back, so that a config equals its own JSON."""
    if not isinstance(value, dict):
        raise TypeError("a mapping of names to values")
    return json.loads(json.dumps(value))


def _fit_tuple(value: Any, inner: tuple, where: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise TypeError("a list")
    wanted = [inner[0]] * len(value) if inner[1:] == (...,) else list(inner)
    if len(value) != len(wanted):
        raise TypeError(f"a list of {len(wanted)} values")
    return tuple(_fit(item, hint, where) for item, hint in zip(value, wanted, strict=True))
