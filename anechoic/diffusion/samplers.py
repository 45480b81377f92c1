"""Samplers: functions of (denoiser, noise, times) that carry noise back to data.

Euler–Maruyama on the reverse SDE (Song
et al. 2021), DPM-Solver in noise and data form (Lu et al. 2022a, b), and the ODE and SDE of SiT (Ma et al. 2024).

A denoiser maps (x (B, ...), t a double scalar in the process's time) to the network's prediction, of x's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from anechoic.choices import GuidanceForm
from anechoic.choices import Prediction as Form
from anechoic.diffusion.process import ContinuousVP, DiscreteLatent, LinearFlow, NoisePredicting, Process
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

Denoiser = Callable[[Tensor, Tensor], Tensor]
StepNoise = Callable[[int], Tensor]


# ---- from a network to a denoiser -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, in the two conventions of the literature, on the first `channels` channels (None: all).

    added:  conditional + scale * (conditional - null); 0 is none (U-ViT)
    scaled: null + scale * (conditional - null);        1 is none (SiT); so scaled = added + 1
    """

    scale: float
    convention: GuidanceForm = "added"
    channels: int | None = None

    @property
    def is_none(self) -> bool:
        return self.scale == (0 if self.convention == "added" else 1)

    def combine(self, conditional: Tensor, null: Tensor) -> Tensor:
        extra = self.scale if self.convention == "added" else self.scale - 1
        guided = conditional + extra * (conditional - null)
        if self.channels is None:
            return guided
        return torch.cat([guided[:, : self.channels], conditional[:, self.channels :]], dim=1)


@dataclass
class NetworkDenoiser:
    """A network as a denoiser, for labels (B,) or none; `evaluations` counts forward passes, `tick` is called at each.

    With guidance, the conditional and the null prediction are one pass over a doubled batch.
    """

    model: nn.Module
    process: Process
    labels: Tensor | None = None
    guidance: Guidance | None = None
    null: int | None = None
    tick: Callable[[], object] = lambda: None
    evaluations: int = 0

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.evaluations += 1
        self.tick()
        time = self.process.network_time(t).to(device=x.device, dtype=torch.float32)
        if self.guidance is None or self.guidance.is_none:
            return self.model(x, time.expand(len(x)), self.labels)
        both = self.model(torch.cat([x, x]), time.expand(2 * len(x)), self.doubled_labels)
        return self.guidance.combine(*both.chunk(2))

    @cached_property
    def doubled_labels(self) -> Tensor:
        """The labels, then as many null labels."""
        assert self.labels is not None
        assert self.null is not None
        return torch.cat([self.labels, torch.full_like(self.labels, self.null)])


# ---- stochastic, variance preserving --------------------------------------------------------------------------------


