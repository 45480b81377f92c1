"""Test the package on several versions of Python and torch: `make matrix`, or `python tools/matrix.py 3.12:2.13.0 ...`.

Every row gets two virtual environments in .matrix, which a second run uses again. In one the tests of `make quick` run.
In the other a wheel is built and installed as by a user, and must answer `--version`, train, and show the demo. The
table is printed in Markdown; CONTRIBUTING.md has the last one. A version of Python that is not installed is reported.
`--wheel` tries the wheels only.
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


def constraints_for(folder: Path, torch: str) -> Path:
    """Write and return the pinned versions, with this torch."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if torch != PINNED:  # torch pins versions of its own, and the libraries around it follow it
        pins = [pin for pin in pins if not re.match(r"torch|triton|nvidia|cuda|sympy", pin)] + [f"torch=={torch}"]
    file = Path(f"{folder}.txt")
    file.write_text("\n".join(pins) + "\n")
    return file


def pip_of(folder: Path) -> list[str]:
    return [str(folder / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def environment(python: str, folder: Path) -> list[list[str]]:
    """Return the command that creates the environment, if there is none."""
    return [] if (folder / "bin/python").exists() else [[python, "-m", "venv", str(folder)]]


def first_problem(commands: list[list[str]], *, cwd: Path = ROOT) -> str:
    """Run the commands; return the last line of the first one that fails, or nothing."""
    for command in commands:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            return ((done.stderr or done.stdout).strip().splitlines() or ["no message"])[-1][:160]
    return ""


def install(python: str, folder: Path, torch: str) -> str:
    """Create or update the environment of the tests; return what went wrong, or nothing."""
    constraint = ["--constraint", str(constraints_for(folder, torch))]
    commands = [
        *environment(python, folder),
        [*pip_of(folder), "install", *constraint, "--editable", f"{ROOT}[dev]"],
        [str(folder / "bin/python"), "-m", "anechoic.adapters.torchvision_operators"],
    ]
    problem = first_problem(commands)
    return problem and f"not installed: {problem}"


def try_wheel(python: str, folder: Path, torch: str) -> str:
    """Build a wheel, install it, and use it outside of the clone; return what went wrong, or "works"."""
    constraint = ["--constraint", str(constraints_for(folder, torch))]
    wheels, command = folder.with_name(f"{folder.name}-dist"), str(folder / "bin/anechoic")
    shutil.rmtree(wheels, ignore_errors=True)
    problem = first_problem(
        [*environment(python, folder), [*pip_of(folder), "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(wheels)]]
    )
    if problem:
        return f"not built: {problem}"
    (wheel,) = wheels.glob("*.whl")
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), flags=re.M)[1]  # type: ignore[index]
    said = f"import subprocess; assert {version!r} in subprocess.check_output([{command!r}, '--version'], text=True)"
    tiny = ["pretrain", "digits", "--out", str(wheels / "run"), "--epochs", "0.2"]
    shown = ["demo", "--out", str(wheels / "demo"), "--samples", "640"]
    return (
        first_problem(
            [
                [*pip_of(folder), "install", *constraint, str(wheel)],
                [*pip_of(folder), "install", "--force-reinstall", "--no-deps", str(wheel)],
                [str(folder / "bin/python"), "-c", said],
                [command, *tiny],
                [command, *shown],
            ],
            cwd=wheels,
        )
        or "works"
    )


def run_tests(python: str, folder: Path, torch: str) -> str:
    """Return the last line of the tests, or why they did not run."""
    problem = install(python, folder, torch)
    if problem:
        return problem
    command = [str(folder / "bin/python"), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    Path(f"{folder}.log").write_text(done.stdout + done.stderr)
    return done.stdout.strip().splitlines()[-1].strip("= ")


def main(arguments: list[str]) -> int:
    wheels_only = "--wheel" in arguments
    rows = [argument for argument in arguments if argument != "--wheel"]
    print("| Python | torch | wheel | `make quick` |\n|---|---|---|---|", flush=True)
    failed = 0
    for row in rows or ROWS:
        version, _, torch = row.partition(":")
        python, torch = interpreter(version), torch or PINNED
        folder = ROOT / ".matrix" / f"{version}-{torch}"
        folder.parent.mkdir(exist_ok=True)
        if python is None:
            wheel = tests = "Python not found"
        else:
            wheel = try_wheel(python, folder.with_name(f"{folder.name}-wheel"), torch)
            tests = "not run" if wheels_only else run_tests(python, folder, torch)
        failed += wheel != "works" or not (wheels_only or re.match(r"\d+ passed", tests))
        print(f"| {version} | {torch} | {wheel} | {tests} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
