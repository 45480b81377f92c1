"""From training to images to scores on tiny models: the commands sample and frechet, and probes at noise levels."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import anechoic
from anechoic.cli.main import main
from anechoic.config import Config, OptimConfig, SaveConfig, ValidationConfig
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.generate import Request, generate, training_config, write_images
from anechoic.diffusion.process import drop_labels
from anechoic.errors import UserError
from anechoic.recipes.diffusion import (
    RECIPES,
    pocket_sit_digits_cond,
    pocket_uvit_digits,
    pocket_uvit_digits_cond,
)
from anechoic.rng import SampleGenerator
from anechoic.training.loop import fit
from anechoic.training.objectives import make_objective

TINY = {"dim": 16, "depth": 2, "num_heads": 2}


def tiny(config: Config, *, updates: int = 4) -> Config:
    """A recipe cut to a few updates of a tiny network."""
    return replace(
        config,
        model=replace(config.model, options={**config.model.options, **TINY}),
        optim=OptimConfig(batch_size=16, samples=16 * updates, lr=1e-3, ema=0.9),
        validation=ValidationConfig(every=16 * updates, report=16),
        save=SaveConfig(every=32, keep_last=9),
        threads=1,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three trained runs: unconditional, class-conditional, and a class-conditional flow."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {"plain": pocket_uvit_digits(), "cond": pocket_uvit_digits_cond(), "flow": pocket_sit_digits_cond()}
    for name, config in configs.items():
        fit(tiny(config), folder / name)
    return {name: folder / name for name in configs}


def failure(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The one sentence of a user's mistake."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("anechoic: ")
    return error


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_every_recipe_builds_its_model_and_states_its_cost(recipe) -> None:  # type: ignore[no-untyped-def]
    config = recipe()
    make_objective(config.objective.name, **config.objective.options)
    with torch.device("meta"):
        model = anechoic.build_model(
            config.model.name,
            image_size=config.data.image_size,
            in_channels=config.data.channels,
            alpha_min=config.shortcut.alpha_min,
            **config.model.options,
        )
    assert (model.config.num_classes is None) or config.data.labels
    assert {"Command:", "Cost:", "Expect:"} <= set(recipe.__doc__.split())
    assert f"anechoic train {recipe.__name__} " in recipe.__doc__


def test_the_paper_is_there_at_all_its_values_of_alpha() -> None:
    for base in ("uvit_cifar100", "uvit_in100_latent", "uvit_in100_latent_cond", "sit_xl_in1k_latent"):
        variants = [f for f in RECIPES if f.__name__ in (base, *(f"{base}_{s}" for s in SUFFIXES))]
        assert sorted(f().shortcut.alpha_min for f in variants) == [0.6, 0.7, 0.8, 1.0]
        assert len({json.dumps(anechoic.config.to_json(without_alpha(f())), sort_keys=True) for f in variants}) == 1


SUFFIXES = ("residual", "alpha06", "alpha07", "alpha08")


def without_alpha(config: Config) -> Config:
    return replace(config, shortcut=Config().shortcut)


@pytest.mark.parametrize(("name", "options"), [("noise_prediction", {"process": "vp"}), ("flow_matching", {})])
def test_loss_is_the_error_at_the_samples_own_time_and_noise(name: str, options: dict) -> None:
    """The prediction of zero costs the mean square of the target, which is known from the samples' draws."""

    class Zero(torch.nn.Module):
        config = anechoic.build_model("uvit_small", **TINY).config

        def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
            self.x, self.t, self.labels = x, t, labels
            return torch.zeros_like(x)

    generator = SampleGenerator(3, torch.arange(5), torch.zeros(5, dtype=torch.long))
    images, noise, u = torch.rand(5, 3, 4, 4), generator.normal("noise", 3, 4, 4), generator.uniform("time")
    model = Zero()
    batch = type("Batch", (), {"images": images, "labels": torch.arange(5)})
    loss = make_objective(name, **options)(model, batch, generator)["loss"]
    assert model.labels is None  # the model is unconditional
    time = u[:, None, None, None]
    if name == "flow_matching":
        torch.testing.assert_close(loss, (images - noise).square().mean())
        torch.testing.assert_close(model.x, time * images + (1 - time) * noise)
        torch.testing.assert_close(model.t, u)
    else:
        abar = torch.exp(-(0.1 * time + 9.95 * time**2))
        torch.testing.assert_close(loss, noise.square().mean())
        torch.testing.assert_close(model.x, abar.sqrt() * images + (1 - abar).sqrt() * noise, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.t, 999 * u)


