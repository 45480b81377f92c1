"""Latents of a small, randomly initialized AutoencoderKL that is really saved, loaded, and used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from zoo import tiny_vae

import anechoic
from anechoic.cli.main import main
from anechoic.config import to_json
from anechoic.data import Array
from anechoic.data.latents import DrawLatents, Latents, crop_square, draw_latents, read_card
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.generate import Request, generate
from anechoic.diffusion.process import process_named
from anechoic.diffusion.samplers import Guidance, sample_batch
from anechoic.diffusion.vae import decode, encode_moments, load_vae, matching_scale, write_latents
from anechoic.errors import UserError
from anechoic.recipes.diffusion import uvit_in100_latent_cond
from anechoic.rng import SampleGenerator
from anechoic.runtime.checkpoint import model_card, write_model
from anechoic.training.objectives import make_objective
from anechoic.training.validation import Samples


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four latent channels, sides halved once."""
    vae = tiny_vae(scaling_factor=0.18215)
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vae(vae_folder: Path) -> Any:
    return load_vae(str(vae_folder))


@pytest.fixture(scope="module")
def pictures() -> Array:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    return Array(images, channels=3, labels=np.arange(40) % 4, classes=tuple("abcd"), fingerprint="f00d")


@pytest.fixture(scope="module")
def cache(pictures: Array, vae: Any, vae_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("latents") / "cache"
    write_latents(pictures, out, vae=vae, vae_name=str(vae_folder), image_size=16, batch_size=7)
    return out


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cache_holds_the_moments_of_images_and_mirror_images(cache: Path, pictures: Array, vae: Any) -> None:
    found = Latents(cache, labels=True)
    assert len(found) == 80
    assert found.card.shape == (40, 2, 8, 8, 8)
    assert found.labels is not None
    assert found.labels[:4].tolist() == [0, 0, 1, 1]
    image = pictures.read(5)[None].float() / 127.5 - 1
    torch.testing.assert_close(found.read(10)[None], encode_moments(vae, image), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.read(11)[None], encode_moments(vae, image.flip(-1)), rtol=1e-4, atol=1e-5)


def test_drawn_latents_follow_their_moments() -> None:
    mean, log_variance = torch.full((4000, 1, 2, 2), 3.0), torch.full((4000, 1, 2, 2), 2.0)
    noise = SampleGenerator(0, torch.arange(4000), torch.zeros(4000, dtype=torch.long)).normal("latent", 1, 2, 2)
    z = draw_latents(torch.cat([mean, log_variance], dim=1), noise, scale=0.5)
    assert z.mean() == pytest.approx(1.5, abs=0.05)
    assert z.std() == pytest.approx(0.5 * np.exp(1.0), rel=0.02)
    extreme = torch.cat([torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 1e4)], dim=1)
    assert draw_latents(extreme, torch.ones(1, 1, 1, 1), scale=1.0).item() == pytest.approx(np.exp(10.0), rel=1e-5)


@pytest.mark.slow
def test_latents_differ_between_visits_and_repeat_exactly(cache: Path) -> None:
    found = Latents(cache)
    moments = [found.read(i) for i in (3, 4)]

    def drawn(visit: int, rows: list[torch.Tensor], ids: list[int]) -> torch.Tensor:
        numbers = torch.tensor(ids)
        return found.transform(
            rows, image_size=8, generator=SampleGenerator(1, numbers, torch.full_like(numbers, visit))
        )

    first = drawn(0, moments, [3, 4])
    assert torch.equal(first, drawn(0, moments, [3, 4]))
    assert torch.equal(first[1:], drawn(0, moments[1:], [4]))
    assert not torch.equal(first, drawn(1, moments, [3, 4]))


@pytest.mark.slow
def test_encoded_images_are_decoded(cache: Path, vae: Any) -> None:
    found = Latents(cache)
    mean = found.read(0)[None].chunk(2, dim=1)[0]
    direct = vae.decode(mean).sample
    torch.testing.assert_close(decode(vae, mean * found.card.scale, scale=found.card.scale), direct)
    assert direct.shape == (1, 3, 16, 16)


