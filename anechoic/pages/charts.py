"""Curves and bars as inline SVG, in the page's own colors, light and dark; figures.py makes pictures for print.

Lines differ in dash as well as in color.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from anechoic.pages.html import Html
from anechoic.pages.tables import cell

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 24, 40
COLORS = 7
DASHES = ("", "7 3", "2 3", "8 3 2 3", "12 4", "4 2 1 2")

Points = tuple[Sequence[float | None], Sequence[float | None]]


class Scale(NamedTuple):
    """Values low .. high to pixels start .. end, by their logarithm if log."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers] or [self.low, self.high]
        return round_ticks(self.low, self.high)


def round_ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Return round numbers between low and high, approximately `about` of them."""
    rough = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    lines: Mapping[str, Points],
    *,
    title: str,
    xlabel: str = "",
    bands: Mapping[str, Points] | None = None,
    marks: Mapping[str, float] | None = None,
    from_zero: bool = False,
    log_x: bool = False,
    dots: bool = True,
) -> Html:
    """lines: name -> (x, y). bands: name -> (low, high) at the line's x, such as an interval. marks: name -> x of an
    upright line. Values that are None or not finite are skipped."""
    points = {name: finite(*line) for name, line in lines.items()}
    values = [y for line in points.values() for _, y in line]
    for low, high in (bands or {}).values():
        values += [y for y in (*low, *high) if y is not None and math.isfinite(y)]
    xs = [x for line in points.values() for x, _ in line] + list((marks or {}).values())
    if not xs:
        return Html(f"<p>{escape(title)}: nothing was recorded.</p>")
    x = Scale(*widened(min(xs), max(xs), log=log_x), LEFT, WIDTH - RIGHT, log_x)
    y = Scale(*padded(values, from_zero=from_zero), HEIGHT - BOTTOM, TOP)
    drawn = frame(x, y, xlabel=xlabel)
    for i, (name, line) in enumerate(points.items()):
        color = f"var(--c{i % COLORS})"
        if bands and name in bands:
            low, high = bands[name]
            there, back = (list(zip(lines[name][0], side, strict=True)) for side in (high, low))
            edge = [*there, *reversed(back)]
            around = " ".join(f"{x(a)},{y(b)}" for a, b in edge if a is not None and b is not None)
            drawn.append(f'<polygon points="{around}" fill="{color}" opacity="0.18"/>')
        path = " ".join(f"{x(a)},{y(b)}" for a, b in line)
        drawn.append(f'<polyline class="line" points="{path}" stroke="{color}"{dash(i)}/>')
        if dots and len(line) <= 30:
            drawn += [
                f'<circle cx="{x(a)}" cy="{y(b)}" r="3" fill="{color}"><title>{escape(name)}: {cell(float(b))} at '
                f"{cell(float(a))}</title></circle>"
                for a, b in line
            ]
    drawn += mark_lines(marks or {}, x)
    return finish(drawn, title=title, names=list(lines) if len(lines) > 1 else [])


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    title: str,
    xlabel: str = "",
    marks: Mapping[str, float] | None = None,
) -> Html:
    """counts between edges (one more); marks: name -> x of an upright line."""
    places = [*edges, *(marks or {}).values()]
    x = Scale(*widened(min(places), max(places)), LEFT, WIDTH - RIGHT)
    y = Scale(*padded([0.0, *map(float, counts)], from_zero=True), HEIGHT - BOTTOM, TOP)
    drawn = frame(x, y, xlabel=xlabel)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        wide = max(x(high) - x(low) - 1, 0.5)
        drawn.append(
            f'<rect x="{x(low)}" y="{y(count)}" width="{wide:.2f}" height="{y(0) - y(count):.2f}" fill="var(--c0)">'
            f"<title>{count} from {low:.4g} to {high:.4g}</title></rect>"
        )
    return finish([*drawn, *mark_lines(marks or {}, x)], title=title, names=[])


# ---- parts


def finite(xs: Sequence[float | None], ys: Sequence[float | None]) -> list[tuple[float, float]]:
    pairs = zip(xs, ys, strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]


def widened(low: float, high: float, *, log: bool = False) -> tuple[float, float]:
    if low < high:
        return low, high
    return (low / 2, low * 2) if log else (low - 0.5, low + 0.5)


def padded(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        low = min(low, 0.0)
    low, high = widened(low, high)
    room = 0.06 * (high - low)
    return (low if from_zero and low == 0 else low - room), high + room


def frame(x: Scale, y: Scale, *, xlabel: str) -> list[str]:
    parts = []
    for tick in y.ticks():
        parts.append(f'<line class="ruler" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{short(tick)}</text>')
    for tick in x.ticks():
        parts.append(f'<text x="{x(tick)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(xlabel)}</text>')
    return parts


def short(value: float) -> str:
    """2500000 -> 2.5M, as ticks are written."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}"
    return f"{value:.6g}"


def dash(i: int) -> str:
    pattern = DASHES[i % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def mark_lines(marks: Mapping[str, float], x: Scale) -> list[str]:
    parts = []
    for name, at in marks.items():
        place, right = x(at), x(at) > (LEFT + WIDTH) / 2
        parts.append(f'<line class="mark" x1="{place}" x2="{place}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        anchor, shift = ("end", -5) if right else ("start", 5)
        parts.append(f'<text x="{place + shift}" y="{TOP + 10}" text-anchor="{anchor}">{escape(name)}</text>')
    return parts


def finish(drawn: Sequence[str], *, title: str, names: Sequence[str]) -> Html:
    legend = "".join(
        f'<span><svg width="26" height="10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5" stroke-width="2.5" '
        f'stroke="var(--c{i % COLORS})"{dash(i)}/></svg> {escape(name)}</span>'
        for i, name in enumerate(names)
    )
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    return Html(
        f'<div class="chart"><svg {size} role="img" aria-label="{escape(title)}">'
        f'<text x="{LEFT}" y="14" font-weight="600">{escape(title)}</text>{"".join(drawn)}</svg>'
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + "</div>"
    )
