"""Children end with their parent, whatever ends it, and get the time to save where there is any."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE = 600
# A parent with two subprocesses; each prints when it runs and when it is asked to stop. Last argument: how they react.
PARENT = """if True:
    import sys, time
    from anechoic.runtime.subprocesses import Subprocesses
    child = '''
import os, signal, sys, time
from pathlib import Path
from anechoic.runtime.subprocesses import exit_when_parent_exits
exit_when_parent_exits()
note = Path(sys.argv[1])
def stop(number, frame):
    note.with_suffix(".asked").touch()
    if sys.argv[2] == "saves":
        time.sleep(0.3)
        note.with_suffix(".saved").touch()
        os._exit(0)
signal.signal(signal.SIGTERM, stop)
note.write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
'''
    with Subprocesses() as children:
        for name in "ab":
            children.start([sys.executable, "-c", child, f"{sys.argv[1]}/{name}.pid", sys.argv[2]])
        while children.running:
            children.check()
            time.sleep(0.05)
"""


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def family(tmp_path):
    """(how children answer) -> the parent once both children run, and their process ids."""
    started = []

    def start(answer):
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), answer], start_new_session=True)
        started.append(parent)
        notes = [tmp_path / f"{name}.pid" for name in "ab"]
        wait_until(lambda: all(note.exists() and note.read_text() for note in notes), "both children run")
        return parent, [int(note.read_text()) for note in notes]

    yield start
    for parent in started:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_child_save(tmp_path, family, number):
    """Ctrl-C, which a terminal sends to the whole group, reaches the children once, by way of their parent."""
    parent, children = family("saves")
    os.killpg(parent.pid, number)
    assert parent.wait(PATIENCE) == 128 + number
    assert not any(map(alive, children))
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["a.saved", "b.saved"]


def test_a_second_signal_ends_children_that_do_not_answer(tmp_path, family):
    parent, children = family("never")
    parent.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("*.asked"))) == 2, "both are asked")
    time.sleep(0.3)
    assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    assert parent.wait(PATIENCE) == 128 + signal.SIGINT
    assert not any(map(alive, children))


def test_children_of_a_killed_parent_save_and_end(tmp_path, family):
    parent, children = family("saves")
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(alive, children)), "the children are gone")
    assert len(list(tmp_path.glob("*.saved"))) == 2


def test_a_child_that_finds_its_parent_gone_ends_at_once():
    """Its parent died while it was being started, so the system has given it another one."""
    code = "from anechoic.runtime.subprocesses import exit_when_parent_exits as end; end(); print('alive')"
    environment = {**os.environ, "ANECHOIC_PARENT": str(2**22 - 1)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
