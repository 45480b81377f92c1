"""The one maker of pages: components in, one self-contained file out that opens from disk and fetches nothing.

Text is escaped wherever it is no `Html` yet. Style and script are in assets/, the same for every page; curves are
drawn by charts.py and small pictures made by thumbnails.py. Numbers shown on a page are also embedded as JSON, so that
a test or another program reads what a person sees.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from anechoic.outcome import as_utf8, counted, plain
from anechoic.pages.tables import cell
from anechoic.storage.files import write_aside

# Groups on a map differ in color, then in shape too (page.js draws the same); longer legends are omitted.
COLORS, SHAPES, MAX_LEGEND = 7, "●■▲◆", 28
ASSETS = Path(__file__).parent / "assets"
MIME = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp", b"<svg": "image/svg+xml"}


class Html(str):
    """Text that is HTML already. Everything else is escaped."""


EMPTY = Html("")


class Section(NamedTuple):
    """A heading, which the page's list of contents names, and what stands under it."""

    heading: str
    parts: Sequence[str]

    @property
    def anchor(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.heading.lower()).strip("-")


class Thumbnail(NamedTuple):
    """picture: a data URI; caption: below it, its first line in bold; marked: stands out from the others.

    link: the address of the file itself; id: the key under which `selectable` knows it, for a check box.
    channels: data URIs of single channels, which `channel_picker` shows instead.
    """

    picture: str
    caption: Sequence[str] = ()
    marked: bool = False
    link: str = ""
    id: int | None = None
    channels: Sequence[str] = ()


def page(
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    footer: str = "",
    data: Mapping[str, Any] | None = None,
    script: str = "",
    live: bool = False,
    beside: bool = False,
) -> str:
    """data: embedded as JSON (`#data`). script: of this page alone. live: may talk to the server it came from.
    beside: may load scripts from its own folder, while that is written to.

    The content policy forbids every other connection, so a page cannot fetch anything even by mistake.
    """
    own = "'self' " if live else ""
    scripts = "'unsafe-inline'" + (" 'self' file:" if beside else "")
    policy = f"default-src 'none'; img-src {own}data: blob:; style-src 'unsafe-inline'; script-src {scripts}" + (
        f"; connect-src {own.strip()}" if live else ""
    )
    contents = [f'<li><a href="#{s.anchor}">{escape(s.heading)}</a></li>' for s in sections]
    body = [
        '<a class="skip" href="#content">Skip to the content</a>',
        f"<header><h1>{escape(title)}</h1>",
        _element("p", lead, "lead") if lead else "",
        f'<nav aria-label="Contents"><ul>{"".join(contents)}</ul></nav>' if len(contents) > 1 else "",
        '</header>\n<main id="content">',
        *(_section(section) for section in sections),
        "</main>",
        _element("footer", footer) if footer else "",
        embedded(data, id="data") if data is not None else "",
        f"<script>{_asset('page.js')}{script}</script>",
    ]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_asset("page.css")}</style>'
    )
    lines = as_utf8("\n".join(part for part in body if part))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{lines}\n</body></html>\n'