def test_crop_is_that_of_the_published_latents() -> None:
    generator = np.random.default_rng(0)
    picture = generator.integers(0, 256, (70, 90, 3), dtype=np.uint8)
    peer = Image.fromarray(picture)
    while min(peer.size) >= 2 * 16:
        peer = peer.resize((peer.width // 2, peer.height // 2), Image.Resampling.BOX)
    scale = 16 / min(peer.size)
    peer = peer.resize((round(peer.width * scale), round(peer.height * scale)), Image.Resampling.BICUBIC)
    array = np.asarray(peer)
    top, left = (array.shape[0] - 16) // 2, (array.shape[1] - 16) // 2
    expected = array[top : top + 16, left : left + 16]
    ours = crop_square(torch.from_numpy(picture).permute(2, 0, 1), 16).permute(1, 2, 0).numpy()
    assert np.array_equal(ours, expected)


# ---- training and sampling ------------------------------------------------------------------------------------------


@pytest.fixture
def run(cache: Path, tmp_path: Path) -> Path:
    """A denoiser of these latents as a run directory, its weights fresh."""
    torch.manual_seed(0)
    options = {"dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4, "label_dropout": 0.1}
    model = anechoic.build_model("uvit_mid", image_size=8, in_channels=4, patch_size=2, **options)
    prepare = Preprocess((0.0,) * 4, (1.0,) * 4, 8, 4)
    write_model(tmp_path / "run" / "model", model.state_dict(), model_card(model, prepare))
    config = to_json(uvit_in100_latent_cond())
    config["data"]["source"] = str(cache)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    return tmp_path / "run"


@pytest.mark.slow
def test_drawn_latents_train_a_denoiser(cache: Path, run: Path) -> None:
    found, model = Latents(cache, labels=True), anechoic.load(run).train()
    ids = torch.arange(16)
    generator = SampleGenerator(0, ids, torch.zeros_like(ids))
    latents = found.transform([found.read(i) for i in ids.tolist()], image_size=8, generator=generator)
    assert torch.equal(model.preprocess.apply(latents.clone()), latents)  # what is no pixels is not normalized
    assert found.labels is not None
    batch = Samples(latents, torch.from_numpy(found.labels[:16]))
    objective = make_objective("noise_prediction", process="discrete")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        losses.append(objective(model, batch, generator)["loss"])
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_samples_of_latents_are_decoded(cache: Path, run: Path, vae: Any) -> None:
    request = Request(run=str(run), num=5, sampler="dpm-solver", steps=3, guidance=0.4)
    images = generate(request, progress=False)
    assert images.pixels.shape == (5, 3, 16, 16)
    assert images.receipt["vae"] == read_card(cache).vae_hash
    model = anechoic.load(run)
    z, _ = sample_batch(
        model,
        torch.arange(5),
        shape=(4, 8, 8),
        process=process_named("vp"),
        sampler="dpm-solver",
        steps=3,
        seed=0,
        labels=torch.arange(5) % 4,
        guidance=Guidance(0.4),
        null=4,
    )
    expected = (vae.decode(z / 0.18215).sample / 2 + 0.5).mul(255).round().clamp(0, 255)
    assert (images.pixels.float() - expected).abs().max() <= 1


@pytest.mark.slow
def test_an_autoencoder_of_another_shape_or_scale_is_refused(run: Path, vae: Any, tmp_path: Path) -> None:
    for change, message in (({"scaling_factor": 0.5}, "scales by 0.5"), ({"latent_channels": 2}, "reads 2")):
        torch.manual_seed(1)
        type(vae).from_config({**vae.config, **change}).save_pretrained(tmp_path / message)
        with pytest.raises(UserError, match=message):
            generate(Request(run=str(run), num=1, steps=1, vae=str(tmp_path / message)), progress=False)


def test_latents_without_an_autoencoder_ask_for_one(run: Path) -> None:
    (run / "config.json").unlink()
    with pytest.raises(UserError, match="give --vae"):
        generate(Request(run=str(run), num=1, steps=1), progress=False)


@pytest.mark.slow
def test_images_reach_a_denoiser_of_latents_through_the_autoencoder(run: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", images=images, labels=np.arange(60) % 4)
    found = anechoic.evaluate(str(run), str(tmp_path / "pictures.npz"), metrics="probe", noise=(0.1,)).metrics
    assert [row["layer"] for row in found["rows"]] == [0, 1, 2, 3]


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_encode_latents_encodes_and_refuses_what_is_no_autoencoder(
    vae_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["--vae", str(vae_folder), "--image-size", "16", "--labels"]
    assert main(["tools", "encode-latents", "scenes:6", "--out", str(tmp_path / "out"), *options]) == 0
    assert "6 images and their mirror images" in capsys.readouterr().out
    assert read_card(tmp_path / "out").scale == 0.18215

    def mistake(*arguments: object) -> str:
        assert main(["tools", "encode-latents", "scenes:6", "--out", *map(str, arguments)]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "exists already" in mistake(tmp_path / "out", "--vae", vae_folder, "--image-size", 16)
    assert "multiple of 2" in mistake(tmp_path / "a", "--vae", vae_folder, "--image-size", 15)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in mistake(tmp_path / "a", "--vae", tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    assert "names 'UNet2DModel'" in mistake(tmp_path / "a", "--vae", tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    assert "No autoencoder could be loaded" in mistake(tmp_path / "a", "--vae", tmp_path / "empty")


@pytest.mark.slow
def test_another_scale_factor_is_refused(cache: Path, vae: Any) -> None:
    space = read_card(cache).space
    assert matching_scale(space, vae) == space.scale
    other = type(vae).from_config({**vae.config, "scaling_factor": 0.2301})
    with pytest.raises(UserError, match=r"scales by 0\.2301"):
        matching_scale(space, other)


@pytest.mark.slow
def test_damaged_caches_are_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory of latents"):
        read_card(tmp_path)
    card = json.loads((cache / "latents.json").read_text())
    (tmp_path / "latents.json").write_text(json.dumps(card))
    (tmp_path / "moments.f32").write_bytes(b"short")
    with pytest.raises(UserError, match="encode the latents again"):
        Latents(tmp_path)
    (tmp_path / "latents.json").write_text(json.dumps({**card, "format": "other"}))
    with pytest.raises(UserError, match="format 'other'"):
        read_card(tmp_path)
    with pytest.raises(UserError, match="set the image size to 8"):
        DrawLatents(1.0)(
            [torch.zeros(8, 8, 8)], image_size=32, generator=SampleGenerator(0, torch.zeros(1), torch.zeros(1))
        )


def test_missing_diffusers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"anechoic\[diffusion\]"):
        load_vae("somewhere")
