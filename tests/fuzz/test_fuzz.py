"""Doors against damaged and hostile files: what was made to harm, what once failed, and a few random inputs more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def run(code: str) -> subprocess.CompletedProcess:
    """In a fresh interpreter: the fuzzer forks, which a process with threads must not do."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    for name in ("datasets", "pyarrow", "diffusers", "transformers"):
        pytest.importorskip(name, reason=f"{name} is one of the doors")


def test_hostile_inputs_and_some_random_ones_are_read_or_refused() -> None:
    done = run("import sys, fuzz; sys.exit(len(fuzz.fuzz(inputs=32, seed=7, keep_failures=False)['failures']))")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_once_failed_fails_no_more() -> None:
    done = run("import sys, fuzz; sys.exit(fuzz.replay())")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fuzzer_notices_what_it_is_for(tmp_path: Path) -> None:
    """Each kind of failure, caused: a traceback, a program, a write outside, too much memory, no end."""
    code = f"""
import os, pathlib, subprocess, time, fuzz
home = pathlib.Path({str(tmp_path)!r})
fuzz.PROCESSOR_SECONDS, fuzz.WALL_SECONDS = 1, 3
def spin():
    while True: pass
def fill(): return str(len(bytearray(2 << 30)))
cases = dict(traceback=lambda: 1 / 0, offence=lambda: subprocess.run(["true"]), hung=spin,
             asleep=lambda: time.sleep(60), outside=lambda: open("/tmp/outside", "w"), memory=fill, fine=lambda: "x")
print({{name: fuzz.isolated(case, home=home)["outcome"] for name, case in cases.items()}})
"""
    found = eval(run(code).stdout)
    assert found == {
        "traceback": "traceback",
        "offence": "offence",
        "hung": "hung",
        "asleep": "hung",
        "outside": "offence",
        "memory": "traceback",
        "fine": "read",
    }
