"""The command line: `anechoic COMMAND ...` calls the function of that command; tyro parses its arguments."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tqdm.auto import tqdm

from anechoic import __version__
from anechoic.choices import Listed, names
from anechoic.cli import command_names, find_command
from anechoic.cli._command import alternatives
from anechoic.cli._renamed import COMMANDS_BEFORE, OPTIONS_BEFORE
from anechoic.config import Config, Section, checking, settings
from anechoic.errors import UserError, nearest_name
from anechoic.outcome import printable
from anechoic.recipes import recipe, table
from anechoic.runtime.signals import InterruptedRun, leave
from anechoic.runtime.subprocesses import exit_when_parent_exits
from anechoic.storage.safe_io import outside_allowed

USER_MISTAKE = 2
READER_GONE = 128 + 13  # as a shell reports a process that SIGPIPE ended
INTERRUPTED = 128 + 2  # and one that Ctrl-C ended
# Errors of the system about a path that cannot be read or written; any other is a defect.
PATH_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG),
}


def summary(name: str) -> str:
    try:
        return (inspect.getdoc(find_command(name)) or "").split("\n", 1)[0]
    except UserError as problem:
        return str(problem)


def overview(names: Sequence[str]) -> str:
    width = max(map(len, names))
    return "\n".join(
        [
            "usage: anechoic COMMAND ... [--json]",
            "",
            "Generative representation learners whose identity shortcuts decay with depth.",
            "",
            *(f"  {name:<{width}}  {summary(name)}" for name in names),
            "",
            "anechoic COMMAND --help explains a command and shows an example. anechoic --version prints the version,",
            "anechoic --completion bash|zsh|fish a script that completes commands and options.",
        ]
    )


def with_json_flag(function: Callable) -> Callable:
    """Return the command with the options of every command, and without a return value: it prints instead."""

    @functools.wraps(function)
    def run(*args: object, json: bool, allow_outside: bool = False, limit: int | None = None, **kwargs: object) -> None:
        bound = signature.bind(*args, **kwargs)
        if limit is not None:
            bound.arguments |= limit_data(bound.arguments, limit)
        with outside_allowed() if allow_outside else nullcontext():
            show(function(*bound.args, **bound.kwargs), as_json=json)

    signature = inspect.signature(function, eval_str=True)
    plain = signature.replace(parameters=[p.replace(annotation=in_help(p)) for p in signature.parameters.values()])
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (hint, default) in common_flags(signature).items()
    ]
    run.__signature__ = plain.replace(parameters=[*plain.parameters.values(), *flags], return_annotation=None)  # type: ignore[attr-defined]
    hints = {p.name: p.annotation for p in [*plain.parameters.values(), *flags]}
    run.__annotations__ = {**hints, "return": None}
    del run.__wrapped__
    return run


def common_flags(signature: inspect.Signature) -> dict[str, tuple[Any, Any]]:
    """Return the options that commands have without declaring them, with their defaults: --json, and two of those that
    read data."""
    parameters = signature.parameters
    found: dict[str, tuple[Any, Any]] = {"json": (bool, False)}
    if "data" in parameters or ("recipe" in parameters and parameters["recipe"].annotation is not str):
        outside = tyro.conf.arg(help="read images outside the folder of the parquet table that names them.")
        found["allow_outside"] = (Annotated[bool, outside], False)
    if "allow_outside" in found and not ("data" in parameters and parameters["data"].annotation is bool):
        limit = tyro.conf.arg(
            metavar="INT",
            help="read this number of images only: always the same, and the same share of every label that is read.",
            help_behavior_hint="(optional)",
        )
        found["limit"] = (Annotated[int | None, limit], None)
    return found


def limit_data(arguments: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return the arguments that name data, limited to this number of images."""
    from anechoic.data import limited

    named: dict[str, Any] = {
        name: limited(arguments[name], limit) for name in ("data", "test") if arguments.get(name) is not None
    }
    config = arguments.get("recipe")
    if isinstance(config, Config):
        data = dataclasses.replace(config.data, source=limited(config.data.source, limit))
        named["recipe"] = dataclasses.replace(config, data=data)
    if not named:
        raise UserError("--limit is for commands that are given data: name it, with --data.")
    return named


