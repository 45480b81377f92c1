"""The pages of search and explore in a real browser: numbers, thumbnails, keys, filters, lists, phones and the dark."""

from __future__ import annotations

import csv
import io

import pytest
from browser import contrast, embedded, fits, showing
from tiny_pages import everything, picture
from tiny_runs import write_run

import anechoic
from anechoic.pages.html import Section, download, page, write_page


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """explore.html and near.html of 60 pictures in three folders, two of them the same."""
    folder = tmp_path_factory.mktemp("pages")
    run, photos = write_run(folder / "mine"), folder / "photos"
    for i in range(59):
        (photos / f"folder {i % 3}").mkdir(parents=True, exist_ok=True)
        picture(i).save(photos / f"folder {i % 3}" / f"{i:02d}.png")
    picture(0).save(photos / "folder 1" / 'copy, "again".png')
    explored = anechoic.explore(str(run), str(photos), out=folder / "explore.html")
    found = anechoic.search(str(run), str(photos), ("0", "5"), k=6, out=folder / "near.html")
    return folder, explored, found


@pytest.mark.slow
def test_numbers_on_the_explore_page_are_those_of_the_json(browser, pages):
    folder, explored, _ = pages
    with showing(browser, folder / "explore.html") as shown:
        assert embedded(shown)["metrics"] == explored.metrics
        cells = dict(row.split("\t") for row in shown.locator("table").first.inner_text().splitlines() if "\t" in row)
        assert cells["images"] == "60"
        assert cells["groups of near-duplicates"] == str(len(explored.metrics["duplicates"]))
        titles = shown.locator("#clusters h3").all_inner_texts()
        sizes = [cluster["size"] for cluster in explored.metrics["clusters"]]
        assert titles == [f"Cluster {i}: {size} images" for i, size in enumerate(sizes, 1)]
        assert f"closer than {explored.metrics['limit']['share']:.3f}" in shown.locator("#near-duplicates").inner_text()


@pytest.mark.slow
def test_a_thumbnail_shows_on_hover_and_by_keys(browser, pages):
    folder, *_ = pages
    with showing(browser, folder / "explore.html") as shown:
        tip, canvas = shown.locator(".tip"), shown.locator("canvas")
        assert tip.is_hidden()
        place = shown.evaluate("document.querySelector('figure.map').map.place(7)")
        canvas.hover(position={"x": place[0], "y": place[1]})
        assert tip.is_visible()
        assert tip.locator(".thumb").evaluate("e => getComputedStyle(e).backgroundImage").startswith('url("data:image')
        name = shown.evaluate("document.querySelector('figure.map').map.data.name[7]")
        assert tip.inner_text().split("\n") == name.split("/")
        shown.mouse.move(0, 0)
        assert tip.is_hidden()
        canvas.focus()
        first = tip.inner_text()
        canvas.press("ArrowRight")
        second = tip.inner_text()
        if second == first:  # the first was the outermost on that side
            canvas.press("ArrowLeft")
        assert tip.inner_text() != first
        canvas.press("Enter")
        assert shown.locator(".picked .thumb").count() == 11
        canvas.press("Escape")
        assert tip.is_hidden()


@pytest.mark.slow
def test_the_map_is_filtered_by_folder(browser, pages):
    folder, *_ = pages
    with showing(browser, folder / "explore.html") as shown:
        options = shown.locator("select option").all_inner_texts()
        assert options == ["all", "folder 0 (20)", "folder 1 (21)", "folder 2 (19)"]
        shown.locator("select").select_option(label="folder 1 (21)")
        assert shown.locator("[data-shown]").inner_text() == "21"
        groups = (
            "const m = document.querySelector('figure.map').map; m.visible().map(i => m.data.groups[m.data.group[i]])"
        )
        assert set(shown.evaluate(f"(() => {{ {groups.replace('m.visible', 'return m.visible')} }})()")) == {"folder 1"}


@pytest.mark.slow
def test_lists_are_saved_as_csv(browser, pages):
    folder, explored, _ = pages
    with showing(browser, folder / "explore.html") as shown:
        rows = {}
        for name in ("duplicates", "outliers", "clusters"):
            with shown.expect_download() as saving:
                shown.locator(f"button[data-name='{name}.csv']").click()
            text = saving.value.path().read_text()
            rows[name] = list(csv.DictReader(io.StringIO(text)))
    assert len(rows["clusters"]) == len(rows["outliers"]) == 60
    pairs = [{row["image"], row["other image"]} for row in rows["duplicates"]]
    assert {"folder 0/00.png", 'folder 1/copy, "again".png'} in pairs
    assert float(rows["outliers"][0]["likeness"]) == explored.metrics["outliers"][0]["likeness"]


@pytest.mark.slow
def test_saved_lists_hold_no_formulas(browser, tmp_path):
    """A spreadsheet would compute a file name that begins like one; numbers stay numbers."""
    rows = [["=1+1", -2.5], ["+a", 3], ["-b", 0], ["@c", 1], ["\td", 2], ["plain, e=f", -1]]
    html = page("list", [Section("list", [download("list.csv", ["name", "value"], rows)])])
    with showing(browser, write_page(tmp_path / "list.html", html)) as shown:
        with shown.expect_download() as saving:
            shown.locator("button[data-name='list.csv']").click()
        found = list(csv.reader(io.StringIO(saving.value.path().read_text(), newline="")))
    assert [name for name, _ in found[1:]] == ["'=1+1", "'+a", "'-b", "'@c", "'\td", "plain, e=f"]
    assert [float(value) for _, value in found[1:]] == [-2.5, 3, 0, 1, 2, -1]


@pytest.mark.slow
def test_a_table_is_sorted_by_its_header(browser, pages):
    folder, _, found = pages
    with showing(browser, folder / "near.html") as shown:
        shown.locator("details").first.locator("summary").click()
        listing = shown.locator("table").first

        def column():
            return [int(text) for text in listing.locator("tbody td:first-child").all_inner_texts()]

        assert column() == [1, 2, 3, 4, 5, 6]
        listing.locator("th button").first.press("Enter")
        listing.locator("th button").first.press("Enter")
        assert column() == [6, 5, 4, 3, 2, 1]
        assert listing.locator("th").first.get_attribute("aria-sort") == "descending"
        assert embedded(shown)["metrics"] == found.metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["explore.html", "near.html", "everything.html"])
def test_pages_fit_a_phone_and_the_dark(browser, pages, name):
    folder, *_ = pages
    write_page(folder / "everything.html", page("Every part there is", everything(), footer="The end.", data={}))
    for dark in (False, True):
        with showing(browser, folder / name, width=400, dark=dark) as shown:
            assert fits(shown)
            assert all(contrast(shown, selector) > 4.5 for selector in ("h1", "p", "a", "footer"))
            ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground[4:-1].split(","))) < 300) == dark
            images = shown.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).length")
            assert images == 0
