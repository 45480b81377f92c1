"""The verb that segments images without labels: segment."""

from __future__ import annotations

import time
from pathlib import Path

from anechoic.cli.evaluating import encoder_and_data, outcome
from anechoic.outcome import Outcome


def segment(
    run: str,
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    clusters: int | None = None,
    classes: int | None = None,
    void: int = 255,
    mapping: Path | None = None,
    listed: Path | None = None,
    samples: int | None = None,
    image_size: int | None = None,
    epochs: int = 201,
    batch: int = 40,
    channels: int = 100,
    ema: float = 0.99,
    baselines: bool = False,
    figures: Path | None = None,
    device: str = "auto",
    seed: int = 12345,
) -> Outcome:
    """Segment images without labels by spectral clustering of an encoder's patches, and score the result against masks.

    Example: anechoic segment runs/mine camvid/val --void 11 --image-size 64 --epochs 150

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER (with --model, the data).
        data: a folder with images/NAME.jpg and masks/NAME.png, or of the COCO-Stuff layout.
        model: timm:NAME or hf:FOLDER instead of a run.
        clusters: how many clusters; by default as many as classes.
        classes: how many classes the masks have; by default found in them.
        void: the mask value of pixels that do not count.
        mapping: a file that maps mask values to classes (JSON, or lines of two numbers), such as 182 to 27.
        listed: a text file that names the images to use.
        samples: use only the first so many images.
        image_size: side of the images; by default 256 / 224 of the model's own. Smaller is much faster.
        epochs: passes over the images; below about a hundred the maps are still noise.
        batch: images per graph.
        channels: channels of the soft assignment.
        ema: decay of the averaged tables per batch; lower it for few epochs.
        baselines: also segment with the untrained network.
        figures: a folder to draw the maps into, as PNG and SVG.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the tables and batches.
    """
    started = time.perf_counter()
    from anechoic.eval.encoders import baselines as baselines_of
    from anechoic.eval.segmenting import larger, segment_images
    from anechoic.eval.spectral import SpectralOptions
    from anechoic.pages.tables import percent, text_table

    encoder, where = encoder_and_data(run, data, model, image_size)
    if image_size is None:
        encoder = larger(encoder)
    options = SpectralOptions(channels=channels, epochs=epochs, batch=batch, ema=ema, seed=seed)
    others = [other for other in baselines_of(encoder) if other.name == "untrained"] if baselines else []
    rows = []
    for segmenting in [encoder, *others]:
        found = segment_images(
            segmenting,
            where,
            options,
            clusters=clusters,
            classes=classes,
            void=void,
            mapping=mapping,
            listed=listed,
            samples=samples,
            device=device,
        )
        rows.append({"encoder": segmenting.name, **found.scores})
        if figures is not None and segmenting is encoder:
            from anechoic.pages.figures import draw_maps

            title = "first three eigenvectors, one color scale for all images"
            drawn = draw_maps(found.pixels, found.colors, figures / "eigenvectors", title=title)
            rows[-1]["figures"] = [str(path) for path in drawn]
    header = ["encoder", "mIoU, Hungarian", "mIoU, greedy", "accuracy, Hungarian", "accuracy, greedy"]
    cells = [
        [
            row["encoder"],
            *(percent(row[way][measure]) for measure in ("miou", "accuracy") for way in ("hungarian", "greedy")),
        ]
        for row in rows
    ]
    text = f"{rows[0]['images']} images, {rows[0]['clusters']} clusters, {epochs} epochs; per cent.\n" + text_table(
        header, cells
    )
    metrics = {"miou": rows[0]["hungarian"]["miou"], "miou_greedy": rows[0]["greedy"]["miou"], "rows": rows}
    return outcome(metrics, text, started, seed, image_size=encoder.image_size)
