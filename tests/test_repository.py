"""The repository: regular files that every tool can read, and one version."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import anechoic

ROOT = Path(__file__).parents[1]


def tracked():
    """Return (mode, path) of every tracked file."""
    listed = subprocess.run(["git", "ls-files", "-s", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    return [(entry.split()[0], entry.partition("\t")[2]) for entry in listed.stdout.split("\0") if entry]


def test_git_tracks_regular_files_only():
    special = [path for mode, path in tracked() if mode not in ("100644", "100755")]
    assert special == [], "symlinks and submodules: tools that read every file would follow them"


def test_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert anechoic.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[0] == version


def test_test_files_have_different_names():
    """pytest imports them by name, so two files of one name stop the collection."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
