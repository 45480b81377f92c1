"""What a command returns: one object with the same fields everywhere, for people (`text`) and programs (`to_json`).

Standard library only, so that pages and run directories can be read without torch.
"""

from __future__ import annotations

import base64
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anechoic.errors import UserError

SCHEMA = 1
# Control characters, marks that reverse the direction of text, and bytes of file names that are not UTF-8.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def rough_duration(seconds: float) -> str:
    """Return an estimated time in ten seconds, minutes, or hours and minutes."""
    if seconds < 95:
        return f"{max(10, round(seconds / 10) * 10)} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of one command: its arguments, what was measured, and the same as text for the terminal."""

    config: dict[str, Any]
    metrics: dict[str, Any]
    seed: int | None = None
    seconds: float | None = None
    text: str = field(default="", repr=False)

    def __repr__(self) -> str:
        """Return the text that the command line prints."""
        return self.text or f"Outcome(metrics={self.metrics!r})"

    def _repr_html_(self) -> str:
        """Return the rows as a table for notebooks, else the text; then the pictures."""
        rows, pictures = self.rows, self.figures.values()
        shown = html_table(rows) if rows else f"<pre>{escape(repr(self))}</pre>"
        return shown + "".join(picture._repr_html_() for picture in pictures)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table in the text, named values each; empty if there is none."""
        found = self.metrics.get("rows")
        if isinstance(found, list) and found and all(isinstance(row, Mapping) for row in found):
            return [flattened(row) for row in found]
        return []

    def to_frame(self) -> Any:
        """Return the rows, or the named numbers if there are none, as a pandas DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("A frame needs pandas: pip install pandas, or use `.rows`.") from error
        return pandas.DataFrame(self.rows or [flattened(self.metrics)])

    @property
    def figures(self) -> dict[str, Picture]:
        """The pictures that were drawn, by name: a notebook shows them."""
        files = [Path(path) for path in self.metrics.get("figures", ())]
        return {path.stem: Picture(path) for path in files if path.suffix == ".png"}

    def to_json(self) -> dict[str, Any]:
        return plain(
            {
                "schema": SCHEMA,
                "config": self.config,
                "seed": self.seed,
                "commit": commit(),
                "machine": machine(),
                "metrics": self.metrics,
                "seconds": self.seconds,
            }
        )


def plain(value: Any) -> Any:
    """Return the value as JSON: arrays as lists, numpy numbers as Python numbers, None if not finite, text UTF-8."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else as_utf8(str(value))


def as_utf8(text: str) -> str:
    """Return text that every file can hold: bytes of file names that are not UTF-8 become escapes such as \\udcff."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str, *, keep: str = "") -> str:
    """Return text that is safe in a terminal: control characters, except those in `keep`, become escapes."""
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


@dataclass(frozen=True)
class Picture:
    """A figure that was written as a file, PNG with an SVG beside it; a notebook shows it."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()

    def _repr_html_(self) -> str:
        content = base64.b64encode(self._repr_png_()).decode()
        return f'<img alt="{escape(self.path.stem)}" src="data:image/png;base64,{content}">'


def counted(count: int, noun: str) -> str:
    """1 -> "1 image", 1200 -> "1,200 images"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """{"accuracy": {"10": 0.5}} -> {"accuracy.10": 0.5}; lists stay as they are."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        inner = flattened(value).items() if isinstance(value, Mapping) else ()
        flat.update({f"{name}.{key}": item for key, item in inner} if inner else {str(name): value})
    return flat


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    top = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ["".join(f"<td>{escape(shortened(row.get(name)))}</td>" for name in names) for row in rows]
    return f"<table><tr>{top}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def shortened(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def commit() -> str | None:
    """Return the commit of the source tree, with "+" if files were changed; None for an installed wheel."""
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
    """Return what a measured number depends on besides the code: CPU, cores, system and versions."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "anechoic": package_version("anechoic"),
    }
