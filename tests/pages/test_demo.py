"""The demo at a budget of seconds, on two styles and a fifth of the objects: table, page, a pair that comes with the
package, and an arm that cannot be trained."""

import base64
import importlib.util
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import contrast, fits, showing

from anechoic.cli.main import main
from anechoic.errors import UserError
from anechoic.eval.metrics.retrieval import retrieval_matrix, retrieval_ranks
from anechoic.pages import demo, demo_page
from anechoic.pages.demo import LAYERS, NOISE, verdict
from anechoic.recipes.demo import demo_mae
from anechoic.runtime import checkpoint
from anechoic.sweeps.trial import EvalPlan, Trial, run_trial

SOURCE = "emoji:test:style=noto+twemoji"


class Shape(HTMLParser):
    """Counts of tags, and whether every tag that needs it is closed."""

    def __init__(self):
        super().__init__()
        self.tags, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "link", "input", "line", "br"):
            self.open.append(tag)
        if tag == "img":
            assert dict(attrs)["src"].startswith("data:image/")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def patched():
    """Two styles, a fifth of the objects, a network of three narrow blocks."""
    small = demo_mae()
    options = {**small.model.options, "dim": 24, "depth": 3, "num_heads": 2, "decoder_depth": 1}
    small = replace(small, model=replace(small.model, options=options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "PRETRAINED", Path("no pair"))
        patch.setattr(demo, "SOURCE", SOURCE)
        patch.setattr(demo, "recipe", lambda name: small)
        patch.setattr(demo_page, "MAPPED_OBJECTS", 20)
        patch.setattr(demo, "TOLERANCE", 2.0)  # one of 410 drawings is a quarter of a point
        yield


@pytest.fixture(scope="module")
def shown(tmp_path_factory, patched):
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--out", str(out), "--samples", "256"]) == 0
    return out


def test_failed_arm_is_reported_with_its_log(tmp_path, patched, monkeypatch):
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="residual autoencoder could not be trained"):
        demo.train_arms(tmp_path, samples=256, seed=0)


def result_of(shown):
    return json.loads((shown / "results.json").read_text())


@pytest.mark.slow
def test_table_has_both_arms_and_the_baselines(shown):
    result = result_of(shown)
    rows = {row["encoder"]: row for row in result["metrics"]["rows"]}
    assert list(rows) == ["raw pixels", "untrained", "residual", "decayed"]
    assert rows["raw pixels"]["mean"] > 25  # of 205 drawings; chance is half a percent
    assert rows["raw pixels"]["class"] is None
    assert rows["untrained"]["echo"] == pytest.approx(1, abs=1e-6)
    for row in rows.values():
        assert 0 <= row["kind"] <= 100
    assert result["seed"] == 0
    assert result["config"]["samples"] == 256
    for arms in result["metrics"]["layers"].values():
        assert [len(values) for values in arms.values()] == [4, 4]


@pytest.mark.slow
def test_arms_differ_in_alpha_min_only(shown):
    configs = [json.loads((shown / name / "config.json").read_text()) for name in ("residual", "decayed")]
    assert [config["shortcut"].pop("alpha_min") for config in configs] == [1.0, 0.6]
    assert configs[0] == configs[1]
    assert configs[0]["data"]["labels"] is False


@pytest.mark.slow
def test_the_page_is_whole_and_its_numbers_are_those_of_the_json(shown):
    page = (shown / "index.html").read_text()
    shape = Shape()
    shape.feed(page)
    assert shape.open == []
    assert shape.tags.count("canvas") == 2
    assert shape.tags.count("svg") > 6
    result = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    assert result["metrics"] == result_of(shown)["metrics"]
    picker = json.loads(re.search(r'id="picker"><script type="application/json">(.*?)</script>', page, re.S)[1])
    assert picker["styles"] == ["noto", "twemoji"]
    ranks = np.frombuffer(base64.b64decode(picker["rank"]), dtype="<u2")
    ranks = ranks.reshape(len(picker["searches"]), 2, 2, len(picker["objects"]))
    last = {one["encoder"]: ranks[i] for i, one in enumerate(picker["searches"])}
    for row in result["metrics"]["rows"]:
        found = last[row["encoder"]]
        assert 50 * ((found[0, 1] == 1).mean() + (found[1, 0] == 1).mean()) == pytest.approx(row["mean"], abs=0.01)


