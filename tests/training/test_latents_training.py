"""Training on cached latents through the one loop, and the command that probes at noise levels."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo import tiny_vae

from anechoic.cli.main import main
from anechoic.config import Config, OptimConfig, ValidationConfig
from anechoic.data import Array, Loader, Source
from anechoic.data.latents import DrawLatents, Latents, read_card
from anechoic.diffusion.generate import Request, generate
from anechoic.diffusion.vae import load_vae, write_latents
from anechoic.errors import UserError
from anechoic.recipes.diffusion import uvit_in100_latent_cond
from anechoic.rng import SampleGenerator
from anechoic.training import loop as engine
from anechoic.training.build import make_loader
from anechoic.training.loop import fit


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty random pictures of four classes, encoded by a small random autoencoder that was saved to disk."""
    folder = tmp_path_factory.mktemp("latents")
    tiny_vae().save_pretrained(folder / "vae")
    images = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    pictures = Array(images, channels=3, labels=np.arange(40) % 4, classes=tuple("abcd"), fingerprint="f00d")
    vae = load_vae(str(folder / "vae"))
    write_latents(pictures, folder / "cache", vae=vae, vae_name=str(folder / "vae"), image_size=16)
    return folder / "cache"


def config_on(cache: Path) -> Config:
    config = uvit_in100_latent_cond()
    options = {"patch_size": 2, "dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4, "label_dropout": 0.1}
    return replace(
        config,
        data=replace(config.data, source=str(cache), image_size=8, holdout=8),
        model=replace(config.model, options=options),
        optim=OptimConfig(batch_size=16, samples=64, lr=1e-3, ema=0.9),
        validation=ValidationConfig(every=64, report=16),
        threads=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 7])
def test_an_image_and_its_mirror_image_are_held_out_together(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    trained_on: list[np.ndarray] = []

    def noted(config: Config, source: Source, indices: np.ndarray, **how: int) -> Loader:
        trained_on.append(indices)
        return make_loader(config, source, indices, **how)

    monkeypatch.setattr(engine, "make_loader", noted)
    config = config_on(cache)
    fit(replace(config, data=replace(config.data, holdout=count)), tmp_path / "run")
    images, samples_of_each = np.unique(trained_on[0] // 2, return_counts=True)
    assert (len(images), set(samples_of_each)) == (36, {2})


@pytest.mark.slow
def test_a_model_is_trained_on_latents_and_its_samples_are_decoded(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = config_on(cache)
    results = fit(config, tmp_path / "run")
    assert 0.5 < results["metrics"]["held_out_loss"] < 2
    images = generate(Request(run=str(tmp_path / "run"), num=5, steps=3, guidance=0.4), progress=False)
    assert images.pixels.shape == (5, 3, 16, 16)
    assert images.receipt["vae"] == read_card(cache).vae_hash

    pictures = np.random.default_rng(1).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "p.npz", images=pictures, labels=np.arange(60) % 4)
    arguments = [
        "evaluate",
        str(tmp_path / "run"),
        str(tmp_path / "p.npz"),
        "--metrics",
        "probe",
        "--noise",
        "0.05",
        "0.1",
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "0.05" in text
    assert "chosen on held-out training data" in text


@pytest.mark.slow
def test_latents_scale_survives_the_loss_of_the_latents_folder(cache: Path, tmp_path: Path) -> None:
    """The run's model card keeps it; an autoencoder with another factor is refused instead of used silently."""
    from diffusers import AutoencoderKL

    moved = tmp_path / "latents"
    shutil.copytree(cache, moved)
    card = json.loads((moved / "latents.json").read_text())
    (moved / "latents.json").write_text(json.dumps({**card, "scale": 0.5}))
    fit(config_on(moved), tmp_path / "run")
    request = Request(run=str(tmp_path / "run"), num=2, steps=2, vae=card["vae"])
    images = generate(request, progress=False)
    shutil.rmtree(moved)
    assert torch.equal(generate(request, progress=False).pixels, images.pixels)
    assert torch.equal(generate(replace(request, vae=None), progress=False).pixels, images.pixels)
    vae = load_vae(card["vae"])
    torch.manual_seed(1)
    AutoencoderKL.from_config({**vae.config, "scaling_factor": 0.25}).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"scaled by 0\.5, this autoencoder scales by 0\.25"):
        generate(replace(request, vae=str(tmp_path / "other")), progress=False)


@pytest.mark.slow
def test_loader_returns_drawn_latents(cache: Path) -> None:
    found = Latents(cache, labels=True)
    first, again = (
        next(iter(Loader(found, image_size=8, batch_size=6, seed=2, shuffle=True, drop_last=True))) for _ in range(2)
    )
    assert first.images.dtype == torch.float32
    assert first.images.shape == (6, 4, 8, 8)
    assert torch.equal(first.images, again.images)
    expected = DrawLatents(0.18215)(
        [found.read(i) for i in first.ids.tolist()], image_size=8, generator=SampleGenerator(2, first.ids, first.visits)
    )
    assert torch.equal(first.images, expected)
