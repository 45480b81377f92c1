"""The command `tools cache`: what is cached on disk, and how to remove it."""

from __future__ import annotations

from typing import Any

from anechoic.cli._command import command
from anechoic.errors import UserError, nearest_name
from anechoic.outcome import Outcome


@command
def cache(*, clear: bool = False, only: str | None = None) -> Outcome:
    """List the caches of decoded pixels, features, indexes and listings with their sizes, or remove them.

    Everything in the cache is computed again when it is needed. The environment variable ANECHOIC_CACHE moves it.

    Example: anechoic tools cache --clear --only pixels

    Args:
        clear: remove what is listed.
        only: one kind, such as pixels, features or index.
    """
    import shutil

    from anechoic.data import cache_dir
    from anechoic.pages.tables import text_table

    folder = cache_dir()
    kinds = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if only is not None:
        names = [path.name for path in kinds]
        if only not in names:
            raise UserError(f"{folder} has no cache {only!r}; {nearest_name(only, names)}")
        kinds = [path for path in kinds if path.name == only]
    rows: list[dict[str, Any]] = []
    for path in kinds:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        rows.append({"cache": path.name, "entries": sum(1 for _ in path.iterdir()), "bytes": size})
        if clear:
            shutil.rmtree(path)
    total = sum(row["bytes"] for row in rows)
    cells = [[row["cache"], row["entries"], f"{row['bytes'] / 1e6:,.1f} MB"] for row in rows]
    summary = f"{folder}: {total / 1e6:,.1f} MB{' removed' if clear else ''}."
    text = f"{text_table(['cache', 'entries', 'size'], cells)}\n{summary}" if rows else summary
    return Outcome(config={}, metrics={"folder": str(folder), "bytes": total, "rows": rows}, text=text)
