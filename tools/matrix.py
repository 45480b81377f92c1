"""Test the package on several versions of Python and torch: `make matrix`, or `python tools/matrix.py 3.12:2.13.0 ...`.

Every row gets a virtual environment in .matrix, which a second run uses again, and runs the tests of `make quick`. The
table is printed in Markdown; CONTRIBUTING.md has the last one. A version of Python that is not installed is reported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)[1]  # type: ignore[index]
OLDEST = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]  # type: ignore[index]
OLDEST += ".0" * (2 - OLDEST.count("."))
ROWS = (f"3.11:{OLDEST}", f"3.12:{PINNED}", f"3.13:{PINNED}")


def interpreter(version: str) -> str | None:
    """Return a Python of this version from the PATH or from pyenv."""
    candidates = [shutil.which(f"python{version}") or ""]
    candidates += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), reverse=True)
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "--version"], capture_output=True).returncode == 0:
            return candidate
    return None


def install(python: str, folder: Path, torch: str) -> str:
    """Create or update the environment; return what went wrong, or nothing."""
    constraints = Path(f"{folder}.txt")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if torch != PINNED:  # torch pins versions of its own, and the libraries around it follow it
        pins = [pin for pin in pins if not re.match(r"torch|triton|nvidia|cuda|sympy", pin)]
    constraints.write_text("\n".join([*pins, *([f"torch=={torch}"] if torch != PINNED else [])]) + "\n")
    own = str(folder / "bin/python")
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        *([] if Path(own).exists() else [[python, "-m", "venv", str(folder)]]),
        [*pip, "--constraint", str(constraints), "--editable", f"{ROOT}[dev]"],
        [own, str(ROOT / "tools/torchvision_operators.py")],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return f"not installed: {(done.stderr or done.stdout).strip().splitlines()[-1][:160]}"
    return ""


def outcome(version: str, torch: str) -> str:
    python = interpreter(version)
    if python is None:
        return "Python not found"
    folder = ROOT / ".matrix" / f"{version}-{torch}"
    folder.parent.mkdir(exist_ok=True)
    problem = install(python, folder, torch)
    if problem:
        return problem
    command = [str(folder / "bin/python"), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    Path(f"{folder}.log").write_text(done.stdout + done.stderr)
    return done.stdout.strip().splitlines()[-1].strip("= ")


def main(rows: list[str]) -> int:
    print("| Python | torch | `make quick` |\n|---|---|---|", flush=True)
    failed = 0
    for row in rows or ROWS:
        version, _, torch = row.partition(":")
        found = outcome(version, torch or PINNED)
        failed += not re.match(r"\d+ passed", found)
        print(f"| {version} | {torch or PINNED} | {found} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
