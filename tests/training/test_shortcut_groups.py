"""shortcut.via=groups: a plain network trained by parameter groups follows the run whose network is decayed."""

from dataclasses import replace

import pytest
import torch
from tiny_runs import tiny_config, train_records

import anechoic
from anechoic.config import ModelConfig, ShortcutConfig
from anechoic.errors import UserError
from anechoic.training import muon
from anechoic.training.build import check, learning_rate_profile, make_model, make_optimizer
from anechoic.training.loop import fit
from anechoic.training.optim import gradient_norm, set_learning_rate

SIZES = {"patch_size": 4, "dim": 24, "depth": 4, "num_heads": 2}
DENOISERS = {"in_channels": 1, "num_classes": None}


def groups_of(config):
    return replace(config, shortcut=replace(config.shortcut, via="groups"))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_run_by_groups_has_the_losses_of_the_decayed_run_and_a_plain_model(tmp_path, algorithm):
    config = tiny_config(steps=20)
    config = replace(config, optim=replace(config.optim, algorithm=algorithm, clip=0.5, ema=0.9))
    for name, wanted in (("network", config), ("groups", groups_of(config))):
        fit(wanted, tmp_path / name)
    decayed, plain = (train_records(tmp_path / name) for name in ("network", "groups"))
    for name in ("loss", "gradient_norm"):
        assert [record[name] for record in plain] == pytest.approx([record[name] for record in decayed], rel=1e-3)
    models = [anechoic.load(tmp_path / name) for name in ("network", "groups")]
    assert models[0].config.factors[-1] == (0.6, 1.0)
    assert set(models[1].config.factors) == {(1.0, 1.0)}
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    outputs = [model.encoder(images) for model in models]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["uvit_small", "sit_s_patch2"])
def test_optimizer_of_a_profile_follows_the_decayed_denoiser(name, algorithm, monkeypatch):
    """In double precision, with clipping, without Muon's own eps; the matrices of U-ViT's long skips are split."""
    monkeypatch.setattr(muon, "EPS", 1e-30)
    config = tiny_config(model=ModelConfig(name, {**SIZES, **DENOISERS}))
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    times = torch.linspace(0.1, 0.9, 4, dtype=torch.float64)
    losses = []
    for wanted in (config, groups_of(config)):
        torch.manual_seed(0)
        model = make_model(wanted).double()
        profile = learning_rate_profile(wanted, model)
        optimizer = make_optimizer(model, replace(wanted.optim, algorithm=algorithm), profile=profile)
        set_learning_rate(optimizer, 1e-3)
        found = []
        for _ in range(20):
            loss = (model(images, times) - images).square().mean()
            loss.backward()
            gradient_norm(model.named_parameters(), clip=0.1, factors=profile)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-9)


@pytest.mark.parametrize("shortcut", [{"form": "branch"}, {"anneal": 0.5}])
def test_groups_refuse_what_no_profile_expresses(shortcut):
    config = tiny_config(shortcut=ShortcutConfig(alpha_min=0.6, via="groups", **shortcut))
    with pytest.raises(UserError, match=r"set shortcut\.form to identity"):
        check(config)
