"""A command opens its data once and loads its network once."""

import numpy as np
import pytest
from PIL import Image
from zoo import make

import anechoic
from anechoic import data
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion import generate
from anechoic.runtime.checkpoint import model_card, write_model

TINY = {"dim": 24, "depth": 2, "num_heads": 2, "decoder_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / "ab"[i % 2] / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = make("vit")
    folder = tmp_path_factory.mktemp("run") / "model"
    return write_model(folder, model.state_dict(), model_card(model, Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3)))


@pytest.fixture
def opened(monkeypatch):
    """The data that was opened, in order."""
    found = []
    really = data._open

    def count(source, **options):
        found.append(str(source))
        return really(source, **options)

    monkeypatch.setattr(data, "_open", count)
    return found


def test_pretrain_opens_its_folder_once(photos, opened, tmp_path):
    options = {"image_size": 16, "model": "mae_tiny_patch4", "model_options": TINY, "epochs": 1, "batch_size": 16}
    found = anechoic.pretrain(photos, out=tmp_path / "run", devices=1, **options)
    assert "verdict" in found.metrics
    assert opened == [str(photos)]


@pytest.mark.parametrize(
    "command",
    [
        lambda run, photos, folder: anechoic.embed(run, photos, out=folder / "v.npz"),
        lambda run, photos, folder: anechoic.search(run, photos, ["0"]),
        lambda run, photos, folder: anechoic.explore(run, photos, out=folder / "page.html"),
        lambda run, photos, folder: anechoic.evaluate(run, photos, metrics=["knn", "rank"]),
    ],
    ids=["embed", "search", "explore", "evaluate"],
)
def test_command_opens_its_folder_once(command, run, photos, opened, tmp_path):
    command(run, photos, tmp_path)
    assert opened == [str(photos)]


def test_sample_loads_its_network_once(tmp_path, monkeypatch):
    model = anechoic.build_model("uvit_small", image_size=8, in_channels=1, dim=24, depth=2, num_heads=2)
    card = model_card(model, Preprocess((0.5,), (0.5,), 8, 1))
    folder = write_model(tmp_path / "model", model.state_dict(), card)
    loaded = []
    really = generate.load
    monkeypatch.setattr(generate, "load", lambda path, **options: loaded.append(path) or really(path, **options))
    anechoic.sample(folder, num=2, steps=1, out=tmp_path / "made.npz")
    assert len(loaded) == 1


def test_finetune_opens_its_folders_once(run, photos, opened, tmp_path):
    anechoic.finetune(run, photos, test=photos, out=tmp_path / "run", epochs=1, batch_size=16, devices=1)
    assert opened == [str(photos)] * 2  # the train and the test data
