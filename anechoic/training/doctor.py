"""Checks of a machine and a run; each finding has a remedy. Nothing is changed or repaired."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anechoic.adapters.torchvision_operators import COMMAND, mismatch
from anechoic.choices import CheckState
from anechoic.errors import UserError
from anechoic.outcome import package_version
from anechoic.storage.files import NEW, OLD, WAS
from anechoic.storage.safe_io import read_table

# Below these, in bytes: what commonly fails, and what may.
LITTLE_DISK, SOME_DISK = 2 << 30, 10 << 30
LITTLE_SHARED_MEMORY = 1 << 30
EXTRAS = {"pyarrow": "parquet", "simplejpeg": "jpeg", "datasets": "hub", "diffusers": "diffusion", "timm": "families"}
LOOKED_AT = 32


@dataclass(frozen=True)
class Finding:
    """state: ok; note, which may cost time or comfort; problem, which makes runs fail."""

    what: str
    state: CheckState
    found: str
    remedy: str = ""


def examine(run: Path | None = None, *, open_data: bool = False) -> list[Finding]:
    """Run every check of the machine and of the given run or model directory.

    open_data: open the run's data as well. Its config, which another person may have written, names any path or URL.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [versions, devices, threads, shared_memory, files, disks, caches]
    found = [finding for check in checks for finding in check()]
    if run is not None:
        if not run.is_dir():
            raise UserError(f"There is no run or model directory {run}.")
        found += run_findings(run, open_data=open_data)
    return found


# ---- the machine


def versions() -> Iterator[Finding]:
    torch_version = package_version("torch") or "none"
    old = tuple(int(part) for part in torch_version.split(".")[:2] if part.isdigit()) < (2, 9)
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        "versions",
        "problem" if old else "ok",
        f"anechoic {package_version('anechoic')}, Python {python}, torch {torch_version}",
        'install a newer torch: pip install "torch>=2.9"' if old else "",
    )
    import torch

    gpu = [f"{name} {number}" for name in ("cuda", "hip") if (number := getattr(torch.version, name, None))]
    yield Finding("torch build", "ok", " ".join(gpu) or "CPU only, or Apple's GPU")
    reason = mismatch()
    if reason:
        yield Finding(
            "torchvision",
            "note",
            f"torchvision {package_version('torchvision')} was not built for torch {torch.__version__} ({reason}): "
            "`import timm` fails, the commands here work",
            f"install torch and torchvision together, by one command of pytorch.org's selector; or {COMMAND}",
        )
    absent = [name for name in EXTRAS if find_spec(name) is None]
    if absent:
        extras = ",".join(EXTRAS[name] for name in absent)
        yield Finding("extras", "note", f"not installed: {', '.join(absent)}", f'pip install "anechoic[{extras}]"')


def devices() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if count:
        names = ", ".join(sorted({torch.cuda.get_device_name(k) for k in range(count)}))
        yield Finding("devices", "ok", f"{count} x {names}")
    elif torch.backends.mps.is_available():
        yield Finding("devices", "ok", "one GPU (MPS)")
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "devices",
            "problem",
            f"an NVIDIA driver is here, but torch {torch.__version__} does not see a device",
            "install a torch built for CUDA, and compare its version with the driver's in nvidia-smi",
        )
    else:
        yield Finding("devices", "ok", "no GPU: training runs on the CPU")


def threads() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed, used = min(cores, quota() or cores), torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS")
    said = f"{used} threads for {allowed:g} cores" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    if used > allowed:
        yield Finding(
            "threads", "note", said, f"set OMP_NUM_THREADS={max(1, int(allowed))}: more threads wait for each other"
        )
    else:
        yield Finding("threads", "ok", said)


def quota() -> float | None:
    """Return the cores that a container may use, if it is limited."""
    file = Path("/sys/fs/cgroup/cpu.max")
    try:
        limit, period = file.read_text().split()[:2]
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("shared memory", "ok", "this system has no /dev/shm")
        return
    usage = shutil.disk_usage(folder)
    little = usage.free < LITTLE_SHARED_MEMORY
    yield Finding(
        "shared memory",
        "problem" if little else "ok",
        f"{size(usage.free)} of {size(usage.total)} free in /dev/shm",
        "give the container more (docker run --shm-size=8g), or train with --data.workers 0 and one process"
        if little
        else "",
    )


def files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 1024
    remedy = f"raise it: ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if few else ""
    yield Finding("open files", "note" if few else "ok", f"up to {soft:,}", remedy)


def disks() -> Iterator[Finding]:
    from anechoic.storage.cache import cache_dir

    for what, folder in (("disk here", Path.cwd()), ("disk of the cache", cache_dir())):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        state: Any = "problem" if free < LITTLE_DISK else "note" if free < SOME_DISK else "ok"
        remedy = "" if state == "ok" else "make room, or give --out (or ANECHOIC_CACHE) on another disk"
        yield Finding(what, state, f"{size(free)} free at {folder}", remedy)
        if not os.access(folder, os.W_OK):
            yield Finding(what, "problem", f"{folder} cannot be written", "choose another folder or change its rights")


def caches() -> Iterator[Finding]:
    from anechoic.storage.cache import cache_dir, entries, limit

    total = sum(entry.size for entry in entries())
    remedy = "free space with anechoic tools cache, or raise ANECHOIC_CACHE_LIMIT" if total > limit() else ""
    found = f"{size(total)} of up to {size(limit())} in {cache_dir()}"
    yield Finding("cache", "note" if remedy else "ok", found, remedy)


