"""A run directory: its lock outlives nobody, its metrics survive cut lines and full disks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

import anechoic.runtime.run
from anechoic.errors import UserError
from anechoic.runtime.checkpoint import is_good
from anechoic.runtime.run import Run, holder, read_metrics
from anechoic.storage import files
from anechoic.storage.files import _delete as delete
from anechoic.storage.files import read_json, write_aside, write_json
from anechoic.training.doctor import ending

HOLD = """
import sys, time
from anechoic.runtime.run import Run
run = Run(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(anechoic.runtime.run, "PATIENCE", 0.0)


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on .*: wait for it or choose another"):
            Run(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with Run(tmp_path):
        pass


def test_a_run_is_free_again_after_it_is_closed(tmp_path):
    for _ in range(2):
        with Run(tmp_path / "run"), pytest.raises(UserError, match=f"process {os.getpid()}"):
            Run(tmp_path / "run")


def test_waits_a_moment_for_a_process_that_is_going(tmp_path, monkeypatch):
    monkeypatch.setattr(anechoic.runtime.run, "PATIENCE", 60.0)
    code = HOLD.replace("time.sleep(600)", "time.sleep(0.5)")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with Run(tmp_path):
        assert holder.wait() == 0
    holder.stdout.close()


def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Run(tmp_path / "file")


def test_json_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": 2, "y": object()})
    assert read_json(path) == {"x": 1}
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(path)


def records(*seen):
    return [{"kind": "train", "seen": value, "loss": 1 / (value + 1)} for value in seen]


def test_metrics_are_appended_and_rewound(tmp_path):
    with Run(tmp_path) as run:
        for record in records(8, 16, 24, 32):
            run.append(record)
        run.rewind(16)
        assert read_metrics(tmp_path) == records(8, 16)
        run.append(*records(24))
    with Run(tmp_path) as run:
        run.append(*records(32))
    assert read_metrics(tmp_path) == records(8, 16, 24, 32)


def test_a_cut_line_is_dropped(tmp_path):
    with Run(tmp_path) as run:
        for record in records(8, 16):
            run.append(record)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "se')
    assert read_metrics(tmp_path) == records(8, 16)
    with Run(tmp_path) as run:
        run.rewind(16)
        run.append(*records(24))
    assert [json.loads(line) for line in path.read_text().splitlines()] == records(8, 16, 24)


def test_rewinding_an_empty_run_is_nothing(tmp_path):
    with Run(tmp_path) as run:
        run.rewind(100)
        assert read_metrics(tmp_path) == []


def test_run_without_a_checkpoint_restarts_its_metrics(tmp_path):
    with Run(tmp_path) as run:
        for record in records(0, 8):
            run.append(record)
        run.rewind(None)
        run.append(*records(0))
    assert read_metrics(tmp_path) == records(0)


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"kind": "train"}\n', b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_damaged_line_is_named(tmp_path, line):
    with Run(tmp_path) as run:
        run.append(*records(8))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(UserError, match=r"Line 2 of .*metrics.jsonl is damaged: restore"):
        read_metrics(tmp_path)


def test_metrics_that_were_changed_are_not_gone_on_with(tmp_path):
    """A checkpoint knows the records before it, times aside; what comes after it is written again, damaged or not."""
    with Run(tmp_path) as run:
        for record in records(8, 16):
            run.append({**record, "seconds": 0.5})
        digest = run.metrics_digest
        run.append(*records(24))
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0.5", b"0.7") + b"nonsense\n")
    with Run(tmp_path) as run:
        run.rewind(16, digest=digest)
        assert run.metrics_digest == digest
        assert [record["seen"] for record in read_metrics(tmp_path)] == [8, 16]
    for damaged in (b"", content.splitlines(keepends=True)[1], content.replace(b": 8", b": 9"), content[:20]):
        path.write_bytes(damaged)
        with Run(tmp_path) as run, pytest.raises(UserError, match="is not what this run wrote up to 16 samples"):
            run.rewind(16, digest=digest)
        assert path.read_bytes() == damaged


def test_leftovers_of_a_killed_process_are_swept(tmp_path):
    (tmp_path / "checkpoints" / ".new-12345678-000000000064").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".old-12345678-000000000032").mkdir()
    (tmp_path / ".new-12345678-config.json").write_text("{")
    (tmp_path / ".new-12345678-model").mkdir()
    (tmp_path / "mine.txt").write_text("")
    with Run(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".owner", "checkpoints", "mine.txt"]
        assert not list((tmp_path / "checkpoints").iterdir())
        # A disk that was read-only for a while has kept what a save could not delete.
        (tmp_path / "checkpoints" / ".new-12345678-000000000096").mkdir()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_directory_stays_until_another_has_its_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "model", []
    for content in ("first", "second"):
        monkeypatch.setattr(files, "_delete", lambda doomed: seen.append((path / "file").read_text()) or delete(doomed))
        with write_aside(path, folder=True) as temporary:
            (temporary / "file").write_text(content)
    assert seen == ["second"]

    def refuse(*paths):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Input/output"), write_aside(path, folder=True) as temporary:
        (temporary / "file").write_text("third")
    assert (path / "file").read_text() == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_was_about_to_be_replaced_comes_back(tmp_path):
    """A process was killed between the two renames, or behind them."""
    for name in (".was-12345678-model", ".was-12345678-other", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with Run(tmp_path):
        assert (tmp_path / "model" / "file").read_text() == ".was-12345678-model"
        assert (tmp_path / "other" / "file").read_text() == "other"
        assert not list(tmp_path.glob(".was-*"))


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text('{"a"')])
def test_a_lost_config_comes_back_from_its_copy(tmp_path, damage):
    with Run(tmp_path) as run:
        run.start({"a": 1})
    damage(tmp_path / "config.json")
    with Run(tmp_path) as run:
        assert run.read_config() == {"a": 1}
        run.start({"a": 1})
    assert read_json(tmp_path / "config.json") == {"a": 1}


