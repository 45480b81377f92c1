"""How Python callers may give the arguments of commands, and what an outcome records of them."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest

import anechoic
from anechoic.cli import command, command_names, find_command
from anechoic.cli._command import as_tuple
from anechoic.outcome import Outcome


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("v.npz", str | Path, "v.npz"),
        (20, Sequence[int], (20,)),
        ([10, 20], Sequence[int], (10, 20)),
        ([10, 20], Annotated[Sequence[int], "help"], (10, 20)),
        (None, Sequence[int] | None, None),
        ("all", Sequence[int] | Literal["all"], "all"),
        (-1, Sequence[int] | Literal["all"], (-1,)),
        (0.3, Sequence[float], (0.3,)),
        ("mean", Sequence[Literal["class", "mean"]], ("mean",)),
        (("mean",), Sequence[Literal["class", "mean"]], ("mean",)),
    ],
)
def test_as_tuple_wraps_one_value_of_a_sequence(value, hint, expected):
    assert as_tuple(value, hint) == expected


def test_command_keeps_signature_and_docstring():
    def ask(run: str, /, *, k: Sequence[int] = ()) -> Outcome:
        """Do it."""
        return Outcome({}, {"k": k})

    decorated = command(ask)
    assert decorated("a", k=3).metrics == {"k": (3,)}
    assert (decorated.__name__, decorated.__doc__) == ("ask", "Do it.")
    assert inspect.signature(decorated) == inspect.signature(ask)
    with pytest.raises(TypeError):
        decorated("a", wrong=1)


def test_command_records_every_argument_in_plain_values():
    @command
    def ask(run: str, /, *, out: Path = Path("x"), k: tuple = (1, Path("y")), seed: int = 0) -> Outcome:
        return Outcome(config={"seed": 7}, metrics={})

    assert ask("a", k=(2, Path("z"))).config == {"run": "a", "out": "x", "k": [2, "z"], "seed": 7}


@pytest.mark.parametrize("name", command_names())
def test_every_command_shows_its_real_signature(name):
    function = find_command(name)
    assert inspect.signature(function) == inspect.signature(inspect.unwrap(function))
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)


def test_user_error_is_public(tmp_path):
    with pytest.raises(anechoic.UserError, match="no run or model directory"):
        anechoic.embed("nowhere", "digits:test", out=str(tmp_path / "v.npz"))
