"""One trial: its JSON, its data, its evaluation, and a record verified."""

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anechoic.cli.main import main
from anechoic.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    SaveConfig,
    ShortcutConfig,
    ValidationConfig,
)
from anechoic.data import open_source
from anechoic.data.embedded import Scenes
from anechoic.errors import UserError
from anechoic.eval import features
from anechoic.eval.encoders import run_encoder
from anechoic.storage.files import read_json, write_json
from anechoic.sweeps import evaluation
from anechoic.sweeps.trial import EvalPlan, Trial, is_file, localized, located, rounded, run_trial, trial_from_json
from anechoic_lab.records.verify import compare, numbers, verdict_text

BATCH = 16
EVALUATION = EvalPlan("digits:train", "digits:test", max_train=200, max_test=100)
MAE = {"patch_size": 4, "dim": 16, "depth": 2, "num_heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


def tiny(model, objective, *, updates=4, **changes):
    config = Config(
        data=DataConfig("digits:train", image_size=8, channels=1, flip=False, holdout=32, workers=0),
        model=model,
        shortcut=ShortcutConfig(alpha_min=0.7),
        objective=objective,
        optim=OptimConfig(batch_size=BATCH, samples=updates * BATCH, lr=1e-3),
        validation=ValidationConfig(every=2 * BATCH, report=BATCH),
        save=SaveConfig(every=2 * BATCH, keep_every=2 * BATCH),
        threads=1,
        devices=1,
    )
    return replace(config, **changes)


def tiny_mae(**changes):
    return tiny(ModelConfig("mae_tiny_patch4", {**MAE, **DECODER}), ObjectiveConfig(), **changes)


def is_accuracy(value, *, tested=100):
    """Percent, and a whole number of the test images."""
    return 0 <= value <= 100 and math.isclose(value * tested / 100, round(value * tested / 100), abs_tol=1e-3)


def cli(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


# ---- JSON and data


def test_a_trial_is_its_json():
    evaluation = EvalPlan(
        "a", "b", max_train=7, protocol="in100", probe_layers=(0, 2), checkpoints=True, noise=(0.5, 0.25)
    )
    trial = Trial("alpha0.7-seed3", "alpha0.7", tiny_mae(seed=3), evaluation)
    assert trial_from_json(json.loads(json.dumps(trial.to_json()))) == trial


@pytest.mark.parametrize(
    "values", [{}, {"name": "x"}, [], {"evaluation": 3, "name": "x", "variant": "x", "config": {}}]
)
def test_what_is_no_trial_is_refused(values):
    with pytest.raises(UserError, match="This is not the record of a trial"):
        trial_from_json(values)


@pytest.mark.parametrize(
    ("source", "there"),
    [
        ("digits:train", "digits:train"),
        ("scenes:train:5000", "scenes:train:5000"),
        ("hf:cifar100:train", "hf:cifar100:train"),
        ("", ""),
        ("cifar100/train.parquet", "data/cifar100/train.parquet"),
        ("digits-of-ours/train", "data/digits-of-ours/train"),
        ("/elsewhere/a.zip", "/elsewhere/a.zip"),
    ],
)
def test_files_are_below_the_root_and_embedded_data_is_everywhere(source, there):
    assert located(source, Path("data")) == there
    assert is_file(source) == ("/" in source)


def test_every_source_of_a_trial_is_located():
    config = tiny_mae(data=DataConfig("train.zip"))
    here = localized(Trial("x", "x", config, EvalPlan("fit.zip", "test.zip")), Path("data"))
    assert (here.config.data.source, here.evaluation.train, here.evaluation.test) == (
        "data/train.zip",
        "data/fit.zip",
        "data/test.zip",
    )
    assert replace(here.config, data=config.data) == config


def test_rounded():
    value = {"a": [1 / 3, (2_000_000.4, True)], "b": {"c": math.nan, "d": -math.inf}, "e": 12_345_678, "f": "text"}
    assert rounded(value) == {
        "a": [0.333333, [2e6, True]],
        "b": {"c": None, "d": None},
        "e": 12_345_678,
        "f": "text",
    }
    assert json.loads(json.dumps(rounded(value), allow_nan=False)) == rounded(value)


def test_evenly_spaced_indices_cover_both_ends_once():
    assert evaluation.evenly(10, 4).tolist() == [0, 3, 6, 9]
    assert evaluation.evenly(5, 99).tolist() == [0, 1, 2, 3, 4]
    found = evaluation.evenly(50_000, 5000)
    assert len(np.unique(found)) == 5000
    assert (found[0], found[-1]) == (0, 49_999)


def test_without_test_data_a_fifth_of_the_train_images_is_held_out(tmp_path):
    trial = Trial("held-seed0", "held", tiny_mae(), EvalPlan("digits:test", probe=False))
    metrics = run_trial(trial, tmp_path / "run", root=tmp_path)["metrics"]
    tested = round(0.2 * len(open_source("digits:test", channels=1)))
    assert is_accuracy(metrics["knn_mean"], tested=tested)
    assert metrics["knn_mean"] > 20


# ---- an encoder, all that its evaluation can do


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """(trial, record, run directory)"""
    folder = tmp_path_factory.mktemp("encoder")
    evaluation = replace(EVALUATION, whitened=True, checkpoints=True, pictures=True, probe_layers=(0, 2, 9))
    trial = Trial("tiny-seed0", "tiny", tiny_mae(), evaluation)
    return trial, run_trial(trial, folder / "run", root=folder), folder / "run"


@pytest.mark.slow
def test_a_record_has_the_fields_of_the_contract(encoder):
    trial, record, _ = encoder
    for field in ("schema", "config", "seed", "commit", "machine", "metrics", "seconds"):
        assert field in record
    assert (record["name"], record["variant"], record["seed"]) == ("tiny-seed0", "tiny", 0)
    assert trial_from_json(record) == trial
    assert {"cpu", "system", "torch", "numpy"} <= set(record["machine"])
    assert record["cpu_seconds"] > 0
    json.dumps(record, allow_nan=False)


@pytest.mark.slow
def test_every_layer_and_token_of_an_encoder_is_evaluated(encoder):
    _, record, _ = encoder
    metrics = record["metrics"]
    for token in ("mean", "class"):
        layers = metrics["layers"][token]
        assert {len(values) for values in layers.values()} == {MAE["depth"] + 1}
        for kind in ("knn", "knn_standardized", "knn_whitened"):
            assert all(is_accuracy(value) for value in layers[kind])
            assert metrics[f"{kind}_{token}"] == layers[kind][-1]
        assert is_accuracy(metrics[f"probe_{token}"])
        assert all(norm > 0 for norm in layers["norm"])
        for entropy, rank in zip(layers["entropy"], layers["rank"], strict=True):
            assert rank == pytest.approx(math.exp(entropy), rel=1e-4)
            assert 1 <= rank <= MAE["dim"]
    assert metrics["rank"] == metrics["layers"]["mean"]["rank"][-1]
    assert metrics["entropy"] == metrics["layers"]["mean"]["entropy"][-1]
    assert metrics["probe_mean"] > 30  # an almost untrained network classifies digits above chance, 10
    assert set(metrics["probe_layers"]) == {"0", "2"}  # there is no layer 9
    assert metrics["probe_layers"]["2"] == metrics["probe_mean"]


@pytest.mark.slow
def test_patches_of_a_shape_are_compared_with_its_mask(encoder, monkeypatch):
    opened = run_encoder(encoder[2])
    plan = replace(EVALUATION, test="scenes:test:8", same_shape=4)
    scenes = open_source(plan.test)
    masks = torch.stack([scenes.mask(index) > 0 for index in range(4)]).float()
    masks[1] = 0  # no patch of a shape
    monkeypatch.setattr(Scenes, "mask", lambda self, index: masks[index])
    known = (F.adaptive_avg_pool2d(masks, 16) > 0.5)[..., None].float()
    noise = torch.randn(4, 16, 16, 64, generator=torch.Generator().manual_seed(0))
    for maps, low, high in ((torch.cat([known, 1 - known], dim=-1), 100, 100), (noise, 45, 55), (known + 1, 50, 50)):
        monkeypatch.setattr(features, "patch_maps", lambda model, images, maps=maps: maps)
        assert low <= evaluation.same_shape(opened, plan) <= high
    with pytest.raises(UserError, match="Only scenes have masks, not digits:test"):
        evaluation.same_shape(opened, replace(plan, test="digits:test"))


def test_triplets_of_patches_are_counted():
    shape, ground = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.5], [1.0, -0.5], [-1.0, 0.0]])
    # The two of the shape are at 45 degrees, those of the ground at 27 and 18, 27 and 72, 180 and 135.
    assert evaluation.triplets(shape, ground) == pytest.approx((0 + 0 + 0 + 1 + 1 + 1) / 6)


