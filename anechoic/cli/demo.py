"""The verb that shows what this is about: demo."""

from __future__ import annotations

from pathlib import Path

from anechoic.outcome import Outcome


def demo(*, out: Path = Path("runs/demo"), samples: int = 64_000, seed: int = 0) -> Outcome:
    """Train a residual and a decayed autoencoder on embedded emoji and write a page that shows what they found.

    It takes minutes. The two differ in alpha_min alone and have the same budget; raw pixels and the untrained network
    stand beside them. On the page you pick a thing and see, block by block, whether it is found drawn by another hand.
    No label is used in training. The same command again goes on where it stopped.

    Example: anechoic demo --out runs/demo

    Args:
        out: folder for the two runs, the pictures, results.json and index.html.
        samples: how many drawings each of the two sees in training.
        seed: of weights, order, crops and masks.
    """
    import time

    from anechoic.pages.demo import ARMS, SOURCE, run_demo, table, verdict
    from anechoic.pages.demo_page import demo_page
    from anechoic.pages.html import write_page
    from anechoic.storage.files import write_json

    started = time.perf_counter()
    shown = run_demo(out, samples=samples, seed=seed)
    said = verdict(shown)
    outcome = Outcome(
        config={"out": str(out), "samples": samples, "data": SOURCE, "alpha_min": ARMS},
        metrics={
            "rows": shown.rows,
            "layers": shown.layers,
            "verdict": said,
            "training_seconds": shown.training_seconds,
        },
        seed=seed,
        seconds=time.perf_counter() - started,
        text=f"{table(shown.rows)}\n\n{said}\n\n{out / 'index.html'}",
    )
    result = outcome.to_json()
    write_json(out / "results.json", result)
    write_page(out / "index.html", demo_page(shown, out, result))
    return outcome
