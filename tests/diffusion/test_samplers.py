"""Samplers against closed forms: for Gaussian data the score and the velocity are known, and so is the transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anechoic.diffusion import samplers as sampling
from anechoic.diffusion.process import PROCESSES, ContinuousVP, DiscreteLatent, LinearFlow, Process
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

VP, DISCRETE, FLOW = ContinuousVP(), DiscreteLatent(), LinearFlow()
MEAN = torch.tensor([0.7, -0.4], dtype=torch.float64)
COVARIANCE = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)


def marginal(process: Process, t: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of x_t for the Gaussian data."""
    alpha, sigma = process.coefficients(t)
    return alpha * MEAN, alpha**2 * COVARIANCE + sigma**2 * torch.eye(2, dtype=torch.float64)


class Exact:
    """The network that a Gaussian data law calls for: E[target | x_t], which is linear in x. Counts its calls."""

    def __init__(self, process: Process) -> None:
        self.process, self.calls = process, 0

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        mean, covariance = marginal(self.process, t)
        alpha, sigma = self.process.coefficients(t)
        whitened = torch.linalg.solve(covariance, (x.double() - mean).T).T
        noise, data = sigma * whitened, MEAN + alpha * whitened @ COVARIANCE
        return self.process.target(data, noise).to(x.dtype)


def root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors @ torch.diag(values.sqrt()) @ vectors.T


def transported(process: Process, x: Tensor, *, start: float, end: float) -> Tensor:
    """The exact end of the probability-flow ODE: all covariances commute, so the map is a product of square roots."""
    (mean_0, cov_0), (mean_1, cov_1) = (marginal(process, torch.tensor(t, dtype=torch.float64)) for t in (start, end))
    return mean_1 + (x - mean_0) @ torch.linalg.solve(root(cov_0), root(cov_1))


def noise(count: int = 256, seed: int = 0) -> Tensor:
    return SampleGenerator(seed, torch.arange(count), torch.zeros(count, dtype=torch.long)).normal("start", 2).double()


def step_noise(step: int, count: int = 20_000) -> Tensor:
    return SampleGenerator(1, torch.arange(count), torch.full((count,), step)).normal("step", 2).double()


# ---- the data law ---------------------------------------------------------------------------------------------------

LAWS = [
    (VP, "euler-maruyama", 1000),
    (VP, "dpm-solver", 50),
    (VP, "dpm-solver++", 50),
    (DISCRETE, "dpm-solver++", 50),
    (DISCRETE, "dpm-solver", 50),
    (FLOW, "euler", 200),
    (FLOW, "heun", 50),
    (FLOW, "dopri5", 1),
    (FLOW, "sde", 250),
]


@pytest.mark.slow
@pytest.mark.parametrize(("process", "sampler", "steps"), LAWS, ids=lambda value: getattr(value, "name", str(value)))
def test_every_sampler_carries_noise_to_the_data_law(process: Process, sampler: str, steps: int) -> None:
    x = sampling.solve(
        Exact(process), noise(20_000), process=process, sampler=sampler, steps=steps, step_noise=step_noise
    )
    torch.testing.assert_close(x.mean(0), MEAN, rtol=0, atol=0.03)
    torch.testing.assert_close(x.T.cov(), COVARIANCE, rtol=0, atol=0.03)


def test_every_named_sampler_is_among_those_proved() -> None:
    proved = {(process.name, sampler) for process, sampler, _ in LAWS}
    offered = {(process.name, sampler) for process in PROCESSES.values() for sampler in sampling.samplers_for(process)}
    assert offered == proved


# ---- orders of convergence ------------------------------------------------------------------------------------------


