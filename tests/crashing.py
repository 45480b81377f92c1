"""The crash test: faults from a printed seed injected into real trainings, which must end as if nothing had happened.

`python tests/crashing.py --faults 200 --trainings 30 --seed 1`. After every fault the same command is given again; at
the end weights, optimiser, averages and metrics (times aside) must equal those of an undisturbed run, byte for byte.
Where equality cannot be, the command must refuse in one sentence; then what was damaged is put back.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet
import sklearn.datasets  # noqa: F401
from PIL import Image

import anechoic.api.training
import anechoic.cli
import anechoic.train.engine  # all once, here: a training is a fork of this process and starts at once
from anechoic.runtime import checkpoint
from anechoic.runtime.run import CLOCK_FIELDS, read_metrics

STEPS, BATCH = 90, 16
PATIENCE = 300.0  # seconds; the machine may be busy
TINY = ["--model.options", "dim=16", "depth=2", "num_heads=2"]
MAE = ["pocket_mae_digits", *TINY, "decoder_dim=16", "decoder_depth=1"]
UVIT = ["pocket_uvit_digits_cond", *TINY]
SETTINGS = [
    *("--seed", "3", "--threads", "1", "--monitor.knn", "0", "--optim.ema", "0.99", "--optim.batch-size", str(BATCH)),
    *("--optim.epochs", "None", "--optim.samples", str(STEPS * BATCH)),
    # Reports, looks at held-out samples and checkpoints at points that do not coincide.
    *("--monitor.report", str(7 * BATCH), "--monitor.every", str(25 * BATCH), "--save.every", str(6 * BATCH)),
]
FILES = ["--data.channels", "1", "--data.image-size", "8", "--data.holdout", "6"]
IMAGES = 64


# ---- what is trained


def make_data(root: Path) -> dict[str, str]:
    """The same images as a folder, a parquet file and shards."""
    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(IMAGES):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (12, 12), dtype=np.uint8)).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    folder = root / "images"
    folder.mkdir(parents=True)
    for number, data in enumerate(encoded):
        (folder / f"{number:02d}.png").write_bytes(data)
    pyarrow.parquet.write_table(pyarrow.table({"image": encoded}), root / "images.parquet")
    for shard in range(2):
        with tarfile.open(root / f"shard-{shard}.tar", "w") as archive:
            for number in range(shard * IMAGES // 2, (shard + 1) * IMAGES // 2):
                info = tarfile.TarInfo(f"{number:02d}.png")
                info.size = len(encoded[number])
                archive.addfile(info, io.BytesIO(encoded[number]))
    return {"folder": str(folder), "parquet": str(root / "images.parquet"), "shards": str(root / "shard-{0..1}.tar")}


def scenarios(sources: dict[str, str]) -> dict[str, list[str]]:
    parts = ["--optim.accumulate", "2"]
    return {
        "mae": [*MAE, *SETTINGS],
        "mae, folder, workers": [*MAE, *SETTINGS, *FILES, "--data.source", sources["folder"], "--data.workers", "2"],
        "u-vit, parts": [*UVIT, *SETTINGS, *parts],
        "mae, parquet": [*MAE, *SETTINGS, *FILES, "--data.source", sources["parquet"], *parts],
        "mae, shards, worker": [*MAE, *SETTINGS, *FILES, "--data.source", sources["shards"], "--data.workers", "1"],
        "mae, 2 processes": [*MAE, *SETTINGS, *parts, "--devices", "2"],
        "u-vit, 2 processes": [*UVIT, *SETTINGS, "--devices", "2"],
    }


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

    def start(self, *, clock_jump: float = 0.0) -> int:
        """A process of its own session that gives the command; its id."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            code = self._become_training(clock_jump)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:  # whatever happens, this copy of the driver goes no further
            os._exit(code)

    def _become_training(self, clock_jump: float) -> int:
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if clock_jump:
            real, born = time.time, time.time()
            time.time = lambda: real() + (clock_jump if real() - born > 0.5 else 0.0)  # type: ignore[assignment]
        sys.argv = ["anechoic", "train", *self.command, "--out", str(self.run)]
        try:
            return anechoic.cli.main()
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def started_anew(self) -> int:
        """The command in a fresh interpreter, as a person gives it."""
        line = [sys.executable, "-m", "anechoic.cli", "train", *self.command, "--out", str(self.run)]
        with open(self.log, "wb") as log:
            return subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True).pid

    def finish(self, pid: int) -> int:
        """Its exit code; nobody whom it started outlives it for long."""
        family = descendants(pid)
        deadline = time.monotonic() + PATIENCE
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            family |= descendants(pid)
            assert time.monotonic() < deadline, f"the training hangs\n{self.log.read_text()}"
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while any(map(alive, family)):
            assert time.monotonic() < deadline, f"orphans: {[pid for pid in family if alive(pid)]}"
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(status)

    def seen(self) -> int:
        found = checkpoint.checkpoints(self.run / "checkpoints")
        return int(found[-1].name) if found else 0


def descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    todo = {pid}
    while todo:
        todo = {child for child, parent in parents.items() if parent in todo} - found
        found |= todo
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- when


def wait_for_moment(training: Training, pid: int) -> bool:
    """Wait for a random moment: while it starts, while it saves, or after some updates. False: it is over."""
    kind = training.rng.choice(["start", "saving", "progress", "progress"])
    goal = training.seen() + training.rng.randrange(1, 18) * BATCH
    until = time.monotonic() + (training.rng.random() * 0.5 if kind == "start" else PATIENCE)
    while time.monotonic() < until:
        if kind == "saving" and any((training.run / "checkpoints").glob(".new-*")):
            break
        if kind == "progress" and training.seen() >= goal:
            break
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        time.sleep(0.001)
    return True


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
    """A second process on the same run: refused, and it disturbs nobody."""
    other = Training(training.command, training.run, training.sources, training.rng, training.log.with_suffix(".other"))
    code = other.finish(other.start())
    words = other.log.read_text()
    assert code == 0 or (code == 2 and ("is in use by process" in words)), words


def fill_disk(training: Training, pid: int) -> None:
    """Not a byte is left for a while."""
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
    """For a run that has nothing else left to go on from."""
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
    """config.json, env.json, metrics.jsonl, results.json or a file of model/; what the run cannot mend is put back."""
    names = ["config.json", "env.json", "metrics.jsonl", "results.json", "model/config.json", "model/model.safetensors"]
    present = [training.run / name for name in names if (training.run / name).is_file()]
    if not present:
        return None
    path = training.rng.choice(present)
    undo = restoring(path)
    if path.stat().st_size:
        training.notes.append(damage_file(path, training.rng))
    return undo


