"""The crash test: faults from a printed seed are injected into real trainings, which must end as if undisturbed.

`make crash-test` runs it. After every fault the same command runs again. At the end weights, optimizer state, EMA
and metrics (times aside) must equal those of an undisturbed run, byte for byte.
Where equality is impossible, the command must refuse with one sentence; then the damage is undone. A failed training is
reported, and the next one begins. Then all commands that write run on full disks (full_disk.py).
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet
import safetensors.torch
import sklearn.datasets  # noqa: F401
import torch
from faults import (
    BATCH,
    BETWEEN,
    OF_THE_FOLDER,
    OTHER_RANKS,
    WHILE_IT_RUNS,
    WITH_A_DISK_OF_ITS_OWN,
    OrphanError,
    Training,
    Undo,
)
from full_disk import full_disks
from PIL import Image

from anechoic.runtime import checkpoint
from anechoic.runtime.run import CLOCK_FIELDS, read_metrics
from anechoic.storage.files import read_json

STEPS = 90
TINY = ["--model.options", "dim=16", "depth=2", "num_heads=2"]
MAE = ["pocket_mae_digits", *TINY, "decoder_dim=16", "decoder_depth=1"]
UVIT = ["pocket_uvit_digits_cond", *TINY]
SETTINGS = [
    *("--seed", "3", "--threads", "1", "--validation.knn", "0", "--optim.ema", "0.95"),
    *("--optim.batch-size", str(BATCH), "--optim.epochs", "None", "--optim.samples", str(STEPS * BATCH)),
    # Reports, validations and checkpoints at points that do not coincide.
    *("--validation.report", str(7 * BATCH), "--validation.every", str(25 * BATCH), "--save.every", str(6 * BATCH)),
]
FILES = ["--data.channels", "1", "--data.image-size", "8", "--data.holdout", "6"]
IMAGES = 64
# Faults for any training.
RUN_FAULTS = [name for name in (*WHILE_IT_RUNS, *BETWEEN) if name not in OF_THE_FOLDER]
# Relative difference of weights and metrics that sums in another order may reach after all updates.
ROUNDING = 2e-4


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
        "mae, 2 processes, sharded": [*MAE, *SETTINGS, "--devices", "2", "--fsdp"],
    }


# ---- one training


def is_refusal(code: int, words: str) -> bool:
    """Return whether it ended with one sentence; warnings of a run that continued come before it."""
    spoken = [line for line in words.splitlines() if line.startswith("anechoic: ")]
    errors = [line for line in spoken if "the run continues" not in line]
    return code == 2 and len(errors) == 1 and "Traceback" not in words


def begin(training: Training, end: str) -> None:
    """Run the command until it has made progress."""
    pid = training.start()
    if training.wait_for_moment(pid, "progress"):
        WHILE_IT_RUNS[end](training, pid)
    training.finish(pid)


def disturb(training: Training, name: str) -> str:
    """Inject one fault, run the command, and return how it ended."""
    undo: Undo = None
    jump = training.rng.choice([-86_400.0, 86_400.0]) if name == "clock jump" else 0.0
    if name in OF_THE_FOLDER and not training.seen():  # changed before the start, it would be the run's data
        begin(training, "SIGTERM")
    if name in BETWEEN:
        undo = BETWEEN[name](training)
    failing = training.rng.randrange(1, 60) if name == "flush to disk fails" else 0
    ranks = None
    if name == OTHER_RANKS:
        begin(training, "SIGKILL to the group")
        ranks, training.other_ranks = 1 if "--devices" in training.command else 2, True
    fresh = name == "SIGKILL to the command" and training.rng.random() < 0.2
    pid = training.start_interpreter() if fresh else training.start(clock_jump=jump, failing_sync=failing, ranks=ranks)
    running = {**WHILE_IT_RUNS, **WITH_A_DISK_OF_ITS_OWN}.get(name)
    # A damaged file must be read before the command is stopped.
    hit = training.wait_for_moment(pid, "progress" if name == OTHER_RANKS or undo is not None else None)
    if running is not None and hit:
        running(training, pid)
    elif running is None and hit:
        os.kill(pid, signal.SIGTERM)  # so that there is a training left to disturb
    code, words = training.finish(pid), training.log.read_text()
    while training.others:
        other, number = training.others.pop()
        assert_one_of_two(other.finish(number), other.log.read_text())
        if "is in use by process" in words:  # the other one was first
            assert is_refusal(code, words), words
            return "refused"
    refused = undo is not None and code == 2
    if undo is not None and (refused or name == "image changed or lost"):
        undo()  # a run repairs its own files, never the images
    if refused:
        assert is_refusal(code, words), words
        return "refused"
    expected = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    killed = is_refusal(code, words) and ("was ended by" in words or "was killed" in words)
    full = is_refusal(code, words) and (name in WITH_A_DISK_OF_ITS_OWN or name == "flush to disk fails")
    changed = is_refusal(code, words) and name == "image changed meanwhile"
    assert code in expected or killed or full or changed, f"{name}: exit code {code}\n{words}"
    assert "Traceback" not in words, f"{name}\n{words}"
    return "finished" if code == 0 else "stopped"


def assert_one_of_two(code: int, words: str) -> None:
    """Of two commands on one run, one may be refused because of the other."""
    assert code == 0 or (is_refusal(code, words) and "is in use by process" in words), words


def content(run: Path) -> dict[str, object]:
    """Return what must be equal: the bytes of the last checkpoint and of the weights, the metrics without times."""
    last = checkpoint.checkpoints(run / "checkpoints")[-1]
    found: dict[str, object] = {"checkpoint": last.name, "metrics": records(run)}
    files = [run / "model" / "model.safetensors", run / "model" / "config.json", last / "config.json"]
    if checkpoint.has_shards(last):  # the order of a shard's header is random, its tensors are not
        for part in ("model", "optimizer", "ema"):
            for name, tensor in checkpoint.read_tensors(last, part).items():
                found[f"{part}/{name}"] = tensor.numpy().tobytes()
        found["state"] = {name: value for name, value in read_json(last / "state.json").items() if "check" not in name}
    else:
        files += sorted(last.iterdir())
    return found | {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def records(run: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in record.items() if k not in CLOCK_FIELDS} for record in read_metrics(run)]


def far_apart(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Return what differs beyond rounding: lines of metrics and weights."""
    ours, other = found["metrics"], expected["metrics"]
    if [sorted(record) for record in ours] != [sorted(record) for record in other]:  # type: ignore[attr-defined]
        return ["the lines of metrics"]
    pairs = zip(numbers_in(ours), numbers_in(other), strict=True)
    different = [f"{a} and {b} in metrics" for a, b in pairs if not math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-4)]
    weights, same = (safetensors.torch.load(part["model/model.safetensors"]) for part in (found, expected))  # type: ignore[arg-type]
    return different + [
        name for name in same if not torch.allclose(weights[name], same[name], rtol=ROUNDING, atol=ROUNDING)
    ]


