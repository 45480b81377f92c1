"""The command `demo`: what decaying shortcuts change, in minutes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from anechoic.cli._command import command
from anechoic.cli.options import Out, Seed
from anechoic.outcome import Outcome

log = logging.getLogger("anechoic")


@command
def demo(*, out: Out = "runs/demo", samples: int = 38_400, seed: Seed = 0) -> Outcome:
    """Compare a residual and a decayed autoencoder of embedded emoji on a page, and train a fresh pair meanwhile.

    If a trained pair comes with the package, the page opens with it. A fresh pair is then trained for minutes, and its
    curve is drawn into the same page. The two of a pair differ in alpha_min alone; raw pixels and the untrained network
    are baselines. On the page you pick an emoji and see, block by block, whether it is found in another style. Training
    uses no label. The folder gets the two runs, the pictures, results.json and index.html. The same command resumes.

    Example: anechoic demo --out runs/demo

    Args:
        samples: number of drawings each of the two sees in training.
    """
    import time

    from anechoic.pages.demo import (
        ARMS,
        SOURCE,
        Curve,
        Demo,
        check_record,
        evaluate_arms,
        evaluate_pair,
        pretrained_pair,
        table,
        train_arms,
        verdict,
        with_tokens,
    )
    from anechoic.pages.demo_page import DemoPage
    from anechoic.storage.files import read_json, write_json

    started = time.perf_counter()
    out = Path(out)
    config = {"out": str(out), "samples": samples, "data": SOURCE, "alpha_min": ARMS}
    metrics: dict[str, Any] = {}

    def result() -> dict[str, Any]:
        return Outcome(config, metrics, seed=seed, seconds=time.perf_counter() - started).to_json()

    def show(pair: Demo) -> DemoPage:
        said = verdict(pair.rows, samples=pair.samples, layers=pair.layers)
        metrics.update(rows=pair.rows, layers=pair.layers, verdict=said, samples=pair.samples)
        return DemoPage(pair, out)

    page, shipped = None, pretrained_pair()
    if shipped is not None:
        trained_on = read_json(shipped["decayed"] / "record.json")["config"]["optim"]["samples"]
        pair = evaluate_pair(shipped, samples=trained_on, seed=seed)
        metrics["record_difference"] = check_record(pair, shipped)
        page = show(pair)
        page.write(result(), {})
        log.warning("%s shows the pair that comes with the package. A fresh pair is being trained.", out / "index.html")

    def report(curve: Curve) -> None:
        if page is not None:
            page.update(result(), curve)
            page.write(result(), curve)

    curve = train_arms(out, samples=samples, seed=seed, report=report)
    trained = {name: float(read_json(out / name / "results.json")["seconds"]) for name in ARMS}
    metrics |= {"curve": curve, "training_seconds": max(trained.values())}
    if page is None:
        pair = evaluate_pair({name: out / name for name in ARMS}, samples=samples, seed=seed)
    else:
        fresh = evaluate_arms(out)
        metrics["fresh"] = {"rows": fresh, "verdict": verdict([*pair.rows[:2], *fresh], samples=samples)}
        page.update(result(), curve)
    page = show(replace(pair, rows=with_tokens(pair.rows, pair.subjects)))
    page.draw(seed=seed)
    outcome = Outcome(config, metrics, seed=seed, seconds=time.perf_counter() - started)
    page.write(outcome.to_json(), curve)
    write_json(out / "results.json", outcome.to_json())
    lines = [table(metrics["rows"]), metrics["verdict"]]
    if "fresh" in metrics:
        lines += [table(metrics["fresh"]["rows"]), metrics["fresh"]["verdict"]]
    return replace(outcome, text="\n\n".join([*lines, str(out / "index.html")]))
