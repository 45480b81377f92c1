"""The evaluator: one pass, labels that follow the images, metrics by name, and the same numbers for everybody."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import anechoic
from anechoic.cli.main import main
from anechoic.data import open_source
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval import evaluator as evaluator_module
from anechoic.eval.encoders import Encoder, baselines, open_encoder
from anechoic.eval.eval_data import open_eval_data
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.metrics import registry
from anechoic.eval.metrics.knn import knn_accuracy
from anechoic.eval.metrics.registry import METRICS, Metric
from anechoic.eval.selection import choose
from anechoic.models import build_model
from anechoic.models.packed import in_groups
from anechoic.pages.run_page import layer_parts
from anechoic.pages.runs import RunOnDisk
from anechoic.pages.summary import Summary, layers_of
from anechoic.recipes.demo import demo_mae
from anechoic.runtime.checkpoint import model_card, write_model
from anechoic.sweeps.evaluation import evaluate_encoder
from anechoic.sweeps.trial import EvalPlan

SMALL = {"image_size": 8, "patch_size": 2, "in_channels": 1, "dim": 24, "depth": 2, "num_heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
GRAY = Preprocess((0.5,), (0.5,), 8, 1)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder("tiny", build_model("vit_tiny_patch4", **SMALL).eval(), GRAY)


@pytest.fixture(scope="module")
def digits():
    return open_eval_data("digits:train", "digits:test", channels=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    model = build_model("mae_tiny_patch4", **SMALL, **DECODER)
    return write_model(tmp_path_factory.mktemp("models") / "model", model.state_dict(), model_card(model, GRAY))


@pytest.fixture
def brightness(tmp_path):
    """Sixty gray images in two folders; brightness determines the class. One of the first class is unreadable."""
    for i in range(60):
        folder = tmp_path / "data" / ("dark" if i < 30 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8), 20 + i if i < 30 else 150 + i, dtype=np.uint8)
        pixels[:4] //= 1 if i < 30 else 4  # another direction, since a cosine does not see brightness alone
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    (tmp_path / "data" / "dark" / "03.png").write_bytes(b"no image")
    return tmp_path / "data"


def test_knn_is_that_of_the_features(encoder, digits):
    spec = EvalSpec(("knn",), layers=(1, -1), poolings=("mean",), neighbors=(5, 20), max_train=300, max_test=100)
    subject = Evaluator(spec, cached=False).extract(encoder, digits)
    found = Evaluator(spec).measure(subject)
    assert [(row["layer"], row["pooling"]) for row in found.rows] == [(1, "mean"), (3, "mean")]  # the norm is a layer
    part = subject.eval_data
    for row in found.rows:
        key = (row["layer"], "mean")
        expected = knn_accuracy(
            subject.train.sets[key], part.train_labels, subject.test.sets[key], part.test_labels, ks=(5, 20)
        )
        assert row["knn_by_k"] == expected
        assert row["knn"] == expected[5]
    assert found.counts == {"train_samples": 300, "test_samples": 100, "classes": 10}


def test_whitened_votes_do_not_see_a_change_of_basis(encoder, digits):
    spec = EvalSpec(
        ("knn", "knn_whitened"), layers=(1,), poolings=("mean",), neighbors=(5,), max_train=300, max_test=100
    )
    subject = Evaluator(spec, cached=False).extract(encoder, digits)
    before = Evaluator(spec).measure(subject).rows[0]
    scales = np.geomspace(1, 30, SMALL["dim"], dtype=np.float32)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(SMALL["dim"], SMALL["dim"])))[0].astype(np.float32)
    for part in (subject.train, subject.test):
        part.sets[1, "mean"] = part.sets[1, "mean"] @ (turn * scales) + 5
    after = Evaluator(spec).measure(subject).rows[0]
    # Two different computations: rounding may flip the vote of a sample.
    assert before["knn_whitened"] == pytest.approx(after["knn_whitened"], abs=0.02)
    assert before["knn_whitened"] > 0.5
    assert before["knn"] != after["knn"]


def test_cached_and_in_memory_features_are_the_same(encoder, digits):
    spec = EvalSpec(("rank", "norm", "echo"), layers="all", max_test=80, max_train=80)
    kept = Evaluator(spec, cached=True).run(encoder, digits)
    assert kept.rows == Evaluator(spec, cached=False).run(encoder, digits).rows
    assert kept.rows == Evaluator(spec, cached=True).run(encoder, digits).rows


def test_labels_follow_the_images_past_an_unreadable_one(brightness):
    pixels = baselines(Encoder("tiny", build_model("vit_tiny_patch4", **SMALL), GRAY))[0]
    assert pixels.name == "raw pixels"
    eval_data = open_eval_data(str(brightness), str(brightness), channels=1)
    for cached in (False, True, True):
        found = Evaluator(EvalSpec(("knn", "probe"), neighbors=(1,)), cached=cached).run(pixels, eval_data)
        assert found.rows[0]["knn"] == 1.0
        assert found.rows[0]["probe"] == 1.0
        assert found.counts["test_samples"] == 59
        assert [name for name, _ in found.skipped] == ["dark/03.png"]


@pytest.mark.slow
def test_a_trial_survives_an_unreadable_image(model_dir, brightness):
    plan = EvalPlan(str(brightness), str(brightness), neighbors=1)
    metrics = evaluate_encoder(model_dir, plan, seed=0)
    assert metrics["knn_mean"] == 100.0
    assert len(metrics["layers"]["mean"]["knn"]) == 3


METRIC_FILE = """
def brightness_metric(subject):
    return {key: {"brightness": float(x.mean()), "detail": [1]} for key, x in subject.sets.items()}
