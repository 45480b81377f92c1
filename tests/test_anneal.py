"""Alpha that falls from 1 to its value over the first part of training."""

import json

import pytest

from anechoic.config import Config, DataConfig, ModelConfig, MonitorConfig, OptimConfig, SaveConfig, ShortcutConfig
from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.runtime.run import read_metrics
from anechoic.shortcut import Annealing, Shortcut
from anechoic.train.engine import fit

SMALL = {"patch_size": 2, "dim": 16, "depth": 2, "num_heads": 2, "decoder_dim": 16, "decoder_depth": 1}


def config(**shortcut):
    return Config(
        data=DataConfig("digits:train", image_size=8, channels=1, flip=False),
        model=ModelConfig("mae_tiny_patch4", {**SMALL, "decoder_num_heads": 2}),
        shortcut=ShortcutConfig(alpha_min=0.5, **shortcut),
        optim=OptimConfig(batch_size=16, samples=160, lr=1e-2),
        monitor=MonitorConfig(every=16, report=16),
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
    import shutil

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
