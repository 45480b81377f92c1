"""The faults of the crash test: while a training runs, and between two commands. crash_test.py chooses among them."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the drivers start as scripts

from processes import alive, descendants

import anechoic.cli.main
import anechoic.cli.train
import anechoic.training.loop  # imported once: a training is a fork of this process
from anechoic.runtime import checkpoint

PATIENCE = 300.0  # seconds; the machine may be busy
BATCH = 16


class OrphanError(AssertionError):
    """A process outlived the command that started it."""


# ---- processes


@dataclass
class Training:
    """A run directory, the command that fills it, and everything that happened to it."""

    command: list[str]
    run: Path
    sources: dict[str, str]
    rng: random.Random
    log: Path
    notes: list[str] = field(default_factory=list)
    others: list[tuple[Training, int]] = field(default_factory=list)
    other_ranks: bool = False  # whether it has run on another number of ranks, so that sums have other last bits

    def start(self, *, clock_jump: float = 0.0, failing_sync: int = 0, ranks: int | None = None) -> int:
        """Fork a process with its own session that runs the command; return its id.

        failing_sync: from this flush to disk on, a few fail as on a full disk. ranks: instead of the command's.
        """
        self.log.write_bytes(b"")  # it may be killed before it opens the file
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            code = self._become_training(clock_jump, failing_sync, ranks)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:  # this copy of the driver must not continue
            os._exit(code)

    def _become_training(self, clock_jump: float, failing_sync: int, ranks: int | None) -> int:
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if clock_jump:
            real, born = time.time, time.time()
            time.time = lambda: real() + (clock_jump if real() - born > 0.5 else 0.0)  # type: ignore[assignment]
        if failing_sync:
            fail_syncs(failing_sync)
        # Ranks need not import the driver as their main module.
        sys.modules["__main__"] = types.ModuleType("__main__")
        count = [] if ranks is None else ["--devices", str(ranks)]
        sys.argv = ["anechoic", "train", *self.command, *count, "--out", str(self.run)]
        try:
            return anechoic.cli.main.main()
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def start_interpreter(self) -> int:
        """Start the command in a new interpreter, as a shell does."""
        line = [sys.executable, "-m", "anechoic.cli.main", "train", *self.command, "--out", str(self.run)]
        with open(self.log, "wb") as log:
            return subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True).pid

    def finish(self, pid: int) -> int:
        """Return its exit code; its subprocesses must exit soon after it."""
        family, looked = descendants(pid), time.monotonic()
        deadline = time.monotonic() + PATIENCE
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > looked + 0.3:  # it reads the whole table of processes
                family |= descendants(pid)
                looked = time.monotonic()
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                raise AssertionError(f"the training hangs\n{self.log.read_text()}")
            time.sleep(0.05)
        deadline = time.monotonic() + 20
        while any(map(alive, family)):
            if time.monotonic() > deadline:
                raise OrphanError(f"{[pid for pid in family if alive(pid)]} outlived the command")
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(status)

    def wait_for_moment(self, pid: int, kind: str | None = None) -> bool:
        """Wait for a random moment: at the start, during a save, after some updates. Return False if it has ended."""
        kind = kind or self.rng.choice(["start", "saving", "progress", "progress"])
        goal = self.seen() + self.rng.randrange(1, 18) * BATCH
        longest = 6.0 if "--devices" in self.command else 0.5  # to start: ranks are no forks and import torch
        until = time.monotonic() + (self.rng.random() * longest if kind == "start" else PATIENCE)
        while time.monotonic() < until:
            if kind == "saving" and any((self.run / "checkpoints").glob(".new-*")):
                break
            if kind == "progress" and self.seen() >= goal:
                break
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
            time.sleep(0.01)
        return True

    def seen(self) -> int:
        found = checkpoint.checkpoints(self.run / "checkpoints")
        return int(found[-1].name) if found else 0


def fail_syncs(first: int, number: int = 3) -> None:
    """Let some calls of fsync fail in this process: every file that is written passes there before it is renamed."""
    sync, calls = os.fsync, 0

    def fail(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if first <= calls < first + number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = fail


# ---- faults while it runs


def send(number: int, *, group: bool = False, times: int = 1) -> Callable[[Training, int], None]:
    def fault(training: Training, pid: int) -> None:
        for repeat in range(times):
            if repeat:
                time.sleep(0.05)
            try:
                (os.killpg if group else os.kill)(pid, number)
            except ProcessLookupError:
                return

    return fault


def kill_a_descendant(training: Training, pid: int) -> None:
    family = sorted(descendants(pid))
    try:
        os.kill(training.rng.choice(family) if family else pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def pause(training: Training, pid: int) -> None:
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.killpg(pid, signal.SIGCONT)


def intrude(training: Training, pid: int) -> None:
    """Start a second process on the same run, which must be refused."""
    other = Training(training.command, training.run, training.sources, training.rng, training.log.with_suffix(".other"))
    code = other.finish(other.start())
    words = other.log.read_text()
    assert code == 0 or (code == 2 and ("is in use by process" in words)), words


def fill_disk(training: Training, pid: int) -> None:
    """Fill the disk for a while."""
    ballast = training.run.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            time.sleep(training.rng.random())
    ballast.unlink()


def make_read_only(training: Training, pid: int) -> None:
    folder = training.run / "checkpoints"
    if not folder.is_dir():
        return
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    time.sleep(training.rng.random())
    subprocess.run(["umount", "-l", folder], check=True)


def change_image(training: Training, pid: int) -> None:
    """Change an image of the folder while it is trained on; its size and time stay."""
    undo = damage_data(training, delete=False)
    time.sleep(0.5 * training.rng.random())
    undo()


WHILE_IT_RUNS: dict[str, Callable[[Training, int], None]] = {
    "SIGKILL to the command": send(signal.SIGKILL),
    "SIGKILL to a rank or worker": kill_a_descendant,
    "SIGKILL to the group": send(signal.SIGKILL, group=True),
    "SIGTERM": send(signal.SIGTERM),
    "SIGTERM to the group": send(signal.SIGTERM, group=True),
    "Ctrl-C": send(signal.SIGINT, group=True),
    "Ctrl-C twice": send(signal.SIGINT, group=True, times=2),
    "SIGSTOP and SIGCONT": pause,
    "a second process": intrude,
    "image changed meanwhile": change_image,
}
WITH_A_DISK_OF_ITS_OWN = {"full disk": fill_disk, "read-only checkpoints": make_read_only}


# ---- faults between two commands: each returns how to undo it where the command must refuse, else None

Undo = Callable[[], None] | None


def damage_file(path: Path, rng: random.Random) -> str:
    kind = rng.choice(["truncated", "flipped", "zeroed", "deleted"])
    data = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        place = rng.randrange(len(data))
        data[place : place + (1 if kind == "flipped" else 64)] = (
            bytes([data[place] ^ 1 << rng.randrange(8)]) if kind == "flipped" else bytes(len(data[place : place + 64]))
        )
        path.write_bytes(bytes(data))
    return f"{path.name} {kind}"


def restoring(path: Path) -> Undo:
    """Return how to restore a file that the run cannot repair."""
    before = path.read_bytes()
    return lambda: path.write_bytes(before) and None


def damage_checkpoint(training: Training) -> Undo:
    newest = checkpoint.checkpoints(training.run / "checkpoints")[-1:]
    files = [path for path in sorted(newest[0].iterdir()) if path.stat().st_size] if newest else []
    if not files:
        return None
    path = training.rng.choice(files)
    undo = restoring(path)
    training.notes.append(damage_file(path, training.rng))
    return undo


def edit_state(training: Training) -> Undo:
    newest = checkpoint.checkpoints(training.run / "checkpoints")[-1:]
    if newest and (newest[0] / "state.json").is_file():
        path = newest[0] / "state.json"
        undo = restoring(path)
        try:
            state = json.loads(path.read_text())
        except ValueError:
            return None  # damaged before
        name = training.rng.choice(sorted(state))
        state[name] = training.rng.choice([None, 5, "text", {}, [1]])
        path.write_text(json.dumps(state))
        training.notes.append(f"{name} edited")
        return undo
    return None


def damage_run_file(training: Training) -> Undo:
    """Damage a file of the run directory; the returned function restores it where the run cannot repair it."""
    names = ["config.json", "env.json", "metrics.jsonl", "results.json", "model/config.json", "model/model.safetensors"]
    present = [training.run / name for name in names if (training.run / name).is_file()]
    if not present:
        return None
    path = training.rng.choice(present)
    undo = restoring(path)
    if path.stat().st_size:
        training.notes.append(damage_file(path, training.rng))
    return undo


def damage_data(training: Training, *, delete: bool = True) -> Callable[[], None]:
    """Delete an image, or change its content at equal size and time."""
    path = Path(training.rng.choice(sorted(Path(training.sources["folder"]).iterdir())))
    before, status, parent = path.read_bytes(), path.stat(), path.parent.stat()
    if delete and training.rng.random() < 0.5:
        path.unlink()
    else:
        path.write_bytes(before[:-20] + bytes([before[-20] ^ 255]) + before[-19:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def undo() -> None:
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.utime(path.parent, ns=(parent.st_atime_ns, parent.st_mtime_ns))

    return undo


def delete_pixel_cache(training: Training) -> Undo:
    """Delete the pixel cache, so that the next fault may come while images are decoded."""
    shutil.rmtree(Path(os.environ["ANECHOIC_CACHE"]) / "pixels", ignore_errors=True)
    return None


def damage_cache(training: Training) -> Undo:
    """Damage a file of the cache, which is made again."""
    files = sorted(path for path in Path(os.environ["ANECHOIC_CACHE"]).rglob("*") if path.is_file())
    files = [path for path in files if path.stat().st_size]
    if files:
        training.notes.append(damage_file(training.rng.choice(files), training.rng))
    return None


def start_another(training: Training) -> Undo:
    """Start the same command at the same moment; one of the two gets the run."""
    other = Training(training.command, training.run, training.sources, training.rng, training.log.with_suffix(".other"))
    training.others.append((other, other.start()))
    return None


BETWEEN: dict[str, Callable[[Training], Undo]] = {
    "checkpoint file damaged": damage_checkpoint,
    "state.json edited": edit_state,
    "run file damaged": damage_run_file,
    "image changed or lost": damage_data,
    "pixel cache deleted": delete_pixel_cache,
    "cache file damaged": damage_cache,
    "two commands at once": start_another,
}
# Faults of the images in a folder, for trainings from it.
OF_THE_FOLDER = ("image changed or lost", "image changed meanwhile")
# Killed on the command's ranks, resumed on another number of them and killed again; for trainings that accumulate.
OTHER_RANKS = "another number of ranks"
