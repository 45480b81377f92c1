"""The package: what loads without torch, what is public, and who imports whom."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import anechoic
from anechoic.cli import COMMANDS

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
        "from anechoic.cli.main import main; main(['--completion', 'bash'])",
    ],
)
def test_torch_is_not_loaded(code):
    assert not loaded_after(code)


def test_help_of_every_command_loads_no_torch():
    code = "from anechoic.cli.main import main\nfrom anechoic.cli import command_names\nimport contextlib\n"
    code += "for name in command_names():\n"
    code += "    with contextlib.suppress(SystemExit):\n        main([*name.split(), '--help'])"
    assert not loaded_after(code)


# ---- public names


def test_every_public_name_resolves_to_the_typed_one():
    """The names that type checkers read are those that Python finds, from the same modules."""
    for name in dir(anechoic):
        assert getattr(anechoic, name) is not None
    (guarded,) = (node for node in tree_of(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    typed = {alias.asname: node.module for node in guarded.body for alias in node.names}
    assert typed == {name: f"anechoic.{module}" for name, module in anechoic._MODULE_OF.items()}
    assert set(typed) | {"__version__"} == set(dir(anechoic)) == set(anechoic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fnord'"):
        anechoic.fnord  # noqa: B018


def test_every_command_is_a_public_function():
    for target in COMMANDS.values():
        module, _, name = target.partition(":")
        assert anechoic._MODULE_OF[name] == module.removeprefix("anechoic.")


@pytest.mark.parametrize("name", ["decay", "fold", "load", "build_model", "train", "evaluate", "embed"])
def test_public_functions_show_real_signatures(name):
    function = getattr(anechoic, name)
    assert function.__doc__
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    assert inspect.Parameter.VAR_POSITIONAL not in kinds


# ---- imports: a package may import those above it in this list, and of its own line only in one direction

LEVELS = [
    ["choices", "errors", "rng", "outcome", "shortcut", "config"],
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
LEVEL = {package: number for number, packages in enumerate(LEVELS) for package in packages}
NAMED_IN_TEXT = re.compile(r"anechoic(\.[a-z_]+)+(:\w+)?")


def package_of(path):
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED_IN_TEXT.fullmatch(node.value):
            yield node.value.partition(":")[0]


@cache
def edges():
    """(package, package it knows) -> a file that does"""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = package_of(path)
        if package in ("__init__", "__main__"):
            continue
        for module in modules_named_in(tree_of(path)):
            known = module.split(".")[1] if module.startswith("anechoic.") else package
            if known in LEVEL and known != package:
                found.setdefault((package, known), path)
    return found


def test_every_package_has_a_level():
    assert {package_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"} == set(LEVEL)


def test_no_package_imports_one_above():
    for (package, known), path in edges().items():
        assert LEVEL[known] <= LEVEL[package], f"{path} knows {known}, which is above {package}"


def test_packages_have_no_import_cycle():
    graph = {package: {known for (other, known) in edges() if other == package} for package in LEVEL}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(LEVEL)  # CycleError if they did


def test_modules_have_no_import_cycle():
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


def test_only_mae_imports_another_model():
    models = {"vit", "mae", "uvit", "sit", "resnet"}
    for path in (PACKAGE / "models").glob("*.py"):
        text = path.read_text()
        known = {name for name in models - {path.stem} if f"anechoic.models.{name} " in text}
        may_know = {"mae": {"vit"}, "packed": {"vit"}, "flops": {"mae"}, "__init__": models}
        assert known <= may_know.get(path.stem, set()), path


def test_no_module_imports_the_command_line():
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "__main__.py"):
            assert "anechoic.cli.main" not in set(modules_named_in(tree_of(path))), path


def test_the_package_runs_as_a_module():
    ended = subprocess.run([sys.executable, "-m", "anechoic", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"anechoic {anechoic.__version__}\n"


def test_only_figures_import_matplotlib():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "import matplotlib" in text or "from matplotlib" in text:
            assert path.name == "figures.py", path
        assert ".cuda()" not in text, path


def test_the_library_never_names_the_laboratory():
    for path in PACKAGE.rglob("*.py"):
        assert "anechoic_lab" not in path.read_text(), path
