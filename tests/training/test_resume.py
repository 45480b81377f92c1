"""Killed, terminated or interrupted, then the same command again: bit for bit the result of an uninterrupted run."""

import os
import random
import signal
import time

import pytest
from processes import alive, descendants, run_to_the_end, wait_until
from tiny_runs import DENOISER, GROUPS, MASKED, ORTHOGONAL, PARTS, PLAIN, TWO, command_for, start

from anechoic.runtime import checkpoint
from anechoic.runtime.run import CLOCK_FIELDS, read_metrics
from anechoic.storage.files import read_json


def assert_equal_runs(a, b):
    """Weights, optimizer and averages by their bytes, metrics by their lines without times."""
    last = [checkpoint.checkpoints(run / "checkpoints")[-1] for run in (a, b)]
    names = sorted(path.name for path in last[0].iterdir())
    assert names == ["config.json", "ema.safetensors", "model.safetensors", "optimizer.safetensors", "state.json"]
    for name in names:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert (a / "model" / "model.safetensors").read_bytes() == (b / "model" / "model.safetensors").read_bytes()
    lines = [[{k: v for k, v in r.items() if k not in CLOCK_FIELDS} for r in read_metrics(run)] for run in (a, b)]
    assert lines[0] == lines[1]
    assert [r["seen"] for r in lines[0] if r["kind"] == "train"] == [*range(112, 1920, 112), 1920]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(more, recipe) -> the directory of an uninterrupted run with these settings."""
    made = {}

    def make(more, *, recipe=MASKED):
        key = more, recipe
        if key not in made:
            made[key] = tmp_path_factory.mktemp("straight") / "run"
            run_to_the_end([*command_for(more, recipe=recipe), "--out", str(made[key])])
        return made[key]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [(MASKED, TWO), (ORTHOGONAL, PARTS), (ORTHOGONAL, (*PARTS, *GROUPS)), (DENOISER, PARTS)],
    ids=["two processes", "muon", "parameter groups", "a denoiser"],
)
def test_kill_and_resume(tmp_path, straight, recipe, more):
    command = command_for(more, recipe=recipe)
    for attempt in range(5):
        out = tmp_path / f"killed-{attempt}"
        process = start(command, out)
        time.sleep(random.random() * 0.2)
        children = descendants(process.pid)
        assert children, "workers or ranks should run"
        process.kill()
        process.end()
        # Nobody outlives the command, and so nobody holds the run directory.
        wait_until(lambda: not any(map(alive, children)), "all processes of the killed run are gone")  # noqa: B023
        if not (out / "results.json").exists():
            break  # else it was faster than the kill
    else:
        pytest.fail("the run always ended before it was killed")
    done = run_to_the_end([*command, "--out", str(out)])
    assert "resuming after" in done.stderr
    assert_equal_runs(straight(more, recipe=recipe), out)
    assert len(read_json(out / "env.json")["starts"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_signals_save_and_exit_cleanly(tmp_path, straight, number):
    """Ctrl-C reaches every process of the terminal's group, SIGTERM only the one that was started."""
    command = command_for(TWO)
    for attempt in range(5):
        out = tmp_path / f"run-{attempt}"
        process = start(command, out)
        children = descendants(process.pid)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output = process.end().stderr
        if not (out / "results.json").exists():
            break
    else:
        pytest.fail("the run always ended before the signal")
    assert process.returncode == 128 + number, output
    assert "the same command resumes" in output
    assert "Traceback" not in output
    wait_until(lambda: not any(map(alive, children)), "all processes are gone")
    # It saved at the update in which it was interrupted.
    saved = int(checkpoint.checkpoints(out / "checkpoints")[-1].name)
    done = run_to_the_end([*command, "--out", str(out)])
    assert f"resuming after {saved:,} samples" in done.stderr
    assert_equal_runs(straight(TWO), out)


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_an_interval_only(tmp_path, straight):
    command = command_for(PLAIN)
    process = start(command, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    process.end()
    newest = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[-1]
    with open(newest / "model.safetensors", "r+b") as file:
        file.truncate(100)
    done = run_to_the_end([*command, "--out", str(tmp_path / "run")])
    assert "is damaged" in done.stderr
    assert_equal_runs(straight(PLAIN), tmp_path / "run")
    # Once more: it is finished.
    assert "was finished before" in run_to_the_end([*command, "--out", str(tmp_path / "run")]).stdout
