"""Photograph pages for the docs: the light page at 1280 pixels beside the dark one at 400, as docs/figures/NAME.webp.

python tools/screenshots.py demo=runs/demo/index.html serve=http://127.0.0.1:8000

Show pages of embedded data only. Run by hand after a change of a page; it needs chromium and playwright.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
WIDTHS, HEIGHT, GAP = ((1280, "light"), (400, "dark")), 1400, 24
SHOWN_WIDTH = 1100


def main(arguments: list[str]) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, _, place in (argument.partition("=") for argument in arguments):
            address = place if "://" in place else Path(place).resolve().as_uri()
            shots = []
            for width, scheme in WIDTHS:
                page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
                page.goto(address)
                page.wait_for_timeout(1500)  # maps and live pages draw after they are loaded
                shots.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
                page.close()
            both = Image.new("RGB", (sum(shot.width for shot in shots) + GAP, HEIGHT), "white")
            both.paste(shots[0], (0, 0))
            both.paste(shots[1], (shots[0].width + GAP, 0))
            both.thumbnail((SHOWN_WIDTH, HEIGHT))
            both.save(FIGURES / f"{name}.webp", quality=80, method=6)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
