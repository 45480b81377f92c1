"""The page that `anechoic demo` writes: one table, one verdict, the pictures, in a file that can be sent to anybody."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b3a; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ccc; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { font-weight: 600; }
figure { margin: 1.5rem 0; }
figcaption { color: #555; font-size: .9rem; }
img { max-width: 100%; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
@media (max-width: 45rem) { .pair { grid-template-columns: 1fr; } }
footer { color: #555; font-size: .85rem; margin-top: 2rem; }
"""


def page(
    *,
    title: str,
    lead: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    verdict: str,
    figures: Sequence[tuple[str, Sequence[Path]]],
    footer: str,
) -> str:
    """figures: (caption, one picture or two side by side)."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(lead)}</p>", table(header, rows), f"<p>{escape(verdict)}</p>"]
    parts += [figure(caption, paths) for caption, paths in figures]
    parts.append(f"<footer>{escape(footer)}</footer>")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["".join(f"<td>{escape(value)}</td>" for value in row) for row in rows]
    return f"<table><tr>{top}</tr>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def figure(caption: str, paths: Sequence[Path]) -> str:
    images = "".join(f'<img src="{data_uri(path)}" alt="{escape(caption)}">' for path in paths)
    inner = f'<div class="pair">{images}</div>' if len(paths) > 1 else images
    return f"<figure>{inner}<figcaption>{escape(caption)}</figcaption></figure>"


def data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def machine_line(machine: Mapping[str, object], commit: str | None, seed: int | None) -> str:
    version = f"commit {commit[:12]}" if commit else f"anechoic {machine['anechoic']}"
    where = f"{machine['cores']} cores ({machine['processor']})"
    return f"Measured with {version}, seed {seed}, torch {machine['torch']}, {where}."
