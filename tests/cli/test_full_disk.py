"""A disk that is full at any write of any command: one sentence or a complete output, and nothing half-written."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from disk_commands import COMMANDS, RESUMED, files_below, make_places, words_of

from anechoic.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.* cannot be cached")]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "sweep"])  # its trials are subprocesses
def test_full_disk_leaves_nothing_half_written(command, places, tmp_path, monkeypatch, capsys):
    words = words_of(command, places)
    sync, calls, failing = os.fsync, 0, 0

    def fail(descriptor):
        nonlocal calls
        calls += stat.S_ISREG(os.fstat(descriptor).st_mode)
        if failing and calls >= failing and stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    def run(name):
        nonlocal calls
        calls = 0
        (tmp_path / name / "out").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path / name / "cache"))
        code = main(words)
        return code, capsys.readouterr().err, files_below(tmp_path / name / "out")

    monkeypatch.setattr(os, "fsync", fail)
    code, _, complete = run("straight")
    assert (code, bool(complete)) == (0, True)
    writes, refusals = calls, 0
    for failing in sorted({1, (writes + 1) // 2 if command in RESUMED else 1, writes}):
        code, message, found = run(f"full-{failing}")
        if code == 0:
            assert found == complete, f"write {failing} of {writes}"
            continue
        refusals += 1
        assert code == 2, message
        errors = [line for line in message.splitlines() if line.startswith("anechoic: ")]
        assert len(errors) == 1, message
        assert "No space left" in errors[0] or "free space there" in errors[0]
        assert "Traceback" not in message
        assert command in RESUMED or found in ([], complete), f"write {failing} of {writes} left {found}"
        assert not any("/.new-" in f"/{name}" for name in found), found
    assert refusals
