"""The commands export and import as a user types them."""

import json

import pytest
import torch

from anechoic import build_model
from anechoic.cli.main import main
from anechoic.data.preprocess import Preprocess
from anechoic.runtime.checkpoint import load, model_card, write_model

TINY = {"image_size": 16, "patch_size": 4, "dim": 48, "depth": 2, "num_heads": 3}
DECODER = {"decoder_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    mae = build_model("mae_tiny_patch4", **TINY, **DECODER, alpha_min=0.6)
    with torch.no_grad():
        for parameter in mae.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("run")
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3, 16, 3)
    write_model(folder / "model", mae.state_dict(), model_card(mae, preprocess))
    return folder


def say(capsys, *arguments):
    """(exit code, what was printed)"""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_export_prints_what_it_measured(run, tmp_path, capsys):
    code, text = say(capsys, "export", run, "--to", "timm", "--out", tmp_path / "out")
    assert code == 0
    assert "with an eps per norm" in text
    assert "with one eps" in text
    assert "README.md shows how to set each" in text
    code, text = say(capsys, "export", run, "--to", "safetensors", "--out", tmp_path / "folded", "--fold", "--json")
    metrics = json.loads(text)["metrics"]
    assert metrics == {
        "differences": {"reloaded": 0.0},
        "compared": "anechoic.load opened it",
        "files": ["config.json", "model.safetensors"],
    }
    original, folded = load(run).encoder, load(tmp_path / "folded")
    assert folded.config.alpha_min == 1
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(folded(images), original(images), atol=1e-5, rtol=1e-5)


def test_export_compares_on_the_images_it_is_given(run, tmp_path, capsys):
    from PIL import Image

    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(3):
        Image.new("RGB", (20, 24), (40 * i, 80, 120)).save(folder / f"{i}.png")
    arguments = ("export", run, "--to", "torch-export", "--out", tmp_path / "out", "--check", folder)
    code, text = say(capsys, *arguments)
    assert code == 0
    assert f"on 3 images ({folder})" in text


def test_import_reports_what_it_read(run, tmp_path, capsys):
    say(capsys, "export", run, "--to", "timm", "--out", tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    code, text = say(capsys, "import", weights, "--out", tmp_path / "in", "--num-heads", 3)
    assert code == 0
    assert "is a ViT: 29 tensors" in text
    assert "none missing or unexpected" in text
    assert "no copy of it: pos_embed" in text
    vit = load(tmp_path / "in")
    assert (vit.config.positions, vit.config.depth, vit.preprocess.image_size) == ("sincos", 2, 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "{run}", "--to", "timm", "--out", "{run}"], "exists already"),
        (["export", "{tmp}/absent", "--to", "timm", "--out", "{tmp}/out"], "no run or model directory"),
        (["export", "timm:vit_tiny_patch16_224", "--to", "timm", "--out", "{tmp}/out"], "`anechoic import` writes one"),
        (["export", "{run}", "--to", "onnx", "--out", "{tmp}/out", "--check", "{tmp}/absent"], "There is no data"),
        (["import", "{tmp}/absent.pth", "--out", "{tmp}/out"], "There is no checkpoint"),
        (["import", "{run}/model/model.safetensors", "--out", "{tmp}/out"], "no known architecture"),
        (["import", "{run}/model/model.safetensors", "--out", "{run}"], "exists already"),
    ],
)
def test_mistakes_get_one_sentence_and_code_2(arguments, sentence, run, tmp_path, capsys):
    code, text = say(capsys, *[argument.format(run=run, tmp=tmp_path) for argument in arguments])
    assert code == 2
    assert sentence in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


def test_latents_are_drawn_for_networks_of_latents(tmp_path, capsys):
    sit = build_model("sit_s_patch2", **{**TINY, "image_size": 8, "patch_size": 2}, num_classes=5)
    preprocess = Preprocess((0.0,) * 4, (1.0,) * 4, 8, 4)
    write_model(tmp_path / "run" / "model", sit.state_dict(), model_card(sit, preprocess))
    code, text = say(capsys, "export", tmp_path / "run", "--to", "safetensors", "--out", tmp_path / "out")
    assert (code, "on 4 images (drawn latents)" in text) == (0, True)
    arguments = ("export", tmp_path / "run", "--to", "safetensors", "--out", tmp_path / "again", "--check", "digits")
    code, text = say(capsys, *arguments)
    assert (code, "omit --check" in text) == (2, True)
