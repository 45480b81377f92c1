"""The demo, at a budget of seconds: the table, the page and what happens when a twin cannot be trained."""

import json
from html.parser import HTMLParser

import pytest

from anechoic.cli import main
from anechoic.report.demo import verdict


class Shape(HTMLParser):
    """Counts of tags, and whether every tag that needs it is closed."""

    def __init__(self):
        super().__init__()
        self.tags, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        if tag == "img":
            assert dict(attrs)["src"].startswith("data:image/png;base64,")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--out", str(out), "--samples", "512"]) == 0
    return out


def test_the_table_has_both_twins_beside_the_baselines(shown):
    result = json.loads((shown / "results.json").read_text())
    rows = {row["encoder"]: row for row in result["metrics"]["rows"]}
    assert list(rows) == ["raw pixels", "untrained", "residual", "decayed"]
    assert rows["raw pixels"]["knn_mean"] > 95
    assert rows["raw pixels"]["knn_class"] is None
    for row in rows.values():
        assert 0 <= row["probe_mean"] <= 100
    assert result["seed"] == 0
    assert result["config"]["samples"] == 512


def test_the_twins_differ_in_alpha_min_alone(shown):
    configs = [json.loads((shown / name / "config.json").read_text()) for name in ("residual", "decayed")]
    assert [config["shortcut"].pop("alpha_min") for config in configs] == [1.0, 0.6]
    assert configs[0] == configs[1]


def test_the_page_is_whole_and_carries_its_pictures(shown):
    shape = Shape()
    shape.feed((shown / "index.html").read_text())
    assert shape.open == []
    assert shape.tags.count("img") == 6
    assert shape.tags.count("tr") == 5


def test_the_same_command_returns_at_once_with_the_same_numbers(shown):
    before = json.loads((shown / "results.json").read_text())["metrics"]
    weights = (shown / "decayed" / "model" / "model.safetensors").read_bytes()
    assert main(["demo", "--out", str(shown), "--samples", "512"]) == 0
    after = json.loads((shown / "results.json").read_text())["metrics"]
    assert after["rows"] == before["rows"]
    assert (shown / "decayed" / "model" / "model.safetensors").read_bytes() == weights


def test_another_budget_in_the_same_folder_is_refused(shown, capsys):
    assert main(["demo", "--out", str(shown), "--samples", "1024"]) == 2
    assert "could not be trained" in capsys.readouterr().err


@pytest.mark.parametrize(("decayed", "word"), [(80.0, "gains 5.0"), (70.0, "loses 5.0"), (75.0, "changes nothing")])
def test_the_verdict_follows_the_numbers(decayed, word):
    rows = [
        {"encoder": "raw pixels", "knn_mean": 98.0, "rank": 10.0},
        {"encoder": "residual", "knn_mean": 75.0, "rank": 10.0},
        {"encoder": "decayed", "knn_mean": decayed, "rank": 5.0},
    ]
    assert word in verdict(rows)
