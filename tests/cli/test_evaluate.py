"""The commands evaluate and embed on runs of ours and on models of other libraries."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip_a_bit
from PIL import Image
from zoo import make

from anechoic.cli.main import main
from anechoic.data import open_source
from anechoic.data.preprocess import Preprocess
from anechoic.data.split import hold_out_share
from anechoic.errors import UserError
from anechoic.eval import dynamics, feature_cache
from anechoic.eval.encoders import baselines, open_encoder
from anechoic.models import build_model
from anechoic.runtime.checkpoint import model_card, save, write_model

LAYERS, POOLINGS = ("rank", "echo", "silhouette", "knn", "stream"), ("class", "mean")
SMALL = {"dim": 24, "depth": 2, "num_heads": 2, "decoder_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}


def cli(*arguments):
    """(exit code, standard output, standard error)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def answer(*arguments):
    """The metrics of a command called with --json; NaN and infinity are not JSON, so they may not appear."""
    code, out, err = cli(*arguments, "--json")
    assert code == 0, err
    return json.loads(out, parse_constant=pytest.fail)["metrics"]


def mistake(*arguments):
    """The sentence of a user's mistake."""
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def train(data, out, *, channels, seen=1, alpha_min=0.7):
    options = [f"{name}={value}" for name, value in SMALL.items()]
    code, _, err = cli(
        *("pretrain", data, "--out", out, "--channels", channels, "--image-size", 16, "--model", "mae_tiny_patch4"),
        *("--model-options", *options, "--epochs", seen, "--batch-size", 64, "--alpha-min", alpha_min),
    )
    assert code == 0, err


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "digits"
    train("digits:train", run, channels=1)
    return run


@pytest.fixture(scope="module")
def cifar(shared_data, tmp_path_factory):
    """The first 600 train and 200 test images of CIFAR-100 as parquet files, and a run trained on them."""
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("cifar")
    for name, count in (("train", 600), ("test", 200)):
        table = pq.read_table(shared_data / "cifar100" / f"{name}.parquet").slice(0, count)
        pq.write_table(table, folder / f"{name}.parquet")
    train(folder / "train.parquet", folder / "run", channels=3)
    return folder


@pytest.mark.slow
def test_evaluate_a_run_trained_on_digits(digits_run, tmp_path):
    parts = ("digits:train", "--test", "digits:test", "--metrics")
    found = answer("evaluate", digits_run, *parts, "knn", "--k", 5, 20)
    names = {row["encoder"] for row in found["rows"]}
    assert names == {"digits", "untrained", "raw pixels", "constant"}
    by_name = {(row["encoder"], row["pooling"]): row["knn_by_k"]["20"] for row in found["rows"]}
    assert by_name["raw pixels", "mean"] > 0.9
    assert by_name["constant", "mean"] < 0.2
    assert found["knn"] > 0.2

    found = answer("evaluate", digits_run, *parts, "probe", "--layers", "all", "--no-baselines")
    assert len(found["rows"]) == 3 * 3
    assert found["probe"] > 0.3

    found = answer("evaluate", digits_run, *parts, "probe", "--protocol", "in100", "--epochs", 2, "--batch-size", 128)
    assert found["rows"][0]["pooling"] == "all"
    found = answer("evaluate", digits_run, *parts, "probe", "--protocol", "mae", "--epochs", 2, "--batch-size", 512)
    assert [row["pooling"] for row in found["rows"]] == ["class"]

    figures = tmp_path / "figures"
    options = ("--metrics", *LAYERS, "--pooling", *POOLINGS, "--figures", figures)
    found = answer("evaluate", digits_run, "digits:test", *options)
    own = [row for row in found["rows"] if row["encoder"] == "digits"]
    assert [(row["layer"], row["pooling"]) for row in own] == [(k, p) for k in range(3) for p in POOLINGS]
    assert own[0]["gain"] == 1
    assert own[4]["gain"] == pytest.approx(math.prod([1.0, 0.9, 0.8, 0.7]))
    assert all(0 <= row["cka"] <= 1 + 1e-9 for row in own)
    constant = next(row for row in found["rows"] if row["encoder"] == "constant")
    assert (constant["rank_rows"], constant["rank_columns"], constant["cka"]) == (0, 0, 0)
    drawn = {path.name for path in figures.iterdir()}
    kinds = ("layers", "tsne", "neighbors", "maps", "reconstructions")
    assert drawn == {f"{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")}