def numbers_in(value: object) -> list[float]:
    """Return all numbers of a tree, in order."""
    if isinstance(value, dict | list):
        return [x for item in (value.values() if isinstance(value, dict) else value) for x in numbers_in(item)]
    return [float(value)] if isinstance(value, int | float) else []


def samples_amiss(found: dict[str, object], expected: dict[str, object]) -> int:
    """Return the number of samples lost or repeated, from the lines of metrics that only one run has."""

    def spans(content: dict[str, object]) -> Counter[tuple[int, int]]:
        ends = [record["seen"] for record in content["metrics"] if record["kind"] == "train"]  # type: ignore[attr-defined]
        return Counter(zip([0, *ends], ends))  # noqa: B905

    ours, other = spans(found), spans(expected)
    return sum(abs(ours[span] - other[span]) * abs(span[1] - span[0]) for span in ours | other)


def leftovers(run: Path) -> list[str]:
    found = [str(path) for path in run.rglob(".*") if path.name.startswith((".new-", ".old-", ".was-", ".owner"))]
    cache = Path(os.environ["ANECHOIC_CACHE"])
    return found + [str(path) for path in cache.rglob("*.unfinished")] if cache.is_dir() else found


# ---- all of them


@dataclass
class Tally:
    """Counts over all trainings."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    close: int = 0
    orphans: int = 0
    leftovers: int = 0
    samples: int = 0
    broken: list[str] = field(default_factory=list)

    def compare(self, training: Training, expected: dict[str, object], faults: list[str]) -> None:
        found = content(training.run)
        left = leftovers(training.run)
        self.samples += samples_amiss(found, expected)
        self.leftovers += len(left)
        different = [key for key in expected.keys() | found.keys() if found.get(key) != expected.get(key)]
        if training.other_ranks:
            different = far_apart(found, expected)
            self.close += 1
            training.other_ranks = False
        assert not different, f"{sorted(different)[:5]} differ\n{training.log.read_text()}"
        assert not left, left
        self.equal += 1

    def lines(self) -> list[str]:
        kinds = [f"{count:4d}  {name}" for name, count in sorted(self.faults.items())]
        ends = ", ".join(f"{self.outcomes[name]} {name}" for name in ("stopped", "finished", "refused"))
        return [
            *kinds,
            f"{self.faults.total()} faults: {ends}",
            f"{self.equal + len(self.broken)} trainings: {self.equal} as if undisturbed "
            f"({self.close} of them on other numbers of ranks, so up to rounding), {len(self.broken)} not",
            f"{self.orphans} orphans, {self.leftovers} leftovers, {self.samples} samples lost or repeated",
        ]


def crash_test(
    *, faults: int, trainings: int, seed: int, only: str = "", work: Path, own_disks: bool, tally: Tally
) -> None:
    """Spread the faults over the trainings, which alternate between the scenarios."""
    rng = random.Random(seed)
    os.environ["ANECHOIC_CACHE"] = str(work / "cache")
    sources = make_data(work / "data")
    plans = {name: command for name, command in scenarios(sources).items() if only in name}
    straight: dict[str, dict[str, object]] = {}
    names = [
        *WHILE_IT_RUNS,
        *BETWEEN,
        "clock jump",
        "flush to disk fails",
        OTHER_RANKS,
        *(WITH_A_DISK_OF_ITS_OWN if own_disks else {}),
    ]
    queue = [names[k % len(names)] for k in range(faults)]
    rng.shuffle(queue)
    shares = [queue[k * faults // trainings : (k + 1) * faults // trainings] for k in range(trainings)]
    order = [list(plans)[number % len(plans)] for number in range(trainings)]
    of_folders = [share for plan, share in zip(order, shares, strict=True) if "folder" in plan]
    accumulating = [share for plan, share in zip(order, shares, strict=True) if "--optim.accumulate" in plans[plan]]
    move(OF_THE_FOLDER, shares, to=of_folders)
    move((OTHER_RANKS,), shares, to=accumulating)
    for number, plan in enumerate(order):
        disk = work / f"training-{number}"
        disk.mkdir()
        if own_disks:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk], check=True)
        training = Training(plans[plan], disk / "run", sources, rng, work / f"training-{number}.log")
        if plan not in straight:
            undisturbed = Training(plans[plan], work / f"straight-{len(straight)}", sources, rng, training.log)
            assert undisturbed.finish(undisturbed.start()) == 0, training.log.read_text()
            straight[plan] = content(undisturbed.run)
        share = shares[number]
        started = time.monotonic()
        result = "equal" if carry_through(training, share, straight[plan], tally) else "BROKEN"
        print(
            f"training {number + 1} of {trainings}, {plan}: {len(share)} faults, {result}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        if own_disks:
            subprocess.run(["umount", "-l", disk], check=True)


def move(names: Sequence[str], shares: list[list[str]], *, to: list[list[str]]) -> None:
    """Exchange these faults for others of the trainings that they are for; what finds no place becomes a SIGKILL."""
    allowed = {id(share) for share in to}
    places = [(share, k) for share in to for k, name in enumerate(share) if name in RUN_FAULTS]
    for share in shares:
        for k, name in enumerate(share):
            if name in names and id(share) not in allowed:
                other, place = places.pop() if places else ([RUN_FAULTS[0]], 0)
                share[k], other[place] = other[place], name


def carry_through(training: Training, share: list[str], expected: dict[str, object], tally: Tally) -> bool:
    """Run one training with its faults to its end; return whether it ended as it must."""
    happened: list[str] = []
    try:
        for name in share:
            happened.append(name)
            tally.faults[name] += 1
            tally.outcomes[disturb(training, name)] += 1
            if (training.run / "results.json").exists() and len(happened) < len(share):
                tally.compare(training, expected, happened)  # it ended before the fault; the next fault gets a new run
                shutil.rmtree(training.run)
        assert training.finish(training.start()) == 0, training.log.read_text()
        tally.compare(training, expected, happened)
    except AssertionError as problem:
        tally.orphans += isinstance(problem, OrphanError)
        problem_text = f"after {happened}, {training.notes}: {type(problem).__name__} {problem}"
        tally.broken.append(problem_text)
        print(problem_text, flush=True)
        return False
    return True


def may_mount() -> bool:
    """Return whether this process has its own mount namespace, where it may fill disks."""
    return os.environ.get("ANECHOIC_OWN_DISKS") == "1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--trainings", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", default="", help="trainings whose description contains this")
    parser.add_argument("--disk-sizes", type=int, default=10, help="full disks of each command, for output and cache")
    options = parser.parse_args()
    namespace = ["unshare", "--map-root-user", "--mount"]
    allowed = subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    if not may_mount() and allowed.returncode == 0:
        os.environ["ANECHOIC_OWN_DISKS"] = "1"
        os.execvp("unshare", [*namespace, sys.executable, *sys.argv, "--seed", str(options.seed)])
    print(f"seed {options.seed}, {options.faults} faults over {options.trainings} trainings", flush=True)
    started, tally = time.monotonic(), Tally()
    sizes = vars(options).pop("disk_sizes")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        crash_test(**vars(options), work=Path(work), own_disks=may_mount(), tally=tally)
        print("\n".join(tally.lines()), flush=True)
        if sizes and may_mount() and not options.only:
            ends, broken = full_disks(Path(work) / "disks", sizes=sizes, rng=random.Random(options.seed))
            tally.broken += broken
            counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
            print(f"{ends.total() + len(broken)} full disks under other commands: {counts}, {len(broken)} broken")
    if tally.broken:
        return 1
    print(f"seed {options.seed}: all equal or refused; {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