def test_a_changed_config_is_refused(tmp_path):
    with Run(tmp_path) as run:
        run.start({"a": 1})
        write_json(tmp_path / "config.json", {"a": 2})
        with pytest.raises(UserError, match=r"is not what the run was started with: put back"):
            run.read_config()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"starts": 5, "checksum": "0"}'])
def test_damaged_environment_is_replaced(tmp_path, content, caplog):
    with Run(tmp_path) as run:
        run.start({"a": 1})
        (tmp_path / "env.json").write_bytes(content)
        run.start({"a": 1})
    assert "env.json is damaged; a new one is started" in caplog.text
    assert len(read_json(tmp_path / "env.json")["starts"]) == 1


FULL = """
import resource, sys
from anechoic.runtime.run import Run, read_metrics
with Run(sys.argv[1]) as run:
    run.append({"kind": "train", "seen": 1})
    size = (run.path / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, resource.RLIM_INFINITY))
    run.append({"kind": "train", "seen": 2})
    run.append({"kind": "train", "seen": 3})
    assert [r["seen"] for r in read_metrics(run.path)] == [1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.append({"kind": "train", "seen": 4})
"""


def test_lines_that_do_not_fit_wait_for_room(tmp_path):
    """The system refuses to let the file grow in the middle of a line, and later allows it."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the run continues and will try again" in done.stderr
    assert [record["seen"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_config_is_frozen_at_the_first_start(tmp_path):
    with Run(tmp_path) as run:
        assert run.read_config() is None
        run.start({"a": 1})
        run.start({"a": 2})
        assert run.read_config() == {"a": 1}
    environment = read_json(tmp_path / "env.json")
    assert len(environment["starts"]) == 2
    assert environment["machine"]["cores"] >= 1
    assert time.strptime(environment["starts"][0]["time"], "%Y-%m-%dT%H:%M:%S%z")


def test_skipped_images_are_listed_once(tmp_path, caplog):
    with Run(tmp_path) as run:
        run.list_skipped([])
        assert not (tmp_path / "skipped.json").exists()
        run.list_skipped([("a.jpg", "cut short")])
        run.list_skipped([("a.jpg", "cut short")])
    assert read_json(tmp_path / "skipped.json") == [{"name": "a.jpg", "reason": "cut short"}]
    assert len(caplog.records) == 1
    with Run(tmp_path) as run:  # resumes, and meets only some of them again
        run.list_skipped([("b.jpg", "empty")])
        run.list_skipped([("b.jpg", "empty"), ("a.jpg", "cut short")])
    assert [item["name"] for item in read_json(tmp_path / "skipped.json")] == ["a.jpg", "b.jpg"]
    (tmp_path / "skipped.json").write_text('{"a.jpg": 1}')
    with Run(tmp_path) as run:
        run.list_skipped([("c.jpg", "empty")])
    assert read_json(tmp_path / "skipped.json") == [{"name": "c.jpg", "reason": "empty"}]
    assert "is damaged" in caplog.text


# ---- links in a run directory of another person


@pytest.mark.parametrize("name", [".lock", ".owner", "metrics.jsonl", "resumed.log"])
def test_run_with_a_link_to_another_file_is_refused(tmp_path, name):
    """It would be written to, or cut to length 0."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"is a link, and writing to it would change another file: remove it\.$"):
        Run(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"


def test_endless_files_of_a_run_are_refused(tmp_path):
    for name in ("metrics.jsonl", "results.json"):
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(not a regular file\)"):
        read_metrics(tmp_path)
    (found,) = ending(tmp_path)
    assert (found.state, "not a regular file" in found.found) == ("problem", True)
    (tmp_path / "000000000064").mkdir()
    (tmp_path / "000000000064" / "state.json").symlink_to("/dev/zero")
    assert not is_good(tmp_path / "000000000064")
    with FileLock(tmp_path / ".lock"):
        (tmp_path / ".owner").symlink_to("/dev/zero")
        assert holder(tmp_path) is None


def test_holder_of_a_deleted_run_creates_nothing(tmp_path):
    assert holder(tmp_path / "run") is None
    assert not (tmp_path / "run").exists()