def euler_maruyama(denoise: Denoiser, x: Tensor, *, process: ContinuousVP, steps: int, step_noise: StepNoise) -> Tensor:
    """dx = (-beta x / 2 - beta score) dt + sqrt(beta) dW backwards over {0} and linspace(1e-3, 1, steps).

    The last step, to t = 0, adds no noise. One evaluation for each step.
    """
    times = torch.cat([torch.linspace(1, 1e-3, steps, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    for step, (t, s) in enumerate(pairwise(times)):
        beta = process.beta(t)
        drift = -0.5 * beta * x - beta * process.score(x, t, denoise(x, t))
        x = x + drift * (s - t)
        if s > 0:
            x = x + torch.sqrt(beta * (t - s)) * step_noise(step)
    return x


# ---- DPM-Solver -----------------------------------------------------------------------------------------------------


def solver_orders(evaluations: int, *, order: int) -> list[int]:
    """Orders of the steps that spend exactly this many evaluations, the highest first, lower ones at the end.

    Of order 3: 50 is 16 x 3 and 2. When 3 divides the number, the last steps have orders 2 and 1.
    """
    full, rest = divmod(evaluations, order)
    if order == 3 and rest == 0:
        return [3] * (full - 1) + [2, 1]
    return [order] * full + [rest] * (rest > 0)


def log_snr_layout(process: Process, evaluations: int, *, order: int, end: float) -> list[Tensor]:
    """Steps uniform in half-log-SNR from the noisiest time to `end`; a step is the times of its nodes, ends included.

    Inner nodes divide a step evenly in half-log-SNR: 1/2 for order 2, 1/3 and 2/3 for order 3.
    """
    orders = solver_orders(evaluations, order=order)
    ends = torch.tensor([process.noisiest, end], dtype=torch.float64)
    start, stop = process.half_log_snr(ends)
    knots = torch.linspace(float(start), float(stop), len(orders) + 1, dtype=torch.float64)
    nodes = [
        process.time_at(torch.linspace(float(a), float(b), k + 1, dtype=torch.float64))
        for k, (a, b) in zip(orders, pairwise(knots), strict=True)
    ]
    # Going through lambda and back may move the ends by a rounding error.
    nodes[0][0], nodes[-1][-1] = ends
    return nodes


def time_layout(process: Process, evaluations: int, *, order: int, end: float) -> list[Tensor]:
    """evaluations + 1 knots uniform in time, grouped: the nodes of a step of order k are k + 1 neighboring knots."""
    knots = torch.linspace(process.noisiest, end, evaluations + 1, dtype=torch.float64)
    steps, position = [], 0
    for k in solver_orders(evaluations, order=order):
        steps.append(knots[position : position + k + 1])
        position += k
    return steps


@dataclass(frozen=True)
class SolverStep:
    """One single-step update of order len(times) - 1 (1 to 3), as numbers: all that does not depend on the sample.

    The noise form integrates x / alpha with the predicted noise m, the data form x / sigma with the predicted data m;
    with g = h (noise) or -h (data) from lambda at the first node, carried and scale swapped between alpha and sigma,
    and D = m_inner - m_0, both are

        x_i = carried_i / carried_0 * x - scale_i * (expm1(g_i) m_0 + correction),

    correction at an inner or last node of order 3:  (expm1(g) / g - 1) * g_ratio * D,
    correction at the end of order 2:                expm1(g) / (2 r) * D.

    times, alphas, sigmas, and carried (the ratio above), scale and growth (expm1(g)): a value for each node.
    corrections: the factor of D at nodes 2 and 3.
    """

    form: Form
    times: tuple[Tensor, ...]
    alphas: tuple[float, ...]
    sigmas: tuple[float, ...]
    carried: tuple[float, ...]
    scale: tuple[float, ...]
    growth: tuple[float, ...]
    corrections: dict[int, float]

    @classmethod
    def between(cls, nodes: Tensor, *, process: NoisePredicting, form: Form) -> SolverStep:
        """From nodes[0] to nodes[-1], by way of the nodes between them."""
        alphas, sigmas = process.coefficients(nodes)
        carried, scale = (alphas, sigmas) if form == "noise" else (sigmas, alphas)
        half_log_snr = process.half_log_snr(nodes)
        g = (half_log_snr - half_log_snr[0]) * (1 if form == "noise" else -1)
        growth = torch.expm1(g)
        if len(nodes) == 3:
            corrections = {2: float(growth[2] * g[2] / (2 * g[1]))}
        else:
            corrections = {i: float((growth[i] / g[i] - 1) * (g[i] / g[i - 1])) for i in range(2, len(nodes))}
        return cls(
            form=form,
            times=nodes.unbind(0),
            alphas=tuple(alphas.tolist()),
            sigmas=tuple(sigmas.tolist()),
            carried=tuple((carried / carried[0]).tolist()),
            scale=tuple(scale.tolist()),
            growth=tuple(growth.tolist()),
            corrections=corrections,
        )

    def run(self, denoise: Denoiser, x: Tensor) -> Tensor:
        """x at the first node -> x at the last one; as many evaluations as the order."""
        first = self.predict(denoise, x, 0)
        later, x_i = first, self.advance(x, first, first, 1)
        for i in range(1, len(self.times) - 1):
            later = self.predict(denoise, x_i, i)
            x_i = self.advance(x, first, later, i + 1)
        return x_i

    def predict(self, denoise: Denoiser, x: Tensor, i: int) -> Tensor:
        """The noise or data at node i."""
        prediction = denoise(x, self.times[i])
        return prediction if self.form == "noise" else (x - self.sigmas[i] * prediction) / self.alphas[i]

    def advance(self, x: Tensor, first: Tensor, later: Tensor, i: int) -> Tensor:
        """x at node i, from the predictions at the first node and at the one before i."""
        change = self.growth[i] * first
        if i in self.corrections:
            change = change + self.corrections[i] * (later - first)
        return self.carried[i] * x - self.scale[i] * change


def dpm_solver(
    denoise: Denoiser, x: Tensor, *, process: NoisePredicting, steps: Sequence[Tensor], form: Form
) -> Tensor:
    """DPM-Solver (form "noise") or DPM-Solver++ (form "data") over the given steps; order k costs k evaluations."""
    for step in [SolverStep.between(nodes, process=process, form=form) for nodes in steps]:
        x = step.run(denoise, x)
    return x


# ---- flows ----------------------------------------------------------------------------------------------------------


def euler(velocity: Denoiser, x: Tensor, *, times: Tensor) -> Tensor:
    """x += v(x, t) dt over the times; one evaluation for each step."""
    for t, dt in zip(times, times.diff().tolist(), strict=False):
        x = x + dt * velocity(x, t)
    return x


def heun(velocity: Denoiser, x: Tensor, *, times: Tensor) -> Tensor:
    """The trapezoid rule with an Euler predictor; two evaluations for each step."""
    for (t, s), dt in zip(pairwise(times), times.diff().tolist(), strict=True):
        slope = velocity(x, t)
        ahead = velocity(x + dt * slope, s)
        x = x + 0.5 * dt * (slope + ahead)
    return x


def dopri5(velocity: Denoiser, x: Tensor, *, times: Tensor, atol: float = 1e-6, rtol: float = 1e-3) -> Tensor:
    """Adaptive Dormand–Prince 5(4). Its steps are chosen for the whole batch, so the result depends on the batch."""
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise UserError('the dopri5 sampler needs torchdiffeq: pip install "anechoic[diffusion]".') from error
    ends = times[[0, -1]].to(x)

    def slope(t: Tensor, x: Tensor) -> Tensor:
        return velocity(x, t.cpu().to(torch.float64))  # as other samplers give it

    # Without step_t the solver would step over the end, where no network was trained, and interpolate back.
    options = {"step_t": ends[1:]}
    return odeint(slope, x, ends, method="dopri5", atol=atol, rtol=rtol, options=options)[-1]


def flow_sde(
    velocity: Denoiser, x: Tensor, *, process: LinearFlow, steps: int, step_noise: StepNoise, last: float = 0.04
) -> Tensor:
    """dx = (v + w score) dt + sqrt(2 w) dW with w = sigma(t) = 1 - t, by Euler–Maruyama.

    steps - 1 noisy steps over linspace(0, 1 - last, steps), then one of length `last` along the drift alone.
    """
    times = torch.linspace(0, 1 - last, steps, dtype=torch.float64)

    def drift(x: Tensor, t: Tensor) -> Tensor:
        # w = sigma cancels the 1 / sigma of the score: v + w * score = v - noise.
        slope = velocity(x, t)
        return slope - process.estimates(x, t, slope)[1]

    for step, (t, s) in enumerate(pairwise(times)):
        x = x + (s - t) * drift(x, t) + torch.sqrt(2 * (1 - t) * (s - t)) * step_noise(step)
    return x + last * drift(x, times[-1])


# ---- samplers by name -----------------------------------------------------------------------------------------------

# Name -> the processes it serves, in the order of preference for the default.
SAMPLERS: dict[str, tuple[type[Process], ...]] = {
    "dpm-solver": (ContinuousVP, DiscreteLatent),
    "dpm-solver++": (DiscreteLatent, ContinuousVP),
    "euler-maruyama": (ContinuousVP,),
    "heun": (LinearFlow,),
    "euler": (LinearFlow,),
    "dopri5": (LinearFlow,),
    "sde": (LinearFlow,),
}


def samplers_for(process: Process) -> list[str]:
    """Names of the samplers that serve a process, those made for it first."""
    serving = [name for name, kinds in SAMPLERS.items() if isinstance(process, kinds)]
    return sorted(serving, key=lambda name: SAMPLERS[name].index(type(process)))


def check_sampler(name: str, *, process: Process, steps: int, order: int) -> None:
    """Refuse what no sampler can do, before a network is evaluated."""
    names = ", ".join(samplers_for(process))
    if name not in SAMPLERS:
        raise UserError(f"there is no sampler {name!r}; this model's samplers are {names}.")
    if not isinstance(process, SAMPLERS[name]):
        raise UserError(
            f"sampler {name!r} does not fit a model of the {process.name!r} process; choose one of {names}."
        )
    if steps < 1:
        raise UserError(f"sampling needs at least 1 step, not {steps}.")
    if name in ("sde", "heun") and steps < 2:
        raise UserError(f"sampler {name!r} needs at least 2 steps, not {steps}.")
    if order not in (1, 2, 3):
        raise UserError(f"DPM-Solver has orders 1, 2 and 3, not {order}.")


def solve(
    denoise: Denoiser,
    x: Tensor,
    *,
    process: Process,
    sampler: str,
    steps: int,
    step_noise: StepNoise,
    order: int = 3,
) -> Tensor:
    """Carry noise x (B, ...) to data with a sampler by name; `steps` is its number of evaluations (dopri5 ignores it).

    dpm-solver is the noise form uniform in log-SNR, dpm-solver++ the data form uniform in time.
    """
    check_sampler(sampler, process=process, steps=steps, order=order)
    if isinstance(process, NoisePredicting):
        # The continuous process has no noise at t = 0, so its logarithm of the SNR is cut off just before.
        end = 1e-4 if isinstance(process, ContinuousVP) else 1.0
        if sampler == "dpm-solver":
            layout = log_snr_layout(process, steps, order=order, end=end)
            return dpm_solver(denoise, x, process=process, steps=layout, form="noise")
        if sampler == "dpm-solver++":
            end = 1e-3 if isinstance(process, ContinuousVP) else 1.0
            layout = time_layout(process, steps, order=order, end=end)
            return dpm_solver(denoise, x, process=process, steps=layout, form="data")
        assert isinstance(process, ContinuousVP)
        return euler_maruyama(denoise, x, process=process, steps=steps, step_noise=step_noise)
    assert isinstance(process, LinearFlow)
    if sampler == "sde":
        return flow_sde(denoise, x, process=process, steps=steps, step_noise=step_noise)
    # Heun spends two evaluations on a step.
    intervals = steps // 2 if sampler == "heun" else steps
    times = torch.linspace(0, 1, intervals + 1, dtype=torch.float64)
    return {"euler": euler, "heun": heun, "dopri5": dopri5}[sampler](denoise, x, times=times)


# ---- images of a seed -----------------------------------------------------------------------------------------------


def sample_batch(
    model: nn.Module,
    ids: Tensor,
    *,
    shape: tuple[int, ...],
    process: Process,
    sampler: str,
    steps: int,
    seed: int,
    labels: Tensor | None = None,
    guidance: Guidance | None = None,
    null: int | None = None,
    order: int = 3,
    tick: Callable[[], object] = lambda: None,
) -> tuple[Tensor, int]:
    """Samples (B, *shape) of the images `ids` (B,) of a seed, and the number of network evaluations.

    All noise of image i is a function of (seed, i, step), so an image does not depend on the batch it is made in.
    """

    def normal(purpose: str, step: int) -> Tensor:
        return SampleGenerator(seed, ids, torch.full_like(ids, step)).normal(purpose, *shape)

    denoise = NetworkDenoiser(model, process, labels=labels, guidance=guidance, null=null, tick=tick)
    with torch.inference_mode():
        x = solve(
            denoise,
            normal("start", 0),
            process=process,
            sampler=sampler,
            steps=steps,
            order=order,
            step_noise=lambda step: normal("step", step),
        )
    return x, denoise.evaluations