def test_labels_are_dropped_as_often_as_asked_and_per_sample() -> None:
    ids = torch.arange(20_000)
    generator = SampleGenerator(0, ids, torch.zeros_like(ids))
    kept = drop_labels(ids % 10, generator, probability=0.15, null=10)
    assert 0.14 < (kept == 10).float().mean() < 0.16
    assert torch.equal(kept[kept != 10], (ids % 10)[kept != 10])
    part = SampleGenerator(0, ids[7:9], torch.zeros(2, dtype=torch.long))
    assert torch.equal(drop_labels(ids[7:9] % 10, part, probability=0.15, null=10), kept[7:9])


def test_a_conditional_model_refuses_data_without_labels(tmp_path: Path) -> None:
    config = tiny(pocket_uvit_digits_cond())
    with pytest.raises(UserError, match=r"data\.labels"):
        fit(replace(config, data=replace(config.data, labels=False)), tmp_path / "run")


def test_noise_prediction_names_the_other_objective_for_flows() -> None:
    with pytest.raises(UserError, match="flow_matching"):
        make_objective("noise_prediction", process="flow")


@pytest.mark.parametrize("name", ["cond", "flow"])
def test_a_run_goes_on_bit_for_bit_average_included(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    """What a kill after the first checkpoint leaves behind, and the same command again."""
    whole = runs[name]
    first, last = (sorted((whole / "checkpoints").iterdir())[place] for place in (0, -1))
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(first, tmp_path / "checkpoints" / first.name)
    for file in ("config.json", "metrics.jsonl"):
        shutil.copy(whole / file, tmp_path)
    base = {"cond": pocket_uvit_digits_cond, "flow": pocket_sit_digits_cond}[name]
    fit(tiny(base()), tmp_path)
    assert first != last
    for file in ("model", "ema", "optimizer"):
        before, after = (
            load_file(run / "checkpoints" / last.name / f"{file}.safetensors") for run in (whole, tmp_path)
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), file


@pytest.mark.slow
def test_two_processes_train_as_one(runs: dict[str, Path], tmp_path: Path) -> None:
    fit(replace(tiny(pocket_uvit_digits_cond()), devices=2), tmp_path / "two")
    one, two = (load_file(run / "model" / "model.safetensors") for run in (runs["cond"], tmp_path / "two"))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-5)


# ---- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sampler"),
    [("plain", None), ("plain", "euler-maruyama"), ("cond", "dpm-solver++"), ("flow", None), ("flow", "sde")],
)
def test_batches_do_not_change_images(runs: dict[str, Path], name: str, sampler: str | None) -> None:
    request = Request(run=str(runs[name]), num=7, sampler=sampler, steps=6, seed=2)
    whole, parts = (generate(replace(request, batch_size=size), progress=False) for size in (7, 3))
    # Equal to rounding before they become bytes, so at most a byte's step apart.
    assert (whole.pixels.int() - parts.pixels.int()).abs().max() <= 1
    assert whole.receipt == parts.receipt
    other = generate(replace(request, seed=3), progress=False)
    assert not torch.equal(whole.pixels, other.pixels)


@pytest.mark.slow
def test_two_processes_make_the_same_images_as_one(runs: dict[str, Path]) -> None:
    request = Request(run=str(runs["cond"]), num=5, steps=4)
    one, two = generate(request, progress=False), generate(request, devices=2, progress=False)
    assert (one.pixels.int() - two.pixels.int()).abs().max() <= 1
    assert one.labels.tolist() == two.labels.tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    assert one.receipt == two.receipt


