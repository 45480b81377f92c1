"""The verbs that show a run on a page: report on disk, serve live."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
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
    from anechoic.outcome import commit, machine, plain
    from anechoic.pages.html import machine_line, write_page
    from anechoic.pages.run_page import report_page
    from anechoic.pages.runs import open_run
    from anechoic.pages.summary import comparison, summarize, unique_names

    opened = [open_run(run) for run in runs]
    summaries = [
        summarize(run, name=name, data=data, samples=samples, device=device, seed=seed)
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


def serve(
    run: Path,
    /,
    *,
    data: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    device: str = "auto",
    upload_mb: int = 20,
    queue: int = 32,
) -> Outcome:
    """Show a run live in the browser: its training, stop and resume; then neighbors and reconstructions of any image.

    The same is a JSON API, described in /openapi.json: /embed, /search, /reconstruct, /patches, /sample. It needs the
    packages of the extra web. Ctrl-C ends it; a training that was resumed on the page saves and ends too.

    Example: anechoic serve runs/photos

    Args:
        run: the run directory, of a training that goes on, has stopped or has ended.
        data: the images that are searched; the run's own by default.
        host: the address to listen on; others than this machine's own need a token.
        port: the port; 0 takes any that is free.
        token: what has to be known to get in: the page's address ends in ?token=TOKEN, programs send Authorization:
            Bearer TOKEN. The environment variable ANECHOIC_TOKEN does the same and is not seen by other users.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        upload_mb: the largest request, in MB.
        queue: how many requests wait for the network before further ones are told to come again.
    """
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "python_multipart")):
        raise UserError('A live page needs more packages: pip install "anechoic[web]".')
    from anechoic.server.server import run_server

    run_server(
        run,
        data=data,
        host=host,
        port=port,
        token=token or os.environ.get("ANECHOIC_TOKEN"),
        device=device,
        upload_mb=upload_mb,
        queue=queue,
    )
    return Outcome({}, {}, text="")
