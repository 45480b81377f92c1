"""Readers against corrupted and malicious files: constructed inputs, earlier failures, and a few random inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(code: str) -> subprocess.CompletedProcess:
    """Run code in a new interpreter: the fuzzer forks, which a process with threads must not do."""
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
        pytest.importorskip(name, reason=f"the fuzzer reads files of {name}")


@pytest.mark.slow
def test_malicious_and_random_inputs_are_read_or_refused() -> None:
    done = run("import sys, fuzz; sys.exit(len(fuzz.fuzz(inputs=32, seed=7, keep_failures=False)['failures']))")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_inputs_that_failed_once_pass() -> None:
    done = run("import sys, fuzz; sys.exit(fuzz.replay())")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_fuzzer_detects_every_kind_of_failure(tmp_path: Path) -> None:
    """A traceback, a program, a write outside, too much memory, an endless loop."""
    code = f"""
import os, pathlib, subprocess, time, fuzz
home = pathlib.Path({str(tmp_path)!r})
fuzz.CPU_SECONDS, fuzz.WALL_SECONDS = 1, 3
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
