"""Muon against an SVD, torch's own Muon and AdamW; its state resumes to the bit."""

import copy

import pytest
import torch
from torch import nn
from zoo import ZOO

from anechoic.config import OptimConfig, from_json, to_json
from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.runtime.checkpoint import optimizer_tensors, restore_optimizer
from anechoic.training.build import make_optimizer
from anechoic.training.muon import STEPS, Muon, _iterate, _iterate_gram, orthogonalize
from anechoic.training.optim import is_body_matrix, match_scales, parameter_groups, set_learning_rate

SHAPES = [(24, 24), (24, 40), (40, 24), (16, 64), (64, 16), (1, 8)]


def tiny_mae():
    options = {"image_size": 16, "dim": 24, "depth": 2, "num_heads": 2}
    return build_model("mae_tiny_patch4", **options, decoder_dim=16, decoder_depth=1, decoder_num_heads=2)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalized_matrices_keep_their_singular_vectors_and_lose_their_singular_values(shape):
    matrices = (
        torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    )
    found = orthogonalize(matrices)
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    # In the basis of the matrix's own singular vectors the result is diagonal, with values near 1 except for the
    # smallest ones, which five steps lift only so far.
    diagonal = u.mT @ found.double() @ vh.mT
    values = diagonal.diagonal(dim1=1, dim2=2)
    assert torch.allclose(diagonal, torch.diag_embed(values), atol=1e-4)
    large = s > 0.02 * s.square().sum(1, keepdim=True).sqrt()
    assert values[large].min() > 0.6
    assert values.max() < 1.25


def test_updates_of_nearly_rank_one_become_updates_of_full_rank():
    """The reason for it: Adam's first updates of a zero matrix have one large singular value."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.outer(torch.ones(32), torch.ones(32)) + 0.3 * torch.randn(32, 32, generator=generator)
    before = torch.linalg.svdvals(matrix)
    after = torch.linalg.svdvals(orthogonalize(matrix[None])[0])
    assert before[0] / before[15] > 10
    assert after[0] / after[15] < 2


@pytest.mark.parametrize("columns", [48, 200])
def test_iterating_on_the_gram_matrix_is_the_same(columns):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, 4, generator=generator) @ torch.randn(2, 4, columns, generator=generator)
    x = x + 1e-3 * torch.randn(2, 48, columns, generator=generator)
    x = x / x.norm(dim=(1, 2), keepdim=True)
    exact = _iterate(x.double())
    assert torch.allclose(_iterate_gram(x.double()), exact, atol=1e-9)
    assert torch.allclose(_iterate_gram(x).double(), exact, atol=1e-4)


def test_zero_gradients_do_not_divide_by_zero():
    assert torch.equal(orthogonalize(torch.zeros(2, 8, 8)), torch.zeros(2, 8, 8))


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_steps_are_those_of_torch_in_its_lower_precision(shape):
    """torch's Muon orthogonalizes in bfloat16, so single entries differ by its rounding, the direction hardly."""
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([{"params": [ours], "algorithm": "muon"}], lr=0.02, momentum=0.9, weight_decay=0.1)
    peer = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.9, weight_decay=0.1, ns_steps=STEPS, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        gradient = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        peer.step()
    moved, expected = (ours - start).detach(), (theirs - start).detach()
    assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.9995
    assert moved.norm() == pytest.approx(expected.norm().item(), rel=5e-3)


def test_what_is_no_matrix_of_the_body_moves_as_with_adamw():
    model = tiny_mae()
    other = copy.deepcopy(model)
    optimizers = [make_optimizer(model, OptimConfig(algorithm="muon")), make_optimizer(other, OptimConfig())]
    for step in range(3):
        for network, optimizer in zip((model, other), optimizers, strict=True):
            give_gradients(network, step)
            set_learning_rate(optimizer, 1e-2)
            optimizer.step()
    moved = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, moved[name]) != is_body_matrix(name, parameter), name


def test_the_body_is_the_matrices_of_blocks_decoder_and_skips():
    chosen = {name for name, parameter in tiny_mae().named_parameters() if is_body_matrix(name, parameter)}
    parts = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    blocks = ("encoder.blocks.0", "encoder.blocks.1", "decoder_blocks.0")
    assert chosen == {
        *(f"{block}.{part}.weight" for block in blocks for part in parts),
        "skips.0.fc1.weight",
        "skips.0.fc2.weight",
    }


