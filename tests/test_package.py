"""The house: what loads without torch, who imports whom, and how the command line answers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import anechoic
from anechoic.api import VERBS, verb
from anechoic.cli import main

PACKAGE = Path(anechoic.__file__).parent


def loaded_after(code):
    script = f"import sys\n{code}\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return out.stdout.strip().splitlines()[-1] == "True"


@pytest.mark.parametrize(
    "code",
    [
        "import anechoic",
        "import anechoic; dir(anechoic)",
        "from anechoic.cli import main; main(['--help'])",
        "from anechoic.cli import main; main(['--version'])",
    ],
)
def test_torch_is_not_loaded(code):
    assert not loaded_after(code)


def test_no_verb_needs_torch_for_its_help():
    code = "from anechoic.cli import main\nfrom anechoic.api import VERBS\nimport contextlib\n"
    code += "for name in VERBS:\n    with contextlib.suppress(SystemExit):\n        main([name, '--help'])"
    assert not loaded_after(code)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert f"usage: anechoic {name}" in help_text
    assert f"Example: anechoic {name}" in " ".join(help_text.split())
    assert verb(name).__doc__.strip().splitlines()[0].endswith(".")


def test_every_public_name_resolves():
    for name in dir(anechoic):
        assert getattr(anechoic, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'fnord'"):
        anechoic.fnord  # noqa: B018


def test_overview_names_every_verb(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in VERBS)


def test_json_has_the_fields_of_the_contract(capsys):
    assert main(["models", "--filter", "resnet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["schema", "config", "seed", "commit", "machine", "metrics", "seconds"]
    assert result["metrics"]["trainable"] == {"resnet18": 11_689_512}
    assert result["machine"]["cores"] >= 1


def test_mistakes_get_one_sentence_and_exit_code_2(capsys):
    assert main(["modles"]) == 2
    assert "did you mean models?" in capsys.readouterr().err
    assert main(["models", "--filter", "nothing-like-this"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("anechoic: No model's name contains")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        main(["models", "--filtre", "x"])
    assert stop.value.code == 2


def test_a_reader_that_leaves_early_gets_no_traceback():
    script = "import sys; from anechoic.cli import main; sys.exit(main(['pretrain', '--help']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert error == b""
    assert process.returncode == 141


def test_unforeseen_errors_are_not_dressed_up_as_mistakes(monkeypatch):
    import anechoic.api.catalogue

    def broken(*, filter: str = "") -> None:
        """Break."""
        raise ValueError("a defect of ours")

    monkeypatch.setattr(anechoic.api.catalogue, "models", broken)
    with pytest.raises(ValueError, match="a defect of ours"):
        main(["models"])


# ---- who may import whom: room -> rooms it may know; modules of the same room may know each other

FREE = {"errors", "draws", "outcome"}
ROOMS = {
    "shortcut": set(),
    "models": {"shortcut"},
    "data": set(),
    "config": {"models", "shortcut"},
    "optim": {"shortcut"},
    "analysis": set(),
    "diffusion": set(),
    "sampling": {"diffusion"},
    "run": set(),
    "pages": {"run"},
}


def imports_of(path):
    """The rooms of this package that a file imports, at its top or inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "anechoic" else [node.module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("anechoic.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_know_only_what_they_may(room):
    files = sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]
    for path in files:
        assert imports_of(path) <= ROOMS[room] | FREE | {room}, path


def test_only_mae_among_the_models_knows_another_model():
    models = {"vit", "mae", "uvit", "sit", "resnet"}
    for path in (PACKAGE / "models").glob("*.py"):
        text = path.read_text()
        known = {name for name in models - {path.stem} if f"anechoic.models.{name} " in text}
        assert known <= ({"vit"} if path.stem == "mae" else models if path.stem == "__init__" else set()), path


def test_nobody_imports_the_command_line():
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "__main__.py"):
            assert "cli" not in imports_of(path), path


def test_the_package_runs_as_a_module():
    ended = subprocess.run([sys.executable, "-m", "anechoic", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"anechoic {anechoic.__version__}\n"


def test_only_the_right_files_know_the_heavy_libraries():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "import matplotlib" in text or "from matplotlib" in text:
            assert path.name == "figures.py", path
        assert ".cuda()" not in text, path