def solver_error(process: Process, order: int, form: str, intervals: int) -> float:
    """Largest distance from the exact end, over steps of one order, uniform in half-log-SNR."""
    start, end = (0.98, 0.01) if process is VP else (980.0, 10.0)
    ends = process.half_log_snr(torch.tensor([start, end], dtype=torch.float64))
    knots = torch.linspace(float(ends[0]), float(ends[1]), intervals * order + 1, dtype=torch.float64)
    times = process.time_at(knots)
    steps = [times[i * order : i * order + order + 1] for i in range(intervals)]
    x = noise()
    found = sampling.dpm_solver(Exact(process), x, process=process, steps=steps, form=form)
    first, last = float(times[0]), float(times[-1])
    return float((found - transported(process, x, start=first, end=last)).abs().max())


@pytest.mark.parametrize("form", ["noise", "data"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_dpm_solver_converges_with_its_order(order: int, form: str) -> None:
    coarse, middle, fine = (solver_error(VP, order, form, intervals) for intervals in (40, 80, 160))
    for ratio in (coarse / middle, middle / fine):
        assert 0.85 * 2**order < ratio < 1.6 * 2**order


@pytest.mark.parametrize(("method", "order"), [(sampling.euler, 1), (sampling.heun, 2)])
def test_flow_integrators_converge_with_their_order(method: Callable, order: int) -> None:
    x = noise()
    exact = transported(FLOW, x, start=0, end=1)

    def error(steps: int) -> float:
        times = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        return float((method(Exact(FLOW), x, times=times) - exact).abs().max())

    assert 0.85 * 2**order < error(40) / error(80) < 1.3 * 2**order


def test_dopri5_keeps_its_tolerance() -> None:
    x = noise()
    exact = transported(FLOW, x, start=0, end=1)

    def error(tolerance: float) -> float:
        found = sampling.dopri5(Exact(FLOW), x, times=torch.tensor([0.0, 1.0]), atol=tolerance, rtol=tolerance)
        return float((found - exact).abs().max())

    assert error(1e-3) < 2e-2
    assert error(1e-8) < 1e-6


def test_higher_orders_are_closer_for_the_same_evaluations() -> None:
    x = noise()
    exact = transported(VP, x, start=1.0, end=1e-4)
    errors = []
    for order in (1, 2, 3):
        steps = sampling.log_snr_layout(VP, 50, order=order, end=1e-4)
        found = sampling.dpm_solver(Exact(VP), x, process=VP, steps=steps, form="noise")
        errors.append(float((found - exact).abs().max()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


# ---- layouts and evaluations ----------------------------------------------------------------------------------------


def test_fifty_evaluations_are_sixteen_thirds_and_a_second() -> None:
    assert sampling.solver_orders(50, order=3) == [3] * 16 + [2]
    assert len(sampling.log_snr_layout(VP, 50, order=3, end=1e-4)) == 17


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orders_spend_exactly_the_evaluations(order: int) -> None:
    for evaluations in range(1, 40):
        orders = sampling.solver_orders(evaluations, order=order)
        assert sum(orders) == evaluations
        assert set(orders) <= {1, 2, 3}


def test_log_snr_layout_divides_evenly_in_log_snr() -> None:
    steps = sampling.log_snr_layout(VP, 50, order=3, end=1e-4)
    assert (float(steps[0][0]), float(steps[-1][-1])) == (1.0, 1e-4)
    lengths = [float(VP.half_log_snr(nodes)[-1] - VP.half_log_snr(nodes)[0]) for nodes in steps]
    assert max(lengths) - min(lengths) < 1e-8
    for nodes in steps:
        gaps = VP.half_log_snr(nodes).diff()
        torch.testing.assert_close(gaps, gaps.mean().expand_as(gaps))


def test_time_layout_is_uniform_in_time() -> None:
    steps = sampling.time_layout(DISCRETE, 50, order=3, end=1.0)
    knots = torch.cat([steps[0][:1], *(nodes[1:] for nodes in steps)])
    torch.testing.assert_close(knots, torch.linspace(1000, 1, 51, dtype=torch.float64))
    assert [len(nodes) - 1 for nodes in steps] == [3] * 16 + [2]


@pytest.mark.parametrize(
    ("process", "sampler", "steps", "evaluations"),
    [
        (VP, "euler-maruyama", 1000, 1000),
        (VP, "dpm-solver", 50, 50),
        (VP, "dpm-solver", 7, 7),
        (DISCRETE, "dpm-solver++", 50, 50),
        (FLOW, "euler", 20, 20),
        (FLOW, "heun", 20, 20),
        (FLOW, "sde", 250, 250),
    ],
)
def test_steps_are_network_evaluations(process: Process, sampler: str, steps: int, evaluations: int) -> None:
    exact = Exact(process)
    sampling.solve(
        exact, noise(2), process=process, sampler=sampler, steps=steps, step_noise=lambda step: step_noise(step, 2)
    )
    assert exact.calls == evaluations


def test_euler_maruyama_adds_no_noise_on_its_last_step() -> None:
    asked: list[int] = []

    def recorded(step: int) -> Tensor:
        asked.append(step)
        return step_noise(step, 2)

    sampling.euler_maruyama(Exact(VP), noise(2), process=VP, steps=10, step_noise=recorded)
    assert asked == list(range(9))


# ---- against diffusers ----------------------------------------------------------------------------------------------


class Wavy(nn.Module):
    """A fixed nonlinear network of x and t, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        shift = torch.sin(t / 300).view(-1, 1, 1, 1)
        return 0.8 * torch.tanh(self.mix(x) + shift) + 0.3 * x


@pytest.fixture(scope="module")
def wavy() -> Wavy:
    torch.manual_seed(0)
    return Wavy()


def image_noise(count: int = 4) -> Tensor:
    return SampleGenerator(5, torch.arange(count), torch.zeros(count, dtype=torch.long)).normal("start", 3, 8, 8)


def through_scheduler(scheduler: object, network: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    for timestep in scheduler.timesteps:  # type: ignore[attr-defined]
        x = scheduler.step(network(x, timestep), timestep, x).prev_sample  # type: ignore[attr-defined]
    return x


# Warnings of numpy and diffusers about diffusers' own code.
PEER_WARNING = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning", "ignore:.*algorithm_type:FutureWarning"
)
BETAS = {"beta_start": 0.00085, "beta_end": 0.0120, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}


@PEER_WARNING
@pytest.mark.parametrize("algorithm", ["dpmsolver", "dpmsolver++"])
@pytest.mark.parametrize("order", [1, 2])
def test_single_step_solver_equals_diffusers(wavy: Wavy, order: int, algorithm: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DPMSolverSinglestepScheduler(
        **BETAS, solver_order=order, algorithm_type=algorithm, final_sigmas_type="sigma_min", lower_order_final=True
    )
    scheduler.set_timesteps(21)
    # Their step 0 is our n = 1; the last interval ends at n = 1, where the smallest sigma lies.
    knots = torch.cat([scheduler.timesteps.double() + 1, torch.ones(1, dtype=torch.float64)])
    groups, begin = [], 0
    for i, k in enumerate(scheduler.order_list):
        # order_list has the order at each knot: a group ends where the next order is 1 again.
        if i + 1 == len(scheduler.order_list) or scheduler.order_list[i + 1] == 1:
            assert k == i + 1 - begin
            groups.append(knots[begin : i + 2])
            begin = i + 1
    form = "noise" if algorithm == "dpmsolver" else "data"
    ours = sampling.dpm_solver(
        sampling.NetworkDenoiser(wavy, DISCRETE), image_noise(), process=DISCRETE, steps=groups, form=form
    )
    theirs = through_scheduler(scheduler, lambda x, n: wavy(x, (n + 1).float().expand(len(x))), image_noise())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@PEER_WARNING
@pytest.mark.parametrize("algorithm", ["dpmsolver", "dpmsolver++"])
def test_first_order_equals_diffusers_multistep(wavy: Wavy, algorithm: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DPMSolverMultistepScheduler(
        **BETAS, solver_order=1, algorithm_type=algorithm, final_sigmas_type="sigma_min"
    )
    scheduler.set_timesteps(20)
    knots = torch.cat([scheduler.timesteps.double() + 1, torch.ones(1, dtype=torch.float64)])
    form = "noise" if algorithm == "dpmsolver" else "data"
    steps = [knots[i : i + 2] for i in range(20)]
    ours = sampling.dpm_solver(
        sampling.NetworkDenoiser(wavy, DISCRETE), image_noise(), process=DISCRETE, steps=steps, form=form
    )
    theirs = through_scheduler(scheduler, lambda x, n: wavy(x, (n + 1).float().expand(len(x))), image_noise())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_flow_euler_equals_diffusers(wavy: Wavy) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    scheduler.set_timesteps(sigmas=[1 - i / 25 for i in range(25)])
    ours = sampling.euler(
        sampling.NetworkDenoiser(wavy, FLOW), image_noise(), times=torch.linspace(0, 1, 26, dtype=torch.float64)
    )
    # Their network predicts noise - data and their time runs from 1000 (noise) to 0 (data).
    theirs = through_scheduler(scheduler, lambda x, n: -wavy(x, (1 - n / 1000).expand(len(x))), image_noise())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ---- guidance, and images of a seed ---------------------------------------------------------------------------------


class EvalData(nn.Module):
    """Predicts its label, so that guidance can be read off."""

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return labels.to(x).view(-1, 1, 1, 1).expand_as(x)


@pytest.mark.parametrize(("convention", "scale", "expected"), [("added", 0.4, -2.2), ("scaled", 1.4, -2.2)])
def test_both_conventions_of_guidance_mean_the_same(convention: str, scale: float, expected: float) -> None:
    denoise = sampling.NetworkDenoiser(
        EvalData(), VP, labels=torch.tensor([1]), guidance=sampling.Guidance(scale, convention), null=9
    )
    out = denoise(torch.zeros(1, 4, 2, 2), torch.tensor(0.5))
    torch.testing.assert_close(out, torch.full((1, 4, 2, 2), expected))


@pytest.mark.parametrize(("convention", "none"), [("added", 0.0), ("scaled", 1.0)])
def test_no_guidance_is_the_conditional_prediction(convention: str, none: float) -> None:
    guidance = sampling.Guidance(none, convention)
    assert guidance.is_none
    assert torch.equal(guidance.combine(torch.ones(1, 3), torch.zeros(1, 3)), torch.ones(1, 3))


def test_guidance_can_leave_channels_alone() -> None:
    guidance = sampling.Guidance(4.0, "scaled", channels=3)
    out = guidance.combine(torch.ones(1, 4, 1, 1), torch.zeros(1, 4, 1, 1))
    assert out.flatten().tolist() == [4, 4, 4, 1]


@pytest.mark.parametrize(
    ("process", "sampler", "steps"),
    [law for law in LAWS if law[1] != "dopri5"],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_an_image_does_not_depend_on_its_batch(wavy: Wavy, process: Process, sampler: str, steps: int) -> None:
    def make(ids: Tensor) -> Tensor:
        return sampling.sample_batch(
            wavy, ids, shape=(3, 8, 8), process=process, sampler=sampler, steps=min(steps, 30), seed=4
        )[0]

    whole = make(torch.arange(5))
    parts = torch.cat([make(torch.tensor([0])), make(torch.tensor([1, 2])), make(torch.tensor([3, 4]))])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    assert (whole[0] - whole[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("process", "sampler", "steps", "order", "message"),
    [
        (VP, "dpm-solver", 0, 3, "at least 1 step"),
        (VP, "heun", 10, 3, "choose one of dpm-solver"),
        (FLOW, "euler-maruyama", 10, 3, "choose one of heun"),
        (VP, "ddim", 10, 3, "there is no sampler 'ddim'"),
        (VP, "dpm-solver", 10, 4, "orders 1, 2 and 3"),
        (FLOW, "sde", 1, 3, "at least 2 steps"),
    ],
)
def test_impossible_requests_say_what_to_do(
    process: Process, sampler: str, steps: int, order: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        sampling.check_sampler(sampler, process=process, steps=steps, order=order)
