"""The law of caches: with a warm, a cold and no cache, every command that reads data returns the same bits.

`make cache-law` runs it. A case is a kind of source, a command, and what happens to data, weights or cache between two
runs of the command, or during the first; all follow from the seed and the number of the case. The warm cache is shared
by consecutive cases, so that two data sets may be confused. Where features are the result, they also equal those of the
pixels in memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutations import (
    DECODER,
    KINDS,
    MUTATIONS,
    SIDE,
    SIZES,
    Picture,
    damage_cache,
    draw_set,
    synchronize,
    write_weights,
)

from anechoic import config as configs
from anechoic.cli.embed import embed
from anechoic.cli.evaluate import evaluate
from anechoic.cli.explore import explore
from anechoic.cli.search import search
from anechoic.cli.tools.shard import shard
from anechoic.data import content_checksums, open_source
from anechoic.errors import UserError
from anechoic.eval.embedding import Pictures
from anechoic.eval.encoders import open_encoder
from anechoic.eval.feature_cache import compute_in_memory
from anechoic.runtime.run import CLOCK_FIELDS, read_metrics
from anechoic.training.checkpointing import Checkpointer
from anechoic.training.loop import fit

# Files count as settled after this time: tests cannot wait for the seconds of a user, but for the clock of a disk.
SETTLED = 0.02
CASES_PER_CACHE = 20


# ---- commands: what they return must be equal


@dataclass
class Scene:
    """Folders of a case: the data set, one of equal names, sizes and times, the model and a place for results."""

    root: Path
    opened: str
    data: Path = field(init=False)
    other: Path = field(init=False)
    model: Path = field(init=False)

    def __post_init__(self) -> None:
        self.data, self.other, self.model = self.root / "data", self.root / "other", self.root / "model"

    def source(self, place: Path) -> str:
        return str(place / self.opened) if self.opened else str(place)

    def out(self, name: str) -> Path:
        folder = self.root / "out"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder / name


def without(metrics: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in names}


def run_embed(scene: Scene) -> Any:
    out = scene.out("vectors.npz")
    found = embed(scene.model, scene.source(scene.data), out=out, layer=0, pooling="all").metrics
    with np.load(out) as arrays:
        return found, {name: arrays[name] for name in arrays.files}


def run_search(scene: Scene) -> Any:
    found = search(scene.model, scene.source(scene.data), ["3", "4"], k=5, vector="mean").metrics
    return without(found, "added", "removed")


def run_explore(scene: Scene) -> Any:
    found = explore(scene.model, scene.source(scene.data), out=scene.out("page.html"), clusters=2).metrics
    return without(found, "added", "removed", "page")


def run_evaluate(scene: Scene) -> Any:
    return evaluate(scene.model, scene.source(scene.data), holdout=0.4, k=[1, 3], baselines=False).metrics


def run_evaluate_test(scene: Scene) -> Any:
    """The data of the test have the names, sizes and times of the training data."""
    return evaluate(
        scene.model, scene.source(scene.data), test=scene.source(scene.other), k=[1, 3], baselines=False
    ).metrics


def run_shard(scene: Scene) -> Any:
    out = scene.out("shards")
    found = shard(scene.source(scene.data), out=out).metrics
    return found, {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def training(scene: Scene) -> configs.Config:
    options = without({**SIZES, **DECODER}, "image_size")
    return configs.Config(
        data=configs.DataConfig(source=scene.source(scene.data), image_size=SIDE, holdout=2),
        model=configs.ModelConfig("mae_tiny_patch4", options),
        optim=configs.OptimConfig(batch_size=4, samples=24, lr=2e-3),
        validation=configs.ValidationConfig(every=12, report=4),
        save=configs.SaveConfig(every=8),
        threads=1,
    )


class Killed(BaseException):
    """A training that is killed after its first checkpoint."""


@contextmanager
def killed_after_saving() -> Iterator[None]:
    save = Checkpointer.save

    def save_and_die(self: Checkpointer, **state: Any) -> bool:
        save(self, **state)
        raise Killed

    Checkpointer.save = save_and_die  # type: ignore[assignment,method-assign]
    try:
        yield
    except Killed:
        pass
    finally:
        Checkpointer.save = save  # type: ignore[method-assign]


def start_training(scene: Scene) -> Any:
    """Train up to the first checkpoint; a later call starts a new run."""
    shutil.rmtree(scene.root / "begun", ignore_errors=True)
    with killed_after_saving():
        fit(training(scene), scene.root / "begun")


def resume_training(scene: Scene) -> Any:
    run = scene.out("run")
    if (scene.root / "begun").is_dir():
        shutil.copytree(scene.root / "begun", run)
    fit(training(scene), run)
    records = [without(record, *CLOCK_FIELDS) for record in read_metrics(run)]
    return records, (run / "model" / "model.safetensors").read_bytes()


@dataclass(frozen=True)
class Command:
    """first: what runs before the data change; then: what is compared. refuses_changes: of data since the first."""

    first: Callable[[Scene], Any]
    then: Callable[[Scene], Any]
    refuses_changes: bool = False


COMMANDS = {
    "embed": Command(run_embed, run_embed),
    "search": Command(run_search, run_search),
    "explore": Command(run_explore, run_explore),
    "evaluate": Command(run_evaluate, run_evaluate),
    "evaluate --test": Command(run_evaluate_test, run_evaluate_test),
    "embed, then evaluate": Command(run_embed, run_evaluate),
    "evaluate, then search": Command(run_evaluate, run_search),
    "shard": Command(run_shard, run_shard),
    "train": Command(start_training, resume_training, refuses_changes=True),
}


def outcome(command: Callable[[Scene], Any], scene: Scene, cache: Path) -> Any:
    """Return the result of a command with this cache, or the sentence of its refusal."""
    os.environ["ANECHOIC_CACHE"] = str(cache)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return command(scene)
    except UserError as error:
        return f"refused: {error}"


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return where two results differ in any bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        equal = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if equal else [f"{where}: arrays differ"]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return [line for k in range(len(a)) for line in differences(a[k], b[k], f"{where}/{k}")]
    equal = type(a) is type(b) and (a == b or (isinstance(a, float) and a != a and b != b))
    return [] if equal else [f"{where}: {a!r:.150} is not {b!r:.150}"]


# ---- one case


class Interference:
    """Calls an action when the n-th file below a folder is opened; an audit hook cannot be removed, only disarmed."""

    def __init__(self) -> None:
        self.below, self.left, self.action = "", 0, lambda: None
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple) -> None:
        if event == "open" and self.below and isinstance(arguments[0], str) and arguments[0].startswith(self.below):
            self.left -= 1
            if self.left <= 0:
                self.below = ""
                self.action()

    @contextmanager
    def armed(self, folder: Path, number: int, action: Callable[[], None]) -> Iterator[None]:
        self.below, self.left, self.action = f"{folder}/", number, action
        try:
            yield
        finally:
            if self.below:  # it was not reached
                self.below = ""
                action()


INTERFERENCE: list[Interference] = []


@dataclass(frozen=True)
class Case:
    """What is run and what happens; `problems` are those of the law."""

    kind: str
    command: str
    mutation: str
    manner: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}, {self.command}: {self.mutation} ({self.manner})"


def run_case(word: str, root: Path, warm: Path) -> Case:
    """Run the case of this seed; the folders of the case are new, the warm cache may have been used before."""
    rng = random.Random(word)
    kind, name, mutation = (rng.choice(list(choices)) for choices in (KINDS, COMMANDS, MUTATIONS))
    if kind == "npy" and name == "evaluate --test":  # it has no labels
        name = "evaluate"
    opened, files_of = KINDS[kind]
    command, scene = COMMANDS[name], Scene(root, opened)
    torn_stays_whole = kind in ("npy", "npz", "shards")  # there are no encoded images to damage, or they are checked
    if mutation == "one torn" and torn_stays_whole:
        mutation = "one other picture"
    torn_before = rng.random() < 0.2 and not torn_stays_whole
    in_place, keep_times, during = (rng.random() < share for share in (0.5, 0.7, 0.25))
    moved, swapped = rng.choice([(True, False), (False, True), *[(False, False)] * 4])
    weights, cache_damage = rng.random() < 0.15, rng.random() < 0.25
    content_checksums.SETTLED = SETTLED if rng.random() < 0.7 else 2.0

    before, other = draw_set(rng), draw_set(rng)
    if torn_before:
        before = MUTATIONS["one torn"](before, rng)
    for place, pictures in ((scene.data, before), (scene.other, other)):
        place.mkdir(parents=True)
        synchronize(place, files_of(pictures), in_place=False, keep_times=True)
    write_weights(scene.model, rng)
    after = MUTATIONS[mutation](before, rng)
    new_files = files_of(after)
    changed = new_files != files_of(before) or swapped
    time.sleep(2 * SETTLED)  # after this, two versions of a file differ in their times

    def mutate() -> None:
        synchronize(scene.data, new_files, in_place=in_place, keep_times=keep_times)

    if during:
        INTERFERENCE or INTERFERENCE.append(Interference())
        with INTERFERENCE[0].armed(scene.data, rng.randint(1, 30), mutate):
            outcome(command.first, scene, warm)
        if command.refuses_changes:  # whether it saw the old data or the new is not known
            shutil.rmtree(root / "begun", ignore_errors=True)
    else:
        outcome(command.first, scene, warm)
        mutate()
    if swapped:
        os.rename(scene.data, root / "third")
        os.rename(scene.other, scene.data)
        os.rename(root / "third", scene.other)
        after, before = other, after
    if moved:
        os.rename(scene.data, root / "elsewhere")
        scene.data = root / "elsewhere"
    if weights:
        write_weights(scene.model, rng, mean=rng.choice([0.5, 0.4]))
    damage = damage_cache(warm, rng) if cache_damage else ""
    manner = [
        *("during the command" for _ in [0] if during),
        "in place" if in_place else "replaced",
        "same times" if keep_times else "other times",
        *(word for word, happens in (("moved", moved), ("swapped", swapped), ("other weights", weights)) if happens),
        *filter(None, [damage]),
    ]

    file_not_folder = root / "file"
    file_not_folder.write_text("")
    caches = {"warm": warm, "cold": root / "cold", "no": file_not_folder / "cache"}
    results = {label: outcome(command.then, scene, cache) for label, cache in caches.items()}
    problems = [
        f"{label} cache and no cache: {line}"
        for label in ("warm", "cold")
        for line in differences(results[label], results["no"])[:3]
    ]
    problems += contradictions(command, scene, results["no"], after, changed=changed, known=not during)
    return Case(kind, name, mutation, ", ".join(manner), tuple(problems))


def contradictions(
    command: Command, scene: Scene, result: Any, pictures: list[Picture], *, changed: bool, known: bool
) -> list[str]:
    """Return what is wrong with a result by itself: vectors of other pixels, a refusal without reason or none with."""
    refused = isinstance(result, str)
    if command.refuses_changes and known and refused != changed:
        return [f"data that {'changed' if changed else 'did not change'}: {result if refused else 'resumed'}"]
    if any(picture.torn for picture in pictures):  # it may be the one that is searched for
        return []
    if refused and not command.refuses_changes:
        return [result]
    if command.then is run_embed:
        encoder = open_encoder(scene.model)
        names = [open_source(scene.source(scene.data)).name(k) for k in range(len(pictures))]
        order = in_order(pictures, names)
        images = [torch.from_numpy(picture.pixels.copy()).permute(2, 0, 1) for picture in order]
        found = compute_in_memory(
            encoder, Pictures(images, channels=3), [(0, "all")], device="auto", workers=0, keep_pixels=False
        )
        return [f"vectors of the pixels: {line}" for line in differences(result[1]["features"], found.sets[0, "all"])]
    return []


def in_order(pictures: list[Picture], names: list[str]) -> list[Picture]:
    """Return the pictures in the order of a source, by their names; unnamed ones are in order."""
    by_name = {key: picture for picture in pictures for key in (picture.path, f"{picture.name}.bmp")}
    return [by_name.get(name.split(".tar/")[-1], pictures[k]) for k, name in enumerate(names)]


# ---- all of them


def run_cases(cases: int, seed: int, *, first: int = 0) -> Iterator[tuple[int, Case]]:
    before, sync = (os.environ.get("ANECHOIC_CACHE", ""), content_checksums.SETTLED), os.fsync
    os.fsync = lambda descriptor: None  # no case loses power
    with tempfile.TemporaryDirectory(prefix="cache-law-") as work:
        try:
            for number in range(first, first + cases):
                warm = Path(work) / f"warm-{number // CASES_PER_CACHE}"
                root = Path(work) / f"case-{number}"
                root.mkdir()
                yield number, run_case(f"{seed}-{number}", root, warm)
                shutil.rmtree(root)
        finally:
            (os.environ["ANECHOIC_CACHE"], content_checksums.SETTLED), os.fsync = before, sync


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    logging.getLogger("anechoic").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"seed {options.seed}, {options.cases} cases", flush=True)
    started, counts, broken = time.monotonic(), Counter[str](), 0
    for number, case in run_cases(options.cases, options.seed, first=options.first):
        counts.update([f"source {case.kind}", f"command {case.command}", f"mutation {case.mutation}"])
        broken += bool(case.problems)
        for problem in case.problems:
            print(f"case {number}: {case}\n    {problem}", flush=True)
    for line, count in sorted(counts.items()):
        print(f"{count:5d}  {line}")
    print(
        f"seed {options.seed}: {options.cases} cases, {broken} broke the law; {time.monotonic() - started:.0f} s, "
        f"{time.process_time():.0f} CPU seconds"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
