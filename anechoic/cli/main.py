"""The command line: `anechoic VERB ...` calls the verb of that name in `anechoic.cli`, its arguments typed by tyro."""

from __future__ import annotations

import errno
import functools
import inspect
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from tqdm.auto import tqdm

from anechoic import __version__
from anechoic.cli import VERBS, verb
from anechoic.cli.arguments import alternatives
from anechoic.config import Section, checking, settings
from anechoic.errors import UserError, nearest_name
from anechoic.recipes import recipe, table
from anechoic.runtime.signals import InterruptedRun, leave
from anechoic.runtime.subprocesses import exit_when_parent_exits

USER_MISTAKE = 2
READER_GONE = 128 + 13  # as a shell reports a process that SIGPIPE ended
INTERRUPTED = 128 + 2  # and one that Ctrl-C ended
# What the system says of a place that cannot be read or written; any other of its errors is a defect.
PLACES_AT_FAULT = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG),
}


def summary(name: str) -> str:
    return (inspect.getdoc(verb(name)) or "").split("\n", 1)[0]


def overview() -> str:
    width = max(map(len, VERBS))
    rows = [f"  {name:<{width}}  {summary(name)}" for name in VERBS]
    return "\n".join(
        [
            "usage: anechoic VERB ... [--json]",
            "",
            "Generative representation learners whose identity shortcuts decay with depth.",
            "",
            *rows,
            "",
            "anechoic VERB --help explains a verb and shows an example.",
        ]
    )


def with_json_flag(function: Callable) -> Callable:
    """The verb with one more flag, --json, and without a return value: it prints instead."""

    @functools.wraps(function)
    def run(*args: object, json: bool, **kwargs: object) -> None:
        show(function(*args, **kwargs), as_json=json)

    signature = inspect.signature(function, eval_str=True)
    plain = signature.replace(parameters=[p.replace(annotation=in_help(p)) for p in signature.parameters.values()])
    flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    run.__signature__ = plain.replace(parameters=[*plain.parameters.values(), flag], return_annotation=None)  # type: ignore[attr-defined]
    hints = {p.name: p.annotation for p in plain.parameters.values()}
    run.__annotations__ = {**hints, "json": bool, "return": None}
    del run.__wrapped__
    return run


def in_help(parameter: inspect.Parameter) -> Any:
    """The annotation with what the help shows: arguments by their names, flags as `flag_in_help` words them."""
    hint, default = parameter.annotation, parameter.default
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        word = parameter.name.upper() + (" ..." if get_origin(alternatives(hint)[0]) is tuple else "")
        needed = default is inspect.Parameter.empty
        told = tyro.conf.arg(metavar=word, help_behavior_hint="(required)" if needed else "(optional)")
        return Annotated[hint, told] if alternatives(hint)[0] in (str, Path) or "..." in word else hint
    return flag_in_help(hint, default)


def flag_in_help(hint: Any, default: Any) -> Any:
    """The annotation of what may be left out says so, instead of `{None}|STR (default: None)`."""
    choices = [choice for choice in alternatives(hint) if choice is not NoneType]
    if len(choices) == len(alternatives(hint)):
        return hint
    metavar = "|".join(dict.fromkeys(word for choice in choices for word in words_for(choice)))
    optional = "(optional)" if default is None else None
    return Annotated[hint, tyro.conf.arg(metavar=metavar, help_behavior_hint=optional)]


