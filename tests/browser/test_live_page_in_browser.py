"""The report and the live page in a real browser: numbers, a training stopped and resumed, an image, its mask."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
from browser import embedded, fits, showing
from serving import jpeg, serving, small_config, start_training, wait_for

import anechoic
from anechoic.config import OptimConfig, SaveConfig
from anechoic.data import open_source
from anechoic.runtime.run import read_metrics
from anechoic.training.loop import fit


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("shown") / "run"
    fit(small_config(), path)
    return path


@contextmanager
def live(browser, client, **options):
    """Open the live page; on exit, check that it requested only its own server and logged no problem."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, **options)
    page = context.new_page()
    problems, asked = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    home = f"http://127.0.0.1:{client.port}/"
    page.set_default_timeout(300_000)
    page.goto(home)
    try:
        yield page
    finally:
        context.close()
    assert [url for url in asked if not url.startswith((home, "data:", "blob:"))] == []
    assert problems == []


def expect_text(page, selector, text, *, seconds=300):
    """Wait for the text of an element; the content policy forbids conditions in JavaScript."""
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(page.locator(selector)).to_have_text(text, timeout=1000 * seconds)


@pytest.mark.slow
def test_report_shows_the_numbers_it_embeds(browser, run, tmp_path):
    found = anechoic.report((run,), out=tmp_path / "report.html", samples=100)
    with showing(browser, tmp_path / "report.html") as page:
        assert embedded(page) == found.metrics
        (summary,) = found.metrics["runs"]
        assert page.locator("#verdict strong").inner_text() == summary["verdict"]["word"].capitalize()
        table = page.locator("#layer-by-layer table")
        columns = [name.replace("↕", "").strip() for name in table.locator("th").all_inner_texts()]
        shown = table.locator("tbody tr").last.locator("td").all()
        values = {name: cell.get_attribute("data-value") for name, cell in zip(columns, shown, strict=True)}
        assert float(values["effective rank"]) == summary["layers"][-1]["rank_columns"]
        assert float(values["echo (CKA with layer 0)"]) == summary["layers"][-1]["cka"]
        assert page.locator("#neighbors img").count() > 5
        canvas = page.locator("#map canvas")
        canvas.focus()
        assert page.locator("#map .tip").is_visible()
    for dark in (False, True):
        with showing(browser, tmp_path / "report.html", width=400, dark=dark) as page:
            assert fits(page)


@pytest.mark.slow
def test_image_is_dropped_and_its_mask_painted(browser, run):
    drawing = open_source("emoji:style=noto").read(3).permute(1, 2, 0).numpy()
    with serving(run) as client, live(browser, client) as page:
        page.wait_for_selector("#try:not([hidden])")
        data = page.evaluate_handle(
            """bytes => { const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "drawing.jpg", { type: "image/jpeg" })); return data; }""",
            list(jpeg(drawing)),
        )
        page.dispatch_event("#drop", "drop", {"dataTransfer": data})
        page.wait_for_selector("#neighbors li")
        assert page.locator("#neighbors li").count() == 12
        assert page.locator("#neighbors b").first.inner_text() == open_source("emoji:style=noto").name(3).split("/")[1]
        assert page.locator("#share").inner_text() == "75 %"
        assert page.locator("#original").get_attribute("src").startswith("data:image")
        assert page.locator("#verdict strong").count() == 1

        # Show all, then hide a row of patches with the mouse, and one more with the keys.
        page.click("#clear")
        expect_text(page, "#share", "0 %")
        plain = page.locator("#reconstruction").get_attribute("src")
        page.locator("#mask").scroll_into_view_if_needed()
        box = page.locator("#mask").bounding_box()
        page.mouse.move(box["x"] + 5, box["y"] + 5)
        page.mouse.down()
        # One move across all patches, as a browser under load reports a fast drag.
        page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 5, steps=1)
        page.mouse.up()
        expect_text(page, "#share", "25 %")  # 4 of 16
        assert page.locator("#reconstruction").get_attribute("src") != plain
        page.focus("#mask")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Space")
        expect_text(page, "#share", "31 %")
        page.set_viewport_size({"width": 400, "height": 800})
        assert fits(page)


@pytest.mark.slow
def test_page_reports_a_file_that_is_no_image(browser, run, tmp_path):
    (tmp_path / "text.png").write_bytes(b"no image")
    with serving(run) as client:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{client.port}/")
        page.wait_for_selector("#try:not([hidden])")
        page.set_input_files("#file", tmp_path / "text.png")
        expect_text(page, "#message", re.compile("no image that can be read"))
        context.close()


@pytest.mark.slow
def test_training_is_stopped_resumed_and_finished_from_the_page(browser, tmp_path):
    long = small_config(optim=OptimConfig(batch_size=32, samples=32 * 200, lr=2e-3), save=SaveConfig(every=32 * 1000))
    run = tmp_path / "run"
    process = start_training(long, run)
    try:
        wait_for(lambda: len(read_metrics(run)) > 2, every=0.2)
        with serving(run) as client, live(browser, client) as page:
            page.wait_for_selector("#charts svg")
            page.click("#stop")
            process.wait(timeout=300)
            page.wait_for_selector("#resume:not([hidden])")
            assert page.locator("#summary").inner_text().startswith("Stopped: ")
            assert page.title() == page.locator("h1").inner_text() == "run · stopped"
            assert "anechoic.training" in page.locator("#command code").inner_text()
            stopped_at = page.evaluate("document.getElementById('progress').value")
            assert 0 < stopped_at < 1
            page.click("#resume")
            expect_text(page, "#summary", re.compile("^Finished"), seconds=600)
            assert page.evaluate("document.getElementById('progress').value") == 1
            assert page.title() == page.locator("h1").inner_text() == "run · finished"
            page.wait_for_selector("#verdict strong")
            page.wait_for_selector("#try:not([hidden])")
    finally:
        process.kill()
        process.wait()