def write_page(path: str | Path, html: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_aside(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return path


def _section(section: Section) -> str:
    parts = "\n".join(part if isinstance(part, Html) else _element("p", part) for part in section.parts if part)
    return f'<section id="{section.anchor}"><h2>{escape(section.heading)}</h2>\n{parts}\n</section>'


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _element(tag: str, text: str, css: str = "") -> Html:
    kind = f' class="{css}"' if css else ""
    return Html(f"<{tag}{kind}>{safe(text)}</{tag}>")


def safe(text: Any) -> Html:
    return text if isinstance(text, Html) else Html(escape(str(text)))


# ---- text and numbers


def note(text: str, *more: str, kind: str = "") -> Html:
    """A box that stands out. kind: good, warn or bad; the words must say it too."""
    return Html(f'<div class="note {kind}">{"".join(_element("p", line) for line in (text, *more))}</div>')


def empty(text: str) -> Html:
    """What stands where a list has no entry."""
    return _element("p", text, "empty")


def heading(text: str) -> Html:
    """Inside a section."""
    return _element("h3", text)


def paragraph(text: str) -> Html:
    return _element("p", text)


def joined(*parts: str) -> Html:
    return Html("\n".join(safe(part) for part in parts))


def embedded(data: Any, *, id: str = "") -> Html:
    """JSON for scripts and tests; NaN and infinity as null, and no text in it can end the element."""
    text = json.dumps(plain(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    name = f' id="{id}"' if id else ""
    return Html(f'<script type="application/json"{name}>' + text.replace("<", "\\u003c") + "</script>")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    caption: str = "",
    strong: Iterable[int] = (),
    sortable: bool = True,
) -> Html:
    """Numbers to the right and sorted as numbers, None as a dash, Html as it is. strong: rows that stand out."""
    numeric = [any(_is_number(row[i]) for row in rows) for i in range(len(header))]
    sortable = sortable and len(rows) > 1
    names = [f'<button type="button">{safe(name)}</button>' if sortable and name else safe(name) for name in header]
    top = "".join(f'<th scope="col"{_num(right)}>{name}</th>' for name, right in zip(names, numeric, strict=True))
    emphasis = set(strong)
    lines = [
        f"<tr{' class=strong' if i in emphasis else ''}>"
        + "".join(_cell(value, right) for value, right in zip(row, numeric, strict=True))
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    title = f"<caption>{safe(caption)}</caption>" if caption else ""
    inside = f"<table>{title}<thead><tr>{top}</tr></thead>\n<tbody>" + "\n".join(lines) + "</tbody></table>"
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or "table")}">{inside}</div>'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _num(right: bool) -> str:
    return " class=num" if right else ""


def _cell(value: Any, right: bool) -> str:
    exact = f' data-value="{value!r}"' if _is_number(value) else ""
    return f"<td{_num(right)}{exact}>{value if isinstance(value, Html) else escape(cell(value))}</td>"


def download(name: str, header: Sequence[str], rows: Sequence[Sequence[Any]], *, extra: Html = EMPTY) -> Html:
    """Return a button that saves the list as a CSV file of this name; extra: another button beside it."""
    words = f"Save {name} ({counted(len(rows), 'row')})"
    button = f'<button type="button" class="plain download" data-name="{escape(name)}">{escape(words)}</button>'
    return Html(f'<div class="controls">{button}{embedded([list(header), *map(list, rows)])}{extra}</div>')


# ---- pictures


def figure(caption: str, pictures: Sequence[str | Path | bytes]) -> Html:
    """Pictures side by side: files or bytes of PNG, JPEG, WebP or SVG, data URIs, or Html such as a chart."""
    images = "".join(
        picture if isinstance(picture, Html) else f'<img src="{data_uri(picture)}" alt="{escape(caption)}">'
        for picture in pictures
    )
    inner = f'<div class="pair">{images}</div>' if len(pictures) > 1 else images
    return Html(f"<figure>{inner}<figcaption>{safe(caption)}</figcaption></figure>")


def data_uri(picture: str | Path | bytes) -> str:
    if isinstance(picture, str) and picture.startswith("data:"):
        return picture
    content = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
    kind = next((mime for start, mime in MIME.items() if content.startswith(start)), "image/svg+xml")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image(picture: str | Path | bytes, *, alt: str) -> Html:
    """One picture, as for a cell of a table."""
    return Html(f'<img src="{data_uri(picture)}" alt="{escape(alt)}">')


def grid(thumbnails: Sequence[Thumbnail], *, row: bool = False) -> Html:
    """row: thumbnails of a fixed width that belong together, so that several such grids share a line."""
    items = []
    for number, thumb in enumerate(thumbnails):
        first, *rest = [*thumb.caption, ""]
        words = f"<b>{escape(first)}</b>" + "".join(f"<span>{escape(line)}</span>" for line in rest if line)
        alt = escape(", ".join(thumb.caption) or "picture")
        channels = f' data-channels="{" ".join(thumb.channels)}"' if thumb.channels else ""
        picture = f'<img src="{thumb.picture}" alt="{alt}" title="{alt}" decoding="async"{channels}>'
        # Keys walk over the check boxes (page.js), so only the first is a tab stop.
        if thumb.link:
            stop = ' tabindex="-1"' if thumb.id is not None else ""
            picture = f'<a href="{escape(thumb.link)}" target="_blank" rel="noopener"{stop}>{picture}</a>'
        if thumb.id is not None:
            stop = "" if number == 0 else ' tabindex="-1"'
            picture += f'<input type="checkbox" data-id="{thumb.id}" aria-label="Select {alt}"{stop}>'
        items.append(f"<li{' class=marked' if thumb.marked else ''}>{picture}{words}</li>")
    return Html(f'<ul class="grid{" row" if row else ""}">{"".join(items)}</ul>')


def channel_picker(names: Sequence[str]) -> Html:
    """Return the control that shows one channel of every picture of a page that has `channels`."""
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
    composed = f"{escape(', '.join(names[:3]))} as {'colors' if len(names) > 2 else 'gray'}"
    return Html(
        '<div class="controls"><label>Channels of the pictures <select data-control="channels">'
        f'<option value="">{composed}</option>{options}</select></label></div>'
    )


def selectable(names: Mapping[int, str], *, root: str | None, files: Mapping[int, str]) -> Html:
    """Return the bar that counts the images selected on a page and saves them, as CSV and as a script that moves them.

    names: by id; root: the folder of the files, None without a script; files: relative to it. Percent encoding
    keeps what is no UTF-8 in a path.
    """
    data = {
        "names": names,
        "root": None if root is None else quote(os.fsencode(root)),
        "files": {i: quote(os.fsencode(file)) for i, file in files.items() if file != as_utf8(names[i])},
    }
    script = (
        '<button type="button" class="plain" data-save="script">Save a script that moves them</button>' if root else ""
    )
    return Html(
        f'<div class="selection" role="region" aria-label="Selection" hidden>{embedded(data, id="selectable")}'
        '<span role="status"><b data-count>0</b> selected</span>'
        f'<button type="button" class="plain" data-save="csv">Save selected.csv</button>{script}'
        '<button type="button" class="plain" data-save="clear">Clear</button></div>'
    )


class Grouping(NamedTuple):
    """What the points of a map are colored and filtered by: names of groups, and the group of each point."""

    label: str
    names: Sequence[str]
    of: Sequence[int]


class Sheet(NamedTuple):
    """Many small square pictures in one: row after row of `columns`, each `side` pixels wide."""

    src: str
    side: int
    columns: int
    rows: int


def point_map(
    points: Any,
    *,
    names: Sequence[str],
    groupings: Sequence[Grouping],
    sheet: Sheet,
    caption: str,
    neighbors: Sequence[Sequence[int]] | None = None,
    ids: Sequence[int] | None = None,
) -> Html:
    """points (n, 2) with a picture of the sheet for each; colored by the first grouping until another is chosen.

    neighbors: of each point, indices of others, shown when it is picked. ids: their keys in `selectable`.
    """
    place = [[float(value) for value in point] for point in points]
    x, y = (_to_unit([point[axis] for point in place]) for axis in (0, 1))
    data = {
        "x": x,
        "y": y,
        "name": list(names),
        "groupings": [{"names": list(one.names), "of": [int(i) for i in one.of]} for one in groupings],
        "sheet": sheet._asdict(),
        "neighbors": neighbors,
        "ids": None if ids is None else [int(i) for i in ids],
    }
    labels = "".join(f'<option value="{i}">{escape(one.label.lower())}</option>' for i, one in enumerate(groupings))
    colors = f'<label>Color by <select data-control="grouping">{labels}</select></label>' if len(groupings) > 1 else ""
    chooser = colors + "".join(_filter(one, number) for number, one in enumerate(groupings))
    controls = (
        f'<div class="controls">{chooser}'
        '<label><input type="checkbox" data-control="pictures" checked> pictures</label>'
        '<button type="button" class="plain" data-control="nearer" aria-label="Zoom in">+</button>'
        '<button type="button" class="plain" data-control="farther" aria-label="Zoom out">−</button>'
        f"<span><span data-shown>{len(place)}</span> images</span></div>"
    )
    stage = (
        f'<div class="stage"><canvas tabindex="0" role="img" aria-label="{escape(caption)}"></canvas>'
        '<div class="tip" hidden role="status"></div></div>'
    )
    help_text = "Point at an image, or use the arrow keys on the map; + and − zoom, dragging moves."
    help_text += " Click or press Enter for the nearest images." if neighbors is not None else ""
    help_text += " Space selects." if ids is not None else ""
    marks = "".join(_legend(one, number) for number, one in enumerate(groupings))
    return Html(
        f'<figure class="map">{embedded(data)}{controls}{stage}{marks}<div class="picked" aria-live="polite"></div>'
        f"<figcaption>{safe(caption)} {escape(help_text)}</figcaption></figure>"
    )


def _filter(grouping: Grouping, number: int) -> str:
    counts = Counter(grouping.of)
    options = "".join(
        f'<option value="{i}">{escape(name)} ({counts[i]})</option>'
        for i, name in enumerate(grouping.names)
        if counts[i]
    )
    if len(counts) < 2:
        return ""
    return (
        f'<label data-grouping="{number}"{" hidden" if number else ""}>{escape(grouping.label)} '
        f'<select data-control="filter"><option value="">all</option>{options}</select></label>'
    )


def _legend(grouping: Grouping, number: int) -> str:
    counts = Counter(grouping.of)
    if not 1 < len(counts) <= MAX_LEGEND:
        return ""
    marks = "".join(
        f'<span><b style="color:var(--c{i % COLORS})">{SHAPES[i // COLORS % len(SHAPES)]}</b> {escape(name)}</span>'
        for i, name in enumerate(grouping.names)
        if counts[i]
    )
    return f'<div class="legend" data-grouping="{number}"{" hidden" if number else ""}>{marks}</div>'


def _to_unit(values: Sequence[float]) -> list[float]:
    """To 0 .. 1, four digits."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return [round((value - low) / ((high - low) or 1.0), 4) for value in values]


def machine_line(machine: Mapping[str, object], commit: str | None, seed: int | None) -> str:
    version = f"commit {commit[:12]}" if commit else f"anechoic {machine['anechoic']}"
    where = f"{machine['cores']} cores ({machine['cpu']})"
    seeded = f", seed {seed}" if seed is not None else ""
    return f"Measured with {version}{seeded}, torch {machine['torch']}, {where}."