def size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# ---- a run


def run_findings(run: Path, *, open_data: bool) -> list[Finding]:
    found = [*leftovers(run), *weights(run)]
    if (run / "config.json").exists() and not (run / "model.safetensors").exists():
        found += [*metrics(run), *checkpoints(run), *data(run, open_data=open_data), *ending(run)]
    return found


def leftovers(run: Path) -> Iterator[Finding]:
    names = [path.name for path in run.rglob(".*") if path.name.startswith((NEW, OLD, WAS))]
    if names:
        yield Finding(
            "leftovers", "note", f"{len(names)} half-written entries, such as {names[0]}", "the next start removes them"
        )


def weights(run: Path) -> Iterator[Finding]:
    from anechoic.runtime.checkpoint import load, model_directory

    try:
        folder = model_directory(run)
        model = load(folder)
    except UserError as problem:
        remedy = (
            "restore the folder from a copy, or run the same command again: it resumes from the last good checkpoint"
        )
        yield Finding("weights", "problem", str(problem), remedy)
        return
    broken = sum(not bool(value.isfinite().all()) for value in model.state_dict().values() if value.is_floating_point())
    count = sum(parameter.numel() for parameter in model.parameters())
    yield Finding(
        "weights",
        "problem" if broken else "ok",
        f"{count:,} in {folder}" + (f", {broken} tensors are not finite" if broken else ""),
        "train again with a lower learning rate, or from an earlier checkpoint" if broken else "",
    )


def metrics(run: Path) -> Iterator[Finding]:
    from anechoic.runtime.run import read_metrics

    try:
        records = read_metrics(run)
    except UserError as problem:
        yield Finding("metrics", "problem", str(problem), "")
        return
    seen = [record["seen"] for record in records if isinstance(record.get("seen"), int)]
    losses = [record["loss"] for record in records if isinstance(record.get("loss"), int | float)]
    if seen != sorted(seen):
        yield Finding("metrics", "problem", "samples seen go back and forth", "restore metrics.jsonl from a copy")
    elif losses and not math.isfinite(losses[-1]):
        yield Finding(
            "metrics", "problem", "the loss is no longer a number", "lower the learning rate, or set --optim.clip 1"
        )
    else:
        yield Finding("metrics", "ok", f"{len(records)} lines, {max(seen, default=0):,} samples seen")


def checkpoints(run: Path) -> Iterator[Finding]:
    from anechoic.runtime.checkpoint import DamagedError, verify
    from anechoic.runtime.checkpoint import checkpoints as listed

    paths = listed(run / "checkpoints")
    good, largest = 0, 0
    for path in paths:
        try:
            verify(path)
            good += 1
        except DamagedError as problem:
            yield Finding(
                "checkpoint", "problem", f"{path.name} is damaged ({problem})", f"delete {path}; others are used"
            )
        largest = max(largest, sum(file.stat().st_size for file in path.iterdir() if file.is_file()))
    if not paths and not (run / "results.json").exists():
        yield Finding("checkpoints", "note", "none yet", "a training saves its first after a twentieth of its samples")
        return
    free = shutil.disk_usage(run).free
    if free < 2 * largest:
        yield Finding(
            "room", "problem", f"{size(free)} free, a checkpoint takes {size(largest)}", "make room on this disk"
        )
    yield Finding(
        "checkpoints", "ok" if good == len(paths) else "note", f"{good} of {len(paths)} good, {size(largest)} each"
    )


def data(run: Path, *, open_data: bool) -> Iterator[Finding]:
    """Check that the run's data is still there, unchanged and readable; only embedded data are opened unasked."""
    from anechoic.config import from_json
    from anechoic.data import is_embedded
    from anechoic.data.source import BadImage
    from anechoic.runtime.run import read_frozen_config
    from anechoic.training import build

    try:
        values = read_frozen_config(run)
        if values is None:
            return
        config = from_json(values)
        if not open_data and not is_embedded(config.data.source):
            yield Finding("data", "note", f"not opened: {config.data.source}", "give --data to check it as well")
            return
        source = build.open_data(config)
    except UserError as problem:
        yield Finding("data", "problem", str(problem), "put the data back at the path in the run's config.json")
        return
    frozen = config.data.fingerprint
    if frozen is not None and not source.has_fingerprint(frozen):
        yield Finding("data", "problem", f"{config.data.source} is not the data the run was started with", "restore it")
        return
    step = max(1, len(source) // LOOKED_AT)
    looked_at = range(0, len(source), step)[:LOOKED_AT]
    bad = [item for item in source.read_many(list(looked_at)) if isinstance(item, BadImage)]
    found = f"{len(source):,} samples, {len(bad)} of {len(looked_at)} looked at cannot be read"
    remedy = f"repair or remove {bad[0].name} ({bad[0].reason})" if bad else ""
    yield Finding("data", "note" if bad else "ok", found, remedy)


def ending(run: Path) -> Iterator[Finding]:
    path = run / "results.json"
    if not path.exists():
        yield Finding("state", "note", "not finished", "the same command resumes it")
        return
    try:
        seconds = read_table(path).get("seconds")
        seconds = seconds if isinstance(seconds, int | float) else None
    except UserError as problem:
        yield Finding("state", "problem", f"results.json cannot be read ({problem})", "run the same command again")
        return
    yield Finding("state", "ok", f"finished{'' if seconds is None else f' after {seconds / 3600:.2f} hours'}")
