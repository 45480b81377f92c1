"""The short form of `make crash-test`: a few faults in one training."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_crash_test_ends_as_if_undisturbed():
    """Run in a subprocess, which forks its trainings before any thread is started."""
    driver = Path(__file__).with_name("crash_test.py")
    command = [sys.executable, str(driver), "--faults", "6", "--trainings", "1", "--seed", "3", "--disk-sizes", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 3, 6 faults over 1 trainings\n")
    assert "seed 3: all equal or refused" in done.stdout
    assert "0 orphans, 0 leftovers, 0 samples lost or repeated" in done.stdout
