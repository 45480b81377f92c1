"""The page on one run or several, and what pretrain prints before and after."""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace

import pytest
from PIL import Image
from tiny_runs import SMALLEST

import anechoic
from anechoic.cli.main import main
from anechoic.config import Config, DataConfig, ModelConfig, OptimConfig, ShortcutConfig, ValidationConfig
from anechoic.errors import UserError
from anechoic.eval.verdict import late_gain
from anechoic.pages.estimates import estimate
from anechoic.pages.run_page import report_page
from anechoic.pages.runs import curves, facts, open_run
from anechoic.pages.summary import Summary
from anechoic.pages.tables import percent
from anechoic.recipes.diffusion import pocket_uvit_digits
from anechoic.runtime.run import picture_files, read_metrics
from anechoic.server.page import status_of
from anechoic.training.loop import fit

TINY = [f"{name}={value}" for name, value in SMALLEST.items()]


def config(*, alpha_min=1.0, seed=0):
    return Config(
        data=DataConfig(source="digits", image_size=8, channels=1, holdout=64, flip=False),
        model=ModelConfig("mae_tiny_patch4", SMALLEST),
        shortcut=ShortcutConfig(alpha_min=alpha_min),
        optim=OptimConfig(batch_size=64, samples=64 * 24, lr=2e-3),
        validation=ValidationConfig(every=64 * 6, report=64 * 6),
        seed=seed,
        threads=1,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two arms of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for alpha_min in (1.0, 0.6):
        for seed in (0, 1):
            fit(config(alpha_min=alpha_min, seed=seed), folder / f"alpha{alpha_min:g}-{seed}")
    return folder


def embedded(page):
    """What the page holds as JSON."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture(scope="module")
def single(runs):
    found = anechoic.report([runs / "alpha1-0"], samples=200)
    return found, (runs / "alpha1-0" / "report.html").read_text()


def test_the_numbers_of_the_page_are_those_of_the_outcome(single):
    found, page = single
    assert embedded(page) == json.loads(json.dumps(found.metrics))
    (run,) = found.metrics["runs"]
    assert run["verdict"]["word"].capitalize() in page
    assert all(reason.split(" (")[0] in page for reason in run["verdict"]["reasons"])
    assert f'data-value="{percent(run["layers"][-1]["knn"])!r}"' in page
    assert "k-NN (%)" in page
    assert "input share (%)" in page
    assert "rank, as in the paper" not in page
    assert f"{run['facts']['epochs']} epochs" in page


def test_a_page_has_every_part(single):
    found, page = single
    for heading in (
        "Verdict",
        "What was trained",
        "Training",
        "Layer by layer",
        "Reconstructions",
        "Neighbors",
        "Map",
    ):
        assert f"<h2>{heading}</h2>" in page
    (run,) = found.metrics["runs"]
    assert {"knn", "probe", "rank_columns", "cka", "input_share"} <= run["layers"][-1].keys()
    assert run["facts"]["seen"] == 64 * 24
    epoch = run["facts"]["images"] // run["facts"]["batch_size"] * run["facts"]["batch_size"]
    assert run["facts"]["epochs"] == round(64 * 24 / epoch, 2)
    assert run["facts"]["finished"] is True
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_curves_are_those_of_the_run(single, runs):
    (run,) = single[0].metrics["runs"]
    losses = [r["held_out_loss"] for r in read_metrics(runs / "alpha1-0") if "held_out_loss" in r]
    assert run["curves"]["validation"]["held_out_loss"] == losses
    assert run["measures"]["held_out_loss"] == losses[-1]


def test_runs_are_compared_over_their_seeds(runs, tmp_path):
    paths = sorted(runs.glob("alpha*"), reverse=True)
    found = anechoic.report(paths, out=tmp_path / "page.html", samples=200)
    rows = {(row["arm"], row["measure"]): row for row in found.metrics["comparison"]}
    assert {arm for arm, _ in rows} == {"alpha_min 1", "alpha_min 0.6"}
    values = {run["name"]: run["measures"]["knn"] for run in found.metrics["runs"]}
    ours = rows["alpha_min 0.6", "knn"]
    expected = estimate([values["alpha0.6-0"] - values["alpha1-0"], values["alpha0.6-1"] - values["alpha1-1"]])
    assert ours["difference"] == {"mean": expected.mean, "half": expected.half, "n": 2}
    assert rows["alpha_min 1", "knn"]["difference"] is None
    page = (tmp_path / "page.html").read_text()
    assert embedded(page) == json.loads(json.dumps(found.metrics))
    assert page.count("Verdict</h2>") == 1
    assert "<h2>Comparison</h2>" in page


def test_a_run_without_its_data_still_has_a_page(runs, tmp_path, monkeypatch):
    """Its curves stay; what cannot be measured is named; images given stand in."""
    from anechoic.storage.files import read_json, sealed, unsealed, write_json

    moved = tmp_path / "moved"
    shutil.copytree(runs / "alpha1-0", moved)
    changed = read_json(moved / "config.json")
    changed["data"]["source"] = str(tmp_path / "gone")
    write_json(moved / "config.json", changed)
    write_json(moved / "env.json", sealed({**unsealed(read_json(moved / "env.json")), "config": changed}))
    (run,) = anechoic.report([moved], out=tmp_path / "page.html").metrics["runs"]
    assert run["verdict"] is None
    assert [sentence.split(":")[0] for sentence in run["missing"]] == [
        "There is no verdict",
        "The layers were not measured",
    ]
    assert run["curves"]["train"]["loss"]
    (run,) = anechoic.report([moved], data="digits:test", out=tmp_path / "page.html", samples=100).metrics["runs"]
    assert run["verdict"]["signals"]["images"] > 64
    assert run["layers"]


def test_a_training_that_goes_on_has_a_page(tmp_path):
    """Before its first checkpoint there are curves and nothing else."""
    run = tmp_path / "run"
    fit(config(), run)
    for name in ("results.json", "model", "checkpoints"):
        (run / name).rename(tmp_path / name)
    (found,) = anechoic.report([run], out=tmp_path / "page.html").metrics["runs"]
    assert "holds no weights" in found["missing"][0]
    assert found["facts"]["finished"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nowhere"], "There is no run directory nowhere."),
        (["report", "runs/phtos"], "There is no run directory runs/phtos; did you mean runs/photos?"),
        (["report", "."], "is no run directory"),
    ],
)
def test_mistakes(capsys, tmp_path, monkeypatch, arguments, words):
    (tmp_path / "runs" / "photos" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_report_needs_a_run():
    with pytest.raises(UserError, match="at least one run"):
        anechoic.report(())


# ---- before and after pre-training


def test_pretrain_prints_a_plan_and_a_verdict(capsys, tmp_path):
    command = ["pretrain", "digits", "--channels", "1", "--epochs", "2", "--out", str(tmp_path / "run")]
    command += ["--image-size", "8", "--model", "mae_tiny_patch4", "--model-options", *TINY]
    assert main(command) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[0].startswith("Pre-training on digits: 1,797 images without labels, ")
    assert lines[1].startswith("Model: mae_tiny_patch4 (")
    assert re.match(r"Length: 3,\d{3} samples in .* about \d+ s with the machine", lines[2])
    assert lines[3].startswith("Pixels: 8-bit, 1 channel; mean (")
    assert lines[4].startswith("Shortcuts: alpha_min 1, plain residual connections")
    assert "optim: " not in printed.err
    assert "Verdict: " in printed.out
    assert printed.out.strip().endswith(f"anechoic report {tmp_path / 'run'}")
    # The same command again: no second introduction, the same verdict.
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)["metrics"]["verdict"]
    assert found["signals"]["images"] == open_run(tmp_path / "run").config.data.holdout


def test_one_image_is_counted_as_one(capsys, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    command = ["pretrain", str(tmp_path), "--epochs", "1", "--out", str(tmp_path / "run"), "--image-size", "8"]
    assert main([*command, "--model", "mae_tiny_patch4", "--model-options", *TINY]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert ": 1 image without labels, 0 of them held out." in lines[0]
    assert lines[2].startswith("Length: 1 sample in 1 update of 1, about ")


def test_every_setting_is_shown_on_demand(capsys, tmp_path):
    command = ["pretrain", "digits", "--channels", "1", "--epochs", "1", "--out", str(tmp_path / "run"), "--verbose"]
    assert main([*command, "--image-size", "8", "--model", "mae_tiny_patch4", "--model-options", *TINY]) == 0
    assert "  optim: algorithm muon" in capsys.readouterr().err


def test_the_estimate_is_that_of_the_whole_length(capsys):
    from anechoic.training.timing import seconds_per_image

    resolved = config()
    assert 0 < seconds_per_image(resolved) < 0.1
    assert seconds_per_image(replace(resolved, optim=replace(resolved.optim, algorithm="muon"))) > 0


def test_one_slow_update_does_not_change_the_estimated_time(monkeypatch):
    from anechoic.training import timing

    clock = iter([0.0, 90.0, *[100.0 + second for second in range(100)]])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timing.timed_updates(config()) == 1 / config().optim.batch_size


BASE = {"kind": "train", "seen": 64, "loss": 1.0, "seconds": 1.0}
DAMAGED = [
    b"[]",
    b"null",
    b'"text"',
    b'{"seen": 64}',
    *(
        json.dumps(BASE | change).encode()
        for change in (
            {"seen": "64"},
            {"seen": True},
            {"seen": -1},
            {"seen": 10**30},
            {"kind": 3},
            {"loss": "low"},
            {"loss": 10**400},
            {"loss": {"a": 1}},
            {"loss": [1.0]},
            {"seconds": "long"},
            {"rank_columns": ["a"]},
            {"rank_columns": [[1.0]]},
            {"note": {"x": 1}},
        )
    ),
]
LEGAL = [
    {"loss": float("nan")},
    {"loss": None},
    {"images_per_second": 0, "seconds": None},
    {"kind": "validation", "rank_columns": [], "held_out_loss": None},
    {"kind": "validation", "rank_columns": 3.0, "token_norm": [1.0]},
    {"kind": "unknown"},
]


def test_damaged_metrics_are_refused_with_their_line(runs, tmp_path):
    shutil.copytree(runs / "alpha1-0", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    intact = metrics.read_bytes()
    for line in DAMAGED:
        metrics.write_bytes(intact + line + b"\n")
        with pytest.raises(UserError, match=r"Line 10 of .*metrics.jsonl is damaged"):
            open_run(tmp_path / "run")


@pytest.mark.parametrize("change", LEGAL)
def test_unusual_metrics_have_a_page(runs, tmp_path, change):
    shutil.copytree(runs / "alpha1-0", tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(BASE | {"seen": 64 * 24} | change) + "\n")
    run = open_run(tmp_path / "run")
    summary = Summary(run, "run", facts(run), curves(run), None, [], None, [])
    assert report_page([summary], [], numbers={}, footer="")
    status = status_of(run, state="running", resume_command="")
    json.dumps({name: value for name, value in status.items() if name != "charts"}, allow_nan=False)
    assert late_gain(run.records) is None or isinstance(late_gain(run.records), float)


def test_report_of_a_denoiser_shows_its_samples_over_training(tmp_path):
    config = pocket_uvit_digits()
    sizes = {"dim": 16, "depth": 2, "num_heads": 2}
    config = replace(
        config,
        model=replace(config.model, options={**config.model.options, **sizes}),
        optim=replace(config.optim, batch_size=16, samples=64, epochs=None),
        validation=ValidationConfig(every=16),
    )
    fit(config, tmp_path / "run")
    files = picture_files(tmp_path / "run")
    assert len(files) == 5
    files[2].unlink()
    files[2].mkdir()
    anechoic.report([tmp_path / "run"], out=tmp_path / "page.html", samples=100)
    page = (tmp_path / "page.html").read_text()
    assert [f"After {seen} samples seen." in page for seen in (0, 16, 32, 48, 64)] == [True, True, False, True, True]
    assert base64.b64encode(files[4].read_bytes()).decode() in page
    assert "32.png could not be read" in page
