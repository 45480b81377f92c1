"""A model in Python: vectors of anything in one call, what prepares images, and outcomes that show themselves."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from zoo import make

import anechoic
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval.embedding import Vectors
from anechoic.outcome import Outcome
from anechoic.runtime.checkpoint import model_card, write_model

PREPROCESS = Preprocess((0.5, 0.4, 0.3), (0.25, 0.2, 0.3), 16, 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model directory and a folder of five PNGs of several sizes."""
    folder = tmp_path_factory.mktemp("embedding")
    model = make("mae", alpha_min=0.7)
    write_model(folder / "model", model.state_dict(), model_card(model, PREPROCESS))
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i, (height, width) in enumerate([(16, 16), (20, 30), (40, 24), (16, 64), (18, 18)]):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / "photos" / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def model(place):
    return anechoic.load(place / "model")


@pytest.fixture(scope="module")
def expected(place, model):
    return model.embed(place / "photos")


def test_a_folder_is_embedded_as_the_command_does(place, expected, tmp_path):
    anechoic.embed(str(place / "model"), str(place / "photos"), out=str(tmp_path / "v.npz"))
    with np.load(tmp_path / "v.npz") as written:
        np.testing.assert_array_equal(written["features"], expected)
        assert expected.names == tuple(written["names"])
    assert isinstance(expected, Vectors)
    assert expected.shape == (5, 48)
    assert expected.dtype == np.float32


def test_every_kind_of_image_has_the_same_vectors(place, model, expected):
    paths = sorted((place / "photos").glob("*.png"))
    pictures = [Image.open(path) for path in paths]
    arrays = [np.asarray(picture) for picture in pictures]
    kinds = {
        "paths": paths,
        "text": list(map(str, paths)),
        "Pillow": pictures,
        "arrays": arrays,
        "tensors": [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays],
        "float tensors": [torch.from_numpy(array.copy()).permute(2, 0, 1) / 255 for array in arrays],
    }
    for name, images in kinds.items():
        np.testing.assert_allclose(model.embed(images), expected, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(model.embed(pictures[1]), expected[1:2], atol=1e-6)
    np.testing.assert_allclose(model.embed(str(paths[2])), expected[2:3], atol=1e-6)
    stacked = np.stack([arrays[0], arrays[0]])
    np.testing.assert_allclose(model.embed(stacked), expected[[0, 0]], atol=1e-6)
    np.testing.assert_allclose(model.embed(torch.from_numpy(stacked).permute(0, 3, 1, 2)), expected[[0, 0]], atol=1e-6)


def test_layers_and_poolings_are_chosen(place, model):
    first, mean = model.embed(place / "photos", layer=0, pooling="mean"), model.embed(place / "photos", pooling="mean")
    assert not np.allclose(first, mean)
    with pytest.raises(UserError, match="no layer 9"):
        model.embed(place / "photos", layer=9)


def test_vectors_are_an_array_with_names(expected):
    assert (expected @ expected.T).shape == (5, 5)
    assert expected[:2].names == ()
    assert (expected * 2).names == ()
    assert expected.names[0] == "0.png"


def test_what_is_no_image_is_refused(place, model):
    for wrong, words in (
        (np.full((4, 4), 7, np.float32), "float32 up to 7: convert it"),
        (np.zeros((4, 4, 7), np.uint8), "takes images of 3 channels and this one has 7"),
        (5, "int is no image"),
        ([], "no image in the list"),
        ([np.zeros((4, 4, 3), np.uint8), "x.png"], "mixes paths with images"),
        (str(place / "photos" / "nowhere.png"), "There is no data"),
    ):
        with pytest.raises(UserError, match=words):
            model.embed(wrong)
    with pytest.raises(UserError, match=r"anechoic\.load"):
        anechoic.build_model("vit_tiny_patch4", dim=48, depth=1, num_heads=3, image_size=16).embed("digits")


def test_unreadable_image_is_refused_if_named_and_skipped_otherwise(place, model, tmp_path):
    for i in range(20):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / f"{i:02d}.png")
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"1 image could not be read; the first is bad\.png"):
        found = model.embed(tmp_path)
    assert len(found) == 20
    assert found.skipped[0][0] == "bad.png"
    with pytest.raises(UserError, match=r"bad\.png"):
        model.embed([tmp_path / "00.png", tmp_path / "bad.png"])


def test_a_loaded_model_can_still_be_copied_and_pickled(place, model, expected):
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.embed(place / "photos"), expected)


def test_an_encoder_of_another_library_embeds_too(place):
    pytest.importorskip("timm")
    encoder = anechoic.load("timm:vit_tiny_patch16_224:random")
    assert encoder.embed(place / "photos" / "0.png").shape == (1, 192)
    assert encoder.preprocess.image_size == 224


# ---- preprocess