@pytest.mark.slow
def test_kept_checkpoints_are_evaluated_and_the_last_is_the_run(encoder):
    _, record, _ = encoder
    metrics = record["metrics"]
    assert [row["seen"] for row in metrics["over_time"]] == [32, 64]
    last = metrics["over_time"][-1]
    assert last["knn_mean"] == metrics["knn_mean"]
    assert last["knn_standardized_class"] == metrics["knn_standardized_class"]
    assert last["entropy_mean"] == pytest.approx(metrics["entropy"])


@pytest.mark.slow
def test_the_looks_during_training_are_kept(encoder):
    _, record, _ = encoder
    training = record["metrics"]["training"]
    assert [look["seen"] for look in training] == [0, 32, 64]
    assert all(look["held_out_loss"] > 0 and len(look["token_norm"]) == MAE["depth"] + 1 for look in training)


@pytest.mark.slow
def test_pictures_are_kept_as_bytes(encoder):
    _, record, _ = encoder
    pictures = record["metrics"]["pictures"]
    assert np.array(pictures["map"]["points"]).shape == (100, 2)
    assert len(pictures["map"]["labels"]) == 100
    assert len(pictures["map"]["names"]) == 10
    images = evaluation.unpacked(pictures["reconstructions"]["images"])
    hidden = evaluation.unpacked(pictures["reconstructions"]["hidden"])
    assert images.shape == evaluation.unpacked(pictures["reconstructions"]["predictions"]).shape == (4, 8, 8, 1)
    assert set(np.unique(hidden)) == {0.0, 1.0}
    assert hidden.mean() == pytest.approx(0.75)
    assert evaluation.unpacked(pictures["colors"]["colors"]).shape == (8, 2, 2, 3)
    first = open_source("digits:test", channels=1).read(0)[0].numpy()
    assert np.abs(images[0, ..., 0] - first / 255).max() < 0.01


