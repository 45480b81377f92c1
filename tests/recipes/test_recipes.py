"""Every recipe builds and states its cost, and the commands that train them report mistakes in one sentence."""

import inspect
import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anechoic
from anechoic.cli.main import main
from anechoic.config import IMAGENET_MEAN, IMAGENET_STD, OptimConfig, from_json, to_json
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import model_config
from anechoic.recipes import recipe, table
from anechoic.recipes.mae import RECIPES as MAE_RECIPES
from anechoic.recipes.pretrain import (
    choose_alpha_min,
    choose_batch,
    choose_image_size,
    choose_patch,
    choose_pocket_lr,
    pretrain_config,
)
from anechoic.storage.files import read_json
from anechoic.training.build import check


@pytest.mark.parametrize("name", table())
def test_every_recipe_can_be_built_and_explains_itself(name):
    config = recipe(name)
    check(config)
    assert config.recipe == name
    text = inspect.getdoc(table()[name])
    assert text.splitlines()[0].endswith(".")
    for part in ("Command: anechoic ", "Cost: ", "Expect: "):
        assert part in text, part
    assert name in text


@pytest.mark.parametrize("function", MAE_RECIPES, ids=lambda function: function.__name__)
def test_settings_of_the_paper(function):
    config = function()
    optim = config.optim
    assert (optim.base_lr, optim.betas, optim.weight_decay, optim.warmup) == (1.5e-4, (0.9, 0.95), 0.05, 0.05)
    assert (optim.batch_size, optim.schedule, optim.weight_decay_on, optim.clip, optim.ema) == (
        1024,
        "cosine",
        "matrices",
        0,
        0,
    )
    assert (config.data.scale, config.data.flip) == ((0.2, 1.0), True)
    assert config.model.options["norm_pix"] is True


def test_baselines_differ_in_nothing_else():
    for family in ("in1k", "in100", "cifar100"):
        decayed, residual = recipe(f"mae_{family}"), recipe(f"mae_{family}_residual")
        assert (decayed.shortcut.alpha_min, residual.shortcut.alpha_min) == (0.6, 1.0)
        assert replace(residual, shortcut=decayed.shortcut, recipe=decayed.recipe) == decayed
    plain = model_config("mae_base_patch16", **recipe("mae_in1k_plain").model.options)
    assert (plain.skips, plain.zero_init, plain.encoder_norm) == (False, False, True)


@pytest.mark.parametrize("name", table())
def test_preprocess_of_every_recipe_is_inverted(name):
    """invert(apply(x)) is x: pixels in 0 .. 1, and latents as they are."""
    config = recipe(name)
    channels = config.data.channels
    default = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    preprocess = Preprocess(config.data.mean or default[0], config.data.std or default[1], 4, channels)
    if channels in (1, 3):
        pixels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 4, 4).expand(-1, channels, -1, -1)
        torch.testing.assert_close(preprocess.invert(preprocess.apply(pixels)), pixels / 255)
    else:
        latents = torch.randn(2, channels, 4, 4)
        assert torch.equal(preprocess.invert(preprocess.apply(latents)), latents)
        old = {**preprocess.to_json(), "std": [1 / 255] * channels}  # as version 0.1 wrote it
        assert Preprocess.from_json(old) == preprocess
        assert from_json({"data": {"channels": 4, "mean": [0.0] * 4, "std": old["std"]}}).data.std == (1.0,) * 4


def test_a_misspelt_recipe_is_answered():
    with pytest.raises(UserError, match="did you mean mae_in1k"):
        recipe("mae_in1K")


# ---- automatic choices of pretrain


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(20, 2_000_000),
    side=st.integers(8, 4000),
    gpus=st.integers(0, 8),
    channels=st.integers(1, 4),
)
def test_any_folder_gets_a_config_that_fits(size, side, gpus, channels):
    config = pretrain_config("x", size=size, side=side, gpus=gpus, channels=channels)
    check(config)
    assert config.data.image_size <= max(side, 2)
    assert config.optim.batch_size <= size
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_rules_of_thumb():
    assert [choose_image_size(side, gpus=0) for side in (8, 28, 32, 50, 500)] == [8, 28, 32, 48, 64]
    assert [choose_image_size(side, gpus=1) for side in (32, 100, 500)] == [32, 96, 224]
    assert [choose_patch(size) for size in (8, 28, 32, 64, 96, 224)] == [2, 4, 4, 8, 8, 16]
    assert [choose_batch(size, gpus=0) for size in (10, 200, 1000, 10**6)] == [10, 16, 64, 128]
    assert choose_batch(10**6, gpus=1) == 1024
    with pytest.raises(UserError, match="cannot be divided into patches"):
        choose_patch(31)


