"""Two ranks, with replicated or sharded (FSDP2) weights, train as one does; another number of ranks resumes.

Everything that two processes do is done by one pair of them, and then looked at: starting them is what costs.
"""

import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from damage import flip_a_bit
from tiny_runs import tiny_config, train_records
from torch import nn

import anechoic
from anechoic.config import DataConfig, ModelConfig, ObjectiveConfig, SaveConfig, ShortcutConfig
from anechoic.data import Loader, Subset, open_source
from anechoic.data.split import hold_out
from anechoic.errors import UserError
from anechoic.runtime import checkpoint
from anechoic.runtime.distributed import average_gradients, barrier, join, launch, parallel
from anechoic.runtime.fsdp import full_tensor, is_distributed, local, shard
from anechoic.runtime.run import read_metrics
from anechoic.runtime.signals import InterruptedRun
from anechoic.training import loop as engine
from anechoic.training.build import check, make_model, preprocess_of
from anechoic.training.loop import Task, fit, split
from anechoic.training.objectives import make_objective

BATCH, STEPS = 24, 30  # shared by one, two or three processes in two parts
UVIT = {"patch_size": 2, "dim": 24, "depth": 2, "num_heads": 2, "num_classes": 10, "label_dropout": 0.1}
DIGITS = {"source": "digits", "image_size": 8, "channels": 1, "holdout": 64}
WAYS = {"one": {}, "ddp": {}, "fsdp": {"fsdp": True}}


def small_config(name, **changes):
    config = tiny_config(save=SaveConfig(every=10 * BATCH, keep_last=9), **changes)
    if name == "u-vit":
        config = replace(
            config,
            data=DataConfig(**DIGITS, labels=True, augment="none", flip=False),
            model=ModelConfig("uvit_small", UVIT),
            objective=ObjectiveConfig("noise_prediction"),
        )
    few = {"batch_size": BATCH, "samples": STEPS * BATCH, "accumulate": 2, "clip": 0.05, "ema": 0.9}
    algorithm = "muon" if name == "muon" else "adamw"
    return replace(
        config,
        optim=replace(config.optim, **few, algorithm=algorithm),
        validation=replace(config.validation, every=10 * BATCH, report=BATCH),
    )


# ---- what the processes do


def gradients(world, name, how):
    """Whole gradients of a batch in two parts, of which this process computes its share."""
    config = small_config(name)
    config = replace(config, data=replace(config.data, mean=(0.5,), std=(0.5,)))
    torch.manual_seed(0)
    model = make_model(config)
    with torch.no_grad():  # away from zero, where many gradients vanish
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    source = open_source("digits", channels=1, labels=config.data.labels)
    place = {"rank": world.rank, "world_size": world.size}
    train = Subset(source, hold_out(len(source), 64)[0])
    loader = Loader(train, image_size=8, batch_size=BATCH, seed=7, shuffle=True, drop_last=True, **place)
    task = Task(model, make_objective(config.objective.name, preprocess=preprocess_of(config)), seed=7)
    task = shard(world, task, dtype=torch.float32) if how == "fsdp" else parallel(world, task)
    for images, *rest in split(next(iter(loader)), 2):
        (task(preprocess_of(config).apply(images), *rest)["loss"] / 2).backward()
    average_gradients(task)
    if how == "fsdp":
        assert all(is_distributed(parameter) for parameter in model.parameters())
        held = sum(local(parameter).numel() for parameter in model.parameters())
        assert held < 0.6 * sum(parameter.numel() for parameter in model.parameters())
    return {name: full_tensor(parameter.grad).clone() for name, parameter in model.named_parameters()}


def stop_after(updates, config, folder):
    """Train until SIGTERM comes in the given update."""
    real, count = engine.split, 0

    def counting(*arguments):
        nonlocal count
        count += 1
        if count == updates:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    engine.split = counting
    try:
        fit(config, folder)
    except InterruptedRun:
        return
    finally:
        engine.split = real
    raise AssertionError("it was not stopped")