def test_evaluate_a_run_trained_on_parquet(cifar):
    parts = (cifar / "train.parquet", "--test", cifar / "test.parquet", "--metrics")
    found = answer("evaluate", cifar / "run", *parts, "knn", "--k", 10)
    assert found["classes"] == 100
    assert (found["train_samples"], found["test_samples"]) == (600, 200)
    assert answer("evaluate", cifar / "run", *parts, "probe", "--pooling", "mean", "--no-baselines")["probe"] >= 0
    rows = answer("evaluate", cifar / "run", cifar / "test.parquet", "--metrics", *LAYERS)["rows"]
    assert {row["encoder"] for row in rows} == {"run", "untrained", "raw pixels", "constant"}


def test_segment_on_camvid(cifar, shared_data, tmp_path):
    found = answer(
        *("evaluate", cifar / "run", shared_data / "camvid" / "val", "--metrics", "segment", "--void", 11),
        *(
            "--samples",
            4,
            "--epochs",
            2,
            "--segment-channels",
            12,
            "--image-size",
            32,
            "--baselines",
            "--figures",
            tmp_path,
        ),
    )
    assert [row["encoder"] for row in found["rows"]] == ["run", "untrained"]
    for row in found["rows"]:
        assert 0 < row["hungarian"]["miou"] < 1
        assert row["greedy"]["accuracy"] >= row["hungarian"]["accuracy"]
    assert (tmp_path / "eigenvectors.svg").exists()


def test_what_is_reported_is_chosen_on_held_out_training_data(tmp_path, monkeypatch):
    """The best layer of the training data is not the best of the test data, whose maximum must not be reported."""
    from anechoic.eval.metrics.registry import METRICS, Metric

    def accuracy(subject):
        testing = len(subject.train.ids) == 80
        better, worse = (0.9, 0.6) if testing else (0.5, 0.7)
        return {key: {"fake": better if key[0] else worse} for key in subject.sets}

    metric = Metric(accuracy, "an accuracy", needs=("labels", "train split"), share=True)
    monkeypatch.setitem(METRICS, "fake", metric)
    model = make("vit", in_channels=1)
    folder = write_model(tmp_path / "model", model.state_dict(), model_card(model, Preprocess((0.5,), (0.5,), 16, 1)))
    pixels = np.random.default_rng(0).integers(0, 256, (100, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.arange(100) % 4)
    found = answer(
        *("evaluate", folder, tmp_path / "data.npz", "--metrics", "fake", "knn", "--layers", 0, 1, "--no-baselines")
    )
    assert found["fake"] == 0.6
    assert found["chosen"]["fake"]["layer"] == 0
    assert found["chosen"]["fake"]["test_maximum"] == 0.9
    chosen = found["chosen"]["knn"]
    row = next(row for row in found["rows"] if (row["layer"], row["pooling"]) == (chosen["layer"], chosen["pooling"]))
    assert found["knn"] == row["knn_by_k"][str(chosen["k"])]
    assert (found["train_samples"], found["test_samples"]) == (80, 20)


# ---- embedding


def test_embedding_to_every_format(digits_run, tmp_path):
    for suffix in ("npz", "parquet", "csv"):
        found = answer("embed", digits_run, "digits:test", "-o", tmp_path / f"out.{suffix}", "--layer", 1)
        assert (found["layer"], found["pooling"], found["dim"]) == ("1", "class", 24)
    with np.load(tmp_path / "out.npz") as file:
        packed = dict(file)
    assert (str(packed["layer"]), str(packed["pooling"])) == ("1", "class")
    source = open_source("digits:test", channels=1)
    assert packed["names"].tolist() == [source.name(i) for i in range(len(source))]

    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "out.parquet")
    assert np.array_equal(np.stack(table["features"].to_pylist()).astype(np.float32), packed["features"])
    assert table["name"].to_pylist() == packed["names"].tolist()
    assert table.schema.metadata[b"layer"] == b"1"
    with open(tmp_path / "out.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:2] == ["name", "layer1_class_0"]
    assert np.array_equal(np.array([row[1:] for row in rows], dtype=np.float32), packed["features"])


def test_embeddings_repeat_and_are_kept_by_content(digits_run, tmp_path, monkeypatch):
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path))
    encoder, source = open_encoder(digits_run), open_source("digits:test", channels=1)
    first = feature_cache.features_of(encoder, source, layers="all")
    assert len(list((tmp_path / "features").glob("*/"))) == 1

    def refuse(*args, **kwargs):
        raise AssertionError("the network ran again")

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "extract_batches", refuse)
        again = feature_cache.features_of(encoder, source, layers=(-1,))
    assert np.array_equal(again.sets[2, "class"], first.sets[2, "class"])
    with torch.no_grad():
        encoder.model.encoder.class_token.add_(0.1)
    other = feature_cache.features_of(open_encoder(digits_run), source)  # weights on disk are unchanged: same entry
    assert np.array_equal(other.sets[2, "class"], first.sets[2, "class"])
    changed = feature_cache.features_of(dataclasses.replace(encoder), source)
    assert not np.array_equal(changed.sets[2, "class"], first.sets[2, "class"])
    assert len(list((tmp_path / "features").glob("*/"))) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(digits_run, tmp_path, monkeypatch):
    source = open_source("digits:test", channels=1)
    expected = feature_cache.features_of(open_encoder(digits_run), source)

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache.Path, "mkdir", refuse)
        with pytest.warns(UserWarning, match="held in memory"):
            found = feature_cache.features_of(open_encoder(digits_run), source)
    assert all(np.array_equal(value, expected.sets[key]) for key, value in found.sets.items())


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(b""),
        Path.unlink,
    ],
    ids=["flipped", "cut", "emptied", "deleted"],
)
@pytest.mark.parametrize("name", ["002-mean.npy", "ids.npy", "entry.json"])
def test_damaged_features_are_computed_again(digits_run, tmp_path, monkeypatch, name, damage):
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path))
    source = open_source("digits:test", channels=1)
    expected = {
        key: np.array(value) for key, value in feature_cache.features_of(open_encoder(digits_run), source).sets.items()
    }
    (file,) = (tmp_path / "features").glob(f"*/{name}")
    (file.parent / ".new-12345678-pass").mkdir()  # of a process that was killed
    damage(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = feature_cache.features_of(open_encoder(digits_run), source)
    assert all(np.array_equal(value, expected[key]) for key, value in found.sets.items())
    assert not list(file.parent.glob(".new-*"))
    assert not (file.parent / "pass").exists()


def test_features_for_which_there_is_no_room_are_held_in_memory(digits_run, tmp_path, monkeypatch):
    """The file is allocated before it is written to, so a full disk is reported instead of ending the process."""
    source = open_source("digits:test", channels=1)
    expected = feature_cache.features_of(open_encoder(digits_run), source)
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path))

    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match="No space left on device.*held in memory"):
        found = feature_cache.features_of(open_encoder(digits_run), source)
    assert all(np.array_equal(value, expected.sets[key]) for key, value in found.sets.items())
    assert not list(tmp_path.rglob("*.npy"))


