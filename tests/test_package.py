"""The house: what loads without torch, who imports whom, and how the command line answers."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import anechoic
from anechoic.cli import VERBS, verb
from anechoic.cli.main import main

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
        "from anechoic.cli.main import main; main(['--help'])",
        "from anechoic.cli.main import main; main(['--version'])",
    ],
)
def test_torch_is_not_loaded(code):
    assert not loaded_after(code)


def test_no_verb_needs_torch_for_its_help():
    code = "from anechoic.cli.main import main\nfrom anechoic.cli import VERBS\nimport contextlib\n"
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
    assert main(["models", "--filtre", "x"]) == 2
    assert "did you mean --filter?" in capsys.readouterr().err


def test_unforeseen_errors_are_not_dressed_up_as_mistakes(monkeypatch):
    import anechoic.cli.list

    def broken(*, filter: str = "") -> None:
        """Break."""
        raise ValueError("a defect of ours")

    monkeypatch.setattr(anechoic.cli.list, "models", broken)
    with pytest.raises(ValueError, match="a defect of ours"):
        main(["models"])


# ---- who may import whom: a room may know those on lower floors, and of its own floor only in one direction

FLOORS = [
    ["errors", "rng", "outcome", "shortcut", "config"],
    ["storage", "models"],
    ["data"],
    ["runtime"],
    ["adapters"],
    ["surgery"],
    ["diffusion"],
    ["eval"],
    ["index", "training"],
    ["recipes", "weights", "pages"],
    ["server", "sweeps"],
    ["cli"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ENTRY_POINT_GROUPS = ("anechoic.commands", "anechoic.metrics")
NAMED_IN_TEXT = re.compile(r"anechoic(\.[a-z_]+)+(:\w+)?")


def room_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def modules_named_in(tree):
    """Every module of this package that a file imports, at its top or inside functions, or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "anechoic":
            yield from (f"anechoic.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in ENTRY_POINT_GROUPS:
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED_IN_TEXT.fullmatch(node.value):
            yield node.value.partition(":")[0]


@cache
def edges():
    """(room, room it knows) -> a file that does"""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        for module in modules_named_in(tree_of(path)):
            known = module.split(".")[1] if module.startswith("anechoic.") else room
            if known not in (room, "__version__"):
                found.setdefault((room, known), path)
    return found


def test_every_room_is_on_a_floor():
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"} == set(FLOOR)


def test_nobody_knows_a_room_above():
    for (room, known), path in edges().items():
        assert FLOOR[known] <= FLOOR[room], f"{path} knows {known}, which is above {room}"


def test_rooms_do_not_go_round():
    graph = {room: {known for (other, known) in edges() if other == room} for room in FLOOR}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(FLOOR)  # CycleError if they did


def test_modules_do_not_go_round_when_they_are_imported():
    """Imports at the top of files, which Python runs at once."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            modules[".".join(["anechoic", *path.relative_to(PACKAGE).with_suffix("").parts])] = path
    graph = {}
    for name, path in modules.items():
        top = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[name] = set(modules_named_in(ast.Module(top, []))) & modules.keys()
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(modules)


def test_only_mae_among_the_models_knows_another_model():
    models = {"vit", "mae", "uvit", "sit", "resnet"}
    for path in (PACKAGE / "models").glob("*.py"):
        text = path.read_text()
        known = {name for name in models - {path.stem} if f"anechoic.models.{name} " in text}
        may_know = {"mae": {"vit"}, "packed": {"vit"}, "flops": {"mae"}, "__init__": models}
        assert known <= may_know.get(path.stem, set()), path


def test_nobody_imports_the_command_line():
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "__main__.py"):
            assert "anechoic.cli.main" not in set(modules_named_in(tree_of(path))), path


def test_the_package_runs_as_a_module():
    ended = subprocess.run([sys.executable, "-m", "anechoic", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"anechoic {anechoic.__version__}\n"


def test_only_the_right_files_know_the_heavy_libraries():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "import matplotlib" in text or "from matplotlib" in text:
            assert path.name == "figures.py", path
        assert ".cuda()" not in text, path


@pytest.mark.parametrize("first", ["", "import anechoic.training.loop, anechoic.models.mae, anechoic.recipes.pocket\n"])
def test_rooms_that_share_a_name_with_a_verb_are_called_as_it(first):
    """Whether the room has been imported before or not."""
    code = f"import anechoic\n{first}print(len(anechoic.recipes(filter='pocket').metrics['recipes']) > 3)\n"
    code += "print('resnet18' in anechoic.models(filter='resnet').text)\n"
    code += "print(anechoic.training('pocket_mae_digits', dry_run=True).config['recipe'])\n"
    code += "from anechoic.models import build_model\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True", "pocket_mae_digits"]
