"""The command `report`: one page on a run, or on several compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import Data, Device, OptionalOut, PathLike, Seed
from anechoic.errors import UserError
from anechoic.outcome import Outcome


@command
def report(
    runs: Sequence[PathLike],
    /,
    *,
    data: Data | None = None,
    out: OptionalOut = None,
    samples: int = 2000,
    device: Device = "auto",
    seed: Seed = 0,
) -> Outcome:
    """Write one self-contained page on a run, or several compared: verdict, curves, layers, reconstructions, map.

    Runs that differ in their seed alone stand together; means have 95 % intervals over seeds.
    The page is report.html in the run, or here for several runs, unless --out names another.

    Example: anechoic report runs/photos --data photos -o report.html

    Args:
        runs: run directories, finished or not.
        data: images to evaluate on; by default the run's own, which are opened only if you started the run on this
            machine (another person's config may name any path or server). With labels, k-NN and probe are measured too.
        samples: maximum number of images, evenly spaced.
    """
    started = time.perf_counter()
    if not runs:
        raise UserError("Name at least one run directory: anechoic report RUN.")
    if samples < 2:
        raise UserError(f"A report needs at least 2 samples, not {samples}.")
    from anechoic.outcome import commit, machine, plain
    from anechoic.pages.html import machine_line, write_page
    from anechoic.pages.run_page import report_page
    from anechoic.pages.runs import open_run
    from anechoic.pages.summary import comparison, summarize, unique_names

    folders = [Path(run) for run in runs]
    opened = [open_run(run) for run in folders]
    summaries = [
        summarize(run, name=name, data=None if data is None else str(data), samples=samples, device=device, seed=seed)
        for run, name in zip(opened, unique_names(opened), strict=True)
    ]
    compared = comparison(summaries) if len(runs) > 1 else []
    metrics = plain({"runs": [summary.to_json() for summary in summaries], "comparison": compared})
    path = Path(out or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    footer = machine_line(machine(), commit(), seed)
    write_page(path, report_page(summaries, compared, numbers=metrics, footer=footer))
    words = [f"{s.name}: {s.verdict.text}" if s.verdict else f"{s.name}: {' '.join(s.missing)}" for s in summaries]
    config = {"out": str(path)}
    return Outcome(config, metrics, seed, time.perf_counter() - started, "\n".join([*words, str(path)]))
