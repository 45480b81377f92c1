"""The metric `segment` of the command `evaluate`: images with masks instead of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anechoic.choices import Weights


def segment(
    run: str,
    data: str,
    *,
    clusters: int | None,
    classes: int | None,
    void: int,
    mapping: Path | None,
    image_list: Path | None,
    samples: int | None,
    image_size: int | None,
    weights: Weights | None,
    epochs: int,
    batch: int,
    channels: int,
    ema: float,
    baselines: bool,
    figures: Path | None,
    device: str,
    seed: int,
) -> tuple[dict[str, Any], str, int]:
    """Segment by spectral clustering of an encoder's patches; return scores against masks, text and image size.

    data: a folder with images/NAME.jpg and masks/NAME.png, or of the COCO-Stuff layout. The image size is 256 / 224 of
    the model's own by default; smaller is much faster.
    """
    from anechoic.eval.encoders import baselines as baselines_of
    from anechoic.eval.encoders import open_encoder
    from anechoic.eval.segmentation import SpectralOptions, larger, segment_images
    from anechoic.pages.tables import percent, text_table

    encoder = open_encoder(run, image_size=image_size, weights=weights)
    if image_size is None:
        encoder = larger(encoder)
    options = SpectralOptions(channels=channels, epochs=epochs, batch=batch, ema=ema, seed=seed)
    others = [other for other in baselines_of(encoder) if other.name == "untrained"] if baselines else []
    rows = []
    for segmenting in [encoder, *others]:
        found = segment_images(
            segmenting,
            data,
            options,
            clusters=clusters,
            classes=classes,
            void=void,
            mapping=mapping,
            listed=image_list,
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
    text = f"{rows[0]['images']} images, {rows[0]['clusters']} clusters, {epochs} epochs; percent.\n" + text_table(
        header, cells
    )
    metrics = {"miou": rows[0]["hungarian"]["miou"], "miou_greedy": rows[0]["greedy"]["miou"], "rows": rows}
    return metrics, text, encoder.image_size
