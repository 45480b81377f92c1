"""Sampling beside diffusers: the same U-ViT, the same noise and the same solver, driven by our loop and by theirs.

The network dominates, so the ratio shows what the solver's own arithmetic costs. Both give the same images (a test
proves it where the algorithms coincide). A last row drives the pocket recipe's network by our loop and by none at all:
what is left over is the sampler's own time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from anechoic.errors import UserError
from anechoic_lab.bench.memory import peak_memory_mb
from anechoic_lab.bench.timing import Options, interleave, row

PEERS = ("diffusers", "torch")
BATCH, STEPS = 16, 20
SMALL = {"image_size": 16, "dim": 64, "depth": 4, "num_heads": 2}
# What `anechoic sample` makes at once by default, and its evaluations.
POCKET_BATCH, POCKET_STEPS = 64, 50


def run(options: Options) -> list[dict[str, Any]]:
    """Rows for DPM-Solver++ of order 2 on the discrete schedule, for Euler steps of a flow, and the overhead."""
    try:
        import diffusers
    except ImportError as error:
        raise UserError('this benchmark compares with diffusers: pip install "anechoic[diffusion]".') from error
    import torch

    network, noise = network_and_noise()

    def by_scheduler(make: Callable[[], Any], predict: Callable[[Any, Any], Any]) -> Callable[[], object]:
        @torch.inference_mode()
        def sample() -> object:
            scheduler, x = make(), noise
            for timestep in scheduler.timesteps:
                x = scheduler.step(predict(x, timestep), timestep, x).prev_sample
            return x

        return sample

    def solver() -> Any:
        scheduler: Any = diffusers.DPMSolverSinglestepScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            solver_order=2,
            algorithm_type="dpmsolver++",
            final_sigmas_type="sigma_min",
        )
        scheduler.set_timesteps(STEPS)
        return scheduler

    def flow() -> Any:
        scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(STEPS)
        return scheduler

    contests = {
        "DPM-Solver++ of order 2": (
            by_solver,
            by_scheduler(solver, lambda x, n: network(x, (n + 1).float().expand(len(x)))),
        ),
        "Euler steps of a flow": (
            by_flow,
            by_scheduler(flow, lambda x, n: -network(x, (1 - n / 1000).float().expand(len(x)))),
        ),
    }
    rows = [
        row(
            f"{work}, {STEPS} evaluations, {BATCH} images",
            interleave({"ours": partial(ours, network, noise), "diffusers": theirs}, rounds=options.rounds),
            peer="diffusers",
            items=BATCH,
            memory_mb=peak_memory_mb(sample_afresh, ours),
        )
        for work, (ours, theirs) in contests.items()
    ]
    return [*rows, overhead_row(rounds=4 * options.rounds)]


def network_and_noise() -> tuple[Any, Any]:
    import torch

    from anechoic.models import build_model

    torch.manual_seed(0)
    return build_model("uvit_small", **SMALL).eval(), torch.randn(BATCH, 3, 16, 16)


def by_solver(network: Any, noise: Any) -> object:
    import torch

    from anechoic.diffusion.process import DiscreteLatent
    from anechoic.diffusion.samplers import NetworkDenoiser, dpm_solver, time_layout

    process = DiscreteLatent()
    with torch.inference_mode():
        layout = time_layout(process, STEPS, order=2, end=1.0)
        return dpm_solver(NetworkDenoiser(network, process), noise, process=process, steps=layout, form="data")


def by_flow(network: Any, noise: Any) -> object:
    import torch

    from anechoic.diffusion.process import LinearFlow
    from anechoic.diffusion.samplers import NetworkDenoiser, euler

    with torch.inference_mode():
        times = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)
        return euler(NetworkDenoiser(network, LinearFlow()), noise, times=times)


def sample_afresh(sample: Callable[[Any, Any], object]) -> None:
    sample(*network_and_noise())


# ---- the sampler's own time


def overhead_row(*, rounds: int) -> dict[str, Any]:
    """What `anechoic sample` does for the pocket U-ViT against the same calls of its network and nothing else.

    overhead: the median, lowest and highest share by which sampling takes longer. own_share: the same from the other
    side, the time of sampling with a network that costs nothing, as a share of the network's time.
    """
    import torch

    network = pocket_network()
    noise = torch.randn(POCKET_BATCH, 1, 8, 8)
    times = torch.linspace(999, 0, POCKET_STEPS)[:, None].expand(-1, POCKET_BATCH)

    @torch.inference_mode()
    def calls() -> None:
        for t in times:
            network(noise, t, None)

    def free(x: Any, t: Any, labels: Any) -> Any:
        return x

    timing = interleave(
        {"ours": lambda: sample_pocket(network), "the network alone": calls, "free": lambda: sample_pocket(free)},
        rounds=rounds,
    )
    ours, alone = timing.seconds["ours"], timing.seconds["the network alone"]
    shares = [a / b - 1 for a, b in zip(ours, alone, strict=True)]
    found = row(
        f"DPM-Solver of order 3, {POCKET_STEPS} evaluations, {POCKET_BATCH} images of the pocket U-ViT",
        timing,
        peer="the network alone",
        items=POCKET_BATCH,
        memory_mb=peak_memory_mb(sample_pocket),
    )
    overhead = {"overhead": statistics.median(shares), "overhead_low": min(shares), "overhead_high": max(shares)}
    return found | overhead | {"own_share": timing.median("free") / timing.median("the network alone")}


def pocket_network() -> Any:
    import torch

    from anechoic.models import build_model
    from anechoic.recipes.diffusion import pocket_uvit_digits

    config = pocket_uvit_digits()
    torch.manual_seed(0)
    size: Any = config.data.image_size
    return build_model(config.model.name, image_size=size, in_channels=1, **config.model.options).eval()


def sample_pocket(network: Any = None) -> object:
    import torch

    from anechoic.diffusion.process import ContinuousVP
    from anechoic.diffusion.samplers import sample_batch

    return sample_batch(
        network or pocket_network(),
        torch.arange(POCKET_BATCH),
        shape=(1, 8, 8),
        process=ContinuousVP(),
        sampler="dpm-solver",
        steps=POCKET_STEPS,
        seed=0,
    )
