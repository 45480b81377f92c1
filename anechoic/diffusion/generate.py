"""Generate images with a trained denoiser and write them with a receipt.

Image i of a seed does not depend on batch size or number of ranks: its noise is a function of (seed, i, step).
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.choices import GuidanceForm, Weights
from anechoic.data.arrays import read_npz
from anechoic.data.latents import crop_square
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.process import LinearFlow, Process, process_named, process_of
from anechoic.diffusion.samplers import Guidance, check_sampler, sample_batch, samplers_for
from anechoic.diffusion.vae import decode, latent_space, load_vae, matching_scale
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.sit import SiT
from anechoic.models.uvit import UViT
from anechoic.runtime.checkpoint import load
from anechoic.runtime.devices import check_devices, current_device
from anechoic.runtime.distributed import join, launch
from anechoic.storage.files import make_folder, write_aside
from anechoic.storage.fingerprint import hash_tensors
from anechoic.storage.safe_io import parse_table, read_table

log = logging.getLogger("anechoic")

RECEIPT = "receipt.json"


@dataclass(frozen=True)
class Request:
    """Everything an image depends on, and the batch size. None: as the run was trained, or the default.

    own: whether the autoencoder that the run names may be opened, any path or server if another person wrote it.
    """

    run: str
    num: int = 64
    sampler: str | None = None
    steps: int = 50
    order: int = 3
    guidance: float | None = None
    convention: GuidanceForm = "added"
    guided_channels: int | None = None
    classes: tuple[int, ...] = ()
    seed: int = 0
    process: str | None = None
    vae: str | None = None
    untrained: bool = False
    weights: Weights | None = None
    batch_size: int = 64
    own: bool = True


@dataclass(frozen=True)
class Images:
    """Generated images uint8 (n, C, H, W), their classes (n,) or None, and the receipt."""

    pixels: Tensor
    labels: Tensor | None
    receipt: dict[str, Any]


# ---- a run as a generator -------------------------------------------------------------------------------------------


def training_config(path: Path) -> dict[str, Any]:
    """Return the config of the run that a run, model or checkpoint directory belongs to; empty outside of one."""
    for folder in (path, *path.absolute().parents[:2]):
        file = folder / "config.json"
        if file.is_file():
            values = read_table(file)
            if "objective" in values:
                return values
    return {}


def open_denoiser(path: Path, *, untrained: bool = False, weights: Weights | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the network and its run's config; UserError for other kinds of network.

    untrained: random initialization instead, the baseline of scores.
    """
    model = load(path, weights=weights)
    if not isinstance(model, UViT | SiT):
        raise UserError(f"{path} holds no diffusion or flow model; only U-ViT and SiT networks make images.")
    if untrained:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.load_state_dict(build(model.config).state_dict())
    return model, training_config(path)


def find_process(model: UViT | SiT, config: dict[str, Any], *, asked: str | None) -> Process:
    """Return the process: as set, as trained, or the default of the model family."""
    if asked is not None:
        return process_named(asked)
    objective = config.get("objective")
    trained = process_of(objective["name"], objective["options"]) if objective else None
    return trained or (LinearFlow() if isinstance(model, SiT) else process_named("vp"))


def find_labels(request: Request, model: UViT | SiT) -> Tensor | None:
    """Return the class of every image (num,): the given or all classes in turn; None if unconditional."""
    count = model.config.num_classes
    if count is None:
        if request.classes:
            raise UserError("this model is unconditional: remove --classes.")
        return None
    for number in request.classes:
        if not 0 <= number < count:
            raise UserError(f"there is no class {number}: this model knows 0 to {count - 1}.")
    turn = torch.tensor(request.classes or range(count))
    return turn[torch.arange(request.num) % len(turn)]


def find_guidance(request: Request, model: UViT | SiT) -> Guidance | None:
    if request.guidance is None:
        return None
    guidance = Guidance(request.guidance, request.convention, request.guided_channels)
    if guidance.is_none:
        return None
    if model.config.num_classes is None:
        raise UserError("guidance needs a class-conditional model and this one is unconditional: remove --guidance.")
    if model.config.label_dropout == 0:
        raise UserError("guidance needs a model trained with label_dropout: remove --guidance.")
    return guidance


@dataclass(frozen=True)
class Decoder:
    """Network output -> uint8 images: latents through the autoencoder, else the inverse of the normalization."""

    preprocess: Preprocess
    vae: Any = None
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        unit = self.preprocess.invert(x) if self.vae is None else decode(self.vae, x, scale=self.scale) / 2 + 0.5
        return (255 * unit).round().clamp(0, 255).to(torch.uint8)


