"""Fine-tuning: augmentations against Pillow, mixing by closed forms, the recipe's groups, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image, ImageEnhance, ImageOps

import anechoic
from anechoic.cli.main import main
from anechoic.config import Config, ModelConfig, ObjectiveConfig, OptimConfig, PixelConfig
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.recipes import recipe
from anechoic.rng import SampleGenerator
from anechoic.runtime.checkpoint import load, model_card, write_model
from anechoic.training import finetuning
from anechoic.training.build import check, make_optimizer
from anechoic.training.objectives import make_objective
from anechoic.training.run_state import effect_of_ranks
from anechoic.training.validation import Samples


def pixels(count=3, channels=3, side=20, seed=0):
    return np.random.default_rng(seed).integers(10, 200, (count, channels, side, side), dtype=np.uint8)


def through_pillow(images, change):
    out = []
    for image in images:
        mode = Image.fromarray(image.transpose(1, 2, 0)) if len(image) == 3 else Image.fromarray(image[0])
        found = np.asarray(change(mode))
        out.append(found.transpose(2, 0, 1) if found.ndim == 3 else found[None])
    return np.stack(out)


def ours(images, operation, strength):
    x = torch.from_numpy(images).float() / 255
    return operation(x, torch.full((len(x),), strength)).mul(255).numpy()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("operation", "strength", "change"),
    [
        (finetuning.invert, 0.9, ImageOps.invert),
        (finetuning.equalize, 0.9, ImageOps.equalize),
        (finetuning.posterize, 0.9, lambda image: ImageOps.posterize(image, 1)),
        (finetuning.posterize, 0.3, lambda image: ImageOps.posterize(image, 3)),
        (finetuning.solarize, 0.6, lambda image: ImageOps.solarize(image, 102)),
    ],
)
def test_level_operations_equal_pillow_s(operation, strength, change, channels):
    images = pixels(channels=channels)
    assert np.abs(ours(images, operation, strength) - through_pillow(images, change)).max() < 1e-3


@pytest.mark.parametrize(
    ("operation", "enhance"),
    [
        (finetuning.color, ImageEnhance.Color),
        (finetuning.contrast, ImageEnhance.Contrast),
        (finetuning.brightness, ImageEnhance.Brightness),
        (finetuning.sharpness, ImageEnhance.Sharpness),
    ],
)
@pytest.mark.parametrize("strength", [0.8, -0.8, 0.0])
def test_blends_equal_pillow_s_up_to_its_rounding(operation, enhance, strength):
    images = pixels()
    expected = through_pillow(images, lambda image: enhance(image).enhance(max(0.1, 1 + 0.9 * strength)))
    assert np.abs(ours(images, operation, strength) - expected).max() <= 2.5


def test_auto_contrast_and_solarize_add():
    images = pixels()
    expected = through_pillow(images, ImageOps.autocontrast)
    assert np.abs(ours(images, finetuning.auto_contrast, 0.5) - expected).max() <= 1.01
    found = ours(images, finetuning.solarize_add, 0.5)
    assert np.allclose(found, np.where(images < 128, np.minimum(255, images + 55.0), images), atol=1e-3)
    flat = np.full((1, 3, 8, 8), 77, dtype=np.uint8)
    for operation in (finetuning.auto_contrast, finetuning.equalize):
        assert np.allclose(ours(flat, operation, 0.5), flat, atol=1e-3)


def test_geometry_by_hand():
    images = pixels(side=20)
    for operation in (finetuning.rotate, finetuning.shear_x, finetuning.shear_y, finetuning.translate_x):
        assert np.allclose(ours(images, operation, 0.0), images, atol=1e-2)
    # 0.45 * (10 / 9) of 20 pixels are 10.
    moved = ours(images, finetuning.translate_x, 10 / 9)
    assert np.allclose(moved[..., :10], images[..., 10:], atol=1e-2)
    mean = images.reshape(3, 3, -1).mean(-1)
    assert np.allclose(moved[..., 11:], mean[:, :, None, None], atol=1e-2)
    moved = ours(images, finetuning.translate_y, -10 / 9)
    assert np.allclose(moved[:, :, 10:], images[:, :, :10], atol=1e-2)
    quarter = ours(images, finetuning.rotate, 3.0)  # three times 30 degrees
    turned = [np.rot90(images, k, axes=(2, 3)) for k in (1, 3)]
    assert min(np.abs(quarter - t)[:, :, 1:-1, 1:-1].max() for t in turned) < 0.1


@pytest.mark.slow
def test_augmentation_belongs_to_the_sample():
    x = torch.rand(6, 3, 16, 16)
    ids = torch.arange(6)
    whole = finetuning.rand_augment(x, SampleGenerator(0, ids, torch.zeros(6, dtype=torch.int64)))
    part = finetuning.rand_augment(x[4:], SampleGenerator(0, ids[4:], torch.zeros(2, dtype=torch.int64)))
    torch.testing.assert_close(whole[4:], part)
    other = finetuning.rand_augment(x, SampleGenerator(0, ids, torch.ones(6, dtype=torch.int64)))
    assert not torch.equal(whole, other)
    assert whole.min() >= 0
    assert whole.max() <= 1


def test_stored_values_are_moved_and_never_clipped():
    preprocess = Preprocess((300.0,) * 5, (20.0,) * 5, 16, 5, PixelConfig(type="uint16"))
    images = torch.full((64, 5, 16, 16), 40.0)  # deviations above the mean: a hot image
    seen = []

    class Network(torch.nn.Module):
        def forward(self, x):
            seen.append(x)
            return x.mean(dim=(2, 3))

    objective = finetuning.finetuning(preprocess=preprocess, num_classes=5, mixup=0, cutmix=0, erase=0)
    zeros = torch.zeros(64, dtype=torch.int64)
    for _ in range(2):
        objective(Network(), Samples(images.clone(), zeros), SampleGenerator(0, torch.arange(64), zeros))
        images[:, :, :8] = 0
    assert seen[0].isclose(torch.tensor(40.0)).all()
    assert not torch.equal(seen[1], images)


def test_every_operation_is_drawn_about_equally_often():
    x = torch.zeros(6000, 1, 4, 4)
    generator = SampleGenerator(1, torch.arange(6000), torch.zeros(6000, dtype=torch.int64))
    counts = torch.bincount(generator.integers("operation 0", len(finetuning.OPERATIONS), 1)[:, 0])
    assert len(counts) == 15
    assert counts.min() > 300
    erased = finetuning.random_erase(x, generator, probability=0.25)
    touched = (erased != 0).flatten(1).any(dim=1).float().mean().item()
    assert touched == pytest.approx(0.25, abs=0.03)
    noise = erased[erased != 0]
    assert (noise.mean().item(), noise.std().item()) == pytest.approx((0, 1), abs=0.05)


def test_smoothed_labels_are_those_of_cross_entropy():
    labels, logits = torch.tensor([0, 3, 1]), torch.randn(3, 5)
    soft = finetuning.smooth_labels(labels, 5, 0.1)
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(3))
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, soft), expected)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_mixes_images_and_labels_alike(mixup, cutmix):
    """With images that are constant at their label, the mean of a mixed image must be the mean of its mixed label."""
    values = torch.tensor([0.0, 1.0, 2.0, 3.0])
    x = values.view(4, 1, 1, 1).expand(4, 1, 8, 8).clone()
    targets = torch.eye(4)
    seen = set()
    for visit in range(40):
        generator = SampleGenerator(0, torch.arange(4), torch.full((4,), visit))
        mixed, soft = finetuning.mix(x, targets, generator, mixup=mixup, cutmix=cutmix, switch=0.5)
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), soft @ values)
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(4))
        seen |= {"cutmix" if (image == image.round()).all() else "mixup" for image in mixed}
    assert seen == {name for name, share in (("mixup", mixup), ("cutmix", cutmix)) if share}


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_does_not_depend_on_ranks_and_micro_batches(mixup, cutmix):
    """Slices of an even size mix as the whole batch does; an odd last sample is left unmixed."""
    x, targets = torch.rand(12, 3, 8, 8), torch.eye(12)
    ids = torch.randperm(12)

    def mixed(rows):
        generator = SampleGenerator(0, ids[rows], torch.zeros(len(ids[rows]), dtype=torch.int64))
        return finetuning.mix(x[rows], targets[rows], generator, mixup=mixup, cutmix=cutmix, switch=0.5)

    whole = mixed(slice(None))
    assert not torch.equal(whole[0], x)
    for size in (2, 4, 6):
        parts = [mixed(slice(start, start + size)) for start in range(0, 12, size)]
        for all_at_once, slices in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(slices), all_at_once)
    assert torch.equal(mixed(slice(0, 3))[0][2], x[2])


@pytest.mark.parametrize("a", [0.2, 0.8, 1.0, 4.0])
def test_beta_quantiles_are_those_of_scipy(a):
    u = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    found, u = finetuning.beta_quantile(u, a).double().numpy(), u.double().numpy()
    off = np.abs(scipy.stats.beta.cdf(found, a, a) - u) > 1 / finetuning.TABLE
    # Near 0 and 1 a step of the table is large for a > 1, and float32 is coarse for a < 1.
    assert found[off] == pytest.approx(scipy.stats.beta.ppf(u, a, a)[off], abs=1e-6)


def test_without_mixing_nothing_changes():
    x, targets = torch.rand(4, 1, 8, 8), torch.eye(4)
    generator = SampleGenerator(0, torch.arange(4), torch.zeros(4, dtype=torch.int64))
    mixed, soft = finetuning.mix(x, targets, generator, mixup=0.0, cutmix=0.0, switch=0.5)
    assert torch.equal(mixed, x)
    assert torch.equal(soft, targets)


def test_the_objective_augments_in_training_only():
    model = build_model("vit_tiny_patch4", image_size=8, dim=24, depth=1, num_heads=2, num_classes=3, pool="mean")
    objective = make_objective("finetuning", preprocess=Preprocess((0.5,) * 3, (0.5,) * 3, 8, 3), num_classes=3)
    batch = Samples(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    generator = SampleGenerator(0, torch.arange(4), torch.zeros(4, dtype=torch.int64))
    model.eval()
    expected = torch.nn.functional.cross_entropy(model(batch.images), batch.labels)
    torch.testing.assert_close(objective(model, batch, generator)["loss"], expected)
    model.train()
    assert objective(model, batch, generator)["loss"].item() != pytest.approx(expected.item(), abs=1e-6)
    with pytest.raises(UserError, match="erase"):
        make_objective("finetuning", num_classes=3, erase=2.0)


def test_augmented_images_are_as_sharp_under_autocast():
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3, 64, 3)
    objective = make_objective("finetuning", preprocess=preprocess, num_classes=2, mixup=0.0, cutmix=0.0)
    images = preprocess.apply(torch.from_numpy(pixels(16, side=64)))
    labels, ids = torch.zeros(16, dtype=torch.long), torch.arange(16)
    given = []

    class Listening(torch.nn.Module):
        def forward(self, x):
            given.append(x)
            return torch.zeros(len(x), 2)

    for rounded in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rounded):
            objective(Listening().train(), Samples(images, labels), SampleGenerator(0, ids, ids))
    assert torch.equal(*given)


def test_how_images_are_normalized_is_said_once():
    """The objective undoes the data's own mean and std, so no second pair can differ from it."""
    config = recipe("finetune_base_in1k")
    options = {**config.objective.options, "mean": [0.1] * 3}
    with pytest.raises(UserError, match="no option 'mean'"):
        check(replace(config, objective=replace(config.objective, options=options)))


