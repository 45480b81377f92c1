"""The command `tools cache`: what is cached on disk, and how to remove it."""

from __future__ import annotations

from typing import Any

from anechoic.choices import CacheKind
from anechoic.cli._command import command
from anechoic.outcome import Outcome


@command
def cache(kind: CacheKind | None = None, /, *, clear: bool = False) -> Outcome:
    """List the cached pixels, features, indexes, listings and hashes, most recently used first, or remove them.

    Everything in the cache is computed again when it is needed. The environment variable ANECHOIC_CACHE moves it,
    ANECHOIC_CACHE_LIMIT (8GB by default) bounds it.

    Example: anechoic tools cache pixels --clear

    Args:
        kind: only this kind of entries.
        clear: remove them, except those that a process is writing.
    """
    from datetime import datetime

    from anechoic.pages.tables import text_table
    from anechoic.storage.cache import cache_dir, entries, limit
    from anechoic.storage.cache import clear as remove

    found = [entry for entry in entries() if kind in (None, entry.kind)]
    rows: list[dict[str, Any]] = [
        {
            "kind": entry.kind,
            "bytes": entry.size,
            "last_used": datetime.fromtimestamp(entry.last_used).isoformat(" ", "minutes"),
            "about": entry.about,
        }
        for entry in found
    ]
    total = sum(entry.size for entry in found)
    text = f"{cache_dir()}: {total / 1e6:,.1f} MB in {len(found)} entries, limit {limit() / 1e6:,.0f} MB."
    metrics: dict[str, Any] = {"folder": str(cache_dir()), "bytes": total, "limit": limit(), "rows": rows}
    if clear:
        metrics["freed"] = freed = remove(kind)
        text += f" Removed {freed / 1e6:,.1f} MB."
    elif rows:
        cells = [[row["kind"], f"{row['bytes'] / 1e6:,.1f} MB", row["last_used"], row["about"]] for row in rows]
        text = f"{text_table(['kind', 'size', 'last used', 'made of'], cells)}\n{text}"
    return Outcome(config={}, metrics=metrics, text=text)
