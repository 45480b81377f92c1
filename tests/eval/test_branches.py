"""What branches write and what components hold: by networks and features whose ranks and shares are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anechoic.data.preprocess import Preprocess
from anechoic.eval.encoders import Encoder
from anechoic.eval.eval_data import open_eval_data
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.feature_cache import batches
from anechoic.eval.metrics.rank import effective_rank
from anechoic.models import build_model

SPEC = EvalSpec(("branches", "components"), layers=(0, -1), poolings=("mean",), max_train=20, max_test=200)


@pytest.fixture(scope="module")
def digits():
    return open_eval_data("digits:train", "digits:test", channels=1)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    model = build_model(
        "vit_tiny_patch4", image_size=8, patch_size=2, in_channels=1, dim=24, depth=2, num_heads=2, zero_init=True
    )
    return Encoder("tiny", model.eval(), Preprocess((0.5,), (0.5,), 8, 1))


def test_a_branch_has_the_rank_of_the_matrix_that_writes_it(encoder, digits):
    first, last = encoder.model.blocks
    with torch.no_grad():
        first.mlp.fc2.weight.copy_(torch.outer(torch.randn(24), torch.randn(96)))
        last.mlp.fc2.weight.normal_()
    found = Evaluator(SPEC, cached=False).run(encoder, digits).network
    zero, one, also_zero, many = found["writer_rank"]
    assert (zero, also_zero) == (0, 0)  # branches start at zero
    assert one == pytest.approx(1)
    energies = torch.linalg.svdvals(last.mlp.fc2.weight.detach().double()).square()
    shares = energies / energies.sum()
    assert many == pytest.approx(torch.exp(-(shares * shares.log()).sum()).item())
    assert found["output_rank"][0] == 0
    assert found["output_rank"][1] == pytest.approx(1, abs=1e-4)
    assert 1 < found["output_rank"][3] <= 24


def test_nothing_is_hooked_afterwards(encoder, digits):
    Evaluator(SPEC, cached=False).run(encoder, digits)
    assert not any(module._forward_hooks for module in encoder.model.modules())


def test_components_separate_color_and_contrast_from_the_rest(encoder, digits):
    subject = Evaluator(SPEC, cached=False).extract(encoder, digits)
    rng = np.random.default_rng(0)
    images = torch.cat(list(batches(encoder, subject.eval_data.test, device="cpu"))).numpy()
    gray = images.mean(axis=(1, 2, 3))[:, None] * rng.normal(size=24)
    subject.sets[0, "mean"] = gray + 1e-3 * rng.normal(size=gray.shape)
    row = next(row for row in Evaluator(SPEC).measure(subject).rows if row["layer"] == 0)
    assert row["look_share"] > 0.99
    assert row["first_share"] > 0.99
    subject.sets[0, "mean"] = rng.normal(size=gray.shape) + 100
    row = next(row for row in Evaluator(SPEC).measure(subject).rows if row["layer"] == 0)
    assert row["look_share"] < 0.1
    assert row["common_share"] == pytest.approx(1, abs=1e-3)
    assert row["first_share"] < row["three_share"] < 0.3


def test_the_rank_of_a_matrix_of_weights_counts_all_its_directions():
    assert effective_rank(torch.eye(7), center="none").rank == pytest.approx(7)
    assert effective_rank(torch.eye(7)).rank == pytest.approx(6)
    assert effective_rank(torch.ones(4, 5), center="none").rank == pytest.approx(1)
