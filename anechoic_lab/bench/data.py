"""The data pipeline against the usual one, Pillow in a DataLoader, and against the training step it has to feed."""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.data import Augment, Loader, Scenes, Source, decoding, open_source
from anechoic.data.files import Files
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.recipes.pocket import pocket_mae_cifar100
from anechoic_lab.bench.memory import peak_memory_mb
from anechoic_lab.bench.timing import Options, Timing, interleave, row

PEERS = ("pillow", "simplejpeg")
PREPROCESS = Preprocess(IMAGENET_MEAN, IMAGENET_STD, 64, 3)
JPEG_SIZE, BATCH, BATCHES = 64, 64, 60
MADE_UP_JPEGS, MADE_UP_SMALL = 500, 10_000
WITHOUT_HASHES = "without hashes"
IDENTIFIED_FILES, IDENTIFIED_SIZES = 10_000, (224, 512, 1024)


class PillowCrops(Dataset):
    """What most training code does: decode, crop, resize and flip with Pillow, then a float tensor, normalized."""

    def __init__(self, paths: list[Path], *, size: int):
        self.paths, self.size = paths, size
        self.mean, self.std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        image = image.crop(random_box(*image.size)).resize((self.size, self.size), Image.Resampling.BICUBIC)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        return pixels.sub_(self.mean).div_(self.std)


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """A random resized crop as Pillow wants it: left, upper, right, lower."""
    for _ in range(10):
        area = width * height * random.uniform(0.2, 1)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, upper = random.randint(0, width - w), random.randint(0, height - h)
            return left, upper, left + w, upper + h
    return 0, 0, width, height


def run(options: Options) -> list[dict[str, Any]]:
    """JPEGs against the peer, identity by content against none, small images against a training step."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.images) if options.images else make_jpegs(Path(temporary))
        rows = jpeg_rows(folder, rounds=options.rounds, workers=options.workers)
    small = open_source(options.small) if options.small else Scenes(MADE_UP_SMALL, size=32)
    for size in IDENTIFIED_SIZES:
        rows += identity_rows(size, rounds=options.rounds)
    return [*rows, step_row(small, rounds=options.rounds)]


def make_jpegs(folder: Path, size: int = 224) -> Path:
    """JPEGs of embedded scenes, for machines without a folder of photographs."""
    source = Scenes(MADE_UP_JPEGS, size=size)
    for k, image in enumerate(source.read_many(range(len(source)))):
        assert isinstance(image, torch.Tensor)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{k:04d}.jpg", quality=90)
    return folder


def jpeg_rows(folder: Path, *, rounds: int, workers: int) -> list[dict[str, Any]]:
    """The same batches of 64 px crops, normalized floats, from the same files with the same number of workers."""
    source = open_source(folder)
    if not isinstance(source, Files):
        raise UserError(
            f"This benchmark needs a folder of JPEGs, and {str(folder)!r} is something else; give one with --images."
        )
    paths = [folder / source.name(k) for k in range(len(source))]
    dataset = PillowCrops(paths, size=JPEG_SIZE)
    sampler = RandomSampler(dataset, replacement=True, num_samples=BATCH * BATCHES)
    crops = DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers)

    # Every turn starts its own workers, so that no contestant prefetches while another is timed.
    def peer() -> None:
        for _ in crops:
            pass

    ways = {"decoded by Pillow": (False, False), "decoded by simplejpeg": (False, True), "from the cache": (True, True)}
    if decoding.simplejpeg is None:
        ways = {name: (cache, False) for name, (cache, _) in ways.items() if name != "decoded by simplejpeg"}
    contestants: dict[str, Callable[[], object]] = {"Pillow and DataLoader": peer}
    contestants |= {
        name: reader(source, workers, cache=cache, simplejpeg=fast, batches=BATCHES)
        for name, (cache, fast) in ways.items()
    }
    # One thread a process for everybody: idle threads of this process would otherwise wait on the workers' cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timing = interleave(contestants, rounds=rounds)
        memory = {name: peak_memory_mb(read_afresh, str(folder), workers, *way) for name, way in ways.items()}
    finally:
        torch.set_num_threads(threads)
    return [
        row(
            f"{BATCH * BATCHES} random crops of {JPEG_SIZE} px from JPEGs, {workers} workers, {name}",
            timing,
            ours=name,
            peer="Pillow and DataLoader",
            items=BATCH * BATCHES,
            memory_mb=memory[name],
        )
        for name in ways
    ]


def identity_rows(size: int, *, rounds: int) -> list[dict[str, Any]]:
    """A pass over many JPEGs, decoded and cropped, with their identity by content and without."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_jpegs(Path(temporary), size)
        for k in range(MADE_UP_JPEGS, IDENTIFIED_FILES):  # the content differs, the picture is one of the first
            (folder / f"{k:05d}.jpg").write_bytes((folder / f"{k % MADE_UP_JPEGS:04d}.jpg").read_bytes() + b"%d" % k)
        timing = time_passes(folder, rounds=rounds)
        kilobytes = sum(file.stat().st_size for file in folder.iterdir()) / IDENTIFIED_FILES / 1000
    return [
        row(
            f"a pass over {IDENTIFIED_FILES} JPEGs of {size} px ({kilobytes:.0f} kB), {name}",
            timing,
            ours=name,
            peer=WITHOUT_HASHES,
            items=IDENTIFIED_FILES,
        )
        for name in ("all files hashed", "hashes known")
    ]