def in_help(parameter: inspect.Parameter) -> Any:
    """Return the annotation as tyro parses it and as the help shows it: arguments by their names."""
    hint, default = for_tyro(parameter.annotation), parameter.default
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        word = parameter.name.upper() + (" ..." if get_origin(alternatives(hint)[0]) is tuple else "")
        needed = default is inspect.Parameter.empty
        shown = tyro.conf.arg(metavar=word, help_behavior_hint="(required)" if needed else "(optional)")
        return Annotated[hint, shown] if alternatives(hint)[0] in (str, Path) or "..." in word else hint
    return flag_in_help(hint, default)


def for_tyro(hint: Any) -> Any:
    """Sequence[int] -> tuple[int, ...], whose defaults tyro can show; str | Path -> str; inside unions too."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(for_tyro(parts[0]), *parts[1:])]
    if origin is Sequence:
        return tuple.__class_getitem__((for_tyro(parts[0]), ...))
    if origin in (Union, UnionType):
        return Union[tuple(for_tyro(part) for part in parts if part is not Path)]  # noqa: UP007
    return hint


def flag_in_help(hint: Any, default: Any) -> Any:
    """Return the annotation of an option that may be omitted, without `{None}|STR (default: None)` in its help."""
    choices = [choice for choice in alternatives(hint) if choice is not NoneType]
    if len(choices) == len(alternatives(hint)):
        return hint
    metavar = "|".join(dict.fromkeys(word for choice in choices for word in words_for(choice)))
    if get_origin(hint) is Annotated:
        metavar = next((named for mark in get_args(hint)[1:] if (named := getattr(mark, "metavar", None))), metavar)
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
    """Return the settings of a recipe, worded as the options of commands are."""
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
    text = json.dumps(outcome.to_json(), indent=2, allow_nan=False) if as_json else printable(outcome.text, keep="\n\t")
    if text:
        print(text)


def main(argv: Sequence[str] | None = None) -> int:
    exit_when_parent_exits()
    if argv is None:  # this is the whole program
        wait_briefly()
        warnings.showwarning = print_warning
        logging.getLogger("anechoic").addHandler(Messages())
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = answer(arguments)
        sys.stdout.flush()
    except UserError as error:
        print_message(f"anechoic: {error}")
        return USER_MISTAKE
    except BrokenPipeError:
        # The reader, such as `head`, has exited; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as problem:
        if problem.errno not in PATH_ERRORS:
            raise
        where = "" if problem.filename is None else f"{problem.filename}: "
        print_message(f"anechoic: {where}{problem.strerror}; choose another path, or free this one.")
        return USER_MISTAKE
    except InterruptedRun as interrupted:
        if argv is None:
            leave(128 + interrupted.signal_number)
        raise
    return code


def wait_briefly() -> None:
    """Let threads without work sleep after microseconds, unless the user has chosen how OpenMP waits.

    GNU's OpenMP, which torch brings on Linux, lets them spin for milliseconds. Beside another busy program they then
    keep each other from working: training was five times as slow. It reads this once, when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def answer(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(command_names()))
        return 0
    if arguments[0] == "--version":
        print(f"anechoic {__version__}")
        return 0
    if arguments[0] == "--completion":
        print(completion_script(arguments[1:]))
        return 0
    name, rest = split_name(arguments)
    if not name:
        print(overview([tool for tool in command_names() if tool.startswith("tools ")]))
        return 0
    if rest[-2:] == ["--metrics", "help"]:
        name, rest = "list", ["metrics", *rest[:-2]]
    refuse_misplaced(name, rest)
    tyro.cli(with_json_flag(find_command(name)), prog=f"anechoic {name}", args=rest, registry=REGISTRY)
    return 0


