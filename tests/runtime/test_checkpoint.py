"""Checkpoints: whole or not at all, checked, pruned, and loaded as the model they were."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from damage import flip_a_bit
from tiny_runs import tiny_config, write_run

import anechoic
from anechoic.cli.main import main
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.recipes import recipe
from anechoic.runtime import checkpoint
from anechoic.runtime.run import Run
from anechoic.training.build import check
from anechoic.training.loop import fit
from anechoic.training.optim import parameter_groups

PREPROCESS = Preprocess((0.5,), (0.25,), 16, 1)
SIZES = {"image_size": 16, "in_channels": 1, "dim": 24, "depth": 2, "num_heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}


def tiny_mae(seed=0, **options):
    torch.manual_seed(seed)
    return build_model("mae_tiny_patch4", **{**SIZES, **DECODER, "alpha_min": 0.6, **options})


def write(folder, *, seen, model=None, **more):
    model = model or tiny_mae(seed=seen)
    tensors = {"model": model.state_dict(), **more}
    card = checkpoint.model_card(model, PREPROCESS)
    return checkpoint.save(folder, seen=seen, tensors=tensors, card=card, state={"sums": {"loss": 0.1}})


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_round_trip(tmp_path):
    model = tiny_mae()
    path = write(tmp_path, seen=64, model=model)
    found, state = checkpoint.latest(tmp_path)
    assert found == path
    assert state["seen"] == 64
    assert state["sums"] == {"loss": 0.1}
    assert equal(checkpoint.read_tensors(path, "model"), model.state_dict())


def test_weights_may_be_read_by_those_who_may_read_their_card(tmp_path):
    model = build_model("vit_tiny_patch4", image_size=8, dim=16, depth=2, num_heads=2)
    card = checkpoint.model_card(model, Preprocess((0.5,) * 3, (0.25,) * 3, 8, 3))
    checkpoint.write_model(tmp_path / "model", model.state_dict(), card)
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1


def test_full_disk_under_the_trained_weights_is_one_sentence(tmp_path, monkeypatch):
    """safetensors has an exception of its own, which the operating system's error is only the text of."""
    save = checkpoint.save_file

    def fail(tensors, path, **options):
        if "model" in str(path.parent.name):
            raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(UserError, match=r"No space left on device: .*: run the same command again"):
        fit(tiny_config(steps=1), tmp_path / "run")
    monkeypatch.undo()
    fit(tiny_config(steps=1), tmp_path / "run")
    assert (tmp_path / "run" / "results.json").exists()


def test_full_disk_under_an_export_is_one_sentence(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")

    def fail(tensors, path, **options):
        raise checkpoint.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    assert main(["export", str(run), "--to", "timm", "--out", str(tmp_path / "exported")]) == 2
    assert "model.safetensors: No space left on device; choose another path, or free this" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


def test_equal_runs_write_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, seen=64)
    files = sorted(path.name for path in (tmp_path / "a" / "000000000064").iterdir())
    assert files == ["config.json", "model.safetensors", "state.json"]
    for file in files:
        a, b = (tmp_path / name / "000000000064" / file for name in "ab")
        assert a.read_bytes() == b.read_bytes(), file


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip_a_bit(path / "model.safetensors"),
        lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-10]),
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "state.json").write_text("{"),
        lambda path: (path / "state.json").write_text("[]"),
        lambda path: (path / "state.json").unlink(),
        lambda path: flip_a_bit(path / "config.json"),
    ],
)
def test_a_damaged_newest_falls_back_with_a_warning(tmp_path, damage, caplog):
    good = write(tmp_path, seen=64)
    damage(write(tmp_path, seen=128))
    found, state = checkpoint.latest(tmp_path)
    assert (found, state["seen"]) == (good, 64)
    assert "is damaged" in caplog.text
    # It is written again when training comes past that point.
    write(tmp_path, seen=128)
    assert checkpoint.latest(tmp_path)[1]["seen"] == 128