@pytest.mark.parametrize("case", [case for case in ZOO if not case.startswith("resnet")])
def test_every_transformer_has_a_body_and_keeps_its_embeddings_and_head_out_of_it(case):
    name, options = ZOO[case]
    model = build_model(name, **options)
    body = [n for n, p in model.named_parameters() if is_body_matrix(n, p)]
    assert len(body) >= 4 * options["depth"]
    assert not any("embed" in n or "head" in n or n.endswith(("positions", "token")) for n in body)
    blocks = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    assert {n for n, _ in model.named_parameters() if n.endswith(blocks)} <= set(body)


def test_a_network_without_such_matrices_is_refused():
    with pytest.raises(UserError, match=r"set optim\.algorithm to adamw"):
        parameter_groups(nn.Linear(4, 4), weight_decay=0.0, algorithm="muon")


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_matrices_of_other_groups_are_stacked_but_move_at_their_own_rate(layer_decay):
    model = tiny_mae()
    start = copy.deepcopy(dict(model.named_parameters()))
    optimizer = make_optimizer(model, OptimConfig(algorithm="muon", layer_decay=layer_decay, weight_decay=0.0))
    give_gradients(model, 0)
    # The same gradient in both blocks: the same direction, at the layer's own rate.
    names = [f"encoder.blocks.{i}.attn.proj.weight" for i in (0, 1)]
    parameters = dict(model.named_parameters())
    parameters[names[1]].grad = parameters[names[0]].grad.clone()
    set_learning_rate(optimizer, 1e-2)
    optimizer.step()
    low, high = ((parameters[name] - start[name]).detach() for name in names)
    assert torch.allclose(low, layer_decay * high, atol=1e-6)


def test_a_parameter_without_gradient_stays():
    model = tiny_mae()
    optimizer = make_optimizer(model, OptimConfig(algorithm="muon"))
    give_gradients(model, 0)
    frozen = model.encoder.blocks[0].attn.qkv.weight
    frozen.grad = None
    before = frozen.detach().clone()
    set_learning_rate(optimizer, 1e-2)
    optimizer.step()
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state


def test_state_is_saved_and_restored_to_the_bit():
    model = tiny_mae()
    optimizer = make_optimizer(model, OptimConfig(algorithm="muon"))
    for step in range(3):
        give_gradients(model, step)
        set_learning_rate(optimizer, 1e-2)
        optimizer.step()
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, OptimConfig(algorithm="muon"))
    restore_optimizer(resumed, copy.deepcopy(optimizer_tensors(optimizer)))
    for network, moves in ((model, optimizer), (other, resumed)):
        give_gradients(network, 3)
        set_learning_rate(moves, 1e-2)
        moves.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert optimizer_tensors(optimizer).keys() == optimizer_tensors(resumed).keys()


def test_torch_state_dicts_work_too():
    model = tiny_mae()
    optimizer = make_optimizer(model, OptimConfig(algorithm="muon"))
    give_gradients(model, 0)
    optimizer.step()
    other = copy.deepcopy(model)
    resumed = make_optimizer(other, OptimConfig(algorithm="muon"))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, moves in ((model, optimizer), (other, resumed)):
        give_gradients(network, 1)
        set_learning_rate(moves, 1e-2)
        moves.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_of_another_scale_take_the_same_steps():
    """With match_scales a network whose matrix is c times another's stays c times it, as with AdamW."""
    factor = 4.0
    model, scaled = tiny_mae(), tiny_mae()
    name = "encoder.blocks.1.mlp.fc2.weight"
    scaled.load_state_dict(model.state_dict())
    with torch.no_grad():
        for network, c in ((model, 1.0), (scaled, factor)):
            weight = dict(network.named_parameters())[name]
            weight.copy_(c * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    plain = Muon(parameter_groups(model, weight_decay=0.05, algorithm="muon"))
    matched = Muon(match_scales(parameter_groups(scaled, weight_decay=0.05, algorithm="muon"), {name: factor}))
    for network, moves, c in ((model, plain, 1.0), (scaled, matched, factor)):
        give_gradients(network, 0)
        dict(network.named_parameters())[name].grad.div_(c)
        set_learning_rate(moves, 1e-2)
        moves.step()
    one, two = (dict(network.named_parameters())[name] for network in (model, scaled))
    assert torch.allclose(factor * one, two, rtol=1e-5, atol=1e-6)


def test_runs_made_before_there_was_a_choice_still_load():
    from anechoic.recipes import recipe

    values = to_json(recipe("pocket_mae_digits"))
    del values["optim"]["algorithm"], values["optim"]["momentum"]
    assert from_json(values).optim.algorithm == "adamw"
