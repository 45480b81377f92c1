"""Sampling beside diffusers: the same U-ViT, the same noise and the same solver, driven by our loop and by theirs.

The network dominates, so the ratio shows what the solver's own arithmetic costs. Both give the same images (a test
proves it where the algorithms coincide).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anechoic.benchmarks.timing import Options, interleave, row
from anechoic.errors import UserError

PEERS = ("diffusers", "torch")
BATCH, STEPS = 16, 20
SMALL = {"image_size": 16, "dim": 64, "depth": 4, "num_heads": 2}


def run(options: Options) -> list[dict[str, Any]]:
    """Rows for DPM-Solver++ of order 2 on the discrete schedule and for Euler steps of a flow."""
    try:
        import diffusers
    except ImportError as error:
        raise UserError('this benchmark compares with diffusers: pip install "anechoic[diffusion]".') from error
    import torch

    from anechoic.diffusion import DiscreteLatent, LinearFlow
    from anechoic.models import build_model
    from anechoic.sampling import NetworkDenoiser, dpm_solver, euler, time_layout

    torch.manual_seed(0)
    network = build_model("uvit_small", **SMALL).eval()
    noise = torch.randn(BATCH, 3, 16, 16)

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

    @torch.inference_mode()
    def our_solver() -> object:
        process = DiscreteLatent()
        layout = time_layout(process, STEPS, order=2, end=1.0)
        return dpm_solver(NetworkDenoiser(network, process), noise, process=process, steps=layout, form="data")

    @torch.inference_mode()
    def our_flow() -> object:
        times = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)
        return euler(NetworkDenoiser(network, LinearFlow()), noise, times=times)

    contests = {
        "DPM-Solver++ of order 2": (
            our_solver,
            by_scheduler(solver, lambda x, n: network(x, (n + 1).float().expand(len(x)))),
        ),
        "Euler steps of a flow": (
            our_flow,
            by_scheduler(flow, lambda x, n: -network(x, (1 - n / 1000).float().expand(len(x)))),
        ),
    }
    return [
        row(
            f"{work}, {STEPS} evaluations, {BATCH} images",
            interleave({"ours": ours, "diffusers": theirs}, rounds=options.rounds),
            peer="diffusers",
            items=BATCH,
        )
        for work, (ours, theirs) in contests.items()
    ]