def test_only_damaged_ones_are_not_a_fresh_start(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    flip_a_bit(write(tmp_path, seen=64) / "model.safetensors")
    with pytest.raises(UserError, match=r"Every checkpoint .* is damaged"):
        checkpoint.latest(tmp_path)


def test_leftovers_of_a_killed_save_are_no_checkpoints(tmp_path):
    path = write(tmp_path, seen=64)
    shutil.copytree(path, tmp_path / ".new-000000000128")
    shutil.copytree(path, tmp_path / ".old-000000000032")
    assert checkpoint.checkpoints(tmp_path) == [path]
    write(tmp_path, seen=128)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["000000000064", "000000000128"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(2, 0, [64, 80]), (1, 32, [32, 64, 80]), (1, 40, [48, 80]), (9, 0, [16, 32, 48, 64, 80])],
)
def test_pruning(tmp_path, keep_last, keep_every, kept):
    for seen in (16, 32, 48, 64, 80):
        write_small(tmp_path, seen)
    checkpoint.prune(tmp_path, keep_last=keep_last, keep_every=keep_every, spacing=16)
    assert [int(path.name) for path in checkpoint.checkpoints(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_pruning_does_not_count_damaged_checkpoints(tmp_path):
    """The good one is older than two damaged ones: the run can only resume from it until it has saved twice."""
    for seen in (16, 32, 48):
        write_small(tmp_path, seen)
    for seen in (32, 48):
        flip_a_bit(tmp_path / f"{seen:012d}" / "model.safetensors")
    write_small(tmp_path, 64)
    checkpoint.prune(tmp_path, keep_last=2)
    assert [int(path.name) for path in checkpoint.checkpoints(tmp_path)] == [16, 32, 48, 64]
    write_small(tmp_path, 80)
    checkpoint.prune(tmp_path, keep_last=2)
    assert [int(path.name) for path in checkpoint.checkpoints(tmp_path)] == [64, 80]


def write_small(folder, seen):
    return checkpoint.save(folder, seen=seen, tensors={"model": {"w": torch.zeros(4)}}, card={}, state={"sums": {}})


def edited(**changes):
    """state.json with fields replaced (None: taken out), its checksum left as it was."""

    def damage(path):
        state = json.loads((path / "state.json").read_text())
        state.update(changes)
        kept = {name: value for name, value in state.items() if value is not None}
        (path / "state.json").write_text(json.dumps(kept))

    return damage


def flipped_without_checksums(path):
    """A changed tensor file without a checksum."""
    flip_a_bit(path / "model.safetensors")
    edited(checksums={})(path)


def of_another_point(path):
    """A good checkpoint under a name that is not its own."""
    shutil.rmtree(path)
    shutil.copytree(path.with_name(f"{64:012d}"), path)


@pytest.mark.parametrize(
    "damage",
    [
        edited(seen=32),
        edited(seen="128"),
        edited(seen=None),
        edited(sums={"loss": 5.0}),
        edited(sums=None),
        edited(checksums={}),
        edited(checksums=None),
        edited(checksum=None),
        edited(extra=1),
        flipped_without_checksums,
        of_another_point,
        lambda path: (path / "ema.safetensors").write_bytes((path / "model.safetensors").read_bytes()),
        lambda path: (path / "state.json").write_bytes(b"\xff\xfe"),
        lambda path: (path / "state.json").write_text("[" * 100_000),
    ],
)
def test_an_edited_state_is_damage(tmp_path, damage, caplog):
    good = write(tmp_path, seen=64)
    damage(write(tmp_path, seen=128))
    assert checkpoint.latest(tmp_path)[0] == good
    assert "is damaged" in caplog.text


def test_a_flipped_model_directory_is_refused(tmp_path):
    write(tmp_path / "checkpoints", seen=64)
    folder = checkpoint.export_weights(tmp_path)
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(UserError, match=r"are damaged, model\.safetensors is not the file"):
        anechoic.load(folder)


REFUSED = """
import resource, sys
import torch
from pathlib import Path
from anechoic.runtime import checkpoint
folder = Path(sys.argv[1])
tensors = {"model": {"w": torch.zeros(1000)}}
checkpoint.save(folder, seen=1, tensors=tensors, card={}, state={})
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    checkpoint.save(folder, seen=2, tensors=tensors, card={}, state={})
except OSError as problem:
    print("refused:", problem)
"""


@pytest.mark.slow
def test_a_refused_write_leaves_what_was_there(tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "refused: " in done.stdout
    assert "File too large" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]
    assert checkpoint.latest(tmp_path)[1]["seen"] == 1


@pytest.mark.slow
def test_optimizer_state_by_name(tmp_path):
    def trained(steps, state=None):
        model = tiny_mae(zero_init=False)
        optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.05), lr=1e-2, fused=True)
        if state is not None:
            model.load_state_dict(state[0])
            checkpoint.restore_optimizer(optimizer, state[1])
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(4, 1, 16, 16), torch.rand(4, 16)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(range(3))
    path = write(tmp_path, seen=3, model=model, optimizer=checkpoint.optimizer_tensors(optimizer))
    again, again_optimizer = trained(
        range(3, 5), (checkpoint.read_tensors(path, "model"), checkpoint.read_tensors(path, "optimizer"))
    )
    straight, straight_optimizer = trained(range(5))
    assert equal(again.state_dict(), straight.state_dict())
    assert equal(checkpoint.optimizer_tensors(again_optimizer), checkpoint.optimizer_tensors(straight_optimizer))


