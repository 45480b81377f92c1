"""The command line itself: help, versions, plugins, names of earlier versions, completion, exit codes."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import get_args

import pytest

from anechoic import cli
from anechoic.cli import command_names, find_command
from anechoic.cli._renamed import COMMANDS_BEFORE, OPTIONS_BEFORE
from anechoic.cli.main import main
from anechoic.outcome import Outcome


@pytest.mark.parametrize("name", command_names())
def test_every_command_has_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert f"usage: anechoic {name}" in help_text
    assert f"Example: anechoic {name}" in " ".join(help_text.split())
    assert find_command(name).__doc__.strip().splitlines()[0].endswith(".")


def test_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in command_names())
    assert main(["tools"]) == 0
    text = capsys.readouterr().out
    assert "  tools plan " in text
    assert "  embed " not in text


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_idle_threads_sleep_soon_unless_the_user_chose_otherwise(own, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    script = "import os, sys; sys.argv[1:] = ['--version']; from anechoic.cli.main import main; main();"
    script += "print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{expected} False"


def test_files_are_named_as_commands_are_typed():
    for name in cli.COMMANDS:
        module = cli.COMMANDS[name].partition(":")[0].rpartition(".")[2]
        assert module.rstrip("_") == name.split()[-1].replace("-", "_")


@pytest.mark.parametrize("option", ["device", "workers", "image_size", "out", "seed"])
def test_shared_options_have_one_help_text(option):
    hints = [inspect.get_annotations(find_command(name), eval_str=True) for name in command_names()]
    texts = [get_args(hint[option])[1].help for hint in hints if option in hint]
    assert len(texts) > 3
    assert len(set(texts)) == 1


def test_json_has_the_fields_of_the_contract(capsys):
    assert main(["list", "models", "--filter", "resnet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["schema", "config", "seed", "commit", "machine", "metrics", "seconds"]
    assert result["metrics"]["trainable"] == {"resnet18": 11_689_512}
    assert result["machine"]["cores"] >= 1


def test_list_shows_metrics_and_sources(capsys):
    for words in (["list", "metrics"], ["evaluate", "--metrics", "help"]):
        assert main(words) == 0
        assert "knn" in capsys.readouterr().out
    assert main(["list", "sources", "--filter", "hf:"]) == 0
    assert "Hugging Face" in capsys.readouterr().out


def test_mistakes_get_one_sentence_and_exit_code_2(capsys):
    for words, expected in (
        (["evalute"], "did you mean evaluate?"),
        (["tools", "plam"], "did you mean tools plan?"),
        (["list", "models", "--filter", "nothing-like-this"], "None of the models"),
        (["list", "models", "--filtre", "x"], "did you mean --filter?"),
        (["--completion", "tcsh"], "bash, zsh, fish"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("anechoic: ")
        assert error.count("\n") == 1
        assert expected in error


@pytest.mark.parametrize("name", COMMANDS_BEFORE)
def test_command_of_an_earlier_version_names_its_replacement(name, capsys):
    assert main([name, "runs/mine"]) == 2
    error = capsys.readouterr().err
    assert COMMANDS_BEFORE[name] in error
    assert error.count("\n") == 1
    words = COMMANDS_BEFORE[name].rstrip(".").split()[1:]
    assert " ".join(words[: 1 + (words[0] == "tools")]) in command_names()


def test_option_of_an_earlier_version_names_its_replacement(capsys):
    for words in (
        ["evaluate", "photos", "--model", "timm:x"],
        ["explore", "runs/mine", "photos", "--output", "a.html"],
    ):
        assert main(words) == 2
        assert OPTIONS_BEFORE[words[-2]] in capsys.readouterr().err


def test_unexpected_errors_keep_their_traceback(monkeypatch):
    import anechoic.cli.list

    def broken(*, filter: str = "") -> Outcome:
        """Break."""
        raise ValueError("a defect of ours")

    monkeypatch.setattr(anechoic.cli.list, "listing", broken)
    with pytest.raises(ValueError, match="a defect of ours"):
        main(["list"])


# ---- commands of other packages


def greet(name: str, /, *, loud: bool = False) -> Outcome:
    """Greet somebody.

    Example: anechoic greet you

    Args:
        name: of the greeted.
    """
    return Outcome(config={}, metrics={"name": name}, text=f"Hello {name}{'!' if loud else '.'}")


def test_another_package_adds_a_command_by_its_entry_point(monkeypatch, capsys):
    points = [
        EntryPoint("greet", f"{__name__}:greet", cli.GROUP),
        EntryPoint("broken", "no.such.module:function", cli.GROUP),
        EntryPoint("embed", f"{__name__}:greet", cli.GROUP),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: points if group == cli.GROUP else [])
    cli.plugins.cache_clear()
    try:
        assert main(["greet", "you", "--loud"]) == 0
        assert capsys.readouterr().out == "Hello you!\n"
        assert main(["--help"]) == 0
        text = capsys.readouterr().out
        assert "  greet " in text
        assert "cannot be loaded" in text
        assert main(["broken"]) == 2
        assert "update or uninstall that package" in capsys.readouterr().err
        assert find_command("embed") is not greet  # a command of ours stays
    finally:
        cli.plugins.cache_clear()


def test_the_laboratory_adds_its_commands_by_entry_points():
    assert {"reproduce", "bench"} <= set(cli.plugins())


# ---- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell, capsys):
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert "encode-latents" in script
    assert "--image-size" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def completions(capsys, words):
    assert main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += f"\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _anechoic; echo ${{COMPREPLY[@]}}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_tools_and_options(capsys):
    assert completions(capsys, "anechoic ev") == ["evaluate"]
    assert completions(capsys, "anechoic tools enc") == ["encode-latents"]
    assert completions(capsys, "anechoic tools plan --gpu") == ["--gpu", "--gpus"]
    assert completions(capsys, "anechoic list rec") == ["recipes"]
