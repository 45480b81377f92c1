"""The command `tools doctor`: problems of this machine or of a run."""

from __future__ import annotations

import time
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import PathLike
from anechoic.outcome import Outcome


@command
def doctor(run: PathLike | None = None, /, *, data: bool = False) -> Outcome:
    """Check this machine, or a run too, for known problems, and print what to do about each.

    Example: anechoic tools doctor runs/photos

    Args:
        run: a run or model directory to check as well.
        data: open the run's data, too, at the path or URL in its config, which another person may have written.
    """
    from anechoic.training.doctor import examine

    started = time.perf_counter()
    findings = examine(None if run is None else Path(run), open_data=data)
    marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
    lines = [
        f"{marks[item.state]} {item.what}: {item.found}" + (f" -> {item.remedy}" if item.remedy else "")
        for item in findings
    ]
    problems = [item for item in findings if item.state == "problem"]
    lines.append(f"{len(problems)} problem{'s' * (len(problems) != 1)} in {len(findings)} checks.")
    return Outcome(
        config={},
        metrics={"problems": len(problems), "findings": [vars(item) for item in findings]},
        seconds=time.perf_counter() - started,
        text="\n".join(lines),
    )
