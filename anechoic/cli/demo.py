"""The command `demo`: what decaying shortcuts change, in minutes."""

from __future__ import annotations

from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import Out, Seed
from anechoic.outcome import Outcome


@command
def demo(*, out: Out = "runs/demo", samples: int = 64_000, seed: Seed = 0) -> Outcome:
    """Train a residual and a decayed autoencoder on embedded emoji and write a page that compares them.

    It takes minutes. The two differ in alpha_min alone and have the same budget; raw pixels and the untrained network
    are baselines. On the page you pick an emoji and see, block by block, whether it is found in another style. Training
    uses no label. The folder gets the two runs, the pictures, results.json and index.html. The same command resumes.

    Example: anechoic demo --out runs/demo

    Args:
        samples: number of drawings each of the two sees in training.
    """
    import time

    from anechoic.pages.demo import ARMS, SOURCE, run_demo, table, verdict
    from anechoic.pages.demo_page import demo_page
    from anechoic.pages.html import write_page
    from anechoic.storage.files import write_json

    started = time.perf_counter()
    out = Path(out)
    shown = run_demo(out, samples=samples, seed=seed)
    conclusion = verdict(shown)
    outcome = Outcome(
        config={"out": str(out), "samples": samples, "data": SOURCE, "alpha_min": ARMS},
        metrics={
            "rows": shown.rows,
            "layers": shown.layers,
            "verdict": conclusion,
            "training_seconds": shown.training_seconds,
        },
        seed=seed,
        seconds=time.perf_counter() - started,
        text=f"{table(shown.rows)}\n\n{conclusion}\n\n{out / 'index.html'}",
    )
    result = outcome.to_json()
    write_json(out / "results.json", result)
    write_page(out / "index.html", demo_page(shown, out, result))
    return outcome
