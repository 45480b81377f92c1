"""Fault injection into trainings: no process is left behind, nothing is lost, one sentence is printed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from damage import flip_a_bit
from processes import PATIENCE, Command, alive, descendants, parent_of, run_to_the_end, wait_until
from tiny_runs import BATCH, PARTS, TWO, command_for, start, tiny_config

from anechoic.config import SaveConfig
from anechoic.data.loader import naming_killed_workers
from anechoic.errors import UserError
from anechoic.runtime.run import read_metrics
from anechoic.training.checkpointing import Checkpointer
from anechoic.training.loop import fit

# ---- processes


@pytest.mark.slow
def test_a_launcher_killed_while_its_ranks_start_leaves_no_orphans(tmp_path):
    """They are still importing torch then, and must not mistake the process that adopts them for their launcher."""
    process = Command([*command_for(TWO), "--out", str(tmp_path / "run")])
    wait_until(lambda: len(descendants(process.pid)) >= 2, "the ranks are being started")
    time.sleep(random.random() / 2)
    children = descendants(process.pid)
    process.kill()
    process.end()
    wait_until(lambda: not any(map(alive, children)), "all processes of the killed launcher are gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [(TWO, "was ended by SIGKILL"), (PARTS, "that decodes images was killed")],
    ids=["rank", "worker"],
)
def test_a_killed_process_is_one_sentence(tmp_path, more, words):
    for attempt in range(5):
        out = tmp_path / f"run-{attempt}"
        process = start(command_for(more), out)
        everybody = descendants(process.pid)
        own = [pid for pid in everybody if parent_of(pid) == process.pid]
        trackers = [pid for pid in own if "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(random.choice([pid for pid in own if pid not in trackers]), signal.SIGKILL)
        output = process.end().stderr
        if not (out / "results.json").exists():
            break
    else:
        pytest.fail("the run always ended before the kill")
    messages = [line for line in output.splitlines() if line.startswith("anechoic: ")]
    assert process.returncode == 2, output
    assert len(messages) == 1
    assert words in messages[0]
    assert "Traceback" not in output
    wait_until(lambda: not any(map(alive, everybody)), "all are gone")


@pytest.mark.slow
def test_killed_worker_is_reported_once():
    """torch's handler would raise once more, out of whatever the exiting program is doing."""
    before = signal.signal(signal.SIGCHLD, lambda *_: pytest.fail("heard of it twice"))
    try:
        with pytest.raises(UserError, match="was killed"), naming_killed_workers():
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        subprocess.run([sys.executable, "-c", ""], check=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_still_saves(tmp_path):
    """As a batch system sends it: the workers get it too, and the run needs them to end its update."""
    for attempt in range(5):
        out = tmp_path / f"run-{attempt}"
        process = start(command_for(PARTS), out)
        os.killpg(process.pid, signal.SIGTERM)
        output = process.end().stderr
        if not (out / "results.json").exists():
            break
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "the same command resumes" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tmp_path):
    """While it waits for a lock, say, or for a save to a disk that hangs."""
    code = (
        "import os, signal, time\n"
        "from anechoic.runtime.signals import catch_signals\n"
        "with catch_signals() as stop:\n"
        "    stop.in_loop = True\n"
        "    print('ready', flush=True)\n"
        "    while not stop.asked:\n"
        "        time.sleep(0.01)\n"
        "    print('asked', flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 128 + signal.SIGINT
    process.stdout.close()


@pytest.mark.slow
def test_a_killed_demo_leaves_no_training_running(tmp_path):
    process = Command(["demo", "--out", str(tmp_path), "--samples", "2000000"])
    wait_until(lambda: len(descendants(process.pid)) >= 2, "both trainings are started")
    time.sleep(random.random() * 6)
    children = descendants(process.pid)
    process.kill()
    process.end()
    wait_until(lambda: not any(map(alive, children)), "the trainings have saved and are gone")


SMALL_SHM = """
import subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", "/dev/shm"], check=True)
sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
"""


@pytest.mark.slow
def test_little_shared_memory_is_said_and_costs_only_time(tmp_path):
    """Containers often have little of it, and touching more than there is ends a process without a word."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run(
        [*namespace, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode:
        pytest.skip("this system does not let a test mount a file system of its own")
    command = [
        sys.executable,
        "-c",
        SMALL_SHM,
        sys.executable,
        "-m",
        "anechoic.cli.main",
        *command_for(TWO),
        "--optim.samples",
        str(20 * 16),
        "--out",
    ]
    done = subprocess.run([*namespace, *command, str(tmp_path / "small")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Shared memory is too small for the gradients" in done.stderr
    assert "images are decoded without workers" in done.stderr
    run_to_the_end([*command_for(TWO), "--optim.samples", str(20 * 16), "--out", str(tmp_path / "usual")])
    small, usual = (read_metrics(tmp_path / name) for name in ("small", "usual"))
    assert [record["loss"] for record in small if record["kind"] == "train"] == pytest.approx(
        [record["loss"] for record in usual if record["kind"] == "train"], rel=1e-5
    )


# ---- the files of a run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, to be copied and damaged."""
    path = tmp_path_factory.mktemp("whole") / "run"
    fit(tiny_config(steps=4, save=SaveConfig(every=2 * BATCH)), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_a_bit, os.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "results.json"])
def test_a_damaged_end_is_written_again(tmp_path, whole, name, damage, caplog):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    damage(run / name)
    results = fit(tiny_config(steps=4, save=SaveConfig(every=2 * BATCH)), run)
    assert results["metrics"]["loss"] == read_metrics(whole)[-1].get("loss", results["metrics"]["loss"])
    for file in ("model/model.safetensors", "model/config.json", "metrics.jsonl"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()
    if (name, damage) != ("results.json", os.unlink):
        assert "was damaged" in caplog.text
    assert fit(tiny_config(steps=4, save=SaveConfig(every=2 * BATCH)), run) == results


@pytest.mark.slow
def test_a_damaged_end_without_checkpoints_is_refused(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints")
    fit(tiny_config(steps=4, save=SaveConfig(every=2 * BATCH)), run)
    flip_a_bit(run / "model" / "model.safetensors")
    with pytest.raises(UserError, match=r"is not what was written\) and has no final"):
        fit(tiny_config(steps=4, save=SaveConfig(every=2 * BATCH)), run)


@pytest.mark.slow
def test_a_crash_before_the_first_checkpoint_repeats_no_line(tmp_path, monkeypatch):
    config = tiny_config(steps=4, save=SaveConfig(every=100 * BATCH))
    fit(config, tmp_path / "straight")

    def crash(*args, **values):
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", crash)  # the first save is that of the end: everything before it is lost
        with pytest.raises(RuntimeError, match="a defect"):
            fit(config, tmp_path / "run")
    assert read_metrics(tmp_path / "run")
    fit(config, tmp_path / "run")
    lines = [[(r["kind"], r["seen"]) for r in read_metrics(tmp_path / name)] for name in ("straight", "run")]
    assert lines[0] == lines[1]
