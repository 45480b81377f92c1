"""The verb that shows what this is about: demo."""

from __future__ import annotations

from pathlib import Path

from anechoic.outcome import Outcome


def demo(*, out: Path = Path("runs/demo"), samples: int = 76_800, seed: int = 0) -> Outcome:
    """Train a residual and a decayed autoencoder on embedded digits, evaluate both frozen, and write a page (minutes).

    The two differ in alpha_min alone and have the same budget. Raw pixels and the untrained network stand beside them.
    No label is used in training. The same command again goes on where it stopped.

    Example: anechoic demo --out runs/demo

    Args:
        out: folder for the two runs, the pictures, results.json and index.html.
        samples: how many images each of the two sees in training.
        seed: of weights, order, crops and masks.
    """
    import time

    from anechoic.report.demo import ARMS, HEADER, NEIGHBOURS, run_demo, verdict
    from anechoic.report.demo import table as text_of
    from anechoic.report.html import Section, figure, machine_line, page, table, write_page
    from anechoic.runtime.files import write_json

    started = time.perf_counter()
    shown = run_demo(out, samples=samples, seed=seed)
    outcome = Outcome(
        config={"out": str(out), "samples": samples, "data": "digits", "alpha_min": ARMS},
        metrics={"rows": shown.rows, "layers": shown.layers, "training_seconds": shown.training_seconds},
        seed=seed,
        seconds=time.perf_counter() - started,
        text=f"{text_of(shown.rows)}\n\n{verdict(shown.rows)}\n\n{out / 'index.html'}",
    )
    result = outcome.to_json()
    write_json(out / "results.json", result)
    files = shown.files
    lead = (
        f"Pre-trained without labels on 8 x 8 digits, side by side, for {samples:,} images each: one network with "
        f"residual connections (alpha_min {ARMS['residual']:g}), one whose identity shortcuts decay with depth "
        f"(alpha_min {ARMS['decayed']:g}). Both were then frozen and evaluated on test digits: weighted "
        f"{NEIGHBOURS}-NN and a linear probe, in per cent, of the last layer's class token and mean of the patches."
    )
    layers = "Every layer, mean token: accuracy, effective rank, and how much of the embedding is left."
    on_a_map = "The test digits on a map (t-SNE of the mean token): residual left, decayed right."
    values = table(
        list(HEADER.values()), [[row[key] for key in HEADER] for row in shown.rows], strong=[len(shown.rows) - 1]
    )
    sections = [
        Section("What they are worth", [values, verdict(shown.rows)]),
        Section("Layer by layer", [figure(layers, [files["layers"]])]),
        Section("Training", [figure("Loss over training, and on digits held out from it.", [files["curves"]])]),
        Section(
            "Reconstructions",
            [figure("Reconstructions: residual left, decayed right.", pair(files, "reconstructions"))],
        ),
        Section("Maps", [figure(on_a_map, pair(files, "map"))]),
    ]
    footer = machine_line(result["machine"], result["commit"], seed)
    write_page(out / "index.html", page("Two autoencoders, one echo", sections, lead=lead, footer=footer, data=result))
    return outcome


def pair(files: dict[str, Path], kind: str) -> list[Path]:
    return [files[f"{name} {kind}"] for name in ("residual", "decayed")]