def find_decoder(request: Request, model: Any, config: dict[str, Any], device: torch.device) -> Decoder:
    space = latent_space(model, config if request.own else {})
    if space is not None and request.vae is None and not request.own:
        raise UserError(
            f"The autoencoder {space.vae:.200} is named by a run that you did not start on this machine, and is not "
            "opened unasked: name it with `anechoic sample --vae`."
        )
    name = request.vae or (space.vae if space else None)
    if name is None:
        if model.config.in_channels not in (1, 3):
            raise UserError(f"this model makes latents of {model.config.in_channels} channels; give --vae to see them.")
        return Decoder(model.preprocess)
    vae = load_vae(name, device=device)
    if vae.config.latent_channels != model.config.in_channels:
        raise UserError(
            f"the model makes {model.config.in_channels} channels and this autoencoder reads "
            f"{vae.config.latent_channels}; give the one its latents were encoded with."
        )
    if space is not None:
        return Decoder(model.preprocess, vae, matching_scale(space, vae))
    log.warning(
        "The model does not record the scale of its latents: the autoencoder's own factor, %g, is used.",
        vae.config.scaling_factor,
    )
    return Decoder(model.preprocess, vae, float(vae.config.scaling_factor))


# ---- making images --------------------------------------------------------------------------------------------------


def generate(request: Request, *, devices: int = 1, progress: bool = True) -> Images:
    """Generate the images 0 .. num - 1 of the request's seed, on one or several ranks."""
    model, config = open_checked(request)
    if devices == 1:
        return _generate_part(request, (model, config), progress=progress)
    if devices < 1 or devices > request.num:
        raise UserError(f"{request.num} images can be generated by 1 to {request.num} devices, not {devices}.")
    check_devices(devices)
    with tempfile.TemporaryDirectory() as folder:
        receipt = launch(_generate_into, request, folder, progress, devices=devices)
        parts = [torch.from_numpy(np.load(Path(folder) / f"{rank}.npy")) for rank in range(devices)]
    return Images(torch.cat(parts), find_labels(request, model), receipt)


def open_checked(request: Request) -> tuple[Any, dict[str, Any]]:
    """Check a request before a rank starts or a network is evaluated."""
    if request.num < 1 or request.batch_size < 1:
        raise UserError("--num and --batch-size must be at least 1.")
    model, config = open_denoiser(Path(request.run), untrained=request.untrained, weights=request.weights)
    process = find_process(model, config, asked=request.process)
    name = request.sampler or samplers_for(process)[0]
    check_sampler(name, process=process, steps=request.steps, order=request.order)
    find_labels(request, model)
    find_guidance(request, model)
    return model, config


def _generate_into(request: Request, folder: str, progress: bool) -> dict[str, Any]:
    """Run on each rank: write its images to a file; rank 0's receipt is returned."""
    torch.set_num_threads(1)
    with join() as world:
        opened = open_denoiser(Path(request.run), untrained=request.untrained, weights=request.weights)
        part = _generate_part(
            request, opened, rank=world.rank, world_size=world.size, progress=progress and world.is_rank_zero
        )
    np.save(Path(folder) / f"{world.rank}.npy", part.pixels.numpy())
    return part.receipt


