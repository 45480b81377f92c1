"""Pictures: t-SNE, reconstructions, maps, neighbors, rank over depth and over training, as PNG and SVG.

The only file that imports matplotlib; arrays in, files out, nothing computed. Lines and classes differ in marker and
dash as well as in shade, so that every picture can be read in black and white. (Figures 3 to 7.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anechoic.errors import UserError
from anechoic.storage.files import write_together

P = ParamSpec("P")

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 2, 2)))
# Dark to light with distinct lightness, so that they stay apart in gray.
SHADES = ("#1b1b3a", "#5f2c82", "#a33b6b", "#d1603d", "#3a7d44", "#2a6f97", "#8d99ae", "#e0a458", "#6b705c", "#c9ada7")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "hatch.linewidth": 0.4,
    "svg.hashsalt": "anechoic",
    "svg.fonttype": "none",
}


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write path.png and path.svg; the same figure has the same bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.parent / f"{path.name}.png", path.parent / f"{path.name}.svg"]
    FigureCanvasAgg(figure)
    with write_together(paths) as (png, svg):
        figure.savefig(png, dpi=150, bbox_inches="tight", metadata={"Software": None})
        figure.savefig(svg, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return paths


def styled(draw: Callable[P, list[Path]]) -> Callable[P, list[Path]]:
    """The drawing function under STYLE; matplotlib's global settings stay as they were."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> list[Path]:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def panels(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """A figure of rows x columns axes, each width x height inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


@styled
def draw_tsne(
    points: np.ndarray, labels: np.ndarray, path: str | Path, *, names: Sequence[str], title: str = ""
) -> list[Path]:
    """points (n, 2), labels (n,) into names: one marker and shade per class (Figure 3)."""
    figure, axes = panels(1, 1, width=5.2, height=4.2)
    axis: Axes = axes[0, 0]
    for i, label in enumerate(np.unique(labels)):
        chosen = points[labels == label]
        axis.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=14,
            marker=MARKERS[i % len(MARKERS)],
            color=SHADES[i % len(SHADES)],
            edgecolors="white",
            linewidths=0.3,
            label=names[int(label)],
        )
    axis.set(xticks=[], yticks=[], xlabel="t-SNE 1", ylabel="t-SNE 2", title=title)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), markerscale=1.4)
    return save(figure, path)


@styled
def draw_reconstructions(
    images: np.ndarray, hidden: np.ndarray, predictions: np.ndarray, path: str | Path, *, title: str = ""
) -> list[Path]:
    """images, predictions (n, H, W, C) in 0 .. 1, hidden (n, H, W) bool: original, what is seen, what is predicted.

    The last column shows predictions at hidden places only, visible pixels elsewhere (Figure 6).
    """
    seen = np.where(hidden[..., None], 0.5, images)
    mixed = np.where(hidden[..., None], predictions, images)
    columns = [("original", images), ("visible", seen), ("prediction", predictions), ("visible + prediction", mixed)]
    figure, axes = panels(len(images), len(columns), width=1.3, height=1.3)
    for row, i in enumerate(range(len(images))):
        for column, (name, pictures) in enumerate(columns):
            show(axes[row, column], pictures[i], title=name if row == 0 else "")
            if name == "visible":
                # Hatching marks hidden patches even where the image itself is gray.
                axes[row, column].contourf(hidden[i], levels=[0.5, 1.5], colors="none", hatches=["//////"])
    figure.suptitle(title, fontsize=9)
    return save(figure, path)


