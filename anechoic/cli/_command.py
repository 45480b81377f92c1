"""The decorator of every command: sequences arrive as tuples, and the outcome records all arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin

from anechoic.outcome import Outcome

P = ParamSpec("P")
Returned = TypeVar("Returned")


def command(function: Callable[P, Returned]) -> Callable[P, Returned]:
    """Return the command with every argument in its outcome's config; entries that the command sets take precedence.

    What is no outcome is returned as it is.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        bound = bind(function, args, kwargs)
        outcome = function(*bound.args, **bound.kwargs)
        if not isinstance(outcome, Outcome):
            return outcome
        given = {name: plain(value) for name, value in bound.arguments.items()}
        return replace(outcome, config={**given, **outcome.config})

    return call


def training_command(function: Callable[P, Outcome]) -> Callable[P, Outcome]:
    """Return a command whose outcome already has a complete config, that of the run it trained."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        bound = bind(function, args, kwargs)
        return function(*bound.args, **bound.kwargs)

    return call


def bind(function: Callable, args: Iterable[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    hints = inspect.get_annotations(function, eval_str=True)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        bound.arguments[name] = as_tuple(value, hints.get(name))
    return bound


def as_tuple(value: Any, hint: Any) -> Any:
    """Return the value, as a tuple where the annotation is a sequence: a list, or one value of its kind."""
    choices = alternatives(hint)
    several = [choice for choice in choices if get_origin(choice) in (tuple, Sequence)]
    if several and isinstance(value, list):
        return tuple(value)
    alone = not isinstance(value, tuple) and value not in [word for choice in choices for word in get_args(choice)]
    if several and alone and any(is_one(value, choice) for choice in alternatives(get_args(several[0])[0])):
        return (value,)
    return value


def is_one(value: Any, hint: Any) -> bool:
    """Return whether the value is of the type, or one of the words of a Literal."""
    return isinstance(value, hint) if isinstance(hint, type) else value in get_args(hint)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """int | None -> (int, NoneType), without what Annotated carries."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    return tuple(one for choice in get_args(hint) for one in alternatives(choice))


def plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return value
