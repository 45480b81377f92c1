"""The fused path of a block: the same loss and gradients as the modules it stands in for, and only where it may."""

from __future__ import annotations

import pytest
import torch
from zoo import inputs, make

from anechoic import build_model
from anechoic.models import fused
from anechoic.models.layers import Block, set_block_options


def loss_and_gradients(model, images, noise):
    model.zero_grad()
    loss = model(images, noise).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{"skips": False}, {"alpha_min": 0.6}, {"form": "both"}])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_loss_and_gradients_are_those_of_the_plain_path(monkeypatch, options, qkv_bias, onednn):
    if not onednn:
        monkeypatch.setattr(fused, "_onednn", None)
    model = make("mae", qkv_bias=qkv_bias, **options).train()
    images, noise = inputs(model)
    set_block_options(model, fused=False)
    plain, expected = loss_and_gradients(model, images, noise)
    set_block_options(model, fused=True)
    calls = count_calls(monkeypatch)
    loss, gradients = loss_and_gradients(model, images, noise)
    assert len(calls) == model.config.depth + model.config.decoder_depth
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_recomputing_returns_the_very_same_gradients():
    for use_fused in (True, False):
        model = make("mae", alpha_min=0.6).train()
        images, noise = inputs(model)
        set_block_options(model, fused=use_fused)
        loss, expected = loss_and_gradients(model, images, noise)
        set_block_options(model, fused=use_fused, recompute=True)
        again, gradients = loss_and_gradients(model, images, noise)
        assert torch.equal(again, loss)
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())


def saved_bytes(model, *given):
    """What a forward pass keeps for the backward pass, beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*given)
    del output
    return sum(kept.values())


def test_memory_saved_for_the_backward_pass():
    """Fused keeps no more than plain, decayed no more than residual, and recomputing far less than both."""
    sizes = {}
    for alpha_min in (1.0, 0.6):
        for path in ({"fused": False}, {}, {"recompute": True}):
            torch.manual_seed(0)
            model = build_model("vit_tiny_patch4", image_size=16, dim=48, depth=6, num_heads=3, alpha_min=alpha_min)
            set_block_options(model.train(), **path)
            sizes[alpha_min, *path] = saved_bytes(model, torch.randn(8, 3, 16, 16))
    assert sizes[1.0,] <= sizes[1.0, "fused"]
    assert sizes[0.6,] == sizes[1.0,]
    assert sizes[1.0, "recompute"] < sizes[1.0,] / 4


@pytest.mark.parametrize("case", ["sit-with-skips", "uvit-conditional"])
def test_denoisers_recompute_too(case):
    found = {}
    for recompute in (False, True):
        model = make(case, alpha_min=0.6).train()
        set_block_options(model, recompute=recompute)
        given = inputs(model)
        kept = saved_bytes(model, *given)
        model(*given).square().mean().backward()
        found[recompute] = kept, {name: weight.grad for name, weight in model.named_parameters()}
    (whole, expected), (few, gradients) = found[False], found[True]
    assert few < whole / 2
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())


def count_calls(monkeypatch):
    calls = []
    whole = fused.attention_branch
    monkeypatch.setattr(fused, "attention_branch", lambda *a: calls.append(1) or whole(*a))
    return calls


def test_hooks_inside_a_block_take_the_plain_path(monkeypatch):
    calls = count_calls(monkeypatch)
    block = Block(12, 3).train()
    x = torch.randn(2, 5, 12)
    block(x)
    assert len(calls) == 1
    seen = []
    handle = block.attn.qkv.register_forward_hook(lambda *_: seen.append(1))
    block(x)
    handle.remove()
    assert (len(calls), len(seen)) == (1, 1)
    with torch.no_grad():
        block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        block(x)
    torch.func.grad(lambda one: block(one).sum())(x)
    Block(12, 3, drop_path=0.5).train()(x)
    assert len(calls) == 1


def test_frozen_weights_and_inputs_get_no_gradient():
    block = Block(12, 3).train()
    block.mlp.fc1.weight.requires_grad_(False)
    x = torch.randn(2, 5, 12, requires_grad=True)
    block(x).sum().backward()
    assert block.mlp.fc1.weight.grad is None
    assert block.mlp.fc2.weight.grad is not None
    assert x.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [5, 90])  # attention as products, and as torch's own kernel
def test_compiled_blocks_compute_the_same_through_the_opaque_product(tokens):
    torch.manual_seed(0)
    block = Block(24, 3).train()
    x = torch.randn(2, tokens, 24, requires_grad=True)
    rows = torch.arange(3).expand(2, 3)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for arguments in ((x,), (x, rows)):
        expected = torch.autograd.grad(block(*arguments).square().sum(), [x, *block.parameters()])
        with torch.profiler.profile() as profile:
            found = torch.autograd.grad(compiled(*arguments).square().sum(), [x, *block.parameters()])
        assert any(event.key == "anechoic::product" for event in profile.key_averages()) == (fused._onednn is not None)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


def test_an_exported_block_needs_nothing_of_ours():
    block = Block(24, 3).train()
    for strict in (True, False):
        graph = torch.export.export(block, (torch.randn(2, 5, 24),), strict=strict).graph
        assert not any("anechoic" in str(node.target) for node in graph.nodes)


def test_compiled_transforms_of_functions_take_the_plain_path():
    block = Block(24, 3).train().requires_grad_(False)
    x = torch.randn(2, 5, 24)

    def gradient(one):
        return torch.func.grad(lambda y: block(y).square().sum())(one)

    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(x), gradient(x), rtol=1e-5, atol=1e-5)