"""


def test_new_metric_is_one_file_and_one_row(encoder, digits, monkeypatch, tmp_path, capsys):
    """It is measured, listed by `evaluate --metrics help` and a column of the report's layer table."""
    (tmp_path / "brightness_metric.py").write_text(METRIC_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "METRICS", dict(METRICS))
    row = Metric(
        "brightness_metric:brightness_metric", "mean of all channels", columns={"brightness": "Light"}, report="chart"
    )
    anechoic.register_metric("brightness", row)

    assert main(["evaluate", "--metrics", "help"]) == 0
    assert re.search(r"^brightness +mean of all channels", capsys.readouterr().out, flags=re.M)
    found = Evaluator(EvalSpec(("knn", "brightness"), max_train=50, max_test=20)).run(encoder, digits)
    assert all({"knn", "brightness"} <= row.keys() for row in found.rows)

    config = demo_mae()
    run = RunOnDisk(tmp_path, replace(config, data=replace(config.data, source="digits:test", channels=1)), [], {})
    rows, subject = layers_of(run, encoder, data=None, samples=40, device="cpu", seed=0)
    assert all(isinstance(row["brightness"], float) and "detail" not in row for row in rows)
    summary = Summary(run, "run", {}, {}, None, rows, subject, [])
    assert summary.measure("brightness") == rows[-1]["brightness"]
    chart, table = map(str, layer_parts([summary])[1:])
    assert "Light" in chart
    assert "Light" in table
    with pytest.raises(UserError, match="already a metric 'brightness'"):
        anechoic.register_metric("brightness", row)


def test_metrics_of_installed_packages_are_found(monkeypatch):
    class Point:
        value = "somewhere:METRIC"

        def __init__(self, name, load):
            self.name, self.load = name, load

    points = [Point("broken", lambda: {}["missing"]), Point("extra", lambda: Metric(lambda subject: {}, "of a plugin"))]
    monkeypatch.setattr(registry, "METRICS", dict(METRICS))
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.load_plugins.cache_clear()
    with pytest.warns(UserWarning, match="'broken' .somewhere:METRIC. cannot be used"):
        assert EvalSpec(("extra",)).metrics == ("extra",)


def test_metric_whose_needs_are_unmet_is_refused_by_name(encoder, digits):
    unlabeled = replace(digits, train=None, train_labels=None, test_labels=None)
    with pytest.raises(UserError, match="The metric silhouette needs labels"):
        Evaluator(EvalSpec(("rank", "silhouette"))).run(encoder, unlabeled)
    with pytest.raises(UserError, match="The metric retrieval needs data that knows object and style"):
        Evaluator(EvalSpec(("retrieval",))).run(encoder, digits)
    with pytest.raises(UserError, match="tiny has no classification head"):
        Evaluator(EvalSpec(("accuracy",), max_test=20)).run(encoder, digits)


@pytest.mark.parametrize("single", [False, True])
def test_selection_reads_train_samples_only(encoder, digits, single):
    """Values for choosing among rows come from held-out train samples, whatever the test split holds."""
    data = replace(digits, train=None, train_labels=None) if single else digits
    spec = EvalSpec(("knn", "probe", "rank"), layers=(1,), poolings=("mean",), select=True, max_train=300, max_test=200)
    subject = Evaluator(spec, cached=False).extract(encoder, data)
    found = Evaluator(spec).measure(subject).rows[0]
    assert set(found["selection"]) >= {"knn", "knn_by_k", "probe"}
    assert "rank_rows" not in found["selection"]
    complete = subject.with_train()
    complete.test.sets[1, "mean"] = np.zeros_like(complete.test.sets[1, "mean"])
    again = Evaluator(spec).measure(complete).rows[0]
    assert again["selection"] == found["selection"]
    assert again["knn"] < found["knn"]


@pytest.mark.slow
def test_every_metric_runs(encoder, digits):
    names = tuple(name for name, row in METRICS.items() if not {"styles", "classifier"} & set(row.needs))
    found = Evaluator(EvalSpec(names, layers="all", max_train=200, max_test=60)).run(encoder, digits)
    assert len(found.rows) == 4 * 3
    assert {"token_norm", "gain", "branch_ratio"} <= found.network.keys()


def test_unknown_metrics_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean probe"):
        EvalSpec(("prob",))


def test_noise_is_for_denoisers(encoder, digits):
    with pytest.raises(UserError, match="no diffusion model"):
        Evaluator(EvalSpec(("knn",), noise=(0.1,))).run(encoder, digits)


