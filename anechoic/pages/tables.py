"""Tables as text: aligned columns, numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anechoic.outcome import printable


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with aligned columns; numbers to the right, None as a dash."""
    texts = [[cell(value) for value in row] for row in rows]
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    widths = [max(len(line[i]) for line in [list(header), *texts]) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, texts)])


def cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def percent(value: float) -> float:
    """0.83215 -> 83.22, as accuracies are written."""
    return round(100 * value, 2)


def bytes_text(size: int) -> str:
    """12345 -> "12 kB", in decimal units."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}" if size >= 10 * unit else f"{size / unit:.1f} {name}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """75.2 -> "1 min 15 s", as people say it."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
