"""A disk that is full at any write of any command: one sentence or a complete output, and nothing half-written."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from tiny_pages import picture
from tiny_runs import tiny_config, write_run

from anechoic.cli.main import main
from anechoic.config import DataConfig, ModelConfig, ObjectiveConfig, SaveConfig, ValidationConfig
from anechoic.training.loop import fit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.* cannot be cached")]
# What a killed or refused command leaves here is continued by the same command.
RESUMED = ("train", "embed parts")

# Arguments and the output, which each command writes below the folder `out`.
COMMANDS = {
    "embed npy": "embed RUN PHOTOS -o out/vectors.npy",
    "embed parquet": "embed RUN PHOTOS -o out/vectors.parquet",
    "embed parts": "embed RUN PHOTOS -o out/parts",
    "search": "search RUN PHOTOS 3 -o out/search.html",
    "explore": "explore RUN PHOTOS -o out/explore.html",
    "export": "export RUN --to timm -o out/exported",
    "shard": "tools shard PHOTOS -o out/shards",
    "report": "report TRAINED --samples 60 -o out/report.html",
    "sample": "sample DENOISER --num 2 --steps 2 -o out/samples",
    "train": "train pocket_mae_digits --out out/run --model.options dim=16 depth=2 num_heads=2 --optim.epochs None"
    " --optim.samples 256 --optim.batch-size 64 --save.every 128",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    (folder / "photos").mkdir()
    for number in range(12):
        picture(number).save(folder / "photos" / f"{number:02d}.png")
    options = {"patch_size": 2, "dim": 16, "depth": 2, "num_heads": 2}
    quiet = {"validation": ValidationConfig(every=None, report=32), "save": SaveConfig(every=None), "steps": 1}
    fit(tiny_config(**quiet), folder / "trained")
    fit(
        tiny_config(
            model=ModelConfig("uvit_small", options),
            data=DataConfig(source="digits", image_size=8, channels=1, holdout=64),
            objective=ObjectiveConfig("noise_prediction"),
            **quiet,
        ),
        folder / "denoiser",
    )
    return {
        "RUN": str(write_run(folder / "run")),
        "PHOTOS": str(folder / "photos"),
        "TRAINED": str(folder / "trained"),
        "DENOISER": str(folder / "denoiser"),
    }


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("command", COMMANDS)
def test_full_disk_leaves_nothing_half_written(command, places, tmp_path, monkeypatch, capsys):
    words = [places.get(word, word) for word in COMMANDS[command].split()]
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