def test_the_recipe_s_rates_are_the_published_ones():
    """0.65^(13 - group): 0 embeddings, i + 1 block i, 13 the rest; no decay of positions, class token and vectors."""
    config = recipe("finetune_base_in1k")
    assert config.optim.base_lr * config.optim.batch_size / 256 == pytest.approx(2e-3)
    with torch.device("meta"):
        model = build_model("vit_base_patch16", **config.model.options, alpha_min=0.6)
    scales, decays = {}, {}
    for group in make_optimizer(model, config.optim).param_groups:
        for name in group["names"]:
            scales[name], decays[name] = group["lr_scale"], group["weight_decay"]
    assert scales["class_token"] == scales["positions"] == pytest.approx(0.65**13)
    assert scales["patch_embed.proj.weight"] == pytest.approx(0.65**13)
    for i in range(12):
        assert scales[f"blocks.{i}.attn.qkv.weight"] == pytest.approx(0.65 ** (12 - i))
    assert scales["head.weight"] == scales["head_norm.weight"] == 1
    exempt = {name for name, decay in decays.items() if decay == 0}
    assert {"positions", "class_token", "head.bias", "blocks.0.norm1.weight"} <= exempt
    assert decays["head.weight"] == decays["blocks.3.mlp.fc1.weight"] == 0.05
    rates = [block.drop_path1.rate for block in model.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


# ---- the command


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"dim": 24, "depth": 2, "num_heads": 2, "decoder_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}
    model = build_model("mae_tiny_patch4", image_size=8, patch_size=2, in_channels=1, alpha_min=0.7, **sizes)
    card = model_card(model, Preprocess((0.5,), (0.5,), 8, 1))
    return write_model(tmp_path_factory.mktemp("runs") / "model", model.state_dict(), card)


@pytest.mark.slow
def test_finetuning_end_to_end(pretrained, tmp_path, capsys):
    settings = ("--epochs", "6", "--base-lr", "2e-2", "--layer-decay", "1", "--batch-size", "64", "--mixup", "0")
    off = ("--cutmix", "0", "--magnitude", "0", "--erase", "0", "--drop-path", "0")
    data = ("digits:train", "--test", "digits:test", "--out", str(tmp_path / "ft"))
    code = main(["finetune", str(pretrained), *data, *settings, *off, "--json"])
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert code == 0
    assert metrics["accuracy"] > 0.2  # guessing is 0.1
    model = load(tmp_path / "ft")
    assert model.config.pool == "mean"
    assert model.config.alpha_min == 0.7
    assert model.config.num_classes == 10


def test_the_encoder_s_weights_are_the_start(pretrained):
    from anechoic.cli.finetune import finetune_config
    from anechoic.runtime.checkpoint import start_from
    from anechoic.training.build import make_model

    config, _ = finetune_config(
        str(pretrained),
        "digits:train",
        image_size=None,
        optim={"epochs": 1, "batch_size": None, "base_lr": 1e-3, "layer_decay": 0.65},
        drop_path=0.1,
        knobs={},
        seed=0,
        devices=None,
    )
    model = make_model(config)
    start_from(model, pretrained)
    encoder = load(pretrained).encoder
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().tokens(images), encoder(images))
    assert config.optim.batch_size == 64


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_large_patch14", {}, ("vit_large_patch14", {})),
        ("vit_tiny_patch8", {"depth": 6}, ("vit_tiny_patch8", {"depth": 6})),
        (
            "vit_small_patch16",
            {"patch_size": 2, "gelu": "tanh"},
            ("vit_small_patch4", {"patch_size": 2, "gelu": "tanh"}),
        ),
    ],
)
def test_the_config_names_the_size_it_trains(name, options, expected):
    from anechoic.cli.finetune import named_size
    from anechoic.models import model_config

    assert named_size(model_config(name, **options)) == expected
    found, changed = named_size(model_config(name, **options))
    assert model_config(found, **changed) == model_config(name, **options)


