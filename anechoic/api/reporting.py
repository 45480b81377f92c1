"""The verbs that show a run on a page: report on disk, serve live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro

from anechoic.errors import UserError
from anechoic.outcome import Outcome

Output = Annotated[Path | None, tyro.conf.arg(aliases=["-o"])]


def report(
    runs: tuple[Path, ...],
    /,
    *,
    data: str | None = None,
    output: Output = None,
    samples: int = 2000,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Write one self-contained page on a run, or several compared: verdict, curves, layers, reconstructions, map.

    Runs that differ in their seed alone stand together; means have 95 % intervals over seeds.

    Example: anechoic report runs/photos --data photos -o report.html

    Args:
        runs: run directories, finished or not.
        data: images to look at, the run's own by default; with labels, k-NN and probe are measured too.
        output: where to write; default report.html in the run, or here for several runs.
        samples: look at no more images than this, evenly spaced.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of crops, masks, held-out parts and of which images are shown.
    """
    started = time.perf_counter()
    if not runs:
        raise UserError("Name at least one run directory: anechoic report RUN.")
    if samples < 2:
        raise UserError(f"A report needs at least 2 samples, not {samples}.")
    from anechoic.outcome import commit, machine
    from anechoic.report.html import machine_line, plain, write_page
    from anechoic.report.run_page import report_page
    from anechoic.report.runs import open_run
    from anechoic.report.summary import comparison, summarise, unique_names

    opened = [open_run(run) for run in runs]
    summaries = [
        summarise(run, name=name, data=data, samples=samples, device=device, seed=seed)
        for run, name in zip(opened, unique_names(opened), strict=True)
    ]
    compared = comparison(summaries) if len(runs) > 1 else []
    metrics = plain({"runs": [summary.to_json() for summary in summaries], "comparison": compared})
    path = output or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    footer = machine_line(machine(), commit(), seed)
    write_page(path, report_page(summaries, compared, numbers=metrics, footer=footer))
    words = [f"{s.name}: {s.verdict.text}" if s.verdict else f"{s.name}: {' '.join(s.missing)}" for s in summaries]
    config = {"output": str(path)}
    return Outcome(config, metrics, seed, time.perf_counter() - started, "\n".join([*words, str(path)]))
