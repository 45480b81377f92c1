"""File names of any bytes: in tables, on pages, in JSON and in the terminal."""

from __future__ import annotations

import csv
import json
import os

import numpy as np
import pytest
from tiny_pages import picture
from tiny_runs import write_run

from anechoic.cli.main import main, print_message
from anechoic.outcome import as_utf8, printable

pytestmark = pytest.mark.usefixtures("own_cache")
# Not UTF-8, control characters, reversed text, a formula; and what they are in a file of text.
NAMES = [b"\xff\xe9.png", b"a\x1b[31m\nb.png", "\u202egnp.png".encode(), b"=1+1.png", b"-1.png", b"\t@.png", b"ok.png"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("names") / "run")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        picture(number).save(folder / f"{number}.png")
        os.rename(folder / f"{number}.png", os.path.join(os.fsencode(folder), name))
    return folder


@pytest.fixture
def names():
    return sorted(os.fsdecode(name) for name in NAMES)


def embedded(run, photos, out):
    assert main(["embed", str(run), str(photos), "-o", str(out)]) == 0
    return out


def test_embed_writes_names_of_any_bytes_to_npz_and_parquet(run, photos, names, tmp_path):
    assert sorted(np.load(embedded(run, photos, tmp_path / "v.npz"))["names"].tolist()) == names
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(embedded(run, photos, tmp_path / "v.parquet"))
    assert sorted(table["name"].to_pylist()) == sorted(map(as_utf8, names))
    assert r"\udcff\udce9.png" in table["name"].to_pylist()


def test_embed_writes_no_formula_to_csv(run, photos, names, tmp_path):
    with open(embedded(run, photos, tmp_path / "v.csv"), newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    found = {row[0] for row in rows[1:]}
    assert not any(name[0] in "=+-@\t\r\n" for name in found)
    assert {name.removeprefix("'") for name in found} == set(map(as_utf8, names))
    assert {"'=1+1.png", "'-1.png", "'\t@.png", "ok.png"} <= found
    assert any(float(value) < 0 for row in rows[1:] for value in row[1:])  # numbers are numbers


@pytest.mark.slow
def test_search_and_explore_show_names_of_any_bytes(run, photos, names, tmp_path, capsys):
    pages = {"search": [str(NAMES.index(b"ok.png"))], "explore": []}
    for command, more in pages.items():
        page = tmp_path / f"{command}.html"
        assert main([command, str(run), str(photos), *more, "-o", str(page)]) == 0
        shown = capsys.readouterr().out
        assert printable(shown, keep="\n") == shown
        assert page.read_bytes().decode("utf-8")
    assert r"a\x1b[31m\nb.png" in shown or r"\udcff" in shown
    assert main(["search", str(run), str(photos), "ok.png", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["metrics"]["rows"]
    assert {row["image"] for row in rows} == set(map(as_utf8, names)) - {"ok.png"}


def test_messages_have_no_control_characters(capsys):
    print_message(f"anechoic: {os.fsdecode(NAMES[0])} and \x1b]0;title\x07\x9b31m are unreadable\nsecond line")
    err = capsys.readouterr().err
    assert err == "anechoic: \\udcff\\udce9.png and \\x1b]0;title\\x07\\x9b31m are unreadable\nsecond line\n"


def test_printable_keeps_text_of_every_language():
    text = "Ünïcode, 日本語, עברית, 👩‍🔬, tab\tand line\n"
    assert printable(text, keep="\t\n") == text
    assert printable("\u202e\x00") == "\\u202e\\x00"