def test_unreadable_images_are_left_out_and_counted(digits_run, tmp_path):
    for i in range(12):
        Image.fromarray(np.full((8, 8), 20 * i, dtype=np.uint8)).save(tmp_path / f"{i:02d}.png")
    (tmp_path / "05.png").write_bytes(b"no image")
    found = answer("embed", digits_run, tmp_path, "-o", tmp_path / "out.npz")
    assert (found["vectors"], [item["name"] for item in found["skipped"]]) == (11, ["05.png"])
    with np.load(tmp_path / "out.npz") as file:
        packed = dict(file)
    assert len(packed["features"]) == 11
    assert not any("05.png" in name for name in packed["names"])


# ---- other people's models


@pytest.fixture(scope="module")
def vit_mae_folder(tmp_path_factory):
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    torch.manual_seed(0)
    config = ViTMAEConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    folder = tmp_path_factory.mktemp("hf") / "vit-mae"
    ViTMAEForPreTraining(config).save_pretrained(folder)
    return folder


def test_a_transformers_masked_autoencoder_is_read_without_masking(vit_mae_folder):
    encoder = open_encoder(f"transformers:{vit_mae_folder}")
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = encoder.model(images), encoder.model(images)
        assert torch.equal(first, second)
        assert first.shape == (3, 1 + 16, 24)
        # The patches are in their places: moving one patch's content moves one embedding.
        moved = images.clone()
        moved[:, :, :4, 4:8] += 1
        difference = encoder.model.model.embeddings(moved, noise=torch.arange(16.0).expand(3, -1))[0]
        difference = difference - encoder.model.model.embeddings(images, noise=torch.arange(16.0).expand(3, -1))[0]
    assert (difference.abs().amax(dim=(0, 2)) > 0).nonzero()[:, 0].tolist() == [2]
    assert encoder.widths == [24] * 4  # embedding, two blocks, final norm