def _generate_part(
    request: Request,
    opened: tuple[Any, dict[str, Any]],
    *,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = False,
) -> Images:
    """Generate this rank's contiguous part of the images."""
    device = current_device()
    model, config = opened
    weights = hash_tensors(model.state_dict())
    model = model.to(device)
    process = find_process(model, config, asked=request.process)
    sampler = request.sampler or samplers_for(process)[0]
    labels, guidance = find_labels(request, model), find_guidance(request, model)
    decoder = find_decoder(request, model, config, device)
    low, high = (request.num * number // world_size for number in (rank, rank + 1))

    parts, evaluations = [], 0
    with EvaluationBar(request, high - low, shown=progress) as tick:
        for ids in torch.arange(low, high, device=device).split(request.batch_size):
            x, evaluations = sample_batch(
                model,
                ids,
                shape=(model.config.in_channels, *model.config.size),
                process=process,
                sampler=sampler,
                steps=request.steps,
                order=request.order,
                seed=request.seed,
                labels=None if labels is None else labels[ids.cpu()].to(device),
                guidance=guidance,
                null=model.config.num_classes,
                tick=tick,
            )
            parts.append(decoder(x).cpu())
    receipt = {
        **asdict(request),
        "sampler": sampler,
        "process": process.name,
        "evaluations": evaluations,
        "weights": weights,
        "ema": request.weights != "raw" and bool(config.get("optim", {}).get("ema", 0)),
        "vae": None if decoder.vae is None else hash_tensors(decoder.vae.state_dict()),
    }
    del receipt["batch_size"]
    return Images(torch.cat(parts), None if labels is None else labels[low:high], receipt)


class EvaluationBar:
    """A progress bar over network evaluations; entering it returns the function that advances it."""

    def __init__(self, request: Request, num: int, *, shown: bool) -> None:
        from tqdm.auto import tqdm

        total = request.steps * math.ceil(num / request.batch_size)
        # disable=None: no bar where there is no terminal. dopri5 chooses its number of evaluations.
        self.bar = tqdm(
            total=None if request.sampler == "dopri5" else total,
            unit="eval",
            disable=None if shown else True,
            desc="sampling",
            dynamic_ncols=True,
        )

    def __enter__(self) -> Callable[[], object]:
        return self.bar.update

    def __exit__(self, *problem: object) -> None:
        self.bar.close()


# ---- files ----------------------------------------------------------------------------------------------------------


def check_output(out: Path) -> None:
    """Raise UserError for a path that cannot be written; create its folder."""
    if out.suffix not in (".png", ".npz", ""):
        raise UserError(f"images cannot be written as {out.suffix}; name a .png picture, an .npz file or a folder.")
    if out.suffix and out.is_dir():
        raise UserError(f"{out} is a folder; choose another name for the file of images.")
    if not out.suffix and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder for the images.")
    make_folder(out.absolute().parent)


def write_images(images: Images, out: Path, *, columns: int | None = None) -> None:
    """Write a contact sheet (.png), arrays (.npz), or a folder of PNG files, by class where there are classes."""
    check_output(out)
    with write_aside(out.absolute(), folder=not out.suffix) as new:
        if out.suffix == ".png":
            contact_sheet(images.pixels, columns=columns or default_columns(images)).save(new)
        elif out.suffix == ".npz":
            pixels = images.pixels.permute(0, 2, 3, 1).numpy()
            arrays = {"images": pixels, "receipt": np.array(json.dumps(images.receipt))}
            if images.labels is not None:
                arrays["labels"] = images.labels.numpy()
            with open(new, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        else:
            write_folder(images, new)


def write_folder(images: Images, folder: Path) -> None:
    for i, pixels in enumerate(images.pixels):
        place = folder if images.labels is None else folder / str(int(images.labels[i]))
        place.mkdir(exist_ok=True)
        to_picture(pixels).save(place / f"{i:06d}.png")
    (folder / RECEIPT).write_text(json.dumps(images.receipt, indent=2) + "\n")


def read_receipt(path: str) -> dict[str, Any] | None:
    """Return the receipt that `write_images` wrote beside images, if there is one."""
    file = Path(path)
    if file.is_dir() and (file / RECEIPT).is_file():
        return read_table(file / RECEIPT)
    if file.suffix == ".npz" and file.is_file():
        found = read_npz(file, only=("receipt",))
        return parse_table(str(found["receipt"]), where=f"The receipt in {file}") if found else None
    return None


def to_picture(pixels: Tensor) -> Any:
    """uint8 (C, H, W) -> a Pillow image, gray for one channel."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array[..., :3])


def default_columns(images: Images) -> int:
    """Return one column per class, or a number that makes the grid about square."""
    if images.labels is not None and 1 < (count := len(images.labels.unique())) <= 20:
        return count
    return math.ceil(math.sqrt(len(images.pixels)))


def contact_sheet(pixels: Tensor, *, columns: int, cell: int = 48, gap: int = 4) -> Any:
    """Draw all images row by row on white; small ones are enlarged by an integer to about `cell` pixels."""
    n, channels, height, width = pixels.shape
    factor = max(1, cell // max(height, width))
    enlarged = pixels.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    height, width = enlarged.shape[2:]
    rows = math.ceil(n / columns)
    sheet = torch.full((channels, rows * (height + gap) + gap, columns * (width + gap) + gap), 255, dtype=torch.uint8)
    for i, image in enumerate(enlarged):
        top, left = (
            gap + place * (side + gap) for place, side in zip(divmod(i, columns), (height, width), strict=True)
        )
        sheet[:, top : top + height, left : left + width] = image
    return to_picture(sheet)


def image_batches(
    source: Any, *, batch_size: int, image_size: int | None = None, num: int | None = None
) -> Iterator[Tensor]:
    """Yield the first `num` readable images as uint8 batches, as they are or cropped square.

    Images of different sizes come one by one.
    """
    from anechoic.data import BadImage

    count = len(source) if num is None else min(num, len(source))
    for start in range(0, count, batch_size):
        found = source.read_many(range(start, min(start + batch_size, count)))
        source.add_skipped((item.name, item.reason) for item in found if isinstance(item, BadImage))
        images = [item for item in found if isinstance(item, Tensor)]
        if image_size is not None:
            images = [crop_square(image, image_size) for image in images]
        if len({image.shape for image in images}) == 1:
            yield torch.stack(images)
        else:
            yield from (image[None] for image in images)
