"""The pages of search and explore in a real browser: numbers, thumbnails, keys, filters, lists, phones and the dark."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pytest
from browser import contrast, embedded, fits, showing
from tiny_pages import everything, picture
from tiny_runs import write_run

import anechoic
from anechoic.outcome import as_utf8
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
        assert len(titles) == len(explored.metrics["clusters"])
        for title, cluster in zip(titles, explored.metrics["clusters"], strict=True):
            assert title.endswith(f", {cluster['size']} images")
            assert cluster["name"] in title
        shown.locator("#near-duplicates summary").click()
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
        assert tip.inner_text().split("\n")[:2] == name.split("/")[::-1]
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
        shown.locator("[data-control=grouping]").select_option(label="folder")
        filter = shown.locator("[data-control=filter]:visible")
        assert filter.locator("option").all_inner_texts() == ["all", "folder 0 (20)", "folder 1 (21)", "folder 2 (19)"]
        filter.select_option(label="folder 1 (21)")
        assert shown.locator("[data-shown]").inner_text() == "21"
        groups = (
            "const m = document.querySelector('figure.map').map; m.visible().map(i => m.grouping.names[m.group(i)])"
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


def select(shown, *names):
    """Tick the images of these names, each wherever it first stands on the page."""
    known = {name: key for key, name in json.loads(shown.locator("#selectable").text_content())["names"].items()}
    for name in names:
        shown.locator(f"#clusters [data-id='{known[name]}'], #outliers [data-id='{known[name]}']").first.check()


def saved(shown, what):
    with shown.expect_download() as saving:
        shown.locator(f"[data-save={what}]").click()
    return saving.value.path().read_bytes()


AWKWARD = [
    "a b.png",
    'it\'s "quoted".png',
    "-rf.png",
    "two\nlines.png",
    "$(touch hacked).png",
    "back\\slash `id`;*.png",
]


def move(folder, *to):
    return subprocess.run(
        ["sh", "move.sh", *to], cwd=folder, capture_output=True, text=True, errors="surrogateescape", timeout=60
    )


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    """A page on images whose names a shell could misread, in a folder whose name is no better."""
    folder = tmp_path_factory.mktemp("awkward")
    photos = folder / "my 'best' {photos}"
    names = [f"-sub dir/{name}" if i % 2 else name for i, name in enumerate(AWKWARD)] + [
        "-sub dir/kept.png",
        "kept.png",
    ]
    names.append(os.fsdecode(b"latin-\xe9.png"))
    for i, name in enumerate(names):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(photos / name)
    run = write_run(folder / "mine")
    anechoic.explore(str(run), str(photos), out=folder / "page" / "explore.html")
    return folder, photos, names


@pytest.mark.slow
def test_script_of_a_selection_moves_exactly_those_files(browser, awkward):
    folder, photos, names = awkward
    chosen = [name for name in names if "kept" not in name]
    before = {name: (photos / name).read_bytes() for name in names}
    with showing(browser, folder / "page" / "explore.html") as shown:
        assert shown.locator(".selection").is_hidden()
        select(shown, *map(as_utf8, chosen))
        assert shown.locator(".selection").inner_text().startswith(f"{len(chosen)} selected")
        script, listing = saved(shown, "script"), saved(shown, "csv").decode()
    (folder / "move.sh").write_bytes(script)
    moved = move(folder)
    target = Path(f"{photos}-selected")
    assert (moved.returncode, moved.stderr) == (0, "")
    assert moved.stdout == f"{len(chosen)} moved to {target}, 0 not moved.\n"
    files = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert files == {name: before[name] for name in chosen}
    left = {path.relative_to(photos).as_posix(): path.read_bytes() for path in photos.rglob("*") if path.is_file()}
    assert left == {name: before[name] for name in names if name not in chosen}
    assert sorted(path.name for path in folder.rglob("hacked*")) == []
    rows = list(csv.DictReader(io.StringIO(listing, newline="")))
    assert {row["image"].removeprefix("'") for row in rows} == set(map(as_utf8, chosen))

    # Run again, and with a file of that name in the way: nothing is overwritten; the exit code is 1.
    again = move(folder)
    assert again.returncode == 1
    assert again.stderr.count("Not moved (not found)") == len(chosen)
    (photos / chosen[0]).write_bytes(b"another")
    blocked = move(folder)
    assert "Not moved (the target exists): ./a b.png" in blocked.stderr
    assert ((photos / chosen[0]).read_bytes(), (target / chosen[0]).read_bytes()) == (b"another", before[chosen[0]])
    elsewhere = move(folder, "-other dir")
    assert (elsewhere.returncode, (folder / "-other dir" / chosen[0]).read_bytes()) == (1, b"another")


@pytest.mark.slow
def test_keys_walk_through_pictures_select_and_open_them(browser, pages):
    folder, explored, _ = pages
    with showing(browser, folder / "explore.html") as shown:
        focused = "Number(document.activeElement.dataset.id)"
        first = shown.locator("#outliers [data-id]").first
        order = [item["index"] for item in explored.metrics["outliers"]]
        first.focus()
        shown.keyboard.press("ArrowRight")
        shown.keyboard.press("Space")
        assert shown.evaluate(focused) == order[1]
        assert shown.locator("[data-count]").inner_text() == "1"
        shown.keyboard.press("ArrowDown")
        below = shown.evaluate(focused)
        columns = shown.evaluate(
            "getComputedStyle(document.querySelector('#outliers .grid')).gridTemplateColumns.split(' ').length"
        )
        assert below == order[1 + columns]
        shown.keyboard.press("ArrowUp")
        shown.keyboard.press("ArrowLeft")
        assert shown.evaluate(focused) == order[0]
        link = shown.evaluate("document.activeElement.parentElement.querySelector('a').href")
        assert Path(url2pathname(urlsplit(link).path)) == folder / "photos" / explored.metrics["outliers"][0]["image"]
        # The map shows the same selection and changes it.
        canvas = shown.locator("canvas")
        canvas.focus()
        canvas.press("Space")
        assert shown.locator("[data-count]").inner_text() == "2"
        shown.locator("[data-save=clear]").click()
        assert shown.locator("[data-id]:checked").count() == 0


@pytest.mark.slow
def test_all_but_the_first_of_each_group_are_selected(browser, pages):
    folder, explored, _ = pages
    with showing(browser, folder / "explore.html") as shown:
        shown.locator("[data-select=copies]").click()
        groups = explored.metrics["duplicates"]
        assert shown.locator("[data-count]").inner_text() == str(sum(len(group["images"]) - 1 for group in groups))
        assert [group["similarity"] for group in groups] == sorted((g["similarity"] for g in groups), reverse=True)
        assert shown.locator(".duplicates li:first-child [data-id]:checked").count() == 0


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


def test_one_channel_of_every_picture_is_shown_at_a_choice(browser, tmp_path):
    """A square is in the fourth channel only, so the composed picture has none of it."""
    tifffile = pytest.importorskip("tifffile")
    generator = np.random.default_rng(0)
    (tmp_path / "cells").mkdir()
    for i in range(24):
        image = generator.integers(900, 1100, (4, 32, 32)).astype(np.uint16)
        image[3, 8:24, 8:24] += 30_000
        names = {"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP", "RFP", "<Cy5>"]}}
        tifffile.imwrite(tmp_path / "cells" / f"{i}.ome.tif", image, metadata=names)
    run, page = tmp_path / "run", tmp_path / "explore.html"
    anechoic.pretrain(tmp_path / "cells", out=run, epochs=1, devices=1)
    anechoic.explore(run, tmp_path / "cells", out=page)
    anechoic.report([run], out=tmp_path / "report.html", samples=24)
    assert "&lt;Cy5&gt;: share of pixels (%)" in (tmp_path / "report.html").read_text()
    middle_over_corner = """image => {
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
        const pen = canvas.getContext("2d", { willReadFrequently: true });
        pen.drawImage(image, 0, 0);
        const at = (x, y) => pen.getImageData(x * canvas.width, y * canvas.height, 1, 1).data[0];
        return at(0.5, 0.5) - at(0.1, 0.1);
    }"""
    with showing(browser, page) as shown:
        picture = shown.locator("img[data-channels]").first
        composed = picture.get_attribute("src")
        shown.get_by_label("Channels of the pictures").select_option("<Cy5>")
        assert len(picture.get_attribute("data-channels").split(" ")) == 4
        picture.evaluate("image => image.decode()")
        assert picture.evaluate(middle_over_corner) > 150
        shown.get_by_label("Channels of the pictures").select_option("")
        assert picture.get_attribute("src") == composed