def time_passes(folder: Path, *, rounds: int) -> Timing:
    """Time a pass over a folder without hashes, with a new cache of hashes, and with a filled one."""

    def work(*, identified: bool, cache: str) -> None:
        before = os.environ.get("ANECHOIC_CACHE")
        os.environ["ANECHOIC_CACHE"] = cache
        try:
            source = open_source(folder)
            assert not identified or source.fingerprint
            for _ in Loader(
                source, image_size=JPEG_SIZE, batch_size=BATCH, augment=Augment(kind="center"), cache=False
            ):
                pass
        finally:
            os.environ.pop("ANECHOIC_CACHE")
            if before is not None:
                os.environ["ANECHOIC_CACHE"] = before

    def first_pass() -> None:
        with tempfile.TemporaryDirectory() as empty:
            work(identified=True, cache=empty)

    with tempfile.TemporaryDirectory() as cache:
        return interleave(
            {
                WITHOUT_HASHES: lambda: work(identified=False, cache=cache),
                "all files hashed": first_pass,
                "hashes known": lambda: work(identified=True, cache=cache),
            },
            rounds=rounds,
        )


def reader(source: Source, workers: int, *, cache: bool, simplejpeg: bool, batches: int) -> Callable[[], None]:
    """Return a function that reads `batches` batches of normalized crops with our pipeline."""
    loader = Loader(source, image_size=JPEG_SIZE, batch_size=BATCH, shuffle=True, workers=workers, cache=cache)
    installed = decoding.simplejpeg

    def work() -> None:
        decoding.simplejpeg = installed if simplejpeg else None
        try:
            for batch in itertools.islice(loader, batches):
                PREPROCESS.apply(batch.images)
        finally:
            decoding.simplejpeg = installed

    return work


def read_afresh(folder: str, workers: int, cache: bool, simplejpeg: bool) -> None:
    # Memory does not grow after the first few batches.
    reader(open_source(folder), workers, cache=cache, simplejpeg=simplejpeg, batches=10)()


def step_row(source: Source, *, rounds: int) -> dict[str, Any]:
    """A batch from the cache against a training step of the pocket masked autoencoder; under 5 % is a ratio over 20."""
    config = pocket_mae_cifar100()
    batch_size, image_size = pocket_sizes()
    batches = iter(Loader(source, image_size=image_size, batch_size=batch_size, shuffle=True))
    model = build_model(config.model.name, image_size=image_size, **config.model.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = PREPROCESS.apply(next(batches).images)

    def step() -> None:
        optimizer.zero_grad()
        model(images).loss.backward()
        optimizer.step()

    timing = interleave(
        {"ours": lambda: PREPROCESS.apply(next(batches).images), "pocket training step": step}, rounds=2 * rounds
    )
    return row(
        f"a batch of {batch_size} crops of {image_size} px from the cache",
        timing,
        peer="pocket training step",
        items=batch_size,
        memory_mb=peak_memory_mb(read_small, source),
    )


def pocket_sizes() -> tuple[int, int]:
    """Images of a batch and their side in the pocket recipe."""
    config = pocket_mae_cifar100()
    batch_size, image_size = config.optim.batch_size, config.data.image_size
    assert isinstance(batch_size, int)
    assert isinstance(image_size, int)
    return batch_size, image_size


def read_small(source: Source) -> None:
    batch_size, image_size = pocket_sizes()
    for batch in itertools.islice(Loader(source, image_size=image_size, batch_size=batch_size, shuffle=True), 10):
        PREPROCESS.apply(batch.images)
