"""What type checkers see of the package: a user's script is checked by mypy --strict and by pyright."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import anechoic

ROOT = Path(anechoic.__file__).parents[1]
RIGHT = """
from pathlib import Path
import torch
import anechoic

model = anechoic.build_model("vit_tiny_patch4", image_size=32, alpha_min=0.6)
alphas: list[float] = anechoic.linear(24, 0.6)
plain: torch.nn.Module = anechoic.fold(anechoic.decay(model, alpha_min="auto"))
rank: float = anechoic.effective_rank(torch.randn(8, 4)).rank
vectors = anechoic.embed("runs/mine", [torch.rand(3, 32, 32)], layer=-1)
names: tuple[str, ...] = vectors.names
skipped: tuple[tuple[str, str], ...] = vectors.skipped
curved = anechoic.decay(model, schedule=lambda n, alpha_min: [1 - (1 - alpha_min) * (k / n) ** 2 for k in range(n)])
groups = anechoic.param_groups(plain, 0.6, lr=1e-3, schedule=anechoic.cosine)
outcome: anechoic.Outcome = anechoic.embed("runs/mine", Path("photos"), out="vectors.npz", pooling="mean")
found = anechoic.evaluate(Path("runs/mine"), "photos", metrics=["knn", "rank"], k=[5, 20], layers="all")
print(alphas, outcome.metrics, found.text, anechoic.load("runs/mine").embed("photos").shape)
"""
# Each line has a mistake: a typo, a wrong type, a name outside a closed set, an option of an earlier version.
WRONG = """import anechoic
anechoic.deccay(1)
anechoic.decay(1)
anechoic.linear("24", 0.6)
anechoic.embed("runs/mine", "photos", out="v.npz", pooling="median")
anechoic.embed("runs/mine", "photos", output="v.npz")
anechoic.pretrain("photos", out="runs/a", epochs="many")
anechoic.decay(anechoic.build_model("vit_tiny_patch4"), schedule=lambda n: [1.0] * n)
anechoic.register_source(3, list)
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    return folder


@pytest.mark.slow
def test_mypy_strict_accepts_right_calls_and_refuses_wrong_ones(scripts):
    pytest.importorskip("mypy")
    (scripts / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\nstrict = true\nfollow_imports = silent\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", scripts / "cache", "right.py", "wrong.py"],
        cwd=scripts,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert "right.py" not in done.stdout, done.stdout
    assert {int(line.split(":")[1]) for line in errors} == set(range(2, 10)), done.stdout + done.stderr


@pytest.mark.slow
def test_pyright_accepts_right_calls_and_refuses_wrong_ones(scripts):
    pytest.importorskip("pyright", reason="pip install pyright")
    settings = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11", "include": ["right.py", "wrong.py"]}
    (scripts / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip().startswith("{"):
        pytest.skip(f"pyright fetches its program from npm on first use, which is not available: {done.stderr[-300:]}")
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [(Path(item["file"]).name, item["range"]["start"]["line"] + 1) for item in found]
    assert {line for name, line in errors if name == "right.py"} == set(), found
    assert {line for name, line in errors if name == "wrong.py"} == set(range(2, 10))


@pytest.mark.slow
def test_help_shows_the_real_signature():
    code = "import anechoic; help(anechoic.decay); help(anechoic.embed)"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "decay(model: " in text
    assert "*args" not in text
    assert "embed(run: 'Run', data: 'Data', /, *, out: 'Out' = tyro.MISSING, layer: 'Layer' = -1" in text.replace(
        "\n", ""
    ).replace("    ", "")