def test_the_optimizer_goes_by_the_machine():
    here, there = (pretrain_config("x", size=5000, side=64, gpus=count).optim for count in (0, 1))
    assert (here.algorithm, there.algorithm) == ("muon", "adamw")
    assert (there.lr, there.base_lr) == (None, OptimConfig().base_lr)  # the paper's
    asked = pretrain_config("x", size=5000, side=64, gpus=0, algorithm="adamw").optim
    assert asked.algorithm == "adamw"
    assert asked.lr < here.lr  # each has a rate of its own
    assert [choose_pocket_lr("adamw", batch_size=batch, samples=1000) for batch in (64, 128)] == [5e-4, 1e-3]
    lengths = (10_000, 100_000, 400_000, 1_600_000)
    assert [choose_pocket_lr("muon", batch_size=64, samples=n) for n in lengths] == [8e-3, 8e-3, 4e-3, 2e-3]
    assert pretrain_config("x", size=5000, side=64, gpus=0, lr=0.123).optim.lr == 0.123
    large = pretrain_config("x", size=5000, side=64, gpus=0, model="mae_base_patch16").optim
    assert (large.algorithm, large.lr) == ("muon", None)  # the rate of the pocket size is not that of a large model


def test_alpha_min_goes_by_the_budget():
    usual = {"image_size": 64, "skips": True}
    adamw = [choose_alpha_min(updates, algorithm="adamw", **usual) for updates in (1, 49_999, 50_000)]
    assert adamw == [1.0, 1.0, "auto"]
    muon = [choose_alpha_min(updates, algorithm="muon", **usual) for updates in (1, 15_999, 16_000)]
    assert muon == [1.0, 1.0, 0.6]
    for algorithm in ("adamw", "muon"):
        assert choose_alpha_min(100_000, algorithm=algorithm, image_size=8, skips=True) == 1.0
        assert choose_alpha_min(100_000, algorithm=algorithm, image_size=64, skips=False) == 1.0
    assert pretrain_config("x", size=50_000, side=32, gpus=0, epochs=50).shortcut.alpha_min == 0.6
    short = pretrain_config("x", size=50_000, side=32, gpus=0, epochs=10)
    long = pretrain_config("x", size=1_281_167, side=400, gpus=8)
    assert (short.shortcut.alpha_min, long.shortcut.alpha_min) == (1.0, "auto")
    asked = pretrain_config("x", size=50_000, side=32, gpus=0, epochs=10, alpha_min=0.7)
    assert asked.shortcut.alpha_min == 0.7


# ---- the commands


def run(capsys, *arguments):
    """(exit code, standard output, standard error) of a command."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


WITHOUT_TORCH = """
import sys
from anechoic.cli.main import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    assert "torch" not in sys.modules
"""


def test_a_typo_in_an_override_costs_a_second_and_names_the_nearest():
    """Without torch: it is found before anything heavy is loaded."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "train", "pocket_mae_digits", "--shortcut.alpha-mim", "0.6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--shortcut.alpha-min" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "pocket_mae_digits", "--devices", "0"], "devices must be at least 1"),
        (["train", "pocket_mae_digits", "--model.options", "dpth=3"], "did you mean depth"),
        (["train", "pocket_mae_digits", "--model.name", "mae_tny_patch4"], "did you mean mae_tiny_patch4"),
        (["train", "pocket_mae_digits", "--objective.name", "masked"], "no objective 'masked'"),
        (["train", "pocket_mae_digits", "--optim.lr", "fast"], "fast"),
        (["train", "mae_in1k"], "--data.source"),
        (["pretrain", "digits", "--channels", "1", "--devices", "0", "--out"], "devices must be at least 1"),
        (["pretrain", "digits", "--channels", "1", "--image-size", "7", "--out"], "cannot be divided into patches"),
        (["pretrain", "digits", "--channels", "1", "--model", "vit_tiny_patch4", "--out"], "trains a mae_ model"),
        (["pretrain", "nowhere", "--out"], "There is no data"),
        (["pretrain", "", "--out"], "The name of the data is empty"),
        (["pretrain", "digits", "--channels", "1", "--epochs", "inf", "--out"], "must be a finite number"),
        (["pretrain", "digits", "--channels", "1", "--image-size", "0", "--out"], "Images of 0 pixels"),
        (["pretrain", "digits", "--channels", "1", "--batch-size", "0", "--out"], "batch_size must be at least 1"),
        (["train", "pocket_mae_digits", "--optim.lr", "1e999"], "must be a finite number"),
    ],
)
def test_mistakes(capsys, tmp_path, arguments, words):
    out = str(tmp_path / "run")
    code, _, err = run(capsys, *arguments, *([out] if arguments[-1] == "--out" else ["--out", out]))
    assert code == 2
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "config.json").exists()


