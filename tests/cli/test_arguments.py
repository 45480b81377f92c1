"""How Python callers may give the arguments of verbs, and what a receipt keeps of them."""

from pathlib import Path
from typing import Annotated, Literal

import pytest

import anechoic
from anechoic.cli import TRAINING, VERBS, verb
from anechoic.cli.arguments import coerce_arguments, fitted, record_arguments
from anechoic.outcome import Outcome


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("v.npz", Path, Path("v.npz")),
        ("v.npz", Path | None, Path("v.npz")),
        ("v.npz", Annotated[Path, "an alias"], Path("v.npz")),
        ("runs/a", str, "runs/a"),
        ("runs/a", str | Path, "runs/a"),
        (20, tuple[int, ...], (20,)),
        ([10, 20], tuple[int, ...], (10, 20)),
        (None, tuple[int, ...] | None, None),
        ("all", tuple[int, ...] | Literal["all"], "all"),
        (-1, tuple[int, ...] | Literal["all"], (-1,)),
        (0.3, tuple[float, ...], (0.3,)),
        ("mean", tuple[Literal["class", "mean"], ...], ("mean",)),
        (("mean",), tuple[Literal["class", "mean"], ...], ("mean",)),
    ],
)
def test_values_become_what_a_verb_wants(value, hint, expected):
    assert fitted(value, hint) == expected


def test_a_forgiving_verb_keeps_its_name_and_help():
    def verb(run: str, /, *, out: Path = Path("x"), k: tuple[int, ...] = ()) -> tuple:
        """Do it."""
        return run, out, k

    call = coerce_arguments(verb)
    assert call("a", out="b", k=3) == ("a", Path("b"), (3,))
    assert call("a") == ("a", Path("x"), ())
    assert (call.__name__, call.__doc__) == ("verb", "Do it.")
    with pytest.raises(TypeError):
        call("a", wrong=1)


def test_receipts_have_every_argument_in_plain_values():
    def ask(run: str, /, *, out: Path = Path("x"), k: tuple = (1, Path("y")), seed: int = 0) -> Outcome:
        return Outcome(config={"seed": 7}, metrics={})

    config = record_arguments(ask)("a", k=(2, Path("z"))).config
    assert config == {"run": "a", "out": "x", "k": [2, "z"], "seed": 7}


@pytest.mark.parametrize("name", [name for name in VERBS if name not in TRAINING])
def test_every_other_verb_keeps_its_arguments(name):
    """The wrapper is what the command line and Python callers get."""
    assert verb(name).__wrapped__.__name__ == name.replace("-", "_")


def test_the_exception_for_mistakes_is_public(tmp_path):
    with pytest.raises(anechoic.UserError, match="no run or model directory"):
        anechoic.embed("nowhere", "digits:test", output=str(tmp_path / "v.npz"))
