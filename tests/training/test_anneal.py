"""Alpha that falls from 1 to its value over the first part of training."""

import json
import shutil
from dataclasses import replace

import pytest
from zoo import ZOO, make

import anechoic
from anechoic.config import Config, DataConfig, ModelConfig, OptimConfig, SaveConfig, ShortcutConfig, ValidationConfig
from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.runtime.checkpoint import path_of
from anechoic.runtime.distributed import barrier, join, launch
from anechoic.runtime.run import read_metrics
from anechoic.shortcut import Annealing, Shortcut
from anechoic.training.build import check
from anechoic.training.loop import fit

SMALL = {"patch_size": 2, "dim": 16, "depth": 2, "num_heads": 2, "decoder_dim": 16, "decoder_depth": 1}


def config(**shortcut):
    return Config(
        data=DataConfig("digits:train", image_size=8, channels=1, flip=False),
        model=ModelConfig("mae_tiny_patch4", {**SMALL, "decoder_num_heads": 2}),
        shortcut=ShortcutConfig(alpha_min=0.5, **shortcut),
        optim=OptimConfig(batch_size=16, samples=160, lr=1e-2),
        validation=ValidationConfig(every=16, report=16),
        save=SaveConfig(every=32, keep_last=9),
        threads=1,
    )


def test_alphas_go_from_one_to_their_own_values_in_a_straight_line():
    model = build_model("mae_tiny_patch4", image_size=8, in_channels=1, alpha_min=0.5, decoder_num_heads=2, **SMALL)
    ends = [shortcut.factors[0] for shortcut in model.modules() if isinstance(shortcut, Shortcut)]
    anneal = Annealing.of(model, share=0.5)

    def now():
        return [shortcut.factors[0] for shortcut in model.modules() if isinstance(shortcut, Shortcut)]

    anneal.set(0.0)
    assert now() == [1.0] * len(ends)
    anneal.set(0.25)
    assert now() == pytest.approx([(1 + end) / 2 for end in ends])
    for progress in (0.5, 0.8, 1.0):
        anneal.set(progress)
        assert now() == ends


@pytest.mark.slow
def test_a_run_begins_as_the_residual_one_and_ends_elsewhere(tmp_path):
    """The first update of an annealed run is that of alpha_min 1; later ones are not; the weights end with 0.5."""
    runs = {"annealed": config(anneal=0.5), "decayed": config()}
    residual = config()
    runs["residual"] = Config(**{**residual.__dict__, "shortcut": ShortcutConfig(alpha_min=1.0)})
    losses = {}
    for name, wanted in runs.items():
        fit(wanted, tmp_path / name)
        losses[name] = [record["loss"] for record in read_metrics(tmp_path / name) if record["kind"] == "train"]
    assert losses["annealed"][0] == losses["residual"][0]
    assert losses["annealed"] not in (losses["residual"], losses["decayed"])
    card = json.loads((tmp_path / "annealed" / "model" / "config.json").read_text())
    assert "0.5" in json.dumps(card)


def test_a_stopped_run_anneals_on_as_if_it_had_not_been_stopped(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    fit(config(anneal=0.5), whole)
    fit(config(anneal=0.5), stopped)
    checkpoints = sorted((stopped / "checkpoints").iterdir())
    for later in checkpoints[2:]:
        shutil.rmtree(later)
    (stopped / "results.json").unlink()
    fit(config(anneal=0.5), stopped)
    first, second = (
        [record["loss"] for record in read_metrics(run) if record["kind"] == "train"] for run in (whole, stopped)
    )
    assert first == second


def test_a_learnable_alpha_is_not_annealed():
    with pytest.raises(UserError, match="learnable"):
        Annealing([Shortcut(0.5, learnable=True)], share=0.5)


@pytest.mark.parametrize("form", ["identity", "attention"])
def test_a_checkpoint_on_the_way_is_opened_with_the_alphas_it_was_trained_with(tmp_path, form):
    fit(replace(config(anneal=0.5, form=form), optim=OptimConfig(batch_size=16, samples=160, ema=0.9)), tmp_path)
    ends = anechoic.load(tmp_path).stream().shortcuts
    assert ends[-1 if form == "identity" else -2].factors[0] < 0.7
    # Half of the training is annealed: 80 of 160 samples.
    for seen in (32, 64, 96, 160):
        opened = anechoic.load(path_of(tmp_path / "checkpoints", seen)).stream().shortcuts
        part = min(1, seen / 80)
        expected = [1 + (end.factors[0] - 1) * part for end in ends]
        assert [shortcut.factors[0] for shortcut in opened] == pytest.approx(expected)
    last, model = (
        json.loads((folder / "config.json").read_text())["config"]
        for folder in (path_of(tmp_path / "checkpoints", 160), tmp_path / "model")
    )
    assert last == model
    assert last["schedule"] == "linear"


def train_shared_out_twice(run):
    """The second time from the first checkpoint on; the others are gone."""
    wanted = replace(config(anneal=0.5), optim=OptimConfig(batch_size=16, samples=96, ema=0.9), fsdp=True)
    with join() as world:
        fit(wanted, run)
        if world.is_rank_zero:
            shutil.copytree(run / "checkpoints" / "000000000032", run.parent / "kept")
            shutil.copyfile(run / "model" / "model.safetensors", run.parent / "first")
            for seen in (64, 96):
                shutil.rmtree(path_of(run / "checkpoints", seen))
            (run / "results.json").unlink()
        barrier(world)
        fit(wanted, run)


@pytest.mark.slow
def test_a_run_that_is_shared_out_anneals_on_too(tmp_path):
    launch(train_shared_out_twice, tmp_path / "run", devices=2)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    kept = anechoic.load(tmp_path / "kept").stream().shortcuts
    assert kept[-1].factors[0] == pytest.approx(1 - 0.5 * 32 / 48)


def test_factors_that_are_fixed_are_not_annealed():
    with pytest.raises(UserError, match="fixed factors"):
        check(replace(config(), shortcut=ShortcutConfig(form="both", anneal=0.5)))


@pytest.mark.parametrize("case", ZOO)
def test_every_network_lists_its_alphas_in_the_order_of_its_config(case):
    model = make(case, alpha_min=0.6)
    assert [shortcut.factors for shortcut in model.stream().shortcuts] == model.config.factors