# ---- loading a model


def test_load_takes_run_model_and_checkpoint_directories(tmp_path):
    model = tiny_mae()
    path = write(tmp_path / "checkpoints", seen=64, model=model)
    assert checkpoint.export_weights(tmp_path) == tmp_path / "model"
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    images, noise = torch.randn(2, 1, 16, 16), torch.rand(2, 16)
    for directory in (tmp_path, str(tmp_path), tmp_path / "model", path):
        loaded = anechoic.load(directory)
        assert not loaded.training
        assert loaded.config == model.config
        assert loaded.preprocess == PREPROCESS
        assert torch.equal(loaded(images, noise).prediction, model.eval()(images, noise).prediction)
    shutil.rmtree(tmp_path / "model")
    assert equal(anechoic.load(tmp_path).state_dict(), model.state_dict())


def test_load_prefers_averaged_weights(tmp_path):
    model, average = tiny_mae(), tiny_mae(seed=1)
    write(tmp_path / "checkpoints", seen=64, model=model, ema=average.state_dict())
    assert equal(anechoic.load(tmp_path).state_dict(), average.state_dict())
    checkpoint.export_weights(tmp_path)
    assert equal(anechoic.load(tmp_path / "model").state_dict(), average.state_dict())


def test_an_unfinished_run_is_loaded_from_its_newest_checkpoint(tmp_path):
    write(tmp_path / "checkpoints", seen=64)
    checkpoint.export_weights(tmp_path)
    newer = tiny_mae(seed=5)
    write(tmp_path / "checkpoints", seen=128, model=newer)
    assert equal(anechoic.load(tmp_path).state_dict(), newer.state_dict())


def test_card_describes_the_network(tmp_path):
    path = write(tmp_path, seen=64)
    card = json.loads((path / "config.json").read_text())
    assert list(card) == ["format", "family", "config", "preprocess"]
    assert card["family"] == "mae"
    assert card["config"]["alphas"] == pytest.approx([1, 1 - 0.4 / 3, 1 - 0.8 / 3, 0.6])


def edit_mean(path):
    change(path, lambda card: card["preprocess"].update(mean=[0.9]))


def drop(path, key):
    change(path, lambda card: card.pop(key))


def change(path, edit):
    """Edit the model's card without a new checksum."""
    card = json.loads((path / "config.json").read_text())
    edit(card)
    (path / "config.json").write_text(json.dumps(card))


def test_edited_card_is_refused(tmp_path):
    """Other statistics or another image size would change every feature without a word."""
    checkpointed = write(tmp_path / "checkpoints", seen=64)
    for path in (checkpoint.export_weights(tmp_path), checkpointed):
        assert anechoic.load(path)
        edit_mean(path)
        with pytest.raises(UserError, match=r"config.json was edited or damaged after it was written: restore it"):
            anechoic.load(path)


def test_edited_card_of_an_earlier_version_is_refused(tmp_path):
    """It has no checksum of its own; the run's env.json has one."""
    write(tmp_path / "checkpoints", seen=64)
    path = checkpoint.export_weights(tmp_path)
    drop(path, "checksum")
    with Run(tmp_path) as run:
        run.finish({})
    assert anechoic.load(tmp_path)
    edit_mean(path)
    with pytest.raises(UserError, match="was edited or damaged"):
        anechoic.load(tmp_path)


def test_card_without_checksums_is_believed(tmp_path):
    write(tmp_path / "checkpoints", seen=64)
    path = checkpoint.export_weights(tmp_path)
    drop(path, "weights_sha256")
    edit_mean(path)
    assert anechoic.load(path).preprocess.mean == (0.9,)


def test_card_of_version_0_1_is_believed_with_a_warning(tmp_path, caplog):
    write(tmp_path / "checkpoints", seen=64)
    path = checkpoint.export_weights(tmp_path)
    assert anechoic.load(path)
    assert not caplog.records
    drop(path, "checksum")
    assert anechoic.load(path)
    assert "nobody can tell whether it was edited" in caplog.text


