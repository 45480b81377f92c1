"""Making images and evaluating them: the verbs sample, frechet and encode-latents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from anechoic.errors import UserError
from anechoic.outcome import Outcome


def sample(
    run: Path,
    /,
    *,
    out: Path = Path("samples.png"),
    num: int = 64,
    sampler: Literal["dpm-solver", "dpm-solver++", "euler-maruyama", "heun", "euler", "dopri5", "sde"] | None = None,
    steps: int = 50,
    order: int = 3,
    guidance: float | None = None,
    guidance_form: Literal["added", "scaled"] = "added",
    guided_channels: int | None = None,
    classes: tuple[int, ...] = (),
    seed: int = 0,
    process: Literal["vp", "discrete", "flow"] | None = None,
    vae: str | None = None,
    untrained: bool = False,
    batch_size: int = 64,
    devices: int = 1,
) -> Outcome:
    """Make images with a trained diffusion or flow model.

    Example: anechoic sample runs/digits --num 100 --steps 50 --seed 0 --out digits.png

    Args:
        run: a run, model or checkpoint directory; averaged weights are used where the run kept them.
        out: a .png picture of them all, an .npz file with images, labels and receipt, or a folder with a file each.
        num: how many images.
        sampler: dpm-solver, dpm-solver++ and euler-maruyama serve diffusion models; heun, euler, dopri5 and sde flows.
            By default the first that fits the model.
        steps: network evaluations for an image (1000 is usual for euler-maruyama, 250 for sde; dopri5 chooses its own).
        order: of dpm-solver and dpm-solver++: 1, 2 or 3.
        guidance: strength of classifier-free guidance, for models trained with label dropout.
        guidance_form: added is conditional + s * (conditional - null), none at 0; scaled is null + w * (conditional -
            null), none at 1.
        guided_channels: guide only the first so many channels (SiT's samples guide 3 of 4); by default all.
        classes: classes to draw, in turn; by default all of them in turn.
        seed: image i of a seed starts from the same noise whatever the batch size and the number of processes.
        process: what the model was trained on, if its run directory is not at hand to say.
        vae: folder or hub name of the autoencoder that turns latents into images; by default the one the run's latents
            were made with.
        untrained: give the network fresh weights first, for images that show what no training is worth.
        batch_size: images made at once.
        devices: processes that share the work.
    """
    from anechoic.diffusion.generate import Request, check_output, generate, write_images

    started = time.perf_counter()
    check_output(out)
    request = Request(
        run=str(run),
        num=num,
        sampler=sampler,
        steps=steps,
        order=order,
        guidance=guidance,
        convention=guidance_form,
        guided_channels=guided_channels,
        classes=classes,
        seed=seed,
        process=process,
        vae=vae,
        untrained=untrained,
        batch_size=batch_size,
    )
    images = generate(request, devices=devices)
    write_images(images, out)
    seconds = time.perf_counter() - started
    receipt = images.receipt
    return Outcome(
        config={},
        metrics={"images": len(images.pixels), "evaluations": receipt["evaluations"], "receipt": receipt},
        seed=seed,
        seconds=round(seconds, 3),
        text=f"{len(images.pixels)} images by {receipt['sampler']} with {receipt['evaluations']} network evaluations "
        f"each, in {seconds:.1f} s: {out}",
    )


def frechet(
    samples: str,
    reference: str,
    /,
    *,
    extractor: str = "efflite0",
    weights: Path | None = None,
    num: int | None = None,
    image_size: int | None = None,
    save_samples: Path | None = None,
    save_reference: Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Measure how far generated images are from real ones: Frechet distance, KID, precision and recall.

    Example: anechoic frechet samples.npz digits:train --extractor digits

    Args:
        samples: generated images: a folder, .npz, any data set, or statistics saved before (.npz).
        reference: real images, or their saved statistics.
        extractor: whose features are compared: efflite0 (gives fd-efflite0), inception (gives fid), digits (a digit
            classifier; gives fd-digits), or the directory of an encoder trained here (gives fd-NAME).
        weights: file with the Inception weights; without it they are downloaded once.
        num: use only the first so many images of each side.
        image_size: crop images to this square first; by default whole images are resized for the extractor.
        save_samples: keep the statistics of the samples in this .npz file.
        save_reference: keep the statistics of the reference in this .npz file, to save time later.
        batch_size: images in the extractor at once.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the random subsets of KID.
    """
    import warnings

    from anechoic.eval.extractors import extractor_named
    from anechoic.eval.frechet import check_statistics_file, compare, save_statistics
    from anechoic.runtime.devices import pick_device

    started = time.perf_counter()
    if batch_size < 1 or (num is not None and num < 2):
        raise UserError("--batch-size must be at least 1, and --num at least 2.")
    kept = {name: path for name, path in (("samples", save_samples), ("reference", save_reference)) if path is not None}
    for path in kept.values():
        check_statistics_file(path)
    network = extractor_named(extractor, weights=weights, device=pick_device(device))
    sides = {
        name: measure(where, network, num=num, image_size=image_size, batch_size=batch_size)
        for name, where in (("samples", samples), ("reference", reference))
    }
    for name, path in kept.items():
        save_statistics(path, sides[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics: dict[str, Any] = {**compare(sides["reference"], sides["samples"], seed=seed)}
    notes = [str(warning.message) for warning in caught]
    if extractor == "digits":
        metrics |= digit_verdict(samples, num=num)
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
    """Statistics of one side: read from a file of them, else measured on its images."""
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
    """What the digit classifier makes of the samples; with labels, how often it sees what was asked for."""
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
    """Whether images that `sample` wrote carry the classes asked for."""
    from anechoic.data.arrays import read_npz_names

    path = Path(samples)
    if path.is_dir():
        return any(item.is_dir() for item in path.iterdir())
    return "labels" in read_npz_names(path)


def encode_latents(
    data: str,
    out: Path,
    /,
    *,
    vae: str,
    image_size: int = 256,
    labels: bool = False,
    scale: float | None = None,
    batch_size: int = 16,
) -> Outcome:
    """Encode images once with a frozen autoencoder, so that a denoiser can be trained on its latents.

    Example: anechoic encode-latents imagenet100/train in100-latents --vae stabilityai/sd-vae-ft-ema --labels

    Args:
        data: a folder, archive, parquet, npz or embedded data set of images.
        out: directory to write; moments of every image and of its mirror image, and the factor that scales them.
        vae: local folder or hub name of a diffusers AutoencoderKL.
        image_size: side of the square images that are encoded.
        labels: keep the labels too, for class-conditional training.
        scale: factor of the latents; by default the autoencoder's own.
        batch_size: images encoded at once.
    """
    from tqdm.auto import tqdm

    from anechoic.data import open_source
    from anechoic.diffusion.vae import load_vae, write_latents
    from anechoic.runtime.devices import current_device

    started = time.perf_counter()
    if batch_size < 1:
        raise UserError("--batch-size must be at least 1.")
    network = load_vae(vae, device=current_device())
    source = open_source(data, labels=labels, channels=network.config.in_channels)
    with tqdm(total=len(source), unit="img", desc="encoding", disable=None) as bar:
        card = write_latents(
            source,
            out,
            vae=network,
            vae_name=str(Path(vae).absolute()) if Path(vae).exists() else vae,
            image_size=image_size,
            scale=scale,
            batch_size=batch_size,
            progress=bar.update,
        )
    count, _, channels, height, width = card.shape
    return Outcome(
        config={},
        metrics={"images": count, "skipped": len(source.skipped), "card": asdict(card)},
        seconds=round(time.perf_counter() - started, 3),
        text=f"{count} images and their mirror images as latents of {channels // 2} x {height} x {width}, scaled by "
        f"{card.scale:g}: {out}",
    )
