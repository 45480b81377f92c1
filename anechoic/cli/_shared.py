"""Checks and texts that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from anechoic.errors import UserError
from anechoic.outcome import counted, printable


def refuse_swapped(run: str | Path, data: str | Path) -> None:
    """Refuse a model in the place of the data."""
    from anechoic.runtime.checkpoint import is_model

    if is_model(str(data)) and not is_model(str(run)) and not str(run).startswith(("timm:", "transformers:")):
        raise UserError(f"{data} is a model and {run} is not: give the model first, then the images.")


def check_workers(workers: int | None) -> int:
    """Return the number of worker processes, 0 by default."""
    if workers is not None and workers < 0:
        raise UserError(f"--workers is a number of processes, 0 or more, not {workers}.")
    return workers or 0


def check_page(out: Path | None) -> None:
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"The page is written as HTML, and {out.name!r} does not end in .html.")


def skipped_rows(skipped: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "reason": reason} for name, reason in skipped]


def skipped_text(skipped: list[dict[str, str]]) -> str:
    if not skipped:
        return ""
    first = skipped[0]
    count = counted(len(skipped), "image")
    return f"\n{count} could not be read; the first is {printable(first['name'])} ({first['reason']})."
