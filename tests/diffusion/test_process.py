"""Forward processes: published schedule values, inverses, and conversions that undo the mixing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anechoic.diffusion.process import PROCESSES, ContinuousVP, DiscreteLatent, LinearFlow, Process, process_named
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

ALL = list(PROCESSES.values())


def alpha_bar(process: Process, t: float) -> float:
    return float(process.coefficients(torch.tensor(t, dtype=torch.float64))[0] ** 2)


@pytest.mark.parametrize(
    ("t", "expected"), [(0.01, 0.9980), (0.05, 0.9706), (0.1, 0.8963), (0.2, 0.6584), (0.3, 0.3963), (0.5, 0.0791)]
)
def test_continuous_schedule_has_the_published_values(t: float, expected: float) -> None:
    assert round(alpha_bar(ContinuousVP(), t), 4) == expected


@pytest.mark.parametrize(
    ("n", "expected"), [(1, 0.9991), (100, 0.8955), (250, 0.6754), (500, 0.2777), (750, 0.0566), (1000, 0.0047)]
)
def test_discrete_schedule_has_the_published_values(n: float, expected: float) -> None:
    assert round(alpha_bar(DiscreteLatent(), n), 4) == expected


def test_discrete_schedule_is_the_product_of_its_betas() -> None:
    product = 1.0
    for n in range(1, 1001):
        root = 0.00085**0.5 + (0.0120**0.5 - 0.00085**0.5) * (n - 1) / 999
        product *= 1 - root**2
        assert math.isclose(alpha_bar(DiscreteLatent(), n), product, rel_tol=1e-10)


@pytest.mark.parametrize("process", ALL, ids=lambda process: process.name)
@settings(deadline=None)
@given(level=st.floats(0.002, 0.998))
def test_log_snr_and_time_are_inverse(process: Process, level: float) -> None:
    t = process.time_of_noise(torch.tensor(level, dtype=torch.float64))
    alpha, sigma = process.coefficients(t)
    half_log_snr = process.half_log_snr(t)
    torch.testing.assert_close(half_log_snr, torch.log(alpha / sigma))
    torch.testing.assert_close(process.time_at(half_log_snr), t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("process", ALL, ids=lambda process: process.name)
def test_more_noise_is_less_signal(process: Process) -> None:
    levels = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    assert (process.half_log_snr(process.time_of_noise(levels)).diff() < 0).all()


@pytest.mark.parametrize("process", ALL, ids=lambda process: process.name)
def test_perfect_prediction_returns_data_and_noise(process: Process) -> None:
    generator = SampleGenerator(0, torch.arange(64), torch.zeros(64, dtype=torch.long))
    data, noise = (generator.normal(purpose, 3, 4, 4).double() for purpose in ("data", "noise"))
    t = process.time_of_noise(generator.uniform("level").double() * 0.9 + 0.05)
    x = process.mix(data, noise, t)
    found_data, found_noise = process.estimates(x, t, process.target(data, noise))
    torch.testing.assert_close(found_data, data, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found_noise, noise, rtol=1e-9, atol=1e-9)
    sigma = process.coefficients(t)[1].view(-1, 1, 1, 1)
    torch.testing.assert_close(process.score(x, t, process.target(data, noise)), -noise / sigma)


def test_score_of_a_velocity_is_the_identity_of_the_linear_path() -> None:
    x, v = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    expected = (t[:, None] * v - x) / (1 - t[:, None])
    torch.testing.assert_close(LinearFlow().score(x, t, v), expected)


def test_network_sees_each_family_its_own_time() -> None:
    half = torch.tensor(0.5)
    assert [float(p.network_time(p.time_of_noise(half))) for p in ALL] == [499.5, 500.0, 0.5]


@pytest.mark.parametrize("process", ALL, ids=lambda process: process.name)
def test_training_times_cover_the_process_evenly(process: Process) -> None:
    t = process.draw_time(SampleGenerator(3, torch.arange(20_000), torch.zeros(20_000, dtype=torch.long)))
    unit = t / 1000 if process.name == "discrete" else t
    counts = torch.histc(unit, bins=10, min=0, max=1)
    assert counts.min() > 1850
    assert counts.max() < 2150
    if process.name == "discrete":
        assert (t.min(), t.max()) == (1, 1000)
        assert torch.equal(t, t.round())


def test_unknown_process_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="vp, discrete, flow"):
        process_named("ve")
