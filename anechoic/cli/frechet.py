"""The command `frechet`: how far generated images are from real ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anechoic.cli._command import command
from anechoic.cli.options import BatchSize, Data, Device, ImageSize, PathLike, Seed
from anechoic.errors import UserError
from anechoic.outcome import Outcome


@command
def frechet(
    samples: PathLike,
    data: Data,
    /,
    *,
    extractor: str = "efflite0",
    weights: PathLike | None = None,
    num: int | None = None,
    image_size: ImageSize = None,
    save_samples: PathLike | None = None,
    save_reference: PathLike | None = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    seed: Seed = 0,
) -> Outcome:
    """Measure how far generated images are from real ones: Frechet distance, KID, precision and recall.

    DATA is the real images, or statistics of them that were saved before. --image-size crops images to a square first;
    by default whole images are resized for the extractor.

    Example: anechoic frechet samples.npz digits:train --extractor digits

    Args:
        samples: generated images: a folder, .npz, any data set, or statistics saved before (.npz).
        extractor: whose features are compared: efflite0 (metric fd-efflite0), inception (fid), digits (a digit
            classifier, fd-digits), or the directory of an encoder trained here (fd-NAME).
        weights: file with the Inception weights; without it they are downloaded once.
        num: maximum number of images of each set, from the first.
        save_samples: save the statistics of the samples to this .npz file.
        save_reference: save the statistics of the real images to this .npz file, to measure them once only.
    """
    import warnings

    from anechoic.eval.extractors import extractor_named
    from anechoic.eval.frechet import check_statistics_file, compare, save_statistics
    from anechoic.runtime.devices import pick_device

    started = time.perf_counter()
    if batch_size < 1 or (num is not None and num < 2):
        raise UserError("--batch-size must be at least 1, and --num at least 2.")
    saved = {"samples": save_samples, "reference": save_reference}
    kept = {name: Path(path) for name, path in saved.items() if path is not None}
    for path in kept.values():
        check_statistics_file(path)
    network = extractor_named(extractor, weights=None if weights is None else Path(weights), device=pick_device(device))
    sides = {
        name: measure(str(where), network, num=num, image_size=image_size, batch_size=batch_size)
        for name, where in (("samples", samples), ("reference", data))
    }
    for name, path in kept.items():
        save_statistics(path, sides[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics: dict[str, Any] = {**compare(sides["reference"], sides["samples"], seed=seed)}
    notes = [str(warning.message) for warning in caught]
    if extractor == "digits":
        metrics |= digit_verdict(str(samples), num=num)
    metrics["receipt"] = {
        "extractor": sides["samples"].extractor,
        **{name: side.images for name, side in sides.items()},
        "notes": notes,
    }
    numbers = [f"{name:<18} {value:.5g}" for name, value in metrics.items() if isinstance(value, float | int)]
    counts = f"{sides['samples'].count} samples against {sides['reference'].count} images"
    return Outcome(
        config={},
        metrics=metrics,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        text="\n".join([*numbers, counts, *(f"Note: {note}" for note in notes)]),
    )


def measure(where: str, extractor: Any, *, num: int | None, image_size: int | None, batch_size: int) -> Any:
    """Return the statistics of one set: read from a file of them, else measured on its images."""
    from tqdm.auto import tqdm

    from anechoic.data import open_source
    from anechoic.diffusion.generate import image_batches, read_receipt
    from anechoic.eval.frechet import is_statistics, load_statistics, measure_images

    if is_statistics(Path(where)):
        found = load_statistics(Path(where))
        if found.extractor != extractor.receipt():
            raise UserError(
                f"the statistics in {where} come from another extractor ({found.extractor.get('metric')}, weights "
                f"{found.extractor.get('weights')}); measure the images again, or choose that extractor."
            )
        return found
    source = open_source(where, channels=extractor.channels or 1)
    if len(source) < 2:
        raise UserError(
            f"{where} is a single image, and distributions are compared: give all images, as a folder or .npz, not a "
            "sheet of them."
        )
    described = {"source": where, "hash": source.fingerprint, "crop": image_size, "made": read_receipt(where)}
    batches = image_batches(source, batch_size=batch_size, image_size=image_size, num=num)
    with tqdm(total=min(num or len(source), len(source)), unit="img", desc=Path(where).name, disable=None) as bar:

        def counted() -> Iterator[Any]:
            for batch in batches:
                yield batch
                bar.update(len(batch))

        return measure_images(counted(), extractor, images=described)


def digit_verdict(samples: str, *, num: int | None) -> dict[str, Any]:
    """Return what the digit classifier predicts for the samples; with labels, its accuracy on the classes asked for."""
    import numpy as np
    import torch

    from anechoic.data import open_source
    from anechoic.diffusion.generate import image_batches, read_receipt
    from anechoic.eval.digit_classifier import evaluate_digits, real_accuracy
    from anechoic.eval.frechet import is_statistics

    if is_statistics(Path(samples)):
        return {}
    receipt = read_receipt(samples)
    asked = receipt is not None and sampled_with_labels(samples)
    source = open_source(samples, channels=1, labels=asked)
    images = torch.cat(list(image_batches(source, batch_size=256, num=num)))
    labels = np.asarray(source.labels)[: len(images)] if asked else None
    return {**evaluate_digits(images, asked=labels), "classifier_accuracy_on_real_digits": real_accuracy()}


def sampled_with_labels(samples: str) -> bool:
    """Return whether images that `sample` wrote carry the classes asked for."""
    from anechoic.data.arrays import read_npz_names

    path = Path(samples)
    if path.is_dir():
        return any(item.is_dir() for item in path.iterdir())
    return "labels" in read_npz_names(path)