def damage_data(training: Training) -> Undo:
    """An image is lost, or has other content at equal size and time."""
    path = Path(training.rng.choice(sorted(Path(training.sources["folder"]).iterdir())))
    before, status, parent = path.read_bytes(), path.stat(), path.parent.stat()
    if training.rng.random() < 0.5:
        path.unlink()
    else:
        path.write_bytes(before[:-20] + bytes([before[-20] ^ 255]) + before[-19:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def undo() -> None:
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.utime(path.parent, ns=(parent.st_atime_ns, parent.st_mtime_ns))

    return undo


def forget_pixels(training: Training) -> Undo:
    """Everything has to be decoded again, so that the next fault may come while it is."""
    shutil.rmtree(Path(os.environ["ANECHOIC_CACHE"]) / "pixels", ignore_errors=True)
    return None


BETWEEN: dict[str, Callable[[Training], Undo]] = {
    "checkpoint file damaged": damage_checkpoint,
    "state.json edited": edit_state,
    "run file damaged": damage_run_file,
    "image changed or lost": damage_data,
    "pixels forgotten": forget_pixels,
}


# ---- one training


def is_refusal(code: int, words: str) -> bool:
    told = [line for line in words.splitlines() if line.startswith("anechoic: ")]
    return code == 2 and len(told) == 1 and "Traceback" not in words


def disturb(training: Training, name: str) -> str:
    """Inject one fault and give the command; says how that ended."""
    undo: Undo = None
    jump = training.rng.choice([-86_400.0, 86_400.0]) if name == "clock jump" else 0.0
    if name in BETWEEN:
        undo = BETWEEN[name](training)
    fresh = name == "SIGKILL to the command" and training.rng.random() < 0.2
    pid = training.started_anew() if fresh else training.start(clock_jump=jump)
    running = {**WHILE_IT_RUNS, **WITH_A_DISK_OF_ITS_OWN}.get(name)
    hit = wait_for_moment(training, pid)
    if running is not None and hit:
        running(training, pid)
    elif running is None and hit:
        os.kill(pid, signal.SIGTERM)  # so that there is a training left to disturb
    code, words = training.finish(pid), training.log.read_text()
    if undo is not None and code == 2:
        assert is_refusal(code, words), words
        undo()
        return "refused"
    expected = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    told = is_refusal(code, words) and ("was ended by" in words or "was ended from outside" in words)
    full = is_refusal(code, words) and name in WITH_A_DISK_OF_ITS_OWN
    assert code in expected or told or full, f"{name}: exit code {code}\n{words}"
    assert "Traceback" not in words, f"{name}\n{words}"
    return "went on" if code == 0 else "ended"


def content(run: Path) -> dict[str, object]:
    """What must be equal: every byte of the last checkpoint and of the weights, every record without its times."""
    last = checkpoint.checkpoints(run / "checkpoints")[-1]
    files = [*sorted(last.iterdir()), run / "model" / "model.safetensors", run / "model" / "config.json"]
    records = [{k: v for k, v in r.items() if k not in CLOCK_FIELDS} for r in read_metrics(run)]
    return {"checkpoint": last.name, "metrics": records, **{f"{f.parent.name}/{f.name}": f.read_bytes() for f in files}}


def compare(training: Training, expected: dict[str, object], faults: list[str]) -> None:
    found = content(training.run)
    different = [key for key in expected if found.get(key) != expected[key]]
    assert not different, f"after {faults}, {training.notes}: {different} differ\n{training.log.read_text()}"
    assert not leftovers(training.run), leftovers(training.run)


def leftovers(run: Path) -> list[str]:
    found = [str(path) for path in run.rglob(".*") if path.name.startswith((".new-", ".old-", ".owner"))]
    cache = Path(os.environ["ANECHOIC_CACHE"])
    return found + [str(path) for path in cache.rglob("*.unfinished")] if cache.is_dir() else found


def crash_test(*, faults: int, trainings: int, seed: int, work: Path, own_disks: bool) -> Counter[str]:
    """Spread the faults over the trainings; how often each was injected. AssertionError where something broke."""
    rng = random.Random(seed)
    os.environ["ANECHOIC_CACHE"] = str(work / "cache")
    sources = make_data(work / "data")
    plans = scenarios(sources)
    straight: dict[str, dict[str, object]] = {}
    names = [*WHILE_IT_RUNS, *BETWEEN, "clock jump", *(WITH_A_DISK_OF_ITS_OWN if own_disks else {})]
    queue = [names[k % len(names)] for k in range(faults)]
    rng.shuffle(queue)
    tally: Counter[str] = Counter()
    for number in range(trainings):
        plan = list(plans)[number % len(plans)]
        disk = work / f"training-{number}"
        disk.mkdir()
        if own_disks:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk], check=True)
        training = Training(plans[plan], disk / "run", sources, rng, work / f"training-{number}.log")
        if plan not in straight:
            undisturbed = Training(plans[plan], work / f"straight-{len(straight)}", sources, rng, training.log)
            assert undisturbed.finish(undisturbed.start()) == 0, training.log.read_text()
            straight[plan] = content(undisturbed.run)
        share = queue[number * faults // trainings : (number + 1) * faults // trainings]
        for name in share:
            if name == "image changed or lost" and "folder" not in plan:
                name = "checkpoint file damaged"
            try:
                outcome = disturb(training, name)
            except AssertionError as problem:
                raise AssertionError(f"training {number} ({plan}), {name}, {training.notes}: {problem}") from problem
            tally[f"{name}: {outcome}"] += 1
            if (training.run / "results.json").exists() and name != share[-1]:
                compare(training, straight[plan], share)  # it was faster than the fault; the next one meets a new run
                shutil.rmtree(training.run)
                tally["trainings"] += 1
        assert training.finish(training.start()) == 0, f"{plan} after {share}\n{training.log.read_text()}"
        compare(training, straight[plan], share)
        tally["trainings"] += 1
        print(f"training {number + 1} of {trainings}, {plan}: {len(share)} faults, equal", flush=True)
        if own_disks:
            subprocess.run(["umount", "-l", disk], check=True)
    return tally


def may_mount() -> bool:
    """Whether this process is in a mount namespace of its own, where it may fill disks."""
    return os.environ.get("ANECHOIC_OWN_DISKS") == "1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--trainings", type=int, default=35)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    namespace = ["unshare", "--map-root-user", "--mount"]
    allowed = subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    if not may_mount() and allowed.returncode == 0:
        os.environ["ANECHOIC_OWN_DISKS"] = "1"
        os.execvp("unshare", [*namespace, sys.executable, *sys.argv, "--seed", str(options.seed)])
    print(f"seed {options.seed}, {options.faults} faults over {options.trainings} trainings", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        tally = crash_test(**vars(options), work=Path(work), own_disks=may_mount())
    ended = tally.pop("trainings")
    for name in sorted(tally):
        print(f"{tally[name]:4d}  {name}")
    seconds = time.monotonic() - started
    print(f"{tally.total()} faults in {ended} trainings, all equal or refused in a sentence; {seconds:.0f} s")


if __name__ == "__main__":
    main()