# ---- a denoiser and a classifier


@pytest.mark.slow
def test_a_denoiser_is_evaluated_by_its_images_and_its_features(tmp_path):
    model = ModelConfig("uvit_small", {"patch_size": 4, "dim": 16, "depth": 2, "num_heads": 2})
    config = tiny(model, ObjectiveConfig("noise_prediction", {"process": "vp"}))
    evaluation = replace(EVALUATION, samples=24, extractor="digits", noise=(0.05, 0.2))
    metrics = run_trial(Trial("d-seed0", "d", config, evaluation), tmp_path / "run", root=tmp_path)["metrics"]
    assert metrics["diverged"] is False
    assert metrics["frechet"] > 0
    assert 0 <= metrics["precision"] <= 1
    assert 0 <= metrics["recall"] <= 1
    assert is_accuracy(metrics["probe"])
    blocks = len(metrics["entropy"])
    assert {(row["noise"], row["layer"]) for row in metrics["held_out"]} == {
        (level, layer) for level in (0.05, 0.2) for layer in {row["layer"] for row in metrics["held_out"]}
    }
    assert len(metrics["held_out"]) == 2 * blocks
    best = max(row["held_out"] for row in metrics["held_out"])
    assert metrics["chosen"]["held_out"] == best
    assert metrics["chosen"] in metrics["held_out"]


def test_without_labels_or_samples_a_denoiser_is_only_trained(tmp_path):
    assert evaluation.evaluate_denoiser(tmp_path, EvalPlan(), source="digits:train", seed=0) == {}


def test_a_classifier_is_evaluated_by_its_own_decisions(tmp_path):
    model = ModelConfig("resnet18", {"num_blocks": 8, "num_classes": 10, "width": 8})
    config = tiny(model, ObjectiveConfig("supervised"), updates=40, save=SaveConfig(every=40 * BATCH))
    config = replace(config, optim=replace(config.optim, lr=1e-2), validation=ValidationConfig(every=40 * BATCH))
    config = replace(config, data=replace(config.data, labels=True, augment="none"))
    metrics = run_trial(Trial("c-seed0", "c", config, EVALUATION), tmp_path / "run", root=tmp_path)["metrics"]
    assert metrics["diverged"] is False
    assert is_accuracy(metrics["accuracy"])
    assert metrics["accuracy"] > 30  # chance is 10
    ranks = metrics["layers"]["mean"]
    assert set(ranks) == {"entropy", "rank", "entropy_centered"}
    assert len(ranks["entropy"]) >= 8
    assert "probe_mean" not in metrics


# ---- measured again


