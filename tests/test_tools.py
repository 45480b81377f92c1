"""The scripts of tools/ that make targets run."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def load(name, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # a tool may add a finder
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("asked", "build", "code"),
    [
        ("as-is", "CUDA 13.0", 0),
        ("cpu", "CPU", 0),
        ("cuda", "CUDA 13.0", 0),
        ("cpu", "CUDA 13.0", 1),
        ("gpu", "CPU", 2),
    ],
)
def test_torch_build_is_printed_and_verified(asked, build, code, monkeypatch):
    module = load("torch_build", monkeypatch)
    found, line = module.verdict(asked, "2.13.0", build)
    assert found == code
    assert line.startswith(f"torch 2.13.0: {build} build." if code < 2 else "TORCH=gpu is unknown")
    assert ("TORCH_INDEX=ADDRESS" in line) == (code == 1)


def test_words_finds_private_words_outside_quotations(tmp_path, monkeypatch):
    module = load("words", monkeypatch)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("The colour of a run that goes on.\n> a quoted colour\nThe color of a run that resumes.\n")
    found = module.findings(page)
    assert [line.partition(" ")[0] for line in found] == ["page.md:1:", "page.md:1:"]


def test_matrix_covers_the_oldest_and_the_pinned_torch(monkeypatch):
    module = load("matrix", monkeypatch)
    assert {row.partition(":")[0] for row in module.ROWS} == {"3.11", "3.12", "3.13"}
    assert {row.partition(":")[2] for row in module.ROWS} == {module.OLDEST, module.PINNED}
    assert module.interpreter("2.99") is None