@pytest.mark.parametrize("protocol", ["logistic", "in100"])
def test_a_denoiser_is_probed_by_the_protocol_of_its_plan(protocol, tmp_path, monkeypatch):
    """The plan's protocol reaches the probe; both give a number, and another one."""
    from anechoic.eval.metrics import probe
    from anechoic.sweeps.evaluation import probe_denoiser

    called = []
    for name in ("logistic_rows", "in100_rows"):
        rows = getattr(probe, name)
        monkeypatch.setattr(probe, name, lambda *args, name=name, rows=rows: called.append(name) or rows(*args))
    torch.manual_seed(0)
    options = {"image_size": 8, "patch_size": 2, "in_channels": 1, "dim": 24, "depth": 2, "num_heads": 2}
    model = build_model("uvit_small", **options)
    run = write_model(tmp_path / "model", model.state_dict(), model_card(model, GRAY))
    plan = EvalPlan("digits:train", "digits:test", max_train=60, max_test=30, noise=(0.1,), protocol=protocol)
    monkeypatch.setattr(evaluator_module, "SELECTION", 0.2)
    metrics = probe_denoiser(run, plan, seed=0)
    assert set(called) == {f"{protocol}_rows"}
    assert 0 <= metrics["probe"] <= 100
    assert len(metrics["held_out"]) == len(metrics["entropy"])


def test_latents_need_real_images_before_they_are_trained_on(tmp_path):
    from anechoic.config import Config, DataConfig
    from anechoic.data.latents import CARD
    from anechoic.sweeps.trial import Trial, check_plan

    (tmp_path / CARD).write_text("{}")
    trial = Trial("a", "a", Config(data=DataConfig(str(tmp_path))), EvalPlan(samples=4))
    with pytest.raises(UserError, match="compared with real ones"):
        check_plan(trial)
    check_plan(replace(trial, evaluation=replace(trial.evaluation, real="digits:train")))


# ---- receipts


def test_a_receipt_reruns(model_dir):
    """Every argument is in the JSON, so the same command with it returns the same numbers."""
    first = anechoic.evaluate(
        str(model_dir), "digits:train", test="digits:test", metrics=["knn"], layers=(1,), pooling=("mean",)
    )
    config = json.loads(json.dumps(first.to_json()["config"]))
    assert {"k", "layers", "pooling", "image_size", "temperature", "holdout", "device", "baselines"} <= config.keys()
    again = anechoic.evaluate(config.pop("run"), config.pop("data"), **config)
    assert again.metrics == first.metrics


def test_defaults_of_knn_adapt_to_few_samples(model_dir, brightness):
    found = anechoic.evaluate(str(model_dir), str(brightness), baselines=False)
    assert list(found.metrics["rows"][0]["knn_by_k"]) == [10, 20]
    assert found.metrics["skipped"][0]["name"] == "dark/03.png"


@pytest.mark.parametrize("scaling", ["standardized", "whitened"])
def test_the_vote_of_scaled_features_is_the_metric_of_that_name(model_dir, digits, scaling):
    parts = {"test": "digits:test", "metrics": "knn"}
    found = anechoic.evaluate(str(model_dir), "digits:train", **parts, k=(5, 20), pooling=("mean",), scaling=scaling)
    spec = EvalSpec((f"knn_{scaling}",), poolings=("mean",), neighbors=(20,))
    expected = Evaluator(spec, cached=False).run(open_encoder(str(model_dir)), digits).rows[0][f"knn_{scaling}"]
    rows = {row["encoder"]: row[f"knn_{scaling}_by_k"] for row in found.metrics["rows"]}
    assert rows.pop(model_dir.name)[20] == expected
    assert set(rows) == {"untrained", "constant"} | ({"raw pixels"} if scaling == "standardized" else set())
    assert found.metrics["chosen"]["knn"]["scaling"] == scaling


# ---- threads


def test_consumer_of_features_has_all_threads():
    torch.set_num_threads(2)
    try:
        stream = in_groups(lambda images: {"x": images}, (torch.zeros(4, 1) for _ in range(3)), tokens=1)
        for _ in stream:
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_source_is_read_once_for_every_metric(encoder, monkeypatch):
    """One pass over the images serves all layers, poolings and metrics of features."""
    eval_data = open_eval_data("digits:test", "digits:test", channels=1)
    passes = []
    original = type(open_source("digits:test", channels=1)).read_many
    monkeypatch.setattr(
        type(eval_data.test), "read_many", lambda self, ids, **kw: passes.append(len(ids)) or original(self, ids, **kw)
    )
    spec = EvalSpec(("knn", "rank", "norm", "echo"), layers="all")
    Evaluator(spec, cached=False).run(encoder, eval_data)
    assert sum(passes) == len(eval_data.train) + len(eval_data.test)


def test_choose_reads_held_out_training_data_only():
    rows = [{"noise": 0.1, "layer": 1, "pooling": "mean", "probe": 0.7}, {"layer": 2, "pooling": "mean", "probe": 0.9}]
    found = choose(rows, [{"probe": 0.8}, {"probe": 0.7}], ["probe"])
    assert (found["layer"], found["accuracy"], found["test_maximum"]) == (1, 0.7, 0.9)
