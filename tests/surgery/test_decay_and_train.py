"""Training on from pretrained weights: preserve=True and the parameter groups that belong to it."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits

from anechoic import build_model, decay
from anechoic.errors import UserError
from anechoic.surgery import weight_factors
from anechoic.training.optim import match_scales, parameter_groups, set_learning_rate


@pytest.fixture(scope="module")
def digits():
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std()


def train(model, digits, *, steps, groups=None, seed=0):
    """Losses of AdamW at 1e-3 from empty averages, on images and masks that depend on the seed alone."""
    optimizer = torch.optim.AdamW(groups or parameter_groups(model, weight_decay=0.05), lr=0.0, betas=(0.9, 0.95))
    set_learning_rate(optimizer, 1e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(digits), (32,), generator=generator)
        loss = model(digits[chosen], torch.rand(32, 16, generator=generator)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.fixture(scope="module")
def pretrained(digits):
    torch.manual_seed(0)
    options = {"dim": 48, "depth": 8, "num_heads": 3, "decoder_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2}
    mae = build_model("mae_tiny_patch4", patch_size=2, image_size=8, in_channels=1, skips=False, **options)
    losses = train(mae, digits, steps=150)
    assert losses[-1] < 0.7 * losses[0]
    return mae


@pytest.mark.slow
def test_matched_groups_follow_the_plain_networks_curve(pretrained, digits):
    expected = train(copy.deepcopy(pretrained), digits, steps=25, seed=1)
    decayed = decay(pretrained, 0.6, preserve=True)
    groups = match_scales(parameter_groups(decayed, weight_decay=0.05), weight_factors(decayed))
    assert train(decayed, digits, steps=25, groups=groups, seed=1) == pytest.approx(expected, abs=5e-4)


@pytest.mark.slow
def test_unmatched_groups_jump_in_the_first_step(pretrained, digits):
    expected = train(copy.deepcopy(pretrained), digits, steps=2, seed=1)
    unmatched = train(decay(pretrained, 0.6, preserve=True), digits, steps=2, seed=1)
    assert unmatched[0] == pytest.approx(expected[0], abs=1e-5)
    assert unmatched[1] > expected[1] + 0.05


@pytest.mark.slow
def test_groups_hold_every_parameter_once(pretrained):
    decayed = decay(pretrained, 0.6, preserve=True)
    factors = weight_factors(decayed)
    groups = match_scales(parameter_groups(decayed, weight_decay=0.05), factors, eps=1e-8)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in decayed.named_parameters())
    for group in groups:
        for name in group["names"]:
            factor = factors.get(name, 1.0)
            assert (group["lr_scale"], group["eps"]) == (factor, 1e-8 / factor)
            assert group["weight_decay"] in (0.0, 0.05 / factor)


def test_a_tensor_with_two_factors_is_refused():
    uvit = build_model("uvit_small", image_size=8, dim=48, depth=4, num_heads=3, alpha_min=0.6)
    with pytest.raises(UserError, match=r"skip_linear\.weight have different factors"):
        weight_factors(uvit)
