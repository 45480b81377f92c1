"""Our networks as other programs' files: each is opened by its program and compared on real images."""

import dataclasses
import json
import re

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from anechoic import build_model, embed
from anechoic.cli.export import check_images
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.runtime.checkpoint import load, model_card, write_model
from anechoic.weights.exporting import TARGETS, export_model, exported_network, largest_difference, with_final_norm
from anechoic.weights.importing import Choices, import_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

PREPROCESS = Preprocess((0.5,) * 3, (0.25,) * 3, 32, 3)
TINY = {"image_size": 32, "dim": 48, "depth": 2, "num_heads": 3}
DECODER = {"decoder_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2}
NETWORKS = {
    "decayed mae": ("mae_tiny_patch8", {**TINY, **DECODER, "alpha_min": 0.6}),
    "mae": ("mae_tiny_patch8", {**TINY, **DECODER, "skips": False}),
    "vit": ("vit_tiny_patch8", {**TINY, "alpha_min": 0.6, "positions": "learned", "qkv_bias": False}),
    "classifier": ("vit_tiny_patch8", {**TINY, "alpha_min": 0.6, "num_classes": 7}),
    "mean classifier": ("vit_tiny_patch8", {**TINY, "alpha_min": 0.6, "num_classes": 7, "pool": "mean", "norm": False}),
    "uvit": ("uvit_small", {**TINY, "num_heads": 4, "alpha_min": 0.6, "patch_size": 8}),
    "sit": ("sit_s_patch8", {**TINY, "in_channels": 3, "alpha_min": 0.8, "num_classes": 5, "skips": True}),
    "resnet": ("resnet18", {"image_size": 32, "width": 8, "num_classes": 5, "alpha_min": 0.7}),
}


def network(name):
    """As it comes out of a run: weights away from zero, in evaluation mode, knowing how images are prepared."""
    model_name, options = NETWORKS[name]
    torch.manual_seed(0)
    model = build_model(model_name, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.preprocess = PREPROCESS
    return exported_network(model.eval())


@pytest.fixture(scope="module")
def real_images():
    """Eight handwritten digits, prepared as the networks here want them."""
    return check_images(network("vit"), "digits")[0]


HEADED = ["decayed mae", "mae", "vit", "classifier", "mean classifier"]


@pytest.mark.parametrize("name", HEADED)
def test_timm_opens_what_was_exported(name, real_images, tmp_path):
    timm = pytest.importorskip("timm", reason="timm is what this test is about")
    model = network(name)
    exported = export_model(model, tmp_path / "out", to="timm", images=real_images)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    by_hand = timm.create_model(config["architecture"], **config["model_args"])
    by_hand.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    for each in (theirs, by_hand.eval()):
        compare(model, each if "classifier" in name else each.forward_features, each, exported, real_images, tmp_path)


@pytest.mark.parametrize("name", HEADED[:-1])
def test_transformers_opens_what_was_exported(name, real_images, tmp_path, caplog):
    transformers = pytest.importorskip("transformers", reason="transformers is what this test is about")
    model = network(name)
    exported = export_model(model, tmp_path / "out", to="transformers", images=real_images)
    if name == "classifier":
        theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
        compare(model, lambda x: theirs(x).logits, theirs, exported, real_images, tmp_path)
    else:
        theirs = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
        compare(model, lambda x: theirs(x).last_hidden_state, theirs, exported, real_images, tmp_path)
        with torch.no_grad():
            answer = theirs(real_images)
        torch.testing.assert_close(answer.pooler_output, answer.last_hidden_state[:, 0])
    assert "newly initialized" not in caplog.text


def compare(model, call, theirs, exported, images, tmp_path):
    """As it opens, the difference is what the export said; with an eps per norm it is rounding."""
    reference = with_final_norm(model)
    as_opened = largest_difference(reference, call, (images,))
    assert as_opened == pytest.approx(exported.differences["with one eps"], rel=0.1, abs=5e-6)
    for name, eps in json.loads((tmp_path / "out" / "norm_eps.json").read_text()).items():
        theirs.get_submodule(name).eps = eps
    assert largest_difference(reference, call, (images,)) < 1e-5
    assert exported.differences["with an eps per norm"] < 1e-5


@pytest.mark.parametrize("size", [(80, 60), (60, 44)])
def test_other_libraries_prepare_pictures_as_we_do(size, real_images, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is what this test is about")
    timm = pytest.importorskip("timm", reason="timm is what this test is about")
    model = network("vit")
    picture = Image.effect_noise(size, 80).resize(size, reducing_gap=None).convert("RGB")
    ours = model.preprocess(picture)
    for to in ("transformers", "timm"):
        export_model(model, tmp_path / to, to=to, images=real_images)
    image_processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "transformers")
    torch.testing.assert_close(image_processor(picture, return_tensors="pt")["pixel_values"], ours, rtol=0, atol=1e-5)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    config = timm.data.resolve_model_data_config(theirs)
    assert (config["crop_pct"], config["crop_mode"], config["interpolation"]) == (0.875, "center", "bicubic")


def test_one_eps_is_a_real_error_where_the_stream_is_small(real_images, tmp_path):
    """Small tokens at the end of a deep stream: there one eps for all norms is far off, and the export reports it."""
    model = build_model("vit_tiny_patch8", **{**TINY, "depth": 12}, alpha_min=0.6, zero_init=True)
    model.preprocess = PREPROCESS
    model.eval()
    exported = export_model(model, tmp_path / "out", to="timm", images=real_images)
    assert exported.differences["with one eps"] > 1e-4 > 1e-5 > exported.differences["with an eps per norm"]
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"{exported.differences['with one eps']:.2g} as it opens" in text


@pytest.mark.parametrize("to", ["timm", "transformers"])
@pytest.mark.parametrize("name", HEADED)
def test_readme_code_reproduces_the_network_and_the_vector_of_embed(name, to, real_images, tmp_path):
    pytest.importorskip(to, reason=f"{to} is what this test is about")
    if (name, to) == ("mean classifier", "transformers"):
        pytest.skip("transformers has no such network")
    model = network(name)
    export_model(model, tmp_path / "out", to=to, images=real_images)
    text = (tmp_path / "out" / "README.md").read_text().replace("FOLDER", str(tmp_path / "out"))
    opening, *setting, embedding = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    pictures = [Image.effect_noise((40, 32), 80).convert("RGB") for _ in range(2)]
    names = {"images": torch.cat([model.preprocess(picture) for picture in pictures])}
    exec(opening + "".join(setting) + opening.splitlines()[-1], names)
    result = names["logits" if "classifier" in name else "tokens"]
    torch.testing.assert_close(result, with_final_norm(model)(names["images"]), atol=1e-5, rtol=0)
    assert 1 <= len(embedding.strip().splitlines()[2:]) <= 3
    exec(embedding, names)
    run = write_model(tmp_path / "own", model.state_dict(), model_card(model, model.preprocess))
    torch.testing.assert_close(names["vector"], torch.tensor(embed(run, pictures)), atol=1e-5, rtol=1e-5)


def test_export_of_a_plain_network_does_not_mention_folding(real_images, tmp_path):
    exported = export_model(network("mae"), tmp_path / "out", to="timm", images=real_images)
    # timm embeds patches by a convolution and we by a product, which round alike only on some CPUs.
    assert max(exported.differences.values()) < 1e-5
    assert "fold" not in (tmp_path / "out" / "README.md").read_text()


def test_a_hub_folder_holds_both_networks(real_images, tmp_path):
    model = network("decayed mae")
    export_model(model, tmp_path / "out", to="hub-folder", images=real_images)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "AutoModel.from_pretrained" in card
    assert largest_difference(model, load(tmp_path / "out" / "anechoic"), (real_images,)) == 0


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("mae", "vit")])
@pytest.mark.slow
def test_torch_export_and_safetensors_round_trips(name, real_images, tmp_path):
    model = network(name)
    for to in ("torch-export", "safetensors"):
        exported = export_model(model, tmp_path / to, to=to, images=real_images)
        assert exported.differences["reloaded"] < 1e-5
    again = torch.export.load(tmp_path / "torch-export" / "model.pt2").module()
    if name == "decayed mae":
        torch.testing.assert_close(again(real_images[:1]), model(real_images[:1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["decayed mae", "sit"])
@pytest.mark.slow
def test_onnx_runs_with_any_batch(name, real_images, tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is what this test is about")
    exported = export_model(network(name), tmp_path / "out", to="onnx", images=real_images)
    assert len(exported.differences) == 2
    assert max(exported.differences.values()) < 1e-5


@pytest.mark.slow
def test_photographs_agree_in_every_format(shared_data, tmp_path):
    model = network("decayed mae")
    images, _ = check_images(model, str(shared_data / "imagenette" / "val"))
    for to in ("timm", "safetensors", "torch-export", "onnx"):
        differences = export_model(model, tmp_path / to, to=to, images=images).differences
        assert all(value < 1e-5 for what, value in differences.items() if what != "with one eps")


def test_onnx_without_the_extra_names_the_packages(real_images, tmp_path, monkeypatch):
    import anechoic.weights.exporting as exporting

    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(UserError, match=r'needs onnxruntime: pip install "anechoic\[export\]"'):
        export_model(network("mae"), tmp_path / "out", to="onnx", images=real_images)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["timm", "transformers", "hub-folder"])
def test_networks_without_a_counterpart_are_refused(to, real_images, tmp_path):
    with pytest.raises(UserError, match="no counterpart of ResNet"):
        export_model(network("resnet"), tmp_path / "out", to=to, images=real_images)
    for options, times in (({"pool": "mean"}, "twice"), ({"norm": False}, "never")):
        odd = build_model("vit_tiny_patch8", **TINY, num_classes=7, **options)
        odd.preprocess = PREPROCESS
        with pytest.raises(UserError, match=f"normalize once before they classify, and this network {times}"):
            export_model(odd, tmp_path / "out", to=to, images=real_images)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(real_images, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        export_model(network("mae"), tmp_path, to="safetensors", images=real_images)
    assert set(TARGETS) == {"timm", "transformers", "hub-folder", "safetensors", "onnx", "torch-export"}


def test_export_to_timm_and_import_again_is_the_folded_network(real_images, tmp_path):
    model = network("vit")
    export_model(model, tmp_path / "out", to="timm", images=real_images)
    again = import_checkpoint(tmp_path / "out", Choices()).network
    eps = tuple(json.loads((tmp_path / "out" / "norm_eps.json").read_text()).values())
    exact = build_model("vit_tiny_patch8", **{**dataclasses.asdict(again.config), "norm_eps": eps})
    exact.load_state_dict(again.state_dict())
    assert largest_difference(model, exact.eval(), (real_images,)) < 1e-5


def test_a_run_directory_of_a_folded_network_keeps_its_eps(real_images, tmp_path):
    from anechoic import fold

    model = network("vit")
    folded = fold(model)
    write_model(tmp_path / "model", folded.state_dict(), model_card(folded, PREPROCESS))
    assert largest_difference(model, load(tmp_path), (real_images,)) < 1e-5
