"""The schedules and the one operation: closed forms, endpoints, the fused kernel, refusals."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anechoic import Shortcut, alpha_min_for, constant, cosine, effective_decay, linear
from anechoic.errors import UserError
from anechoic.shortcut import EFFECTIVE_DECAY, FORMS, RETIRED_SCHEDULES, SQRT_HALF, schedule_alphas, shortcut_factors

# The 24 alphas of a ViT-B at alpha_min 0.6, by block: attention, MLP, product so far.
TABLE = """
1.0000 0.9826 0.9826
0.9652 0.9478 0.8989
0.9304 0.9130 0.7637
0.8957 0.8783 0.6007
0.8609 0.8435 0.4362
0.8261 0.8087 0.2914
0.7913 0.7739 0.1785
0.7565 0.7391 0.0998
0.7217 0.7043 0.0507
0.6870 0.6696 0.0233
0.6522 0.6348 0.0097
0.6174 0.6000 0.0036
"""


def test_linear_is_the_published_table():
    alphas = linear(24, alpha_min=0.6)
    for block, row in enumerate(TABLE.split("\n")[1:-1]):
        attention, mlp, product = map(float, row.split())
        assert alphas[2 * block] == pytest.approx(attention, abs=5e-5)
        assert alphas[2 * block + 1] == pytest.approx(mlp, abs=5e-5)
        assert effective_decay(alphas[: 2 * block + 2]) == pytest.approx(product, abs=5e-5)
    assert alphas[0] == 1.0
    assert alphas[-1] == 0.6


@pytest.mark.parametrize(("alpha_min", "product"), [(0.9, 0.2885), (0.8, 0.07558), (0.7, 0.01765), (0.6, 0.003578)])
def test_effective_decay_of_24_branches(alpha_min, product):
    assert effective_decay(linear(24, alpha_min)) == pytest.approx(product, rel=3e-4)


@pytest.mark.parametrize(
    ("n", "alpha_min", "product"),
    [(26, 0.8, 0.0610), (26, 0.6, 0.00224), (34, 0.8, 0.0258), (34, 0.6, 0.00035), (56, 0.8, 0.00243)],
)
def test_effective_decay_of_other_depths(n, alpha_min, product):
    assert effective_decay(linear(n, alpha_min)) == pytest.approx(product, rel=2e-2)
    assert len(linear(n, alpha_min)) == n


def test_alpha_min_for_inverts_the_linear_schedule():
    assert alpha_min_for(24, effective_decay=0.003578) == pytest.approx(0.6, abs=1e-4)
    assert alpha_min_for(56, effective_decay=0.00243) == pytest.approx(0.8, abs=1e-3)


@given(n=st.integers(1, 100), alpha_min=st.floats(0.05, 1.0), schedule=st.sampled_from([linear, cosine, constant]))
def test_alpha_min_for_is_an_inverse(n, alpha_min, schedule):
    product = effective_decay(schedule(n, alpha_min))
    found = alpha_min_for(n, effective_decay=product, schedule=schedule)
    assert effective_decay(schedule(n, found)) == pytest.approx(product, rel=1e-9)


@given(n=st.integers(2, 100), alpha_min=st.floats(0.05, 1.0), schedule=st.sampled_from([linear, cosine]))
def test_schedules_fall_from_exactly_1_to_exactly_alpha_min(n, alpha_min, schedule):
    alphas = schedule(n, alpha_min)
    assert len(alphas) == n
    assert alphas[0] == 1.0
    assert alphas[-1] == alpha_min
    assert all(a >= b - 1e-15 for a, b in pairwise(alphas))


def test_retired_schedule_builds_but_is_not_offered():
    """As linear until another step would leave less than 0.4 of the input; a record of ours was trained with it."""
    alphas = schedule_alphas(24, 0.6, "stopped")
    decayed = alphas.index(1.0, 1)
    assert alphas[:decayed] == linear(24, 0.6)[:decayed]
    assert set(alphas[decayed:]) == {1.0}
    assert effective_decay(linear(24, 0.6)[: decayed + 1]) < 0.4 <= effective_decay(alphas)
    assert schedule_alphas(24, "auto", "stopped")[:8] == linear(24, "auto")[:8]
    with pytest.raises(UserError, match="choose one of linear, cosine, constant or list"):
        schedule_alphas(24, 0.6, "fnord")
    with pytest.raises(UserError, match=r"No alpha_min of this schedule leaves 0\.1 of the input"):
        alpha_min_for(24, effective_decay=0.1, schedule=RETIRED_SCHEDULES["stopped"])


def test_schedules_in_closed_form():
    assert linear(1, 0.3) == [0.3]
    assert cosine(3, 0.5) == pytest.approx([1.0, 0.75, 0.5])
    assert cosine(5, 0.6)[1] == pytest.approx(0.6 + 0.4 * (1 + math.cos(math.pi / 4)) / 2)
    assert constant(4, 0.7) == [0.7] * 4


def test_auto_aims_at_one_effective_decay_and_stops_at_a_half():
    for n in (24, 34, 56, 96):
        assert effective_decay(linear(n, "auto")) == pytest.approx(3.6e-3, rel=1e-6)
    assert linear(8, "auto")[-1] == 0.5


@pytest.mark.parametrize("schedule", [linear, cosine, constant])
@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan"), float("inf"), "half", None, True])
def test_alpha_outside_its_range_is_refused(schedule, alpha):
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\]"):
        schedule(4, alpha)


def test_no_branches_and_impossible_decays_are_refused():
    with pytest.raises(ValueError, match="at least one residual branch"):
        linear(0)
    with pytest.raises(ValueError, match="effective_decay must lie in"):
        alpha_min_for(4, effective_decay=0.0)
    with pytest.raises(ValueError, match="alpha must lie in"):
        Shortcut(1.5)
    with pytest.raises(ValueError, match="beta must lie in"):
        Shortcut(1.0, 0.0)
    with pytest.raises(ValueError, match="learnable alpha"):
        Shortcut(0.5, 0.5, learnable=True)


# ---- the operation


@pytest.mark.parametrize(
    ("alpha", "beta"), [(1.0, 1.0), (0.6, 1.0), (1.0, SQRT_HALF), (SQRT_HALF, SQRT_HALF), (0.3, 0.9)]
)
def test_shortcut_is_the_weighted_sum(alpha, beta):
    x, fx = torch.randn(2, 3, 5, 4, dtype=torch.float64).unbind(0)
    torch.testing.assert_close(Shortcut(alpha, beta)(x, fx), alpha * x + beta * fx, rtol=1e-14, atol=1e-14)


def test_plain_shortcut_is_bitwise_a_sum():
    x, fx = torch.randn(2, 64, 64).unbind(0)
    assert torch.equal(Shortcut()(x, fx), x + fx)


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shortcut", [Shortcut(), Shortcut(0.6), Shortcut(1.0, SQRT_HALF)])
def test_shortcut_is_one_kernel_and_keeps_its_inputs(shortcut):
    x, fx = torch.randn(2, 3, 4).unbind(0)
    before = x.clone(), fx.clone()
    with Kernels() as kernels:
        shortcut(x, fx)
    assert kernels.names == ["add"]
    assert torch.equal(x, before[0])
    assert torch.equal(fx, before[1])


def test_learnable_alpha_starts_at_the_schedule_and_gets_its_gradient():
    shortcut = Shortcut(0.75, learnable=True)
    x, fx = torch.randn(2, 3, 4).unbind(0)
    torch.testing.assert_close(shortcut(x, fx), 0.75 * x + fx)
    shortcut(x, fx).sum().backward()
    torch.testing.assert_close(shortcut.alpha.grad, x.sum())


def test_every_form_has_the_factors_of_the_ablation_table():
    kinds = ["attention", "mlp"] * 3
    alphas = linear(6, 0.6)
    assert shortcut_factors(kinds, alpha_min=0.6) == [(a, 1.0) for a in alphas]
    assert shortcut_factors(kinds, alpha_min=0.6, form="learnable") == [(a, 1.0) for a in alphas]
    assert shortcut_factors(kinds, alpha_min=0.6, form="attention") == [
        (a if i % 2 == 0 else 1.0, 1.0) for i, a in enumerate(alphas)
    ]
    assert shortcut_factors(kinds, alpha_min=0.6, form="mlp") == [
        (a if i % 2 else 1.0, 1.0) for i, a in enumerate(alphas)
    ]
    assert shortcut_factors(kinds, alpha_min=1, form="branch") == [(1.0, math.sqrt(0.5))] * 6
    assert shortcut_factors(kinds, alpha_min=1, form="both") == [(math.sqrt(0.5), math.sqrt(0.5))] * 6
    assert shortcut_factors(kinds, alpha_min=1, form="plain") == [(1.0, 1.0)] * 6
    assert shortcut_factors(kinds, schedule=[1.0, 0.9, 0.9, 0.9, 0.8, 0.8])[4] == (0.8, 1.0)
    assert set(FORMS) == {"identity", "learnable", "attention", "mlp", "branch", "both", "plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "sideways"}, "There is no form"),
        ({"form": "both", "alpha_min": 0.6}, "takes no decay"),
        ({"form": "attention", "kinds": ["convolution"]}, "no attention branches"),
        ({"schedule": "steep"}, "There is no schedule"),
        ({"schedule": [1.0, 0.5]}, "lists 2 alphas"),
    ],
)
def test_contradictory_forms_are_refused(options, message):
    kinds = options.pop("kinds", ["attention", "mlp"] * 2)
    with pytest.raises(ValueError, match=message):
        shortcut_factors(kinds, **options)


# ---- schedules that are functions


def squared(n, alpha_min):
    return [1 - (1 - alpha_min) * (k / (n - 1)) ** 2 for k in range(n)]


def test_function_as_schedule_sets_the_alphas_of_every_network():
    import anechoic

    options = {"image_size": 8, "dim": 16, "depth": 2, "num_heads": 2}
    model = anechoic.build_model("vit_tiny_patch4", **options, alpha_min=0.5, schedule=squared)
    alphas = [shortcut.alpha for shortcut in anechoic.shortcuts(model)]
    assert alphas == squared(4, 0.5)
    plain = anechoic.build_model("vit_tiny_patch4", **options)
    decayed = anechoic.decay(plain, 0.5, schedule=squared)
    assert [shortcut.alpha for shortcut in anechoic.shortcuts(decayed)] == alphas
    by_function, by_list = (
        [group["lr"] for group in anechoic.param_groups(plain, 0.5, lr=1e-3, schedule=schedule)]
        for schedule in (squared, alphas)
    )
    assert by_function == by_list
    listed = model.config.schedule
    assert isinstance(listed, tuple)
    assert list(listed) == alphas  # a saved config names no function


def test_function_as_schedule_solves_auto_for_itself():
    alphas = schedule_alphas(48, "auto", squared)
    assert math.prod(alphas) == pytest.approx(EFFECTIVE_DECAY, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda n: [1.0] * n, "is a function \\(n, alpha_min\\)"),
        (lambda n, alpha_min: 0.5, "returns n numbers"),
        (lambda n, alpha_min: [1.0], "lists 1 alphas"),
    ],
)
def test_function_that_is_no_schedule_is_refused(schedule, words):
    with pytest.raises(UserError, match=words):
        schedule_alphas(4, 0.6, schedule)