def test_analyze_a_transformers_model(vit_mae_folder):
    first, second = (
        answer("evaluate", f"transformers:{vit_mae_folder}", "scenes:test:40", "--metrics", *LAYERS) for _ in range(2)
    )
    assert first["rows"] == second["rows"]
    assert {row["encoder"] for row in first["rows"]} == {"transformers:vit-mae", "untrained", "raw pixels", "constant"}


@pytest.mark.slow
def test_timm_models(tmp_path):
    found = answer(
        *("evaluate", "timm:vit_tiny_patch16_224:random", "scenes:train:60", "--metrics", "knn", "--k", 5),
        *("--image-size", 224, "--pooling", "class", "--no-baselines"),
    )
    assert [row["layer"] for row in found["rows"]] == [13]  # twelve blocks and the final norm
    encoder = open_encoder("timm:resnet18:random")
    assert encoder.widths == [64, 64, 64, 128, 256, 512]
    assert encoder.poolings == ("mean",)
    assert [baseline.name for baseline in baselines(encoder)] == ["untrained", "raw pixels", "constant"]


@pytest.mark.parametrize(
    ("spec", "image_size"),
    [("hf", 8), ("hf", 32), ("timm:test_vit", 80), ("timm:test_vit", 320), ("timm:resnet18", 32)],
)
def test_encoders_of_other_libraries_take_images_of_another_side(vit_mae_folder, spec, image_size):
    encoder = open_encoder(
        f"transformers:{vit_mae_folder}" if spec == "hf" else f"{spec}:random", image_size=image_size
    )
    images = torch.randn(2, 3, image_size, image_size)
    for network in (encoder.model, encoder.untrained()):
        assert torch.isfinite(network(images)).all()


def test_a_side_that_cuts_patches_is_refused_in_a_sentence():
    with pytest.raises(UserError, match=r"takes no images of 13 pixels.*--image-size"):
        open_encoder("timm:test_vit:random", image_size=13)


# ---- denoisers


def test_a_denoiser_is_probed_at_noise_levels(tmp_path):
    from dataclasses import replace

    from anechoic.recipes import recipe
    from anechoic.training.loop import fit

    config = recipe("pocket_uvit_digits")
    small = {"dim": 24, "depth": 2, "num_heads": 2}
    config = replace(
        config,
        model=replace(config.model, options={**config.model.options, **small}),
        optim=replace(config.optim, batch_size=64, epochs=None, samples=128),
    )
    fit(config, tmp_path / "run")
    assert "--noise" in mistake("evaluate", tmp_path / "run", "digits:train")
    found = answer(
        *("evaluate", tmp_path / "run", "digits:train", "--test", "digits:test", "--metrics", "probe"),
        *("--noise", 0.05, 0.3, "--layers", 1, 2),
    )
    assert {(row["layer"], row["noise"]) for row in found["rows"]} == {(k, t) for k in (1, 2) for t in (0.05, 0.3)}
    assert found["probe"] <= found["chosen"]["probe"]["test_maximum"]


# ---- dynamics


def test_dynamics_over_checkpoints(tmp_path):
    runs = []
    for alpha_min in (0.6, 0.8, 1.0):
        run = tmp_path / f"alpha{alpha_min}"
        for seen in (64, 128):
            torch.manual_seed(seen)
            model = build_model("mae_tiny_patch4", image_size=16, in_channels=1, alpha_min=alpha_min, **SMALL)
            card = model_card(model, Preprocess((0.5,), (0.5,), 16, 1))
            save(run / "checkpoints", seen=seen, tensors={"model": model.state_dict()}, card=card, state={})
        runs.append(run)
    found = answer("evaluate", runs[0], "digits:test", "--runs", *runs[1:], "--figures", tmp_path)
    assert [(point["alpha_min"], point["seen"]) for point in found["points"]] == [
        (alpha, seen) for alpha in (0.6, 0.8, 1.0) for seen in (64, 128)
    ]
    assert (tmp_path / "dynamics.png").exists()
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no checkpoints"):
        dynamics.dynamics([tmp_path / "empty"], train="digits:test")


def test_correlations_only_where_all_runs_are():
    def point(run, seen, entropy, accuracy):
        return {"run": run, "seen": seen, "entropy_rows": entropy, "entropy_columns": entropy, "accuracy": accuracy}

    points = [point(run, seen, run, 1 - run / 10) for run in range(4) for seen in (1, 2)]
    found = dynamics.correlations(points[:-1], num_runs=4)
    assert [row["seen"] for row in found] == [1]
    assert found[0]["r_rows"] == pytest.approx(-1)


