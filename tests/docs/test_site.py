"""The documentation site: it builds strictly, opens from disk, fetches nothing from other hosts, misses no command."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import anechoic
from anechoic.cli import command_names
from anechoic.config import Config, settings
from anechoic.recipes import table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site is built by mkdocs-material")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


class Fetched(HTMLParser):
    """What a browser asks for when it opens the page, and where links lead."""

    def __init__(self, page):
        super().__init__()
        self.fetched, self.linked = [], []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video") and values.get("src"):
            self.fetched.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.fetched.append(values["href"])
        if tag == "a" and values.get("href"):
            self.linked.append(values["href"])


@pytest.mark.slow
def test_site_opens_from_disk_without_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for address in Fetched(page).fetched:
            assert not re.match(r"(?:https?:)?//", address), f"{page.name} fetches {address}"
            if not address.startswith("data:") and page.name != "404.html":
                assert (page.parent / address.split("?")[0]).exists(), f"{page.name}: {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", style.read_text(encoding="utf-8")), style.name


@pytest.mark.slow
def test_links_between_pages_resolve(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for address in Fetched(page).linked:
            path = address.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                assert (page.parent / path).exists(), f"{page.relative_to(site)} links to {address}"


@pytest.mark.slow
def test_reference_lists_everything_in_the_code(site):
    def words(name):
        return (site / "reference" / f"{name}.html").read_text(encoding="utf-8")

    commands, python, recipes = words("commands"), words("python"), words("recipes")
    for name in command_names():
        assert f'id="{name.replace(" ", "-")}"' in commands
    for name in (name for name, module in anechoic._MODULE_OF.items() if not module.startswith("cli.")):
        assert f'id="{name.lower()}"' in python, name
    for name in table():
        assert f'id="{name}"' in recipes
    for name, _ in settings(Config()):
        assert f"<code>{name.replace('_', '-')}</code>" in words("settings"), name
    assert "samples between two checkpoints" in words("settings")


@pytest.mark.slow
def test_search_works_from_disk_in_a_browser(site, browser):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").type("alpha_min")
    page.locator(".md-search-result__item").first.wait_for(timeout=15_000)
    assert "alpha" in page.locator(".md-search-result__item").first.inner_text().lower()
    page.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert problems == []