def test_guidance_of_both_conventions_is_the_same_image(runs: dict[str, Path], tmp_path: Path) -> None:
    from anechoic.runtime.checkpoint import model_card, write_model

    # After a few updates labels hardly matter yet; random weights make them.
    torch.manual_seed(0)
    model = anechoic.load(runs["flow"])
    weights = {
        name: torch.randn_like(value) * 0.3 if name != "alphas" else value for name, value in model.state_dict().items()
    }
    write_model(tmp_path / "random", weights, model_card(model, model.preprocess))
    base = Request(run=str(tmp_path / "random"), num=3, steps=4)
    added = generate(replace(base, guidance=1.5), progress=False)
    scaled = generate(replace(base, guidance=2.5, convention="scaled"), progress=False)
    none = generate(replace(base, guidance=0.0), progress=False)
    assert (added.pixels.int() - scaled.pixels.int()).abs().max() <= 1
    assert torch.equal(none.pixels, generate(base, progress=False).pixels)
    assert not torch.equal(none.pixels, added.pixels)


def test_a_picture_holds_every_image(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    found = anechoic.sample(runs["cond"], num=20, steps=2, out=out, batch_size=20)
    pixels = generate(Request(run=str(runs["cond"]), num=20, steps=2), progress=False).pixels
    picture = np.asarray(Image.open(out))
    assert picture.shape == (2 * 52 + 4, 10 * 52 + 4)  # a row of ten classes, 8-pixel images sixfold
    assert np.array_equal(picture[4 + 52 : 52 + 52 : 6, 4 + 52 : 52 + 52 : 6], pixels[11, 0].numpy())
    assert found.metrics["evaluations"] == 2


def test_arrays_and_folders_carry_labels_and_a_receipt(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = {"num": 4, "steps": 2, "classes": (3, 5), "seed": 9}
    anechoic.sample(runs["cond"], out=tmp_path / "s.npz", **arguments)
    anechoic.sample(runs["cond"], out=tmp_path / "folder", **arguments)
    with np.load(tmp_path / "s.npz") as arrays:
        assert arrays["images"].shape == (4, 8, 8, 1)
        assert arrays["labels"].tolist() == [3, 5, 3, 5]
        receipt = json.loads(str(arrays["receipt"]))
        first = arrays["images"][0, :, :, 0]
    assert (receipt["seed"], receipt["ema"], receipt["sampler"], receipt["steps"]) == (9, True, "dpm-solver", 2)
    assert receipt == json.loads((tmp_path / "folder" / "receipt.json").read_text())
    assert np.array_equal(np.asarray(Image.open(tmp_path / "folder" / "3" / "000000.png")), first)
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["3", "5", "receipt.json"]


@pytest.mark.parametrize("out", ["images.jpg", "full", "folder.png"])
def test_a_place_where_images_cannot_go_is_refused_before_any_is_made(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("anechoic.diffusion.generate.generate", lambda *_, **__: pytest.fail("images were made"))
    with pytest.raises(UserError, match=r"choose another|cannot be written"):
        anechoic.sample(runs["plain"], out=tmp_path / out, num=2, steps=2)


@pytest.mark.parametrize("out", ["images", "images.png", "images.npz"])
def test_images_are_written_whole_or_not_at_all(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    images = generate(Request(run=str(runs["cond"]), num=4, steps=2), progress=False)
    write_images(images, tmp_path / "deep" / out)
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {out}

    def broken(self: object, file: Path | str, *_: object, **__: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", broken)
    monkeypatch.setattr(np, "savez", lambda file, **_: broken(None, file.name))
    with pytest.raises(OSError, match="disk full"):
        write_images(images, tmp_path / "later" / out)
    assert not list((tmp_path / "later").iterdir())


def test_averaged_weights_are_the_ones_used(runs: dict[str, Path]) -> None:
    last = sorted((runs["plain"] / "checkpoints").iterdir())[-1]
    averaged, loaded = load_file(last / "ema.safetensors"), anechoic.load(runs["plain"]).state_dict()
    assert all(torch.equal(averaged[key], loaded[key]) for key in averaged)


def test_untrained_weights_are_other_weights_and_always_the_same(runs: dict[str, Path]) -> None:
    request = Request(run=str(runs["flow"]), num=2, steps=2)
    trained, fresh, again = (
        generate(replace(request, untrained=untrained), progress=False) for untrained in (False, True, True)
    )
    assert trained.receipt["weights"] != fresh.receipt["weights"]
    assert torch.equal(fresh.pixels, again.pixels)
    # Gates and predictor of a fresh SiT are zero, so it leaves the starting noise as it is.
    noise = SampleGenerator(0, torch.arange(2), torch.zeros(2, dtype=torch.long)).normal("start", 1, 8, 8)
    assert torch.equal(fresh.pixels, (255 * (noise * 0.5 + 0.5)).round().clamp(0, 255).byte())


def test_the_process_is_found_from_anywhere_in_a_run(runs: dict[str, Path]) -> None:
    last = sorted((runs["flow"] / "checkpoints").iterdir())[-1]
    for path in (runs["flow"], runs["flow"] / "model", last):
        assert training_config(path)["objective"]["name"] == "flow_matching"


def test_sampling_mistakes_are_one_sentence(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plain, cond, flow, out = runs["plain"], runs["cond"], runs["flow"], ["--out", tmp_path / "x.png"]
    assert "unconditional" in failure(capsys, "sample", plain, "--guidance", 2, *out)
    assert "unconditional" in failure(capsys, "sample", plain, "--classes", 1, *out)
    assert "no class 10: this model knows 0 to 9" in failure(capsys, "sample", cond, "--classes", 3, 10, *out)
    assert "at least 1 step" in failure(capsys, "sample", plain, "--steps", 0, *out)
    assert "choose one of heun" in failure(capsys, "sample", flow, "--sampler", "dpm-solver", *out)
    assert "at least 1" in failure(capsys, "sample", plain, "--num", 0, *out)
    assert "1 to 2 devices" in failure(capsys, "sample", plain, "--num", 2, "--devices", 3, *out)
    assert "cannot be written as .jpg" in failure(capsys, "sample", plain, "--steps", 1, "--out", tmp_path / "x.jpg")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert "not empty" in failure(capsys, "sample", plain, "--steps", 1, "--out", tmp_path / "full")
    assert "no run or model directory" in failure(capsys, "sample", tmp_path / "absent", *out)


def test_other_networks_make_no_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from anechoic.runtime.checkpoint import model_card, write_model

    vit = anechoic.build_model("vit_tiny_patch4", image_size=8, **TINY)
    write_model(tmp_path / "vit", vit.state_dict(), model_card(vit, Preprocess((0.5,) * 3, (0.5,) * 3, 8, 3)))
    assert "only U-ViT and SiT" in failure(capsys, "sample", tmp_path / "vit")


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_digits_score_well_and_noise_badly(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", images=noise)
    saved = tmp_path / "train.npz"
    real = anechoic.frechet("digits:test", "digits:train", extractor="digits", save_reference=saved).metrics
    bad = anechoic.frechet(str(tmp_path / "noise.npz"), str(saved), extractor="digits").metrics
    assert real["classifier_accuracy_on_real_digits"] > 0.97
    assert real["classes_seen"] == 10
    assert 20 * real["fd-digits"] < bad["fd-digits"]
    assert real["precision"] > 0.8 > 0.1 > bad["precision"]
    same = anechoic.frechet(str(saved), str(saved), extractor="digits").metrics
    assert abs(same["fd-digits"]) < 1e-3


def test_a_score_comes_with_its_receipt(runs: dict[str, Path], tmp_path: Path) -> None:
    anechoic.sample(runs["cond"], out=tmp_path / "s.npz", num=130, steps=2, guidance=0.5, batch_size=130)
    found = anechoic.frechet(str(tmp_path / "s.npz"), "digits:test", extractor="digits")
    receipt = found.metrics["receipt"]
    assert receipt["extractor"]["metric"] == "fd-digits"
    assert {"weights", "resize", "antialias", "size"} <= receipt["extractor"].keys()
    made = receipt["samples"]["made"]
    assert (made["sampler"], made["steps"], made["guidance"], made["seed"], made["ema"]) == (
        "dpm-solver",
        2,
        0.5,
        0,
        True,
    )
    assert receipt["samples"]["count"] == 130
    assert len(receipt["reference"]["hash"]) > 8
    assert 0 <= found.metrics["asked_class_share"] <= 1
    assert not receipt["notes"]


def test_few_samples_are_noted_and_other_statistics_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = tmp_path / "few.npz"
    np.savez(few, images=np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8))
    saved = tmp_path / "saved.npz"
    assert main(["frechet", str(few), "digits:test", "--extractor", "digits", "--save-samples", str(saved)]) == 0
    assert "20 images are fewer than the 128 features" in capsys.readouterr().out
    with np.load(saved) as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    changed["receipt"] = np.array(str(changed["receipt"]).replace("fd-digits", "fid"))
    np.savez(tmp_path / "other.npz", **changed)
    error = failure(capsys, "frechet", tmp_path / "other.npz", "digits:test", "--extractor", "digits")
    assert "another extractor (fid" in error
    assert "no extractor 'digts'" in failure(capsys, "frechet", few, "digits:test", "--extractor", "digts")


def test_frechet_takes_an_encoder_of_ours(runs: dict[str, Path], tmp_path: Path) -> None:
    from anechoic.runtime.checkpoint import model_card, write_model

    torch.manual_seed(0)
    vit = anechoic.build_model("vit_tiny_patch4", image_size=8, in_channels=1, **TINY)
    prepare = Preprocess((0.5,), (0.5,), 8, 1)
    write_model(tmp_path / "mine", vit.state_dict(), model_card(vit, prepare))
    found = anechoic.frechet("digits:test", "digits:train", extractor=str(tmp_path / "mine")).metrics
    assert found["fd-mine"] > 0
    assert found["receipt"]["extractor"]["size"] == 8


# ---- probing --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_probe_has_a_row_for_every_layer_and_noise_level(runs: dict[str, Path]) -> None:
    parts = {"test": "digits:test", "metrics": "probe"}
    found = anechoic.evaluate(str(runs["cond"]), "digits:train", **parts, noise=(0.01, 0.3))
    rows = found.metrics["rows"]
    assert [(row["noise"], row["layer"]) for row in rows] == [(t, k) for t in (0.01, 0.3) for k in range(4)]
    assert "chosen on held-out training data" in found.text
    again = anechoic.evaluate(str(runs["cond"]), "digits:train", **parts, noise=(0.3,), layers=(2,))
    assert again.metrics["rows"] == [row for row in rows if (row["noise"], row["layer"]) == (0.3, 2)]
    last = anechoic.evaluate(str(runs["cond"]), "digits:train", **parts, noise=(0.3,), layers=(-1,))
    assert last.metrics["rows"] == [row for row in rows if (row["noise"], row["layer"]) == (0.3, 3)]


def test_noise_levels_and_protocols_are_checked(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="between 0"):
        anechoic.evaluate(str(runs["plain"]), "digits:train", metrics="probe", noise=(1.5,))
    with pytest.raises(UserError, match="logistic or in100"):
        anechoic.evaluate(str(runs["plain"]), "digits:train", metrics="probe", noise=(0.1,), protocol="mae")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pooling": ("class",)}, "omit --pooling"),
        ({"image_size": 16}, "omit --image-size"),
    ],
)
def test_flags_that_noise_cannot_honor_are_refused(runs: dict[str, Path], flags: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        anechoic.evaluate(str(runs["plain"]), "digits:train", noise=(0.1,), **flags)


def test_raw_weights_make_other_images_than_the_ema(runs: dict[str, Path], tmp_path: Path):
    made = {}
    for weights in ("raw", "ema", None):
        found = anechoic.sample(runs["plain"], out=tmp_path / f"{weights}.npz", num=2, steps=2, weights=weights)
        made[weights] = found.metrics["receipt"]["weights"], found.metrics["receipt"]["ema"]
    assert made["ema"] == made[None]
    assert made["raw"][0] != made["ema"][0]
    assert [made[weights][1] for weights in ("raw", "ema")] == [False, True]
