"""The live page: how far the training is, its curves, stop and resume; and what the network does with an image.

The page polls /status; its script is assets/live.js.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from anechoic.data import described
from anechoic.outcome import commit, machine, plain, rough_duration
from anechoic.pages.html import Html, Section, figure, machine_line, page
from anechoic.pages.run_page import report_page, training_charts, verdict_note
from anechoic.pages.runs import RunOnDisk, curves, encoder_of, facts, open_run, verdict_on
from anechoic.pages.summary import Summary, summarize

ASSETS = Path(__file__).parent / "assets"


def live_page(run: RunOnDisk, state: str) -> str:
    denoises = run.config.objective.name in ("noise_prediction", "flow_matching")
    sections = [Section("Training", [asset("training.html")]), Section("Try it", [asset("image.html")])]
    if denoises:
        sections.append(Section("Samples", [asset("samples.html")]))
    lead = f"{run.config.model.name} on {described(run.config.data.source)}, alpha_min {run.config.shortcut.alpha_min}."
    return page(
        f"{run.name} · {state}",
        sections,
        lead=lead,
        footer=machine_line(machine(), commit(), run.config.seed),
        script=asset("live.js"),
        live=True,
    )


@cache
def asset(name: str) -> Html:
    return Html((ASSETS / name).read_text(encoding="utf-8"))


# ---- what the page shows


def status_of(run: RunOnDisk, *, state: str, resume_command: str) -> dict[str, Any]:
    train = run.of_kind("train")
    samples = run.config.optim.samples or 0
    speed = finite(train[-1].get("images_per_second")) if train else None
    left = finite((samples - run.seen) / speed) if speed and state == "running" else None
    return {
        "state": state,
        "name": run.name,
        "seen": run.seen,
        "samples": samples,
        "images_per_second": speed,
        "seconds_left": left,
        "loss": finite(train[-1].get("loss")) if train else None,
        "summary": summary_of(run, state=state, left=left),
        "charts": figure("", training_charts(curves_alone(run))) if run.records else "",
        "resume_command": resume_command if state == "stopped" else "",
    }


def finite(value: float | None) -> float | None:
    """Return the number, or None for one that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def summary_of(run: RunOnDisk, *, state: str, left: float | None) -> str:
    samples = run.config.optim.samples or 0
    words = f"{state.capitalize()}: {run.seen:,} of {samples:,} samples"
    loss = next(
        (x for x in (record.get("held_out_loss") for record in reversed(run.validations)) if x is not None), None
    )
    words += f", held-out loss {loss:.4f}" if loss is not None else ""
    return words + (f", about {rough_duration(left)} left." if left is not None else ".")


def curves_alone(run: RunOnDisk) -> Summary:
    """A summary for its curves: nothing is measured."""
    return Summary(run, run.name, facts(run), curves(run), None, [], None, [])


@lru_cache(maxsize=4)
def cached_verdict(path: Path, weights: Any, *, device: str) -> dict[str, Any]:
    """Return the verdict, measured once for each state of the weights."""
    run = open_run(path)
    verdict = verdict_on(run, encoder_of(run, device=device), device=device, seed=run.config.seed)
    shown = {name: value for name, value in verdict.to_json().items() if name != "signals"}
    return {**shown, "html": verdict_note(verdict)}


def report_of(path: Path, *, data: str | None, device: str) -> str:
    run = open_run(path)
    summary = summarize(run, name=run.name, data=data, device=device)
    numbers = plain({"runs": [summary.to_json()], "comparison": []})
    return report_page([summary], [], numbers=numbers, footer=machine_line(machine(), commit(), 0))