def words_for(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    if get_origin(hint) is tuple:
        return [f"[{'|'.join(words_for(get_args(hint)[0]))} ...]"]
    return [getattr(hint, "__name__", str(hint)).upper()]


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.struct_rule
def settings_in_help(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """The settings of a recipe, worded as the flags of verbs are."""
    if not (isinstance(info.type, type) and issubclass(info.type, Section) and isinstance(info.default, info.type)):
        return None
    texts = checking.descriptions(info.type)
    return tyro.constructors.StructConstructorSpec(
        instantiate=info.type,
        fields=tuple(
            tyro.constructors.StructFieldSpec(
                name, flag_in_help(hint, getattr(info.default, name)), getattr(info.default, name), texts.get(name)
            )
            for name, hint in checking.hints(info.type).items()
        ),
    )


def show(outcome: object, *, as_json: bool) -> None:
    from anechoic.outcome import Outcome

    assert isinstance(outcome, Outcome)
    text = json.dumps(outcome.to_json(), indent=2, allow_nan=False) if as_json else outcome.text
    if text:
        print(text)


def main(argv: Sequence[str] | None = None) -> int:
    exit_when_parent_exits()
    if argv is None:  # this is the whole program
        warnings.showwarning = tell_warning
        logging.getLogger("anechoic").addHandler(Messages())
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = answer(arguments)
        sys.stdout.flush()
    except UserError as error:
        say(f"anechoic: {error}")
        return USER_MISTAKE
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as problem:
        if problem.errno not in PLACES_AT_FAULT:
            raise
        where = "" if problem.filename is None else f"{problem.filename}: "
        say(f"anechoic: {where}{problem.strerror}; choose another place, or free this one.")
        return USER_MISTAKE
    except InterruptedRun as stopped:
        if argv is None:
            leave(128 + stopped.signal_number)
        raise
    return code


def answer(arguments: list[str]) -> int:
    """What the words after `anechoic` ask for; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"anechoic {__version__}")
        return 0
    name, *rest = arguments
    if name not in VERBS:
        raise UserError(f"there is no verb {name!r}; {nearest_name(name, VERBS)}")
    refuse_misplaced(name, rest)
    tyro.cli(with_json_flag(verb(name)), prog=f"anechoic {name}", args=rest, registry=REGISTRY)
    return 0


# ---- flags of other verbs


def flags_of(name: str) -> set[str]:
    """Every flag of a verb; of one whose argument is a whole config, the settings too."""
    flags = {"--help", "--json", "--no-json"}
    hints = inspect.get_annotations(verb(name), eval_str=True)
    for parameter in inspect.signature(verb(name)).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            flags |= switches(parameter.name, hints[parameter.name] is bool)
        elif parameter.name == "recipe" and hints[parameter.name] is not str:
            for setting, value in settings(recipe(next(iter(table())))):
                flags |= switches(setting, isinstance(value, bool))
    return {flag.replace("_", "-") for flag in flags}


def switches(name: str, is_switch: bool) -> set[str]:
    """--data.flip, and --data.no-flip if it is on or off."""
    section, dot, last = name.rpartition(".")
    return {f"--{name}"} | ({f"--{section}{dot}no-{last}"} if is_switch else set())


def refuse_misplaced(name: str, words: Sequence[str]) -> None:
    """A flag that this verb lacks is answered with where it is, if another verb has it or it is called otherwise here,
    or with the nearest of its own. So is a recipe that does not exist.

    What follows -- is another command's.
    """
    own = flags_of(name)
    if name == "train" and words and not words[0].startswith("-") and words[0] not in table():
        raise UserError(f"there is no recipe {words[0]!r}; {nearest_name(words[0], table())}")
    for word in itertools.takewhile(lambda word: word != "--", words):
        flag = word.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in own or any(flag.startswith(f"{other}.") for other in own):
            continue
        last = flag.strip("-").rpartition(".")[2]
        here = sorted(other for other in own if other.strip("-").rpartition(".")[2] == last)
        if here:
            raise UserError(f"{name} has no {flag}; here it is {' or '.join(here)}.")
        others = [other for other in VERBS if flag in flags_of(other)]
        if others:
            raise UserError(
                f"{name} has no {flag}, which is an option of {', '.join(others[:3])}; anechoic {name} --help lists "
                "its own."
            )
        raise UserError(f"{name} has no {flag}; {nearest_name(flag, sorted(own))}")


# ---- messages beside a progress bar


def say(text: str) -> None:
    """To stderr, on a line of its own though a progress bar may be on the last one."""
    tqdm.write(text, file=sys.stderr)


def tell_warning(message: Warning | str, *rest: object, **more: object) -> None:
    """A warning in one line; where in the code it was raised helps nobody who types commands."""
    say(f"anechoic: {message}")


class Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"anechoic: {record.getMessage()}")


if __name__ == "__main__":
    sys.exit(main())