def test_samples_replace_the_epochs_of_a_recipe_and_the_other_way_around(capsys):
    budgets = {"pocket_mae_digits": ("--optim.samples", "640"), "demo_mae": ("--optim.epochs", "2")}
    for name, words in budgets.items():
        code, out, err = run(capsys, "train", name, *words, "--dry-run")
        assert code == 0, err
        optim = json.loads(out)["optim"]
        assert (optim["samples"], optim["epochs"]) in [(640, None), (None, 2.0)]


def test_dry_run_prints_the_config_and_makes_nothing(capsys, tmp_path):
    out = tmp_path / "run"
    overrides = ["--shortcut.alpha-min", "0.7", "--model.options", "depth=3", "--optim.epochs", "2"]
    code, text, _ = run(capsys, "train", "pocket_mae_digits", "--out", str(out), "--dry-run", *overrides)
    assert code == 0
    config = from_json(json.loads(text))
    base = recipe("pocket_mae_digits")
    assert (config.shortcut.alpha_min, config.optim.epochs) == (0.7, 2.0)
    assert config.model.options == {**base.model.options, "depth": 3}
    assert not out.exists()


TINY = [
    "--model-options",
    "dim=16",
    "depth=2",
    "num_heads=2",
    "decoder_dim=16",
    "decoder_depth=1",
    "decoder_num_heads=2",
]


@pytest.mark.slow
def test_pretrain_and_load(capsys, tmp_path):
    command = ["pretrain", "digits", "--channels", "1", "--epochs", "1", "--out", str(tmp_path), "--knn", "100", *TINY]
    code, text, err = run(capsys, *command)
    assert code == 0
    assert "is trained" in text
    assert "alpha_min 1, plain residual connections: shortcuts decay only in runs of 16,000 updates" in err
    assert anechoic.load(tmp_path).config.depth == 2
    code, text, _ = run(capsys, *command, "--json")
    again = json.loads(text)
    assert again["metrics"].pop("verdict")["word"]
    assert again == {**read_json(tmp_path / "results.json"), "config": read_json(tmp_path / "config.json")}
    code, _, err = run(capsys, *command, "--seed", "5")
    assert code == 2
    assert "seed: 0 in the run, 5 asked for" in err


def test_recipes_are_listed(capsys):
    code, text, _ = run(capsys, "list", "recipes")
    assert code == 0
    assert all(f"\n{name} " in text for name in table())
    assert run(capsys, "list", "recipes", "--filter", "nothing-like-this")[0] == 2


# ---- real images


@pytest.mark.parametrize("kind", ["folder", "parquet", "zip"])
def test_pretrain_on_real_images(capsys, tmp_path, shared_data, kind):
    if kind == "folder":
        source = shared_data / "imagenette" / "val"
    elif kind == "parquet":
        source = shared_data / "cifar100" / "test.parquet"
    else:
        source, folder = tmp_path / "a zip.zip", shared_data / "imagenette" / "val"
        with zipfile.ZipFile(source, "w") as archive:
            for path in sorted(folder.rglob("*.jp*g"))[:200]:
                archive.write(path, path.relative_to(folder))
    out = tmp_path / "run"
    command = ["pretrain", str(source), "--out", str(out), "--image-size", "32", "--epochs", "0.2", *TINY]
    code, _, err = run(capsys, *command)
    assert code == 0, err
    assert read_json(out / "results.json")["metrics"]["seen"] > 0