@pytest.mark.slow
def test_the_same_command_trains_nothing_again(shown, patched):
    weights = (shown / "decayed" / "model" / "model.safetensors").read_bytes()
    demo.train_arms(shown, samples=256, seed=0)
    assert (shown / "decayed" / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_another_budget_in_the_same_folder_is_refused(shown, capsys, patched):
    assert main(["demo", "--out", str(shown), "--samples", "512"]) == 2
    assert "other settings (optim.samples: 256 in the run, 512 asked for" in capsys.readouterr().err


def rows_of(decayed, *, residual=12.0, untrained=3.0):
    values = {"tokens": 20.0, "mean": 9.0}
    return [
        {"encoder": "raw pixels", "mean": 20.0},
        {"encoder": "untrained", "whitened": untrained},
        {"encoder": "residual", "whitened": residual, **values},
        {"encoder": "decayed", "whitened": decayed, **values},
    ]


@pytest.mark.parametrize(
    ("decayed", "untrained", "word"),
    [
        (12.1 + NOISE, 3.0, "ahead of the residual one by 1.4 points"),
        (11.9 - NOISE, 3.0, "behind the residual one by 1.4 points"),
        (11.9 + NOISE, 3.0, "are level"),
        (12.1 - NOISE, 3.0, "are level"),
        (20.0, 20.0, "neither encoder is better than the untrained network"),
    ],
)
def test_verdict_names_a_lead_only_beyond_noise_and_the_untrained_network(decayed, untrained, word):
    layers = {LAYERS["retrieval_whitened_mean"]: {"residual": [1.0, 13.0, 12.0], "decayed": [1.0, 2.0, decayed]}}
    said = verdict(rows_of(decayed, untrained=untrained), samples=64_000, layers=layers)
    assert word in said
    assert ("ahead" in said) == word.startswith("ahead")
    assert "block 1 of the residual one (13.0 %)" in said


@pytest.mark.parametrize(
    ("decayed", "residual", "word"),
    [
        (19.0, 12.0, "Raw pixels find 20.0 %: they keep the layout"),
        (29.0, 12.0, "The decayed one is above raw pixels (20.0 %)"),
        (29.0, 24.0, "Both are above raw pixels (20.0 %)"),
    ],
)
def test_verdict_compares_with_raw_pixels(decayed, residual, word):
    assert word in verdict(rows_of(decayed, residual=residual), samples=64_000)


def test_page_shows_no_empty_charts_before_the_training_begins(tmp_path):
    assert demo_page.training_curves(tmp_path) == ""


# ---- a pair that comes with the package


@pytest.fixture(scope="module")
def with_pair(tmp_path_factory, patched):
    """A demo whose package has a pair of twice the length, made by the tool that ships one."""
    folder = tmp_path_factory.mktemp("shipped")
    spec = importlib.util.spec_from_file_location("ship_pair", Path(__file__).parents[2] / "tools" / "ship_pair.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    arguments = []
    for name, alpha_min in demo.ARMS.items():
        trial = Trial(name, name, demo.arm(alpha_min, samples=512, seed=3), PLAN)
        record = run_trial(trial, folder / name, root=folder)
        (folder / f"{name}.json").write_text(json.dumps(record))
        arguments += [str(folder / name), str(folder / f"{name}.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "PRETRAINED", folder / "pretrained")
        tool.main(arguments)
        assert main(["demo", "--out", str(folder / "out"), "--samples", "256"]) == 0
        yield folder / "out"


PLAN = EvalPlan("emoji:train", "emoji:test", probe=False, retrieval=SOURCE, max_train=100, max_test=100)


@pytest.mark.slow
def test_shipped_pair_has_the_numbers_of_its_record(with_pair):
    metrics = result_of(with_pair)["metrics"]
    assert metrics["record_difference"] <= demo.TOLERANCE
    assert metrics["samples"] == 512
    assert [row["encoder"] for row in metrics["fresh"]["rows"]] == ["residual", "decayed"]
    assert metrics["curve"]["decayed"].keys() == metrics["curve"]["residual"].keys()
    seen, last = max((int(seen), point) for seen, point in metrics["curve"]["decayed"].items())
    assert seen == 256
    assert last["whitened"] == pytest.approx(metrics["fresh"]["rows"][1]["whitened"], abs=demo.TOLERANCE)


@pytest.mark.slow
def test_changed_shipped_weights_are_reported(with_pair, monkeypatch, caplog):
    shipped = demo.pretrained_pair()
    pair = demo.evaluate_pair(shipped, samples=512, seed=0)
    assert demo.check_record(pair, shipped) <= demo.TOLERANCE
    assert not caplog.messages
    swapped = dict(zip(shipped, reversed(shipped.values()), strict=True))
    monkeypatch.setattr(demo, "TOLERANCE", 1e-6)
    assert demo.check_record(pair, swapped) > 0
    assert "differ from its record" in caplog.text


@pytest.mark.slow
def test_shipped_networks_are_loaded_by_name(with_pair):
    model = checkpoint.load("emoji-decayed")
    assert model.config.alpha_min == 0.6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert checkpoint.is_model("emoji-residual")
    assert not checkpoint.is_model("emoji-other")


@pytest.mark.slow
def test_open_page_draws_the_curve_that_is_written_beside_it(browser, with_pair, tmp_path):
    text = (with_pair / "index.html").read_text()
    assert "file:" not in text.partition("<style>")[0]  # a finished page loads nothing
    policy = "script-src 'unsafe-inline'"
    page_file = tmp_path / "index.html"
    page_file.write_text(text.replace(policy, f"{policy} 'self' file:").replace(" data-done=1", ""))
    page = browser.new_page()
    page.goto(page_file.as_uri())
    (tmp_path / "live.js").write_text('showLive("<p>half of it</p>", false);')
    page.get_by_text("half of it").wait_for(timeout=60_000)
    page.close()


def test_places_agree_with_the_shares_of_retrieval():
    random = np.random.default_rng(0)
    objects, styles = np.tile(np.arange(12), 3), np.repeat(np.arange(3), 12)
    features = random.normal(size=(12, 8))[objects] + 0.7 * random.normal(size=(36, 8))
    order = random.permutation(36)
    best, ranks = retrieval_ranks(features[order], objects[order], styles[order])
    shares = retrieval_matrix(features[order], objects[order], styles[order])
    for i in range(3):
        for j in range(3):
            if i != j:
                assert (ranks[i, j] == 1).mean() == pytest.approx(shares[i, j])
                assert np.array_equal(best[i, j] == np.arange(12), ranks[i, j] == 1)
    assert (ranks[0, 0] == 0).all()
    assert (best[0, 0] == -1).all()


# ---- in a browser


@pytest.mark.slow
def test_picked_object_shows_its_rank(browser, shown):
    with showing(browser, shown / "index.html") as page:
        picker = json.loads(page.locator("#picker script").text_content())
        searches, objects = picker["searches"], picker["objects"]
        ranks = np.frombuffer(base64.b64decode(picker["rank"]), dtype="<u2").reshape(len(searches), 2, 2, len(objects))
        rows = page.locator("#picker tbody tr")
        assert [row.split("\n")[0] for row in rows.all_inner_texts()] == [
            "raw pixels",
            "untrained",
            "residual",
            "decayed",
        ]
        chosen = 7
        page.locator("#picker input[type=search]").fill(objects[chosen])
        assert page.locator("#picker .objects button:visible").count() < len(objects)
        page.get_by_role("button", name=objects[chosen], exact=True).click()
        assert objects[chosen] in page.locator("#picker .asked").inner_text()
        last = [i for i, one in enumerate(searches) if one["encoder"] == "decayed"][-1]
        label = rows.nth(3).locator("td").last.locator(".rank").inner_text()
        rank = ranks[last, 0, 1, chosen]
        assert label == ("✓ found" if rank == 1 else f"rank {rank}")
        share = 100 * (ranks[last, 0, 1] == 1).mean()
        assert rows.nth(3).locator("td").last.locator(".share").inner_text() == f"all: {share:.1f} %"
        drawn = page.locator("#picker td .tile").first.evaluate("e => getComputedStyle(e).backgroundImage")
        assert drawn.startswith('url("blob:')


@pytest.mark.slow
def test_a_narrow_page_shows_the_last_block_first(browser, shown):
    with showing(browser, shown / "index.html", width=250) as page:
        hidden = "e => (e = document.querySelector('#picker .scroll')).scrollWidth - e.clientWidth"
        assert page.evaluate(hidden) > 20
        page.wait_for_function(f"e => document.querySelector('#picker .scroll').scrollLeft > ({hidden})() - 2")


@pytest.mark.slow
def test_the_page_fits_a_phone_in_the_dark(browser, shown):
    with showing(browser, shown / "index.html", width=400, dark=True) as page:
        assert fits(page)
        assert contrast(page, "#picker .rank") > 4.5
        page.locator("#picker select").nth(1).select_option(index=0)
        assert "two different styles" in page.locator("#picker").inner_text()
