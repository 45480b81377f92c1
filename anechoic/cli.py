"""The command line: `anechoic VERB ...` calls the verb of that name in `anechoic.api`, its arguments typed by tyro."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from anechoic import __version__
from anechoic.api import VERBS, verb
from anechoic.errors import UserError, nearest_name
from anechoic.runtime.children import end_with_whoever_started_me
from anechoic.runtime.signals import InterruptedRun, leave

USER_MISTAKE = 2
READER_GONE = 128 + 13  # as a shell reports a process that SIGPIPE ended
INTERRUPTED = 128 + 2  # and one that Ctrl-C ended


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

    hints = inspect.get_annotations(function, eval_str=True)
    plain = inspect.signature(function, eval_str=True)
    flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    run.__signature__ = plain.replace(parameters=[*plain.parameters.values(), flag], return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, "json": bool, "return": None}
    del run.__wrapped__
    return run


def show(outcome: object, *, as_json: bool) -> None:
    from anechoic.outcome import Outcome

    assert isinstance(outcome, Outcome)
    text = json.dumps(outcome.to_json(), indent=2) if as_json else outcome.text
    if text:
        print(text)


def main(argv: Sequence[str] | None = None) -> int:
    end_with_whoever_started_me()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"anechoic {__version__}")
        return 0
    name, *rest = arguments
    if name not in VERBS:
        print(f"anechoic: there is no verb {name!r}; {nearest_name(name, VERBS)}", file=sys.stderr)
        return USER_MISTAKE
    try:
        tyro.cli(with_json_flag(verb(name)), prog=f"anechoic {name}", args=rest)
        sys.stdout.flush()
    except UserError as error:
        print(f"anechoic: {error}", file=sys.stderr)
        return USER_MISTAKE
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except InterruptedRun as stopped:
        if argv is None:  # this is the whole program
            leave(128 + stopped.signal_number)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
