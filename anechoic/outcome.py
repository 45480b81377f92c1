"""What a verb returns: one object with the same fields everywhere, for people (`text`) and for machines (`to_json`).

Standard library only, so that pages and run directories can be read without torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Outcome:
    """The result of one verb: how it was asked for, what was measured, and the same as text for the terminal."""

    config: dict[str, Any]
    metrics: dict[str, Any]
    seed: int | None = None
    seconds: float | None = None
    text: str = field(default="", repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "config": self.config,
            "seed": self.seed,
            "commit": commit(),
            "machine": machine(),
            "metrics": self.metrics,
            "seconds": self.seconds,
        }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def commit() -> str | None:
    """The commit of the source tree this package runs from, with "+" if it was changed; None for an installed wheel."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--", "anechoic"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if dirty.stdout.strip() else "")


@cache
def machine() -> dict[str, Any]:
    """What a measured number depends on besides the code: processor, cores, system and the versions that compute."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "anechoic": package_version("anechoic"),
    }
