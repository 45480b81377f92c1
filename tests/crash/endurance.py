"""Memory and descriptors of a long training with several processes and workers: flat, or something leaks.

`python tests/crash/endurance.py --updates 5000`. A real command trains a tiny network from a folder of images; the
resident memory (RSS) and the open descriptors of every process below it are read on the way. After the first fifth, in
which caches fill, neither may grow: the last fifth is compared with the second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from crash_test import FILES, MAE, make_data
from faults import BATCH
from processes import descendants, parent_of

from anechoic.runtime.run import read_metrics

PAGE = os.sysconf("SC_PAGE_SIZE")
GROWTH = 4.0  # MB that a process may have more at the end than after a fifth


def sample(pid: int) -> tuple[float, int] | None:
    """Resident memory in MB and open descriptors; None if it has ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6
        return resident, len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def role(pid: int, launcher: int) -> str:
    if pid == launcher:
        return "launcher"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if "resource_tracker" in words:
        return "tracker"
    return "rank" if parent_of(pid) == launcher else "worker"


def observe(command: list[str], run: Path, *, every: float) -> dict[str, list[tuple[int, float, int]]]:
    """{"rank 123": [(samples seen, MB, descriptors), ...], ...} of a training from its start to its end."""
    seen: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    names: dict[int, str] = {}
    while process.poll() is None:
        lines = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        for pid in (process.pid, *descendants(process.pid)):
            names.setdefault(pid, role(pid, process.pid))
            found = sample(pid)
            if found is not None and lines:
                seen[f"{names[pid]} {pid}"].append((int(lines[-1]["seen"]), *found))
        time.sleep(every)
    assert process.returncode == 0, f"the training ended with exit code {process.returncode}"
    return seen


def fifths(points: list[tuple[int, float, int]], samples: int, column: int) -> list[float]:
    """The median in each fifth of the training."""
    parts: list[list[float]] = [[] for _ in range(5)]
    for point in points:
        parts[min(4, 5 * point[0] // samples)].append(point[column])
    return [statistics.median(part) if part else float("nan") for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    samples, grown = options.updates * BATCH, []
    with tempfile.TemporaryDirectory() as work:
        os.environ["ANECHOIC_CACHE"] = f"{work}/cache"
        folder, run = make_data(Path(work) / "data")["folder"], Path(work) / "run"
        settings = ["--optim.batch-size", str(BATCH), "--optim.epochs", "None", "--optim.samples", str(samples)]
        settings += ["--optim.ema", "0.99", "--optim.accumulate", "2", "--validation.knn", "0", "--data.source", folder]
        settings += ["--devices", "2", "--data.workers", "2", *(["--fsdp"] if options.fsdp else [])]
        command = [sys.executable, "-m", "anechoic.cli.main", "train", *MAE, *FILES, *settings, "--out", str(run)]
        started = time.monotonic()
        samples_of = observe(command, run, every=0.5)
        print(f"{options.updates} updates, 2 processes with 2 workers each, {time.monotonic() - started:.0f} s")
        starts = len(read_metrics(run))
    print(f"{'process':18s}  MB resident, by fifth of the run          open descriptors")
    for name, points in sorted(samples_of.items()):
        if len(points) < 10:
            continue
        memory, files = fifths(points, samples, 1), fifths(points, samples, 2)
        print(f"{name:18s}  {'  '.join(f'{value:6.1f}' for value in memory)}    {'  '.join(f'{v:.0f}' for v in files)}")
        if memory[4] > memory[1] + GROWTH or files[4] > files[1]:
            grown.append(name)
    print(f"{starts} lines of metrics; " + (f"grew: {', '.join(grown)}" if grown else "nothing grew"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