# ---- mistakes


@pytest.fixture
def pictures(tmp_path):
    """Twelve images in two class folders, and the same without folders."""
    for i in range(12):
        for name in (f"sorted/{'ab'[i % 2]}", "loose", "single/only"):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 20 * i, dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_default_neighbors_are_those_of_the_samples_that_are_left_to_train(digits_run):
    found = answer("evaluate", digits_run, "digits:train", "--metrics", "knn", "--samples", 100, "--layers", -1)
    assert found["train_samples"] == 80
    assert list(found["rows"][0]["knn_by_k"]) == ["10", "20"]


def test_mistakes_are_one_clear_sentence(digits_run, pictures, tmp_path):
    sorted_, loose = pictures / "sorted", pictures / "loose"

    def wrong(run, data, *words):
        return mistake("evaluate", run, data, *words)

    knn, probe = ("--metrics", "knn"), ("--metrics", "probe")
    assert "folder per class" in wrong(digits_run, loose, *knn)
    assert "at least two classes" in wrong(digits_run, pictures / "single", *knn)
    assert "k = 200 is more than the 10 train samples" in wrong(digits_run, sorted_, *knn, "--k", 200)
    assert "no run or model directory" in wrong(tmp_path / "nowhere", sorted_)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert "has not saved yet" in wrong(tmp_path / "empty", sorted_)
    assert "between 0 and 1" in wrong(digits_run, sorted_, *probe, "--holdout", 2)
    assert "no layer 7" in wrong(digits_run, sorted_, *probe, "--layers", 7)
    assert "There is no metric 'knnn'; did you mean knn?" in wrong(digits_run, sorted_, "--metrics", "knnn")
    assert "at least 2 samples" in wrong(digits_run, loose, "--samples", 1)
    assert "There is no data" in wrong(digits_run, tmp_path / "nothing")
    assert "timm has no model" in wrong("timm:vit_tiny_pach16", sorted_)
    assert "has no config.json" in wrong(f"transformers:{tmp_path}", sorted_)
    assert "For a model write transformers:folder" in wrong("hf:folder", sorted_)
    assert "folders images and masks" in wrong(digits_run, loose, "--metrics", "segment")
    assert "without other --metrics" in wrong(digits_run, loose, "--metrics", "segment", "knn")
    assert "name a run directory" in wrong("timm:x", sorted_, "--noise", 0.1)
    assert ".npz" in mistake("embed", digits_run, loose, "-o", tmp_path / "out.txt")
    assert "no device 'gpu'" in mistake("embed", digits_run, "digits:test", "-o", tmp_path / "x.npz", "--device", "gpu")


def test_images_of_another_kind_than_the_model_s(digits_run, tmp_path):
    np.save(tmp_path / "five.npy", np.zeros((12, 8, 8, 5), dtype=np.uint8))
    assert "channels" in mistake("embed", digits_run, tmp_path / "five.npy", "-o", tmp_path / "out.npz")
    assert "patches" in mistake("embed", digits_run, "digits:test", "-o", tmp_path / "out.npz", "--image-size", 17)


def test_damaged_weights_are_noticed(tmp_path):
    model = build_model("vit_tiny_patch4", image_size=16, in_channels=1, dim=24, depth=2, num_heads=2)
    with torch.no_grad():
        model.class_token.fill_(math.nan)
    card = model_card(model, Preprocess((0.5,), (0.5,), 16, 1))
    write_model(tmp_path / "model", model.state_dict(), card)
    model = ("evaluate", tmp_path / "model", "digits:train", "--test", "digits:test", "--metrics")
    for words in (["knn"], ["probe"], ["probe", "--protocol", "in100", "--epochs", 1], ["rank"]):
        assert "NaN" in mistake(*model, *words)


def test_a_held_out_part_is_disjoint_and_seeded():
    train, test = hold_out_share(50, 0.2, seed=3)
    assert sorted([*train, *test]) == list(range(50))
    assert len(test) == 10
    assert np.array_equal(test, hold_out_share(50, 0.2, seed=3)[1])
    assert not np.array_equal(test, hold_out_share(50, 0.2, seed=4)[1])
    with pytest.raises(UserError, match="cannot be split"):
        hold_out_share(2, 0.1, seed=0)
