"""The loop against a reference written in plain torch; its records, errors and fault injection."""

import errno
import gc
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import BATCH, MODEL, tiny_config, train_records

import anechoic
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
from anechoic.data import Array, open_source
from anechoic.data.loader import permutation
from anechoic.data.preprocess import Preprocess
from anechoic.data.split import hold_out
from anechoic.errors import UserError
from anechoic.models import build_model, model_config
from anechoic.rng import SampleGenerator
from anechoic.runtime import checkpoint
from anechoic.runtime.run import read_metrics
from anechoic.storage.files import read_json
from anechoic.training import loop as engine
from anechoic.training.build import check
from anechoic.training.cost import forward_flops
from anechoic.training.loop import DivergedError, Task, due, fit
from anechoic.training.objectives import make_objective

SMALL = {"dim": 24, "depth": 2, "num_heads": 2}


def reference_losses(steps, *, ema):
    """The same run, spelt out: digits 8 x 8 without augmentation, AdamW in two groups, warm-up and cosine by update."""
    source = open_source("digits", channels=1)
    train, _ = hold_out(len(source), 64)
    pixels = torch.stack([source.read(int(i)) for i in train]).float() / 255
    images = (pixels - 0.5) / 0.5
    torch.manual_seed(7)
    model = build_model("mae_tiny_patch4", image_size=8, in_channels=1, alpha_min=0.6, **MODEL)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    per_epoch = len(train) // BATCH
    losses = []
    for step in range(steps):
        lr = 2e-3 * step / (0.1 * steps)
        if step >= 0.1 * steps:
            lr = 2e-3 * 0.5 * (1 + math.cos(math.pi * (step - 0.1 * steps) / (0.9 * steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        epoch, place = divmod(step, per_epoch)
        ids = permutation(len(train), seed=7, epoch=epoch)[place * BATCH : (place + 1) * BATCH]
        noise = SampleGenerator(7, ids, torch.full_like(ids, epoch)).uniform("mask", 16)
        loss = model(images[ids], noise).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name] = ema * average[name] + (1 - ema) * value
        losses.append(loss.item())
    return losses, average


@pytest.mark.slow
def test_losses_and_average_equal_a_plain_loop(tmp_path):
    config = tiny_config()
    config = replace(
        config, data=replace(config.data, augment="none", flip=False), optim=replace(config.optim, ema=0.9)
    )
    fit(config, tmp_path)
    losses, average = reference_losses(30, ema=0.9)
    records = train_records(tmp_path)
    assert [record["seen"] for record in records] == [BATCH * (i + 1) for i in range(30)]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    # It does learn: zero-init predicts nothing at first.
    assert np.mean(losses[-5:]) < 0.97 * np.mean(losses[:5])
    loaded = anechoic.load(tmp_path).state_dict()
    # Biases of keys have no gradient but rounding errors, which Adam brings to the size of the others.
    for name, value in average.items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-3, atol=2e-3 if name.endswith("qkv.bias") else 1e-5)


def test_accumulated_parts_are_the_same_batch(tmp_path):
    config = tiny_config(steps=8)
    fit(config, tmp_path / "whole")
    fit(replace(config, optim=replace(config.optim, accumulate=4)), tmp_path / "parts")
    whole, parts = train_records(tmp_path / "whole"), train_records(tmp_path / "parts")
    for key in ("loss", "gradient_norm"):
        assert [r[key] for r in whole] == pytest.approx([r[key] for r in parts], rel=1e-5)


def test_the_run_directory(tmp_path):
    config = tiny_config(steps=25, save=SaveConfig(every=5 * BATCH, keep_last=2, keep_every=10 * BATCH))
    results = fit(config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "checkpoints",
        "config.json",
        "env.json",
        "metrics.jsonl",
        "model",
        "results.json",
    ]
    assert [int(path.name) for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == [320, 640, 800]
    assert results == read_json(tmp_path / "results.json")
    assert list(results) == ["schema", "config", "seed", "commit", "machine", "metrics", "seconds"]
    assert results["config"] == read_json(tmp_path / "config.json")
    assert results["metrics"]["seen"] == 25 * BATCH
    assert anechoic.load(tmp_path).preprocess == Preprocess((0.5,), (0.5,), 8, 1)


def test_knn_validation_is_left_out_where_there_are_no_labels(tmp_path):
    np.save(tmp_path / "unlabeled.npy", np.random.default_rng(0).integers(0, 256, (100, 8, 8), dtype=np.uint8))
    config = tiny_config(steps=2, validation=ValidationConfig(every=BATCH, knn=50))
    config = replace(config, data=replace(config.data, source=str(tmp_path / "unlabeled.npy")))
    fit(config, tmp_path / "run")
    (last,) = [record for record in read_metrics(tmp_path / "run") if record["seen"] == 2 * BATCH][-1:]
    assert "held_out_loss" in last
    assert "knn_accuracy" not in last


def test_validation_records(tmp_path):
    """Looks at the start, on the way and at the end; a number per layer and per shortcut; the same when repeated."""
    config = tiny_config(steps=20, validation=ValidationConfig(every=10 * BATCH, report=10 * BATCH, knn=200))
    fit(config, tmp_path)
    looks = [record for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert [look["seen"] for look in looks] == [0, 320, 640]
    for look in looks:
        assert len(look["rank_columns"]) == len(look["token_norm"]) == MODEL["depth"] + 1
        assert len(look["branch_ratio"]) == 2 * MODEL["depth"]
        assert 0 <= look["knn_accuracy"] <= 1
    # Zero-init: branches are silent at first, and the stream decays by exactly its alphas.
    alphas = [1, 1 - 0.4 / 3, 1 - 0.8 / 3, 0.6]
    assert looks[0]["branch_ratio"] == [0, 0, 0, 0]
    assert looks[0]["token_norm"][2] == pytest.approx(math.prod(alphas) * looks[0]["token_norm"][0], rel=1e-5)
    assert looks[2]["held_out_loss"] < looks[0]["held_out_loss"]
    assert all(ratio > 0 for ratio in looks[2]["branch_ratio"])
    # Reported losses are means since the last report.
    assert [record["seen"] for record in train_records(tmp_path)] == [320, 640]


def test_held_out_samples_are_never_trained_on():
    train, held_out = hold_out(1000, 64)
    assert sorted([*train, *held_out]) == list(range(1000))
    assert len(held_out) == 64
    again, _ = hold_out(1000, 64)
    assert (again == train).all()


@pytest.mark.parametrize(
    ("every", "expected"), [(32, [32, 64, 96, 128]), (64, [64, 128]), (50, [64, 128]), (128, [128])]
)
def test_due_points(every, expected):
    assert [seen for seen in range(32, 129, 32) if due(seen, every, 32)] == expected


def test_a_finished_run_is_returned_and_not_touched(tmp_path):
    config = tiny_config(steps=2)
    first = fit(config, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert fit(config, tmp_path) == first
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_config_is_refused_with_the_difference(tmp_path):
    config = tiny_config(steps=2)
    fit(config, tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    other = replace(config, seed=8, optim=replace(config.optim, lr=1e-3))
    with pytest.raises(UserError) as error:
        fit(other, tmp_path)
    assert "optim.lr: 0.002 in the run, 0.001 asked for; seed: 7 in the run, 8 asked for" in str(error.value)
    assert f"--init-from {tmp_path}" in str(error.value)
    with pytest.raises(UserError, match=r"data.fingerprint: .* asked for"):
        fit(replace(config, data=replace(config.data, source="digits:train")), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def image_config(tmp_path, *, seed=0, name="images.npy"):
    images = np.random.default_rng(seed).integers(0, 255, (3 * BATCH, 8, 8), np.uint8)
    np.save(tmp_path / name, images)
    os.utime(tmp_path / name, (1, 1))
    config = tiny_config(steps=2)
    return replace(config, data=replace(config.data, source=str(tmp_path / name), holdout=8))


@pytest.mark.slow
def test_run_refuses_data_of_other_content_at_equal_size_and_time(tmp_path):
    config = image_config(tmp_path)
    fit(config, tmp_path / "run")
    image_config(tmp_path, seed=1)
    with pytest.raises(UserError, match=r"is not the data that the run .* was started with \(names or content"):
        fit(config, tmp_path / "run")


@pytest.mark.slow
def test_run_resumes_on_a_copy_of_its_data(tmp_path, caplog):
    config = image_config(tmp_path)
    expected = fit(config, tmp_path / "run")["metrics"]
    os.utime(tmp_path / "images.npy", (5, 5))
    assert fit(config, tmp_path / "run")["metrics"] == expected
    copy = image_config(tmp_path, name="copy.npy")
    (tmp_path / "images.npy").unlink()
    assert fit(copy, tmp_path / "run")["metrics"] == expected
    assert "the same data from" in caplog.text


@pytest.mark.slow
def test_run_of_an_earlier_version_is_recognized_by_its_fingerprint(tmp_path, monkeypatch):
    config = image_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Array, "compute_fingerprint", lambda source: source.earlier_fingerprint)
        expected = fit(config, tmp_path / "run")["metrics"]
    assert fit(config, tmp_path / "run")["metrics"] == expected
    os.utime(tmp_path / "images.npy", (5, 5))
    with pytest.raises(UserError, match="names or content"):
        fit(config, tmp_path / "run")


def test_a_new_run_from_weights(tmp_path):
    fit(tiny_config(steps=5), tmp_path / "old")
    config = tiny_config(steps=1, init_from=str(tmp_path / "old"), optim=OptimConfig(batch_size=BATCH, samples=BATCH))
    fit(config, tmp_path / "new")
    old = [record for record in read_metrics(tmp_path / "old") if record["kind"] == "validation"]
    new = [record for record in read_metrics(tmp_path / "new") if record["kind"] == "validation"]
    assert new[0]["held_out_loss"] == old[-1]["held_out_loss"]


def test_supervised_training_reads_labels(tmp_path):
    config = Config(
        data=DataConfig(source="digits", image_size=8, channels=1, augment="none", flip=False, holdout=64),
        model=ModelConfig(
            "vit_tiny_patch4", {"patch_size": 2, "dim": 24, "depth": 2, "num_heads": 2, "num_classes": 10}
        ),
        objective=ObjectiveConfig("supervised", {"label_smoothing": 0.1}),
        optim=OptimConfig(batch_size=BATCH, samples=100 * BATCH, lr=3e-3),
        validation=ValidationConfig(every=100 * BATCH),
        threads=1,
    )
    metrics = fit(config, tmp_path)["metrics"]
    assert metrics["held_out_accuracy"] > 0.25


def test_drop_path_is_a_function_of_progress(tmp_path):
    """Layers that draw for themselves repeat exactly, whatever was drawn in the process before."""
    options = {"patch_size": 2, "dim": 24, "depth": 2, "num_heads": 2, "num_classes": 10, "drop_path": 0.5}
    config = tiny_config(
        steps=6,
        model=ModelConfig("vit_tiny_patch4", options),
        shortcut=ShortcutConfig(),
        objective=ObjectiveConfig("supervised"),
    )
    losses = []
    for name in ("a", "b"):
        fit(config, tmp_path / name)
        losses.append([record["loss"] for record in train_records(tmp_path / name)])
        torch.rand(3)
    assert losses[0] == losses[1]


def test_drop_path_belongs_to_the_samples():
    """Each half of a batch, on a process of its own, drops what the whole batch drops."""
    torch.manual_seed(0)
    options = {"image_size": 8, "patch_size": 2, "in_channels": 1, "dim": 24, "depth": 3, "num_heads": 2}
    model = build_model("vit_tiny_patch4", **options, num_classes=10, drop_path=0.5).train()
    objective = make_objective("supervised")
    images, labels, ids = torch.randn(8, 1, 8, 8), torch.arange(8), torch.arange(100, 108)
    task = Task(model, objective, seed=3)

    def losses(rows):
        visits = torch.zeros(len(rows), dtype=torch.int64)
        return [task(images[i : i + 1], ids[i : i + 1], visits[:1], labels[i : i + 1])["loss"] for i in rows]

    whole = task(images, ids, torch.zeros(8, dtype=torch.int64), labels)["loss"]
    torch.testing.assert_close(torch.stack(losses(range(8))).mean(), whole)
    other = task(images, ids, torch.ones(8, dtype=torch.int64), labels)["loss"]
    assert not torch.equal(whole, other)


def test_settings_of_the_process_are_put_back(tmp_path):
    torch.set_num_threads(2)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    try:
        fit(tiny_config(steps=1), tmp_path)
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(1)


def test_annealed_alphas_are_not_compiled(tmp_path):
    config = tiny_config(compile=True, shortcut=ShortcutConfig(alpha_min=0.6, anneal=0.5))
    with pytest.raises(UserError, match="cannot be annealed"):
        fit(config, tmp_path / "run")


def test_the_garbage_collector_looks_through_everything_again_after_a_run(tmp_path, monkeypatch):
    frozen = []
    settle = engine.freeze_garbage
    monkeypatch.setattr(engine, "freeze_garbage", lambda: (settle(), frozen.append(gc.get_freeze_count())))
    gc.unfreeze()  # what the tests froze for themselves
    fit(tiny_config(), tmp_path / "run")
    assert len(frozen) == 1
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_what_somebody_else_froze_stays_frozen(tmp_path):
    before = gc.get_freeze_count()
    assert before > 0, "the tests freeze what they imported"
    fit(tiny_config(steps=1), tmp_path / "run")
    assert before / 2 < gc.get_freeze_count() <= before  # some of it is freed in the meantime


@pytest.mark.slow
def test_a_compiled_run_computes_the_same(tmp_path, monkeypatch):
    """Traced as for the compiler, but run by plain kernels, since not every machine has a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = tiny_config(steps=4)
    fit(config, tmp_path / "plain")
    fit(replace(config, compile=True), tmp_path / "compiled")
    assert (
        anechoic.load(tmp_path / "compiled").state_dict().keys()
        == anechoic.load(tmp_path / "plain").state_dict().keys()
    )
    losses = [[record["loss"] for record in train_records(tmp_path / name)] for name in ("plain", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_no_data_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match=r"--data\.source"):
        fit(tiny_config(data=DataConfig()), tmp_path)


def test_tensorboard_files_on_demand(tmp_path):
    pytest.importorskip("tensorboard")
    fit(tiny_config(steps=2, validation=ValidationConfig(every=BATCH, report=BATCH, tensorboard=True)), tmp_path)
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_tensorboard_without_its_package_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"anechoic\[tensorboard\]"):
        fit(tiny_config(steps=2, validation=ValidationConfig(tensorboard=True)), tmp_path)


def test_progress_on_a_log(tmp_path, capsys):
    """Without a terminal: the frozen config first, then a line per look."""
    fit(tiny_config(steps=20), tmp_path, verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{tmp_path}: starting, ")
    assert any("alpha_min 0.6" in line for line in lines)
    shown = [line for line in lines if " held_out_loss " in line]
    assert [line.split()[0] for line in shown] == ["0", "320", "640"]
    assert [" left  " in line for line in shown] == [False, True, False]
    fit(tiny_config(steps=20), tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_run_is_not_resumed_with_other_labels_of_the_same_images(tmp_path):
    names = []
    for number in range(40):
        names.append(f"{number}.png")
        Image.fromarray(np.full((8, 8), 6 * number, np.uint8)).save(tmp_path / names[-1])

    def config(first):
        rows = [f"{name}\t{'ab'[number % 2 == first]}\n" for number, name in enumerate(names)]
        (tmp_path / "list.txt").write_text("".join(rows))
        data = DataConfig(source=str(tmp_path / "list.txt"), image_size=8, channels=1, holdout=2, labels=True)
        return tiny_config(steps=1, data=data)

    fit(config(0), tmp_path / "run")
    fit(config(0), tmp_path / "run")
    with pytest.raises(UserError, match="or labels, differ"):
        fit(config(1), tmp_path / "run")


# ---- fault injection


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    config = tiny_config(steps=40, save=SaveConfig(every=BATCH, keep_last=100))
    # The rate grows until the weights overflow, which takes some updates: those before are saved.
    config = replace(config, optim=replace(config.optim, lr=1e38, warmup=1.0, ema=0.9))
    with pytest.raises(DivergedError) as error:
        fit(config, tmp_path)
    assert "a larger shortcut.alpha_min" in str(error.value)
    assert "a lower optim.base_lr" in str(error.value)
    saved = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert saved
    for weights in ("raw", "ema"):
        for value in anechoic.load(saved[-1], weights=weights).state_dict().values():
            assert torch.isfinite(value).all()
    assert not (tmp_path / "results.json").exists()


INJECTED = """
import subprocess, sys
sys.path.insert(0, sys.argv[3])
from dataclasses import replace
from functools import partial
from pathlib import Path
from anechoic.runtime import checkpoint
from anechoic.training import loop as engine
from anechoic.training.checkpointing import Checkpointer
from tiny_runs import BATCH, tiny_config
from anechoic.config import SaveConfig

run, failure = Path(sys.argv[1]), sys.argv[2]
run.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(run)], check=True)
real, calls = Checkpointer.save, 0

def save(checkpointer, **values):
    # The second save fails; before the third one the disk works again.
    global calls
    calls += 1
    folder = checkpointer.folder
    if calls == 2 and failure == "full":
        with open(run / "ballast", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    if calls == 2 and failure == "read-only":
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    if calls == 3 and failure == "full":
        (run / "ballast").unlink()
    if calls == 3 and failure == "read-only":
        subprocess.run(["umount", str(folder)], check=True)
    try:
        return real(checkpointer, **values)
    finally:
        if calls == 2:
            print("intact:", checkpoint.latest(folder)[1]["seen"], flush=True)

Checkpointer.save = save
engine.fit(tiny_config(steps=15, save=SaveConfig(every=5 * BATCH)), run)
print("calls:", calls)
for name in ("metrics.jsonl", "model/model.safetensors"):
    Path(sys.argv[4], name.replace("/", "-")).write_bytes((run / name).read_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["full", "read-only"])
def test_a_disk_that_refuses_does_not_end_the_run(tmp_path, failure):
    """A small file system of its own is filled, or made read-only, while the run saves; later it is put right."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    allowed = subprocess.run(
        [*namespace, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, check=False
    )
    if allowed.returncode:
        pytest.skip("this system does not let a test mount a file system of its own")
    tests = os.path.dirname(os.path.dirname(__file__))
    code = [sys.executable, "-c", INJECTED, str(tmp_path / "run"), failure, tests, str(tmp_path)]
    done = subprocess.run([*namespace, *code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "intact: 160" in done.stdout
    assert "calls: 3" in done.stdout
    assert "The checkpoint at 320 samples could not be saved" in done.stderr
    # Nothing of the result is lost or changed by it.
    fit(tiny_config(steps=15, save=SaveConfig(every=5 * BATCH)), tmp_path / "undisturbed")
    undisturbed = tmp_path / "undisturbed" / "model" / "model.safetensors"
    assert (tmp_path / "model-model.safetensors").read_bytes() == undisturbed.read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["seen"] for line in lines] == [line["seen"] for line in read_metrics(tmp_path / "undisturbed")]


def test_weights_that_cannot_be_saved_at_the_end_are_trained_again(tmp_path, monkeypatch):
    config = tiny_config(steps=15, save=SaveConfig(every=5 * BATCH))
    fit(config, tmp_path / "undisturbed")
    save = checkpoint.save

    def full(folder, *, seen, **values):
        if seen > 5 * BATCH:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(folder, seen=seen, **values)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(UserError, match="free space there and run the same command again"):
        fit(config, tmp_path / "run")
    monkeypatch.undo()
    fit(config, tmp_path / "run")
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("run", "undisturbed")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("num_classes", [9, 5])
def test_labels_that_the_model_has_no_class_for_are_refused(tmp_path, num_classes):
    """Digits have ten; the tenth would be trained as the null label, and one beyond it is no row of the table."""
    config = tiny_config(
        model=ModelConfig("uvit_small", {**SMALL, "num_classes": num_classes, "label_dropout": 0.1}),
        data=DataConfig(source="digits", image_size=8, channels=1, holdout=64, labels=True),
        objective=ObjectiveConfig("noise_prediction"),
    )
    with pytest.raises(UserError, match=f"labels up to 9 and the model {num_classes} classes"):
        fit(config, tmp_path)


def test_an_objective_of_other_classes_than_the_models_is_refused():
    options = {**SMALL, "patch_size": 2, "num_classes": 10, "pool": "mean"}
    config = tiny_config(
        model=ModelConfig("vit_tiny_patch16", options), objective=ObjectiveConfig("finetuning", {"num_classes": 7})
    )
    with pytest.raises(UserError, match="The objective counts 7 classes and the model 10"):
        check(config)
    check(replace(config, objective=ObjectiveConfig("finetuning", {"num_classes": 10})))


def test_a_resnet_has_no_blocks_to_compute_again():
    config = tiny_config(
        model=ModelConfig("resnet18", {"num_blocks": 8, "num_classes": 10}),
        objective=ObjectiveConfig("supervised"),
        shortcut=ShortcutConfig(),
    )
    check(config)
    with pytest.raises(UserError, match="set recompute to false"):
        check(replace(config, recompute=True))


@pytest.mark.parametrize("name", ["uvit_small", "sit_s_patch2"])
def test_a_denoiser_without_a_null_label_is_validated_by_its_loss(tmp_path, name):
    options = {**SMALL, "num_classes": 10, "label_dropout": 0.0}
    config = tiny_config(
        steps=1,
        model=ModelConfig(name, options),
        data=DataConfig(source="digits", image_size=8, channels=1, holdout=64, labels=True),
        objective=ObjectiveConfig("noise_prediction"),
    )
    fit(config, tmp_path)
    looks = [record for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert [record["seen"] for record in looks] == [0, BATCH]
    assert all(record["held_out_loss"] > 0 for record in looks)
    assert forward_flops(model_config(name, image_size=8, **options)) > 0
    with pytest.raises(UserError, match="k-NN"):
        check(replace(config, validation=replace(config.validation, knn=100)))


def test_a_run_that_goes_on_does_not_need_what_it_started_from(tmp_path):
    old, run = tmp_path / "old", tmp_path / "run"
    fit(tiny_config(steps=1), old)
    fit(tiny_config(steps=2, init_from=str(old), save=SaveConfig(every=BATCH)), run)
    expected = (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(old)
    shutil.rmtree(checkpoint.path_of(run / "checkpoints", 2 * BATCH))
    (run / "results.json").unlink()
    fit(tiny_config(steps=2, init_from=str(old), save=SaveConfig(every=BATCH)), run)
    assert (run / "model" / "model.safetensors").read_bytes() == expected