def split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """["tools", "plan", ...] -> ("tools plan", [...]); the name is empty for a list of the tools."""
    name, *rest = arguments
    if name == "tools":
        if not rest or rest[0] in ("-h", "--help"):
            return "", rest
        name, *rest = f"tools {rest[0]}", *rest[1:]
    names = command_names()
    if name in names:
        return name, rest
    if name in COMMANDS_BEFORE:
        raise UserError(f"The command {name} is now: {COMMANDS_BEFORE[name]}")
    raise UserError(f"There is no command {name!r}; {nearest_name(name, names)}")


# ---- options of other commands


def flags_of(name: str) -> set[str]:
    """Return every option of a command; of one whose argument is a whole config, the settings too."""
    function = find_command(name)
    flags = {"--help"}.union(
        *(switches(flag, True) for flag in common_flags(inspect.signature(function, eval_str=True)))
    )
    hints = inspect.get_annotations(function, eval_str=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            flags |= switches(parameter.name, alternatives(hints[parameter.name]) == (bool,))
        elif parameter.name == "recipe" and hints[parameter.name] is not str:
            for setting, value in settings(recipe(next(iter(table())))):
                flags |= switches(setting, isinstance(value, bool))
    return {flag.replace("_", "-") for flag in flags}


def switches(name: str, is_switch: bool) -> set[str]:
    """--data.flip, and --data.no-flip if it is on or off."""
    section, dot, last = name.rpartition(".")
    return {f"--{name}"} | ({f"--{section}{dot}no-{last}"} if is_switch else set())


def refuse_misplaced(name: str, words: Sequence[str]) -> None:
    """Refuse an option that this command lacks, and a recipe that does not exist, with a sentence that helps.

    The sentence names the new option of a renamed one, the option of that name here or in another command, or the
    nearest one. Words after -- belong to another command.
    """
    own = flags_of(name)
    if name == "train" and words and not words[0].startswith("-") and words[0] not in table():
        raise UserError(f"There is no recipe {words[0]!r}; {nearest_name(words[0], table())}")
    for word in itertools.takewhile(lambda word: word != "--", words):
        flag = word.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in own or any(flag.startswith(f"{other}.") for other in own):
            continue
        if flag in OPTIONS_BEFORE:
            raise UserError(f"{name} has no {flag}: {OPTIONS_BEFORE[flag]}")
        last = flag.strip("-").rpartition(".")[2]
        here = sorted(other for other in own if other.strip("-").rpartition(".")[2] == last)
        if here:
            raise UserError(f"{name} has no {flag}; here it is {' or '.join(here)}.")
        others = [other for other in command_names() if flag in flags_of(other)]
        if others:
            raise UserError(
                f"{name} has no {flag}, which is an option of {', '.join(others[:3])}; anechoic {name} --help lists "
                "its own."
            )
        raise UserError(f"{name} has no {flag}; {nearest_name(flag, sorted(own))}")


# ---- completion


def completion_script(words: Sequence[str]) -> str:
    from anechoic.cli._completion import SHELLS, script

    if len(words) != 1 or words[0] not in SHELLS:
        raise UserError(f"--completion takes the name of a shell: {', '.join(SHELLS)}.")
    positions = {"train": sorted(table()), "list": list(names(Listed))}
    return script(words[0], {name: sorted([*flags_of(name), *positions.get(name, ())]) for name in command_names()})


# ---- messages beside a progress bar


def print_message(text: str) -> None:
    """Print to stderr, on a line of its own beside a progress bar."""
    tqdm.write(printable(text, keep="\n\t"), file=sys.stderr)


def print_warning(message: Warning | str, *rest: object, **more: object) -> None:
    """Print a warning in one line, without the place in the code."""
    print_message(f"anechoic: {message}")


class Messages(logging.Handler):
    """Print messages; one that repeats the last, as when the same data is opened again, is not printed again."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        before, self.last = self.last, record.getMessage()
        if self.last != before:
            print_message(f"anechoic: {self.last}")


if __name__ == "__main__":
    sys.exit(main())