@styled
def draw_maps(images: np.ndarray, maps: np.ndarray, path: str | Path, *, title: str = "") -> list[Path]:
    """images (n, H, W, C) and RGB maps (n, h, w, 3), both in 0 .. 1: the image above, its map below (Figure 4)."""
    columns = min(8, len(images))
    lines = -(-len(images) // columns)
    figure, axes = panels(2 * lines, columns, width=1.3, height=1.3)
    for axis in axes.flat:
        axis.set_axis_off()
    for i in range(len(images)):
        line, column = divmod(i, columns)
        show(axes[2 * line, column], images[i])
        show(axes[2 * line + 1, column], maps[i])
    figure.suptitle(title, fontsize=9)
    return save(figure, path)


@styled
def draw_neighbors(
    queries: np.ndarray,
    neighbors: np.ndarray,
    path: str | Path,
    *,
    similarities: np.ndarray,
    names: Sequence[Sequence[str]],
    correct: np.ndarray | None = None,
    title: str = "",
) -> list[Path]:
    """queries (n, H, W, C), neighbors (n, k, H, W, C), similarities (n, k); names: of each query and its
    neighbors; where correct (n, k) is false, a cross."""
    n, k = neighbors.shape[:2]
    figure, axes = panels(n, k + 1, width=1.2, height=1.45)
    for row in range(n):
        show(axes[row, 0], queries[row], title=f"query\n{names[row][0]}")
        for column in range(k):
            wrong = correct is not None and not correct[row, column]
            words = f"{similarities[row, column]:.2f}{' ✗' if wrong else ''}\n{names[row][column + 1]}"
            show(axes[row, column + 1], neighbors[row, column], title=words)
    figure.suptitle(title, fontsize=9)
    return save(figure, path)


@styled
def draw_layers(
    curves: Mapping[str, Mapping[str, Mapping[int, float | None]]], path: str | Path, *, title: str = ""
) -> list[Path]:
    """panel -> line -> layer -> value: one panel for each measure, one line for each encoder or pooling (Figure 7)."""
    figure, axes = panels(1, len(curves), width=3.2, height=2.6)
    for axis, (measure, lines) in zip(axes[0], curves.items(), strict=True):
        for i, (name, values) in enumerate(lines.items()):
            known = [(layer, value) for layer, value in sorted(values.items()) if value is not None]
            if known:
                axis.plot(*zip(*known, strict=True), **line_style(i), label=name)
        axis.set(xlabel="layer (0: embedding)", title=measure)
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    legend_below(figure, axes[0, 0])
    figure.suptitle(title, fontsize=9)
    return save(figure, path)


@styled
def draw_decay(alphas: Mapping[str, Sequence[float]], path: str | Path) -> list[Path]:
    """name -> alpha of every branch: alpha over depth, and the running product, which is what is left of the input."""
    figure, axes = panels(1, 2, width=3.6, height=2.7)
    for i, (name, values) in enumerate(alphas.items()):
        axes[0, 0].plot(range(len(values)), values, **line_style(i), markevery=max(1, len(values) // 6), label=name)
        left = np.cumprod(values)
        axes[0, 1].plot(range(len(left)), left, **line_style(i), markevery=max(1, len(left) // 6))
    axes[0, 0].set(xlabel="residual branch", title="alpha", ylim=(0, 1.05))
    axes[0, 1].set(xlabel="residual branch", title="share of the input on the identity path", yscale="log")
    legend_below(figure, axes[0, 0])
    return save(figure, path)


@styled
def draw_sheet(
    pictures: np.ndarray, path: str | Path, *, rows: Sequence[str] = (), columns: Sequence[str] = ()
) -> list[Path]:
    """pictures (rows, columns, H, W, C) in 0 .. 1, with a name for each row and column."""
    height, width = pictures.shape[:2]
    figure, axes = panels(height, width, width=0.85, height=0.95 if columns else 0.72)
    for i in range(height):
        for j in range(width):
            show(axes[i, j], pictures[i, j], title=columns[j] if columns and i == 0 else "")
        if rows:
            axes[i, 0].text(-0.15, 0.5, rows[i], transform=axes[i, 0].transAxes, ha="right", va="center")
    return save(figure, path)


@styled
def draw_dynamics(found: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> list[Path]:
    """Rank, accuracy and their correlation across runs, over samples seen (Figure 5)."""
    points, correlations = found["points"], found["correlations"]
    if not points:
        raise UserError("There are no checkpoints to draw; train the runs with --save.keep-every N.")
    figure, axes = panels(1, 3, width=3.2, height=2.6)
    panel_of = (("entropy_rows", "effective rank (entropy)"), ("accuracy", "accuracy"))
    for axis, (key, name) in zip(axes[0], panel_of, strict=False):
        for i, run in enumerate(dict.fromkeys(point["run"] for point in points)):
            own = [point for point in points if point["run"] == run]
            label = f"alpha_min {own[0]['alpha_min']:g}"
            axis.plot([p["seen"] for p in own], [p[key] for p in own], **line_style(i), label=label)
        axis.set(xlabel="samples seen", title=name)
    legend_below(figure, axes[0, 0])
    last = axes[0, 2]
    seen = [row["seen"] for row in correlations]
    r, low, high = (
        np.array([row[f"{name}_rows"] for row in correlations], dtype=float) for name in ("r", "low", "high")
    )
    last.plot(seen, r, **line_style(0), label="Pearson r")
    last.fill_between(seen, low, high, alpha=0.25, color=SHADES[6], label="95 % interval")
    last.axhline(0, color="black", linewidth=0.5)
    last.set(xlabel="samples seen", title="rank and accuracy across runs", ylim=(-1.05, 1.05))
    last.legend()
    return save(figure, path)


@styled
def draw_growth(rows: Sequence[Mapping[str, Any]], path: str | Path) -> list[Path]:
    """Rows of `bench growth`: images a second along each axis, beside a line that falls as the matrix products say."""
    names = list(dict.fromkeys(row["axis"] for row in rows))
    figure, axes = panels(1, len(names), width=2.3, height=2.6)
    for axis, name in zip(axes[0], names, strict=True):
        own = [row for row in rows if row["axis"] == name]
        speeds = [row["items"] / row["ours"] for row in own]
        if name == "cores":
            axis.bar([row["label"].replace(" of ", "\nof ") for row in own], speeds, color=SHADES[0], width=0.6)
            axis.tick_params(axis="x", labelsize=6)
            continue
        sizes = [row["value"] for row in own]
        axis.plot(sizes, speeds, **line_style(0), label="measured")
        # The line meets the last point, where overhead weighs least.
        products = [own[-1]["ours"]]
        for later, row in zip(own[:0:-1], own[-2::-1], strict=True):
            products.insert(0, products[0] * (row["value"] / later["value"]) ** later["expected"])
        expected = [row["items"] / seconds for row, seconds in zip(own, products, strict=True)]
        axis.plot(sizes, expected, color=SHADES[3], linestyle="--", linewidth=1, label="as the matrix products")
        axis.set(xscale="log", yscale="log", xlabel=name)
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        seen = [*speeds, *expected]
        marks = [m * 10**e for e in range(6) for m in (1, 2, 5) if min(seen) / 1.5 <= m * 10**e <= max(seen) * 1.5]
        axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
        axis.minorticks_off()
    axes[0, 0].set_ylabel("images a second")
    legend_below(figure, axes[0, 0])
    return save(figure, path)


def legend_below(figure: Figure, axis: Axes) -> None:
    """One legend for all panels, where it hides no line."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(1, len(labels))))


def line_style(i: int) -> dict[str, Any]:
    return {
        "color": SHADES[i % len(SHADES)],
        "linestyle": DASHES[i % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def show(axis: Axes, picture: np.ndarray, *, title: str = "") -> None:
    """One image (H, W, C) in 0 .. 1 without ticks; one channel as gray, the first three of more."""
    picture = np.clip(picture, 0, 1)
    picture = picture[..., 0] if picture.shape[-1] < 3 else picture[..., :3]
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set_title(title, fontsize=8)
    axis.set_axis_off()


@styled
def draw_estimates(
    curves: Mapping[str, Mapping[str, Sequence[tuple[Any, float, float]]]],
    path: str | Path,
    *,
    xlabel: str = "",
    ylabel: str = "",
    zero: bool = False,
    log: bool = False,
) -> list[Path]:
    """panel -> line -> (x, mean, half-width of its interval). Words as x are listed; numbers span an axis (log: by
    factors, with a mark for each that was measured)."""
    words = [
        x for lines in curves.values() for points in lines.values() for x, _, _ in points[:1] if isinstance(x, str)
    ]
    longest = max((len(points) for lines in curves.values() for points in lines.values()), default=1)
    height = 0.8 + 0.28 * longest if words else 2.8
    figure, axes = panels(1, max(1, len(curves)), width=3.4, height=height)
    for column, (axis, (measure, lines)) in enumerate(zip(axes[0], curves.items(), strict=False)):
        for i, (name, points) in enumerate(lines.items()):
            if not points:
                continue
            x, mean, half = zip(*points, strict=True)
            if words:
                places = range(len(x))
                axis.errorbar(mean, places, xerr=half, color=SHADES[i], fmt="o", markersize=4, capsize=3)
                axis.set_yticks(list(places), labels=list(x) if column == 0 else [""] * len(x))
            else:
                axis.errorbar(x, mean, yerr=half, **line_style(i), capsize=2, label=name)
        if words:
            axis.set_ylim(longest - 0.5, -0.5)
            axis.margins(x=0.08)
            if zero:
                axis.axvline(0, color="black", linewidth=0.5)
        else:
            axis.set(xlabel=xlabel, ylabel=ylabel if column == 0 else "", xscale="log" if log else "linear")
            if log:
                measured = sorted({x for points in lines.values() for x, _, _ in points})
                axis.set_xticks(measured, labels=[f"{x:,.0f}" if x >= 1 else f"{x:g}" for x in measured])
                axis.minorticks_off()
            low, high = axis.get_ylim()
            if low < 0 < high:
                axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(measure)
    if not words:
        legend_below(figure, axes[0, 0])
    return save(figure, path)