def test_a_trial_is_evaluated_with_the_threads_of_its_training(tmp_path, monkeypatch):
    monkeypatch.setattr("anechoic.sweeps.trial.measure", lambda *_: {"seen_threads": torch.get_num_threads()})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        record = run_trial(Trial("c-seed0", "c", tiny_mae(updates=1), EVALUATION), tmp_path / "run", root=tmp_path)
        assert record["metrics"]["seen_threads"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def record_file(encoder, tmp_path):
    _, record, _ = encoder
    plain = {**record, "evaluation": {**record["evaluation"], "pictures": False}}
    plain["metrics"] = {name: value for name, value in record["metrics"].items() if name != "pictures"}
    path = tmp_path / "records" / "record.json"
    path.parent.mkdir()
    write_json(path, plain)
    return path


@pytest.mark.slow
def test_a_record_repeated_is_the_same(record_file, tmp_path):
    code, out, error = cli("reproduce", "--verify", record_file, "--runs", tmp_path / "runs", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["metrics"]["identical"] is True
    assert found["metrics"]["largest_difference"] == 0
    assert found["metrics"]["compared"] == len(list(numbers(read_json(record_file)["metrics"])))
    assert found["metrics"]["compared"] > 50
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_tampered_record_is_refused(record_file, tmp_path):
    beside = record_file.parent.parent / "of-another-program" / "a-seed1.json"
    beside.parent.mkdir()
    write_json(beside, {"config": {}})
    record = read_json(record_file)
    record["metrics"]["knn_mean"] += 10
    write_json(record_file, record)
    code, out, error = cli("reproduce", "--verify", record_file, "--runs", tmp_path / "runs")
    assert (code, out) == (2, "")
    assert error.count("\n") == 1
    assert "headline numbers differ by at most 10, 1 beyond the spread of seeds: knn_mean by 10" in error


def metrics_of(record, **changes):
    return {**record, "metrics": {**record["metrics"], **changes}}


@pytest.mark.slow
def test_small_differences_are_tolerated_and_reported(encoder):
    _, record, _ = encoder
    near, far = (metrics_of(record, knn_mean=record["metrics"]["knn_mean"] + points) for points in (1, 40))
    found = compare(record, near)
    assert not found.within_tolerance
    assert "no other seeds show its spread" in verdict_text(record, near, found)
    seeds = [metrics_of(record, knn_mean=points) for points in (20.0, 21.0, 22.0, 23.0)]
    for neighbors in (seeds, [*seeds, {**metrics_of(record, knn_mean=90.0), "variant": "another"}]):
        found = compare(record, near, neighbors)
        assert (found.identical, found.within_tolerance) == (False, True)
        (changed,) = (difference for difference in found.differences if difference.size)
        assert changed.allowed == pytest.approx(12.924 * math.sqrt(2 * 5 / 3), rel=1e-3)  # Student's t, 3 degrees
        assert not compare(record, far, neighbors).within_tolerance
    assert compare(record, near, same_data=seeds).within_tolerance
    steady = [metrics_of(record, knn_mean=20.0)] * 2
    assert not compare(record, near, steady, same_data=seeds).within_tolerance  # neighbors know better
    assert "knn_mean" in found.table
    assert found.largest == pytest.approx(1)
    assert "although commit and machine are the same" in verdict_text(record, near, found)
    elsewhere = {**near, "commit": "another", "machine": {**near["machine"], "cpu": "abacus"}}
    words = verdict_text(record, elsewhere, compare(record, elsewhere))
    assert "it was made on another kind of machine" in words
    assert "this is commit another" in words


@pytest.mark.slow
def test_a_missing_number_or_another_fate_is_no_repetition(encoder):
    _, record, _ = encoder
    missing = metrics_of(record, knn_mean=None)
    assert not compare(record, missing).within_tolerance
    assert not compare(missing, record).within_tolerance
    older = {**record, "metrics": {key: value for key, value in record["metrics"].items() if key != "knn_mean"}}
    assert compare(older, record).within_tolerance
    wild = {**record, "metrics": {"diverged": True, "reason": "it did", "seen": 16, "training": []}}
    for one, other in ((record, wild), (wild, record)):
        found = compare(one, other)
        assert not found.within_tolerance
        assert "one of the two runs diverged" in verdict_text(one, other, found)


@pytest.mark.slow
def test_record_without_evaluation_is_verified_by_its_loss(encoder):
    _, record, _ = encoder
    training = record["metrics"]["training"]
    bare = {**record, "metrics": {"diverged": False, "training": training}}
    worse = [*training[:-1], {**training[-1], "held_out_loss": training[-1]["held_out_loss"] + 0.1}]
    assert compare(bare, bare).identical
    found = compare(bare, {**record, "metrics": {"diverged": False, "training": worse}})
    assert found.largest == pytest.approx(10)
    assert not found.within_tolerance


@pytest.mark.slow
def test_what_is_no_record_is_not_repeated(encoder, tmp_path):
    trial, *_ = encoder
    write_json(tmp_path / "trial.json", trial.to_json())
    (tmp_path / "broken.json").write_text("{")
    write_json(tmp_path / "other.json", {"a": 1})
    for name in ("trial.json", "broken.json", "other.json", "missing.json"):
        code, out, error = cli("reproduce", "--verify", tmp_path / name, "--runs", tmp_path / "runs")
        assert (code, out) == (2, "")
        assert error.count("\n") == 1
        assert not (tmp_path / "runs").exists()
