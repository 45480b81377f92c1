"""Parameter groups, learning rates, clipping and averages against the paper's rules and closed forms."""

import copy
import math

import pytest
import torch
from torch import nn

from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.training.ema import EMA
from anechoic.training.optim import (
    gradient_norm,
    layer_of,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)

TINY = {"image_size": 16, "dim": 24, "depth": 2, "num_heads": 2}


def tiny_mae():
    return build_model("mae_tiny_patch4", **TINY, decoder_dim=16, decoder_depth=2, decoder_num_heads=2, alpha_min=0.6)


def test_matrices_and_tokens_decay_and_vectors_do_not():
    model = tiny_mae()
    groups = parameter_groups(model, weight_decay=0.05)
    decay_of = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decay_of == {
        name: 0.05 if parameter.ndim >= 2 and not name.endswith(".bias") else 0.0
        for name, parameter in model.named_parameters()
    }
    assert decay_of["encoder.class_token"] == decay_of["skips.0.mask_token"] == 0.05
    assert decay_of["encoder.blocks.0.norm1.weight"] == decay_of["predictor.bias"] == 0.0


@pytest.mark.parametrize("layer_decay", [1.0, 0.65])
def test_groups_hold_every_parameter_once(layer_decay):
    model = build_model("vit_tiny_patch4", **TINY, num_classes=3, pool="mean", positions="learned")
    groups = parameter_groups(model, weight_decay=0.05, layer_decay=layer_decay)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert all(len(group["params"]) == len(group["names"]) for group in groups)


def test_one_group_decays_everything():
    (group,) = parameter_groups(tiny_mae(), weight_decay=0.03, weight_decay_on="all")
    assert group["weight_decay"] == 0.03


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [group["names"] for group in parameter_groups(model, weight_decay=0.1)] == [["weight"]]
    model.weight.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter to train"):
        parameter_groups(model, weight_decay=0.1)


def test_layer_decay_of_fine_tuning():
    """ViT with 12 blocks: 14 groups, embeddings 0, block i is i + 1, the head 13; scale 0.65^(13 - group)."""
    options = {"image_size": 16, "dim": 24, "depth": 12, "num_heads": 2, "num_classes": 3, "pool": "mean"}
    model = build_model("vit_tiny_patch4", **options, positions="learned")
    exempt = ("positions", "class_token")
    groups = parameter_groups(model, weight_decay=0.05, exempt=exempt, layer_decay=0.65)
    scale = {name: group["lr_scale"] for group in groups for name in group["names"]}
    decay = {name: group["weight_decay"] for group in groups for name in group["names"]}
    for name in ("class_token", "positions", "patch_embed.proj.weight"):
        assert scale[name] == pytest.approx(0.65**13)
    for i in range(12):
        of_block = [scale[name] for name in scale if name.startswith(f"blocks.{i}.")]
        assert of_block == pytest.approx([0.65 ** (12 - i)] * 12)
    assert scale["head.weight"] == scale["head_norm.weight"] == 1.0
    assert decay["positions"] == decay["class_token"] == 0.0
    assert decay["patch_embed.proj.weight"] == 0.05
    assert layer_of("decoder_blocks.3.norm1.weight", 12) == 13


def test_learning_rate_is_set_with_its_scale():
    groups = parameter_groups(build_model("vit_tiny_patch4", **TINY), weight_decay=0.0, layer_decay=0.5)
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    set_learning_rate(optimizer, 0.2)
    assert all(group["lr"] == 0.2 * group["lr_scale"] for group in optimizer.param_groups)


def test_schedule_of_the_paper():
    """40 of 800 epochs of warm-up, then half a cosine, on the fractional epoch; 123 updates an epoch."""
    lr, per_epoch, batch = 6e-4, 123, 1024
    for update in range(0, 800 * per_epoch, 997):
        epoch = update / per_epoch
        wanted = lr * epoch / 40 if epoch < 40 else 0.5 * lr * (1 + math.cos(math.pi * (epoch - 40) / 760))
        got = learning_rate(update * batch, samples=800 * per_epoch * batch, lr=lr, warmup=0.05, schedule="cosine")
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-15)


def test_ends_of_the_schedules():
    cosine = {"samples": 1000, "lr": 1.0, "warmup": 0.1, "schedule": "cosine", "min_lr": 0.25}
    assert [learning_rate(seen, **cosine) for seen in (0, 50, 100, 550, 1000)] == pytest.approx(
        [0, 0.5, 1, 0.625, 0.25]
    )
    constant = {"samples": 1000, "lr": 1.0, "warmup": 0.1, "schedule": "constant"}
    assert [learning_rate(seen, **constant) for seen in (0, 50, 100, 1000)] == [0, 0.5, 1, 1]
    assert learning_rate(0, samples=1000, lr=1.0, warmup=0.0, schedule="cosine") == 1.0


def test_ema_has_its_closed_form():
    """With constant weights w after the start m: decay^n m + (1 - decay^n) w."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    start = copy.deepcopy(model.state_dict())
    ema = EMA(model, decay=0.9)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    model[1].running_mean.fill_(7.0)
    for _ in range(5):
        ema.update(model)
    for name, value in model.named_parameters():
        torch.testing.assert_close(ema.tensors[name], 0.9**5 * start[name] + (1 - 0.9**5) * value)
    assert (ema.tensors["1.running_mean"] == 7.0).all()
    assert ema.tensors["1.num_batches_tracked"].dtype == torch.int64


def test_ema_of_decay_zero_is_the_weights():
    model = nn.Linear(3, 4)
    ema = EMA(model, decay=0.0)
    with torch.no_grad():
        model.weight.mul_(2.0)
    ema.update(model)
    assert torch.equal(ema.tensors["weight"], model.weight)


@pytest.mark.parametrize(("updates", "warned"), [(125, True), (597, True), (598, False)])
def test_ema_warns_of_a_run_too_short_for_its_decay(updates, warned, caplog):
    """0.995^598 is below 5 %. The recommended decay does not warn."""
    EMA(nn.Linear(2, 2), decay=0.995).warn_if_slow(updates=updates)
    assert ("of the initial weights" in caplog.text) == warned
    if warned:
        recommended = float(caplog.text.split("optim.ema to ")[1].rstrip(".\n"))
        caplog.clear()
        EMA(nn.Linear(2, 2), decay=recommended).warn_if_slow(updates=updates)
        assert not caplog.text


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_gradient_norm_and_clipping_against_torch(clip):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 6), nn.Linear(5, 6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = gradient_norm(ours.named_parameters(), clip=clip, factors={})
    reference = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
    torch.testing.assert_close(norm, reference)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