def test_preprocess_prepares_what_the_network_is_given(place, model):
    paths = sorted((place / "photos").glob("*.png"))
    batch = model.preprocess([Image.open(path) for path in paths])
    assert batch.shape == (5, 3, 16, 16)
    with torch.inference_mode():
        tokens = model.encoder(batch)
    np.testing.assert_allclose(tokens[:, 0], model.embed(paths, pooling="class"), atol=1e-5)
    small = np.asarray(Image.open(paths[0]))
    reference = (small / 255 - np.array(PREPROCESS.mean)) / np.array(PREPROCESS.std)
    np.testing.assert_allclose(model.preprocess(small)[0].permute(1, 2, 0), reference, atol=1e-5)
    floats = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.preprocess(floats), floats)


def test_preprocess_describes_itself(model):
    text = str(model.preprocess)
    for word in ("shorter side to 18", "center 16 x 16", "minus (0.5, 0.4, 0.3)", "divided by (0.25, 0.2, 0.3)"):
        assert word in text
    assert "Preprocess(mean=(0.5, 0.4, 0.3)" in repr(model.preprocess)


def test_transparency_is_laid_on_white_as_in_files(model, tmp_path):
    picture = Image.new("RGBA", (16, 16), (255, 0, 0, 128))
    picture.save(tmp_path / "half.png")
    np.testing.assert_array_equal(model.embed(picture), model.embed(tmp_path / "half.png"))


# ---- outcomes


def outcome(**metrics):
    return Outcome(config={}, metrics=metrics, text="a table\n-------")


def test_an_outcome_shows_its_table():
    found = outcome(rows=[{"encoder": "<mine>", "accuracy": {"10": 0.123456}}, {"encoder": "other", "accuracy": {}}])
    assert repr(found) == "a table\n-------"
    html = found._repr_html_()
    assert "&lt;mine&gt;" in html
    assert "<th>accuracy.10</th>" in html
    assert "0.1235" in html
    assert repr(Outcome(config={}, metrics={"x": 1})) == "Outcome(metrics={'x': 1})"
    assert outcome(x=1)._repr_html_() == "<pre>a table\n-------</pre>"


def test_an_outcome_becomes_a_frame():
    pytest.importorskip("pandas")
    frame = outcome(rows=[{"k": 1, "accuracy": {"10": 0.5}}, {"k": 2, "accuracy": {"10": 0.6}}]).to_frame()
    assert list(frame.columns) == ["k", "accuracy.10"]
    assert frame["accuracy.10"].tolist() == [0.5, 0.6]
    assert outcome(x=1, y={"z": 2}).to_frame().iloc[0].to_dict() == {"x": 1, "y.z": 2}


def test_without_pandas_a_frame_names_it(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install pandas"):
        outcome(x=1).to_frame()


def test_figures_are_objects(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "layers.png")
    (tmp_path / "layers.svg").write_text("<svg/>")
    found = outcome(figures=[str(tmp_path / "layers.png"), str(tmp_path / "layers.svg")])
    assert list(found.figures) == ["layers"]
    assert found.figures["layers"]._repr_png_().startswith(b"\x89PNG")
    assert "data:image/png;base64," in found._repr_html_()


def test_every_bar_works_in_a_notebook():
    """tqdm.auto draws a widget there; the plain one draws nothing, because stderr is no terminal."""
    from pathlib import Path

    for path in Path(anechoic.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert "from tqdm import" not in text, path
        assert "isatty()" not in text or path.name in ("sweep.py",), path


# ---- damaged weights


def damaged(place, folder, value):
    """The model with one weight of its last block changed, or with all weights zero."""
    model = make("mae", alpha_min=0.7)
    with torch.no_grad():
        for weight in model.parameters() if value == 0 else [model.encoder.blocks[-1].attn.proj.bias]:
            weight.fill_(value)
    return write_model(folder / "model", model.state_dict(), model_card(model, PREPROCESS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused_with_their_layer(place, tmp_path, value):
    path = damaged(place, tmp_path, value)
    layers = len(make("mae").encoder.blocks)
    with pytest.raises(UserError, match=rf"features of layer {layers} \(class\) contain NaN or infinity"):
        anechoic.embed(str(path), str(place / "photos"), out=tmp_path / "v.npz")
    assert not (tmp_path / "v.npz").exists()
    with pytest.raises(UserError, match=f"features of layer {layers}"):
        anechoic.load(path).embed(place / "photos")
    assert np.isfinite(anechoic.load(path).embed(place / "photos", layer=0, pooling="mean")).all()


def test_constant_features_are_warned_about(place, tmp_path):
    path = damaged(place, tmp_path, 0)
    with pytest.warns(UserWarning, match="are the same for all 5 images"):
        anechoic.embed(str(path), str(place / "photos"), out=tmp_path / "v.npz")
    with pytest.warns(UserWarning, match="are the same for all 5 images"):
        anechoic.load(path).embed(place / "photos")
