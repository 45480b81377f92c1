"""The common page: what is escaped, what is embedded, and that it is whole and fetches nothing."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from tiny_pages import everything

from anechoic.pages.charts import line_chart, round_ticks
from anechoic.pages.html import (
    Html,
    Section,
    Sheet,
    embedded,
    page,
    plain,
    table,
    write_page,
)
from anechoic.pages.thumbnails import sheet, thumbnail

VOID = {"meta", "img", "link", "input", "br"}


class Shape(HTMLParser):
    """Whether every element that needs it is closed in its turn; attributes that would fetch something."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "action", "poster") + ("href",) * (tag != "a") and not value.startswith(("data:", "#")):
                self.fetched.append(value)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def shape_of(html):
    shape = Shape()
    shape.feed(html)
    shape.close()
    assert shape.open == []
    return shape


def back(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_a_page_is_whole_and_fetches_nothing():
    html = page("Everything", everything(), lead="All parts.", footer="The end.", data={"x": 1})
    shape = shape_of(html)
    assert shape.fetched == []
    assert "url(" not in re.sub(r"url\(\$\{src\}\)", "", html)
    assert "default-src 'none'" in html
    assert "connect-src" not in html
    assert "connect-src 'self'" in page("Live", [], live=True)


def test_text_is_escaped_and_html_is_not():
    evil = "<img src=x onerror=alert(1)>"
    rows = [[evil, Html("<i>x</i>")]]
    html = page(evil, [Section(evil, [evil, table([evil, "y"], rows, caption=evil)])], lead=evil, footer=evil)
    assert "<img" not in html
    assert "<i>x</i>" in html
    assert html.count("&lt;img") >= 6


def test_no_text_can_leave_the_embedded_json():
    evil = {"name": "</script><script>alert(1)</script>", "x": float("nan"), "y": np.float32(0.5), "z": np.arange(2)}
    text = embedded(evil)
    assert text.count("</script>") == 1
    inside = text[text.index(">") + 1 : text.rindex("<")]
    assert json.loads(inside) == {"name": evil["name"], "x": None, "y": 0.5, "z": [0, 1]}


def test_plain_keeps_what_json_knows():
    assert plain({"a": (1, True, None, "x", float("inf"))}) == {"a": [1, True, None, "x", None]}


def test_cells_carry_the_exact_number():
    html = table(["x"], [[0.123456789], [2.0]])
    assert 'data-value="0.123456789"' in html
    assert ">0.1235<" in html


def test_a_thumbnail_is_small_and_keeps_small_pixels():
    assert back(thumbnail(np.zeros((300, 200, 3), np.uint8), side=96)).size == (64, 96)
    assert back(thumbnail(np.zeros((8, 8, 1), np.uint8), side=96)).size == (96, 96)


def test_a_sheet_holds_every_picture_in_its_place():
    shades = [10, 60, 110, 160, 210, 250, 30]
    made = sheet([np.full((16, 16, 3), shade, np.uint8) for shade in shades], side=32)
    assert isinstance(made, Sheet)
    whole = np.asarray(back(made.src))
    assert whole.shape == (made.rows * 32, made.columns * 32, 3)
    for i, shade in enumerate(shades):
        y, x = i // made.columns * 32 + 16, i % made.columns * 32 + 16
        assert abs(int(whole[y, x, 0]) - shade) < 4


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.001, 0.0042), (0, 76_800), (5, 5.5)])
def test_ticks_are_round_and_inside(low, high):
    ticks = round_ticks(low, high)
    assert 3 <= len(ticks) <= 8
    assert low <= ticks[0] + 1e-9
    assert ticks[-1] <= high + 1e-9
    steps = np.diff(ticks)
    np.testing.assert_allclose(steps, steps[0])


def test_chart_without_points_is_labeled_as_empty():
    assert "nothing was recorded" in line_chart({"loss": ([], [])}, title="Loss")
    assert "nothing was recorded" in line_chart({"loss": ([1.0], [float("nan")])}, title="Loss")


def test_a_page_is_written_whole(tmp_path):
    path = write_page(tmp_path / "new" / "page.html", page("Ä", []))
    assert "Ä" in path.read_text(encoding="utf-8")
    assert [item.name for item in path.parent.iterdir()] == ["page.html"]