def noting_ids(config, folder):
    """Train to the end; every process notes which samples it took, update by update."""
    real, taken = engine.split, []

    def noting(batch, parts):
        taken.append(batch.ids.tolist())
        return real(batch, parts)

    engine.split = noting
    try:
        fit(config, folder)
    finally:
        engine.split = real
    Path(f"{folder}-ids-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(taken))


def refusing_disk(config, folder):
    """Train; the second checkpoint meets a disk that refuses."""
    from anechoic.runtime import sharded_checkpoint as parts

    real, saves = parts.write_aside, []

    def refuse(path, **options):
        saves.append(path)
        if len(saves) == 2:
            raise OSError(28, "No space left on device")
        return real(path, **options)

    parts.write_aside = refuse
    try:
        fit(config, folder)
    finally:
        parts.write_aside = real


def by_two(root):
    torch.set_num_threads(1)
    with join() as world:
        found = {(name, how): gradients(world, name, how) for name in ("mae", "u-vit") for how in ("ddp", "fsdp")}
        for how in ("ddp", "fsdp"):
            fit(small_config("mae", **WAYS[how]), root / "mae" / how)
            fit(small_config("u-vit", **WAYS[how]), root / "u-vit" / how)
            stop_after(14, small_config("mae", **WAYS[how]), root / "stopped" / how)
        fit(small_config("muon"), root / "muon" / "ddp")
        fit(small_config("mae", fsdp=True, precision="bfloat16"), root / "bfloat16" / "fsdp")
        refusing_disk(small_config("muon", fsdp=True), root / "muon" / "fsdp")
        if world.is_rank_zero:
            shutil.copytree(root / "stopped" / "fsdp", root / "again")
        barrier(world)
        fit(small_config("mae", fsdp=True), root / "again")
        return found


def by_three(root):
    with join():
        for how in ("ddp", "fsdp"):
            noting_ids(small_config("mae", **WAYS[how]), root / "three" / how)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(where runs are, the gradients of two processes)"""
    root = tmp_path_factory.mktemp("runs")
    return root, launch(by_two, root, devices=2)


@pytest.fixture(scope="module")
def root(done):
    for name in ("mae", "u-vit", "muon"):
        fit(small_config(name), done[0] / name / "one")
    return done[0]


# ---- and what must have come of it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae", "u-vit"])
def test_two_processes_have_the_gradients_of_one(done, name):
    with join() as alone:
        one = gradients(alone, name, "one")
    for how in ("ddp", "fsdp"):
        two = done[1][name, how]
        assert two.keys() == one.keys()
        ours, theirs = (nn.utils.parameters_to_vector(list(found.values())) for found in (two, one))
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), how


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [(name, how) for name in ("mae", "u-vit", "muon") for how in ("ddp", "fsdp")])
def test_two_processes_have_the_losses_of_one(root, name, how):
    """Over thirty updates in two parts, clipped; the first process measures a whole copy of shared-out weights."""
    one, two = (train_records(root / name / which) for which in ("one", how))
    assert len(one) == len(two) == STEPS
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    assert [r["gradient_norm"] for r in two] == pytest.approx([r["gradient_norm"] for r in one], rel=1e-4)
    assert one[5]["gradient_norm"] > 0.05  # it is clipped
    records = (read_metrics(root / name / which) for which in ("one", how))
    held_out = [[r["held_out_loss"] for r in found if r["kind"] == "validation"] for found in records]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-4)
    assert len(held_out[0]) == 4


@pytest.mark.slow
def test_bfloat16_is_shared_out_too(root):
    one, two = (train_records(path) for path in (root / "mae" / "one", root / "bfloat16" / "fsdp"))
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=2e-2)
    assert [r["loss"] for r in two] != pytest.approx([r["loss"] for r in one], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae", "u-vit"])
def test_a_shared_out_run_ends_in_an_ordinary_model(root, name):
    """model/ and every checkpoint in parts give the averaged weights, those of one process to rounding."""
    run = root / name / "fsdp"
    last = checkpoint.checkpoints(run / "checkpoints")[-1]
    assert checkpoint.has_shards(last)
    assert not (last / "model.safetensors").exists()
    expected, found = (anechoic.load(path).state_dict() for path in (root / name / "one", run / "model"))
    assert found.keys() == expected.keys()
    kept = anechoic.load(last).state_dict()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4)
        assert value.equal(kept[key])


@pytest.mark.slow
def test_a_shared_out_run_goes_on_bit_for_bit(root):
    """Stopped by SIGTERM between two checkpoints, and given the same command again."""
    first, again = (root / name / "model" / "model.safetensors" for name in ("mae/fsdp", "again"))
    assert first.read_bytes() == again.read_bytes()
    assert len(json.loads((root / "again" / "env.json").read_text())["starts"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_run_that_two_stopped_is_ended_by_one(root, tmp_path, how):
    shutil.copytree(root / "stopped" / how, tmp_path / "run")
    noting_ids(small_config("mae", **WAYS[how], devices=1), tmp_path / "run")
    taken = json.loads(Path(tmp_path / "run-ids-0.json").read_text())
    assert taken == samples_in_order()[14:]
    losses = [[r["loss"] for r in train_records(path)] for path in (root / "mae" / "one", tmp_path / "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # A process alone has nobody to share with, and writes whole files.
    assert not checkpoint.has_shards(checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[-1])


@pytest.mark.slow
def test_a_run_that_two_stopped_is_ended_by_three(root):
    shutil.copytree(root / "stopped", root / "three")
    launch(by_three, root, devices=3)
    for how in ("ddp", "fsdp"):
        ranks = [json.loads(Path(f"{root}/three/{how}-ids-{rank}.json").read_text()) for rank in range(3)]
        taken = [list(chain(*shares)) for shares in zip(*ranks, strict=True)]
        assert taken == samples_in_order()[14:]
        losses = [[r["loss"] for r in train_records(path)] for path in (root / "mae" / "one", root / "three" / how)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def samples_in_order():
    """The samples of every update, as one process takes them."""
    source = open_source("digits", channels=1)
    train = Subset(source, hold_out(len(source), 64)[0])
    loader = iter(Loader(train, image_size=8, batch_size=BATCH, seed=7, shuffle=True, drop_last=True))
    return [next(loader).ids.tolist() for _ in range(STEPS)]


@pytest.mark.slow
def test_parts_that_were_not_finished_or_are_damaged_do_not_count(root, tmp_path):
    # The disk refused the second checkpoint; the run continued.
    saved = [int(path.name) for path in checkpoint.checkpoints(root / "muon" / "fsdp" / "checkpoints")]
    assert saved == [10 * BATCH, 30 * BATCH]
    folder = tmp_path / "checkpoints"
    shutil.copytree(root / "mae" / "fsdp" / "checkpoints", folder)
    newest = checkpoint.checkpoints(folder)[-1]
    part = sorted(newest.glob("shard-*.safetensors"))[-1]
    flip_a_bit(part)
    found = checkpoint.latest(folder)
    assert found is not None
    assert found[1]["seen"] == 20 * BATCH
    part.unlink()
    with pytest.raises(UserError, match="belong to plain shortcuts, but this network's have factors of their own"):
        anechoic.load(newest)  # the marks of decay were in that part


@pytest.mark.slow
def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(UserError, match="compile"):
        check(tiny_config(fsdp=True, compile=True))
    with pytest.raises(UserError, match="single number"):
        check(tiny_config(fsdp=True, shortcut=ShortcutConfig(form="learnable")))
    with pytest.raises(UserError, match="Only transformers"):
        check(tiny_config(fsdp=True, model=ModelConfig("resnet18"), objective=ObjectiveConfig("supervised")))