def test_mistakes_are_one_clear_sentence(pretrained, tmp_path, capsys):
    np.savez(tmp_path / "one.npz", images=np.zeros((40, 8, 8), dtype=np.uint8), labels=np.zeros(40, dtype=int))
    assert main(["finetune", str(pretrained), str(tmp_path / "one.npz"), "--out", str(tmp_path / "x")]) == 2
    assert "one class only" in capsys.readouterr().err
    torch.manual_seed(0)
    model = build_model("resnet18", image_size=16, width=8, num_classes=3)
    card = model_card(model, Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3))
    write_model(tmp_path / "resnet", model.state_dict(), card)
    assert main(["finetune", str(tmp_path / "resnet"), "digits:train", "--out", str(tmp_path / "x")]) == 2
    assert "masked autoencoder or vision transformer" in capsys.readouterr().err


# ---- the supervised control


def test_a_network_of_another_program_is_named_with_the_way_in(pretrained, tmp_path):
    anechoic.export(pretrained, to="timm", out=tmp_path / "timm")
    with pytest.raises(UserError, match=r"written for timm.*anechoic import "):
        anechoic.finetune(tmp_path / "timm", "digits:train", out=tmp_path / "run")


def test_supervised_control_reports_rank_over_depth_and_training(tmp_path):
    from dataclasses import replace

    from anechoic.runtime.run import read_metrics
    from anechoic.training.loop import fit

    for name, alpha_min in (("resnet18_cifar", 0.7), ("resnet18_cifar_residual", 1.0)):
        assert recipe(name).shortcut.alpha_min == alpha_min
    config = recipe("pocket_resnet_scenes")
    config = replace(
        config,
        data=replace(config.data, source="scenes:train:160", image_size=16),
        model=replace(config.model, options={**config.model.options, "width": 4, "num_blocks": 10}),
        optim=replace(config.optim, batch_size=32, epochs=1.0),
    )
    fit(config, tmp_path / "run")
    looks = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "validation"]
    assert len(looks) >= 2
    assert all(len(look["rank_columns"]) == 11 for look in looks)
    assert all(np.isfinite(look["rank_columns"]).all() for look in looks)


def test_resuming_on_other_ranks_states_what_changes():
    config = Config(
        objective=ObjectiveConfig("finetuning", {"num_classes": 2}), optim=OptimConfig(batch_size=12), devices=1
    )
    assert "last bits" in effect_of_ranks(config, 2)
    assert "other pairs" in effect_of_ranks(config, 4)
    assert "batch norm" in effect_of_ranks(replace(config, model=ModelConfig("resnet18")), 2)
