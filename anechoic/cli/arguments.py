"""The arguments of verbs: how Python callers may give them, and how a receipt keeps them so that it can be rerun."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from anechoic.outcome import Outcome


def record_arguments(verb: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """The verb with every argument in its outcome's config; what the verb itself says there counts more."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Outcome:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        outcome = verb(*args, **kwargs)
        asked = {name: plain(value) for name, value in bound.arguments.items()}
        return replace(outcome, config={**asked, **outcome.config})

    return call


def plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return value


def coerce_arguments(verb: Callable) -> Callable:
    """The verb for Python callers: text where a Path is wanted, one value or a list where several are."""
    hints = inspect.get_annotations(verb, eval_str=True)
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = fitted(value, hints.get(name))
        return verb(*bound.args, **bound.kwargs)

    return call


def fitted(value: Any, hint: Any) -> Any:
    """The value as the annotation wants it, where that is plain; everything else is left to the verb."""
    choices = alternatives(hint)
    if isinstance(value, str) and Path in choices and str not in choices:
        return Path(value)
    several = [choice for choice in choices if get_origin(choice) is tuple and get_args(choice)[1:] == (...,)]
    if several and isinstance(value, list):
        return tuple(value)
    alone = not isinstance(value, tuple) and value not in [word for choice in choices for word in get_args(choice)]
    if several and alone and any(is_one(value, choice) for choice in alternatives(get_args(several[0])[0])):
        return (value,)
    return value


def is_one(value: Any, hint: Any) -> bool:
    """Whether the value is of the type, or one of the words of a Literal."""
    return isinstance(value, hint) if isinstance(hint, type) else value in get_args(hint)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """int | None -> (int, NoneType); what Annotated carries is left out."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    return tuple(one for choice in get_args(hint) for one in alternatives(choice))
