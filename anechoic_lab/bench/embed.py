"""Embedding a folder of JPEGs with a ViT-S/16 of 224 pixels: `anechoic embed` against transformers' ViTModel.

Both decode, resize the shorter side to 256, cut the middle, normalize and write one vector per image to a .npz file;
the peer does it with Pillow in a DataLoader of as many workers, at its best number of threads and images a batch. Every
contestant is a process of its own and opens its model before the clock runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.choices import HeadPooling
from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic_lab.bench.contest import Entry, contest, fastest
from anechoic_lab.bench.timing import Options, gemm_flops, row

PEERS = ("transformers", "pillow", "torch")
MODEL: dict[str, Any] = {"dim": 384, "depth": 12, "num_heads": 6}
SIZE, MARGIN = 224, 256
IMAGES, PEER_BATCHES = 128, (4,)
WORKERS = (0, 2)
PREPROCESS = Preprocess(IMAGENET_MEAN, IMAGENET_STD, SIZE, 3)


def run(options: Options) -> list[dict[str, Any]]:
    """A row for no workers and one for two, and one for the class token beside the mean of the patches."""
    from anechoic.data import open_source
    from anechoic.data.files import Files
    from anechoic_lab.bench.data import make_jpegs

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.images) if options.images else make_jpegs(Path(temporary))
        source = open_source(folder)
        if not isinstance(source, Files):
            raise UserError(f"This benchmark needs a folder of JPEGs, and {str(folder)!r} is something else.")
        # Evenly spaced, so that every sub-folder is met, and as often as it takes for a turn of some seconds.
        chosen = np.linspace(0, len(source) - 1, IMAGES).astype(int)
        paths = tuple(str((folder / source.name(int(k))).resolve()) for k in chosen)
        listing = Path(temporary) / "images.txt"
        listing.write_text("\n".join(paths))
        return measure(str(listing), paths, rounds=options.rounds)


def measure(listing: str, paths: tuple[str, ...], *, rounds: int) -> list[dict[str, Any]]:
    gemm = gemm_flops()
    threads = os.cpu_count() or 1
    counts = sorted({1, threads})
    rows = []
    for workers in WORKERS:
        entries = {"ours": Entry(embedder, (listing, workers, "class"), threads=threads)}
        if workers == 0:
            entries["ours, mean of patches"] = Entry(embedder, (listing, workers, "mean"), threads=threads)
        for count in counts:
            for batch in PEER_BATCHES:
                name = f"transformers, {count} threads, batches of {batch}"
                entries[name] = Entry(peer_embedder, (paths, workers, batch), threads=count)
        timing, memory = contest(entries, rounds=rounds, turn=0.0)
        peer = fastest(timing, [name for name in entries if name.startswith("transformers")])
        for ours in (name for name in entries if name.startswith("ours")):
            pooled = "mean of patches" if "mean" in ours else "class token"
            rows.append(
                row(
                    f"{len(paths)} JPEGs by ViT-S/16 at {SIZE} px, {pooled}, {workers} workers",
                    timing,
                    ours=ours,
                    peer=peer,
                    items=len(paths),
                    flops=len(paths) * image_flops(),
                    gemm=gemm,
                    memory_mb=memory[ours],
                )
            )
    return rows


def image_flops() -> float:
    """Of one image through the plain network: every product of every token."""
    from anechoic.training.cost import block_flops

    patches, dim = (SIZE // 16) ** 2, MODEL["dim"]
    return 2.0 * patches * 3 * 16 * 16 * dim + MODEL["depth"] * block_flops(1 + patches, dim, 4.0)


def embedder(world: object, listing: str, workers: int, pooling: HeadPooling) -> Callable[[], object]:
    """What `anechoic embed` does once its model is open, each time with an empty cache."""
    import torch

    from anechoic.data import open_source
    from anechoic.eval.encoders import Encoder
    from anechoic.eval.export_features import embed_source
    from anechoic.models import build_model

    torch.manual_seed(0)
    model = build_model("vit_small_patch16", image_size=SIZE, **MODEL).eval()
    encoder = Encoder("vit", model, PREPROCESS)
    assert encoder.fingerprint
    assert encoder.widths

    def step() -> None:
        cache = tempfile.mkdtemp()
        os.environ["ANECHOIC_CACHE"] = cache
        try:
            output = Path(cache) / "vectors.npz"
            embed_source(encoder, open_source(listing), output, pooling=pooling, device="cpu", workers=workers)
        finally:
            shutil.rmtree(cache)

    return step


def peer_embedder(world: object, paths: tuple[str, ...], workers: int, batch: int) -> Callable[[], object]:
    """The usual loop: Pillow in a DataLoader, the model under inference mode, the vectors to a file at the end."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=MODEL["dim"],
        num_hidden_layers=MODEL["depth"],
        num_attention_heads=MODEL["num_heads"],
        intermediate_size=4 * MODEL["dim"],
        image_size=SIZE,
    )
    model = ViTModel(config, add_pooling_layer=False).eval()
    loader: DataLoader = DataLoader(PillowImages(paths), batch, num_workers=workers)  # type: ignore[arg-type]

    @torch.inference_mode()
    def step() -> None:
        found = [model(pixels).last_hidden_state[:, 0].numpy() for pixels in loader]
        with tempfile.TemporaryFile() as file:
            np.savez(file, names=np.array(paths), features=np.concatenate(found))

    return step


class PillowImages:
    """Decode, resize the shorter side, cut the middle; a normalized float tensor."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        # As ours: an image that is smaller than the margin is not enlarged to it.
        shorter = min(MARGIN, max(SIZE, min(image.size)))
        if min(image.size) != shorter:
            longer = int(shorter * max(image.size) / min(image.size))
            sides = (shorter, longer) if image.width <= image.height else (longer, shorter)
            image = image.resize(sides, Image.Resampling.BICUBIC)
        left, upper = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
        image = image.crop((left, upper, left + SIZE, upper + SIZE))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div_(255)
        return pixels.sub_(torch.tensor(IMAGENET_MEAN).view(3, 1, 1)).div_(torch.tensor(IMAGENET_STD).view(3, 1, 1))
