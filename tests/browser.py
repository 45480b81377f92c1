"""A real browser for pages: a chromium found on the machine, driven by playwright, that refuses every connection."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HINT = "apt-get install chromium, and pip install playwright, show pages in a real browser"


def launch() -> Iterator[Any]:
    """Yield one browser for all tests, or skip with a hint how to install one."""
    sync = pytest.importorskip("playwright.sync_api", reason=f"no playwright: {HINT}")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no chromium: {HINT}")
    with sync.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@contextmanager
def showing(browser: Any, file: Path, *, width: int = 1100, dark: bool = False) -> Iterator[Any]:
    """The page of a file; afterwards it may have asked nobody for anything and complained of nothing."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light", accept_downloads=True
    )
    page = context.new_page()
    problems: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.resolve().as_uri())
    try:
        yield page
    finally:
        context.close()
    foreign = [url[:100] for url in asked if url != file.resolve().as_uri() and not url.startswith(("data:", "blob:"))]
    assert foreign == []
    assert problems == []


def embedded(page: Any) -> Any:
    """The numbers that the page carries as JSON."""
    return json.loads(page.locator("#data").text_content())


def fits(page: Any) -> bool:
    """Whether nothing has to be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def contrast(page: Any, selector: str) -> float:
    """Of the text's color on the page's ground, as WCAG counts it."""
    colors = page.evaluate(
        "(s) => [getComputedStyle(document.querySelector(s)).color, getComputedStyle(document.body).backgroundColor]",
        selector,
    )

    def luminance(color: str) -> float:
        parts = [int(value) / 255 for value in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, colors), reverse=True)
    return (light + 0.05) / (dark + 0.05)
