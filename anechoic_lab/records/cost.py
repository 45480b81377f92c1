"""When does the lead appear, and what does it cost? The lead of decayed shortcuts against CPU minutes of a network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from anechoic.pages import figures
from anechoic.pages.estimates import ENOUGH
from anechoic_lab.grids import Grid
from anechoic_lab.paper.muon_tables import FRESH
from anechoic_lab.paper.muon_tables import SAMPLES as TABLE_SAMPLES
from anechoic_lab.records.markdown_tables import line, signed
from anechoic_lab.records.scoreboard import records_of
from anechoic_lab.records.statistics import Estimate
from anechoic_lab.studies import cifar_length, emoji_styles


class Setting(NamedTuple):
    """A decayed variant beside its residual baseline, with the measure that was named for such data."""

    data: str
    arm: str
    samples: int
    grid: Grid
    decayed: str
    residual: str
    measure: str


class Cost(NamedTuple):
    setting: Setting
    minutes: float
    lead: Estimate


CIFAR, EMOJI = "CIFAR-100, whitened k-NN of the mean token", "Emoji, whitened mean token finds another style"
PHOTOGRAPHS, DRAWINGS = cifar_length.LENGTH, emoji_styles.LENGTH
SETTINGS = (
    *(
        Setting(
            CIFAR,
            "learning rate by held-out loss",
            samples,
            PHOTOGRAPHS,
            cifar_length.name_of("muon", 0.6, samples),
            cifar_length.name_of("muon", 1.0, samples),
            "knn_whitened_mean",
        )
        for samples in (cifar_length.SAMPLES, *cifar_length.LONG)
    ),
    Setting(
        CIFAR,
        "learning rate by held-out k-NN",
        TABLE_SAMPLES,
        FRESH,
        "alpha0.6",
        "alpha1",
        "knn_whitened_mean",
    ),
    *(
        Setting(
            EMOJI,
            "learning rate by held-out loss",
            samples,
            DRAWINGS,
            decayed,
            residual,
            "retrieval_whitened_mean",
        )
        for samples, decayed, residual in (
            (emoji_styles.SAMPLES, "muon-alpha0.6", "muon-alpha1"),
            *((n, emoji_styles.long_name(0.6, n), emoji_styles.long_name(1.0, n)) for n in emoji_styles.LONG),
        )
    ),
)
GOAL_MINUTES = 10


def costs(results: Path) -> list[Cost]:
    """Return every setting that has a pair: the median CPU minutes of a network, evaluation included, and the lead."""
    found = []
    for setting in SETTINGS:
        records = records_of(setting.grid, results)
        lead = records.difference(setting.decayed, setting.residual, setting.measure)
        if lead.n:
            networks = [*records.by_variant[setting.decayed].values(), *records.by_variant[setting.residual].values()]
            found.append(Cost(setting, median(record["cpu_seconds"] for record in networks) / 60, lead))
    return found


def write_costs(results: Path, out: Path) -> Path:
    found = costs(results)
    curves: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for cost in found:
        points = curves.setdefault(cost.setting.data, {}).setdefault(cost.setting.arm, [])
        points.append(cost.lead.at(round(cost.minutes, 1)))
    figures.draw_estimates(curves, out / "cost", xlabel="CPU minutes of a network", ylabel="lead, points", log=True)
    titles = ["measure", "learning rate", "samples", "CPU minutes", "decayed minus residual", "pairs", "page"]
    lines = ["# The lead against CPU minutes", "", INTRODUCTION, "", line(titles), line(["---"] * len(titles))]
    for (data, arm, samples, grid, *_), minutes, lead in found:
        page = f"[{grid.name}]({grid.name}.md)"
        lines.append(line([data, arm, f"{samples:,}", f"{minutes:.0f}", signed(lead), str(lead.n), page]))
    lines += ["", *(cheapest(data, [cost for cost in found if cost.setting.data == data]) for data in curves)]
    path = out / "cost.md"
    path.write_text("\n".join([*lines, "", "![The lead against CPU minutes](cost.png)"]) + "\n")
    return path


INTRODUCTION = (
    "Masked autoencoders with Muon, alpha_min 0.6 beside 1, both with skips. Minutes are the median CPU minutes "
    "(1 core) of a network, evaluation included, on the machines that its records name, which differ up to twofold. "
    "± is half of a 95 % interval over pairs of the same seed."
)


def cheapest(data: str, found: Iterable[Cost]) -> str:
    """Return a sentence on the cheapest setting with a lead beyond its interval, beside the goal."""
    leading = [cost for cost in found if cost.lead.n >= ENOUGH and cost.lead.sign > 0]
    if not leading:
        return f"- {data}: no setting leads by more than its interval over {ENOUGH} pairs."
    setting, minutes, lead = min(leading, key=lambda cost: cost.minutes)
    goal = "met" if minutes <= GOAL_MINUTES else "missed"
    return (
        f"- {data}: the cheapest lead beyond its interval takes {minutes:.0f} CPU minutes a network "
        f"({setting.samples:,} samples, {signed(lead)} points, {lead.n} pairs). The goal of {GOAL_MINUTES} minutes is "
        f"{goal}."
    )