def test_what_is_no_model_is_refused(tmp_path):
    for directory, words in ((tmp_path / "nowhere", "There is no run"), (tmp_path, "holds no weights")):
        with pytest.raises(UserError, match=words):
            anechoic.load(directory)
    with pytest.raises(UserError, match="no checkpoint yet"):
        checkpoint.export_weights(tmp_path)
    path = write(tmp_path, seen=64)
    card = json.loads((path / "config.json").read_text())
    (path / "state.json").unlink()
    (path / "config.json").write_text(json.dumps({**card, "format": "anechoic/9"}))
    with pytest.raises(UserError, match="format 'anechoic/9'"):
        anechoic.load(path)
    (path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="no readable weights"):
        anechoic.load(path)


def test_shard_that_is_no_regular_file_is_refused(tmp_path):
    """Opening a pipe would wait forever."""
    path = write(tmp_path, seen=64)
    (path / "state.json").unlink()
    (path / "model.safetensors").unlink()
    shard = path / "shard-00001-model-00001-of-00001.safetensors"
    os.mkfifo(shard)
    # A writer, so that without the check the test fails instead of waiting.
    descriptor = os.open(shard, os.O_RDWR)
    os.write(descriptor, b"x")
    with pytest.raises(UserError, match="is not a regular file"):
        anechoic.load(path)
    os.close(descriptor)
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file"):
        anechoic.load(path)


@pytest.mark.parametrize("which", ["run", "checkpoint"])
def test_raw_or_ema_weights_are_loaded_as_asked(tmp_path, which):
    raw, ema = tiny_mae(seed=1), tiny_mae(seed=2)
    saved = write(tmp_path / "checkpoints", seen=64, model=raw, ema=ema.state_dict())
    checkpoint.export_weights(tmp_path)
    path = tmp_path if which == "run" else saved
    for wanted, expected in (("raw", raw), ("ema", ema), (None, ema)):
        assert equal(anechoic.load(path, weights=wanted).state_dict(), expected.state_dict())
    with pytest.raises(UserError, match="no checkpoint with raw and EMA weights"):
        anechoic.load(tmp_path / "model", weights="raw")


def test_an_ema_that_was_not_trained_is_refused(tmp_path):
    write(tmp_path / "checkpoints", seen=64)
    with pytest.raises(UserError, match="trained without an EMA"):
        anechoic.load(tmp_path, weights="ema")
    with pytest.raises(UserError, match="one set of weights"):
        anechoic.load("timm:resnet10t:random", weights="raw")


# ---- starting a new run from weights


def test_start_from_the_same_network(tmp_path):
    source, target = tiny_mae(), tiny_mae(seed=1)
    checkpoint.start_from(target, write(tmp_path, seen=1, model=source))
    assert equal(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_a_classifier_starts_from_the_encoder(tmp_path, positions):
    """The tokens of the new classifier are the encoder's, learned positions included; only its head is new."""
    source = tiny_mae(zero_init=False).eval()
    options = {**SIZES, "alpha_min": 0.6, "norm": False, "num_classes": 3, "pool": "mean", "positions": positions}
    target = build_model("vit_tiny_patch4", **options).eval()
    checkpoint.start_from(target, write(tmp_path, seen=1, model=source))
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(target.tokens(images), source.encoder(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dim": 32}, "do not fit"), ({"skips": False}, "do not fit"), ({"alpha_min": 1.0}, "factors")],
)
def test_weights_of_another_network_are_refused(tmp_path, options, words):
    path = write(tmp_path, seen=1)
    with pytest.raises(UserError, match=words):
        checkpoint.start_from(tiny_mae(**options), path)


def test_a_torch_that_cannot_keep_parts_is_named(tmp_path, monkeypatch):
    """Before anything is launched, and when a checkpoint of another machine is opened."""
    import_module("torch.distributed.checkpoint")
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint.hf_storage", None)
    monkeypatch.delitem(sys.modules, "anechoic.runtime.sharded_checkpoint", raising=False)
    with pytest.raises(UserError, match=r"need torch 2.8 or newer, not"):
        check(replace(recipe("pocket_mae_digits"), fsdp=True))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "shard-00001-model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"need torch 2.8 or newer, not"):
        checkpoint.load(tmp_path)
