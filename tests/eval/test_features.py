"""Reading layers: equal to running the blocks by hand, never masked, deterministic, and laws of the statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from anechoic.errors import UserError
from anechoic.eval import features
from anechoic.models import build_model

SMALL = {"image_size": 16, "dim": 24, "depth": 3, "num_heads": 2}


def small_vit(**options):
    torch.manual_seed(0)
    return build_model("vit_tiny_patch4", **SMALL, **options)


def small_mae(**options):
    torch.manual_seed(0)
    sizes = {"decoder_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}
    return build_model("mae_tiny_patch4", **SMALL, **sizes, zero_init=False, **options)


@pytest.fixture
def images():
    return torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def by_hand(vit, images):
    """The embedding and every block's output."""
    from anechoic.models.layers import patchify

    x = vit.embed_tokens(patchify(images, 4), (4, 4))
    stream = [x]
    for block in vit.blocks:
        stream.append(block(stream[-1]))
    return stream


@torch.no_grad()
def test_every_layer_is_the_block_s_output(images):
    model = small_vit(alpha_min=0.7, norm=True)
    found = features.extract(model, images.split(2), layers="all")
    stream = by_hand(model, images)
    stream.append(model.norm(stream[-1]))
    assert sorted({layer for layer, _ in found}) == [0, 1, 2, 3, 4]
    for layer, tokens in enumerate(stream):
        expected = {"class": tokens[:, 0], "mean": tokens[:, 1:].mean(1), "all": tokens.mean(1)}
        for pooling, value in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[layer, pooling]), value, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_last_layer_is_the_output_of_the_model(images):
    for norm in (True, False):
        model = small_vit(norm=norm)
        found = features.extract(model, [images], layers=(-1,), poolings=("class",))
        ((layer, _),) = found
        assert layer == (4 if norm else 3)
        torch.testing.assert_close(torch.from_numpy(found[layer, "class"]), model(images)[:, 0], rtol=1e-5, atol=2e-6)
    assert features.layer_widths(small_vit(norm=False), images[:1]) == [24] * 4


def test_a_masked_autoencoder_is_never_masked(images):
    model = small_mae(alpha_min=0.6)
    first, second = (features.extract(model, [images], layers="all") for _ in range(2))
    for key, value in first.items():
        assert (value == second[key]).all()
    expected = features.extract(model.encoder, [images], layers="all")
    assert all((first[key] == expected[key]).all() for key in expected)
    with torch.no_grad():
        seen = model.encoder(images)[:, 0]
    torch.testing.assert_close(torch.from_numpy(first[3, "class"]), seen, rtol=1e-5, atol=2e-6)


def test_batches_do_not_matter_and_modes_are_restored(images):
    model = small_vit(drop_path=0.5).train()
    whole = features.extract(model, [images])
    parts = features.extract(model, images.split(1))
    assert model.training
    for key, value in whole.items():
        torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(parts[key]), rtol=1e-4, atol=1e-5)
    assert not [hook for module in model.modules() for hook in module._forward_hooks]


def test_hooks_are_removed_after_an_error(images):
    model = small_vit()
    with pytest.raises(UserError):
        features.extract(model, [images[:, :1]])
    assert not [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_networks_of_maps(images):
    torch.manual_seed(0)
    model = build_model("resnet18", image_size=16, width=8, num_classes=3)
    found = features.extract(model, [images], layers="all", poolings=("mean",))
    assert [found[layer, "mean"].shape[1] for layer in range(9)] == [8, 8, 8, 16, 16, 32, 32, 64, 64]
    assert features.poolings_of(model) == ("mean",)
    assert features.patch_maps(model, images).shape[-1] == 64


def test_another_forward_can_be_given(images):
    torch.manual_seed(0)
    model = build_model("uvit_small", image_size=8, dim=24, depth=2, num_heads=2)
    small = images[:, :, :8, :8]
    found = features.extract(model, [small], poolings=("mean",), forward=lambda x: model(x, torch.zeros(len(x))))
    ((value),) = found.values()
    assert value.shape == (5, 24)


def test_patch_maps_are_in_place(images):
    model = small_vit(norm=False)
    with torch.no_grad():
        tokens = model(images)[:, 1:]
    assert torch.equal(features.patch_maps(model, images), tokens.view(5, 4, 4, 24))


def test_unknown_layers_and_tokens_are_one_clear_sentence(images):
    with pytest.raises(UserError, match=r"no layer 9: this model has 0 \(its embedding\) to 3"):
        features.extract(small_vit(norm=False), [images], layers=(9,))
    model = build_model("resnet18", image_size=16, width=8, num_classes=3)
    assert features.extract(model, [images], poolings=("mean",))
    with pytest.raises(UserError, match="no `blocks`"):
        features.extract(nn.Linear(2, 2), [images])
    with pytest.raises(UserError, match="no class token"):
        features.pool(torch.zeros(1, 4, 2), pooling="class", num_prefix_tokens=0)


# ---- statistics


def test_an_untrained_decayed_encoder_is_a_pure_echo(images):
    """With zero branch outputs the stream is gain x_0: branches add nothing, ranks do not change."""
    torch.manual_seed(0)
    model = build_model("vit_tiny_patch4", **SMALL, alpha_min=0.6, norm=False, zero_init=True)
    found = features.block_statistics(model, images)
    assert found["branch_ratio"] == [0.0] * 6
    gains = [1.0]
    for gain in features.block_gains(model):
        gains.append(gains[-1] * gain)
    assert gains[-1] == pytest.approx(math.prod(alpha for alpha, _ in model.config.factors))
    for norm, gain in zip(found["token_norm"], gains, strict=True):
        assert norm == pytest.approx(gain * found["token_norm"][0], rel=1e-5)
    for rank in found["rank_columns"]:
        assert rank == pytest.approx(found["rank_columns"][0], rel=1e-3)
    assert features.block_ratios(model, images) == pytest.approx([0] * 3, abs=1e-6)


@torch.no_grad()
def test_branch_ratio_is_measured_where_branches_meet(images):
    model = small_vit(alpha_min=0.5, norm=False)
    found = features.block_statistics(model, images)
    x = by_hand(model, images)[0]
    block = model.blocks[0]
    branch, shortcut = block.attn(block.norm1(x)), block.shortcut1.alpha * x
    assert found["branch_ratio"][0] == pytest.approx((branch.norm(dim=-1).mean() / shortcut.norm(dim=-1).mean()).item())
    assert len(found["branch_ratio"]) == 6
    assert {len(found[key]) for key in ("entropy_rows", "rank_rows", "entropy_columns", "token_norm")} == {4}
