"""The readers of the fuzzer: for each kind of file a valid example and how it is read, and malicious inputs."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image


class Door(NamedTuple):
    """make writes whole examples into a folder; enter reads one of them as the library does.

    damage: what happens to an example instead of damage to its bytes.
    """

    make: Callable[[Path], Any]
    enter: Callable[[Path], Any]
    damage: Callable[[Path, random.Random], None] | None = None


def load_everything() -> None:
    """Import before forking what the doors use, so that an input pays for itself only."""
    for name in (
        *("datasets", "pyarrow.parquet", "diffusers.models.autoencoders.autoencoder_kl"),
        *("transformers.models.vit.modeling_vit", "anechoic.diffusion.vae", "anechoic.diffusion.generate"),
        *("anechoic.eval.encoders", "anechoic.eval.frechet", "anechoic.index.index", "anechoic.eval.segmentation"),
        *("anechoic.data.tiff", "anechoic.data.dicom", "anechoic.data.measure", "imagecodecs"),
        *("anechoic.data.zarr_array", "anechoic.data.nifti"),
        *("anechoic.weights.importing", "anechoic.weights.exporting", "anechoic.runtime.sharded_checkpoint"),
        *("anechoic.cli.embed", "anechoic.cli.search", "anechoic.cli.explore", "anechoic.eval.export_features"),
        *("anechoic.pages.collection_pages", "anechoic.index.collection", "anechoic.server.page", "sklearn.manifold"),
        *("sklearn.cluster", "sklearn.decomposition"),
    ):
        import_module(name)
    outcome = import_module("anechoic.outcome")
    outcome.commit(), outcome.machine()  # they start programs, once


# ---- images


def picture(mode: str = "RGB", size: tuple[int, int] = (20, 17)) -> Image.Image:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (size[1], size[0]), dtype=np.uint16))
    return Image.fromarray(pixels, "RGBA").convert(mode)


def encoded(form: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    picture(mode).save(file, form, **options)
    return file.getvalue()


def make_images(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = {
        "plain.jpg": encoded(),
        "turned.jpg": encoded(exif=exif),
        "progressive.jpg": encoded(progressive=True),
        "cmyk.jpg": encoded(mode="CMYK"),
        "alpha.png": encoded("PNG", "RGBA"),
        "palette.png": encoded("PNG", "P"),
        "deep.png": encoded("PNG", "I;16"),
        "plain.webp": encoded("WEBP", lossless=True),
        "plain.bmp": encoded("BMP"),
        "plain.tif": encoded("TIFF"),
        "packed.tif": encoded("TIFF", compression="tiff_lzw"),
        "moving.gif": encoded("GIF", "P"),
    }
    for name, data in kinds.items():
        (folder / name).write_bytes(data)


def enter_image(path: Path) -> Any:
    from anechoic.data.decoding import Undecodable, decode, decode_labels
    from anechoic.storage.safe_io import read_regular

    try:
        data = read_regular(path)
    except OSError as error:
        return str(error)
    found = []
    for read in (*(lambda k=k: decode(data, channels=k) for k in (1, 3, 4)), lambda: decode(data, min_side=4)):
        try:
            found.append(tuple(read().shape))
        except Undecodable as error:
            found.append(str(error))
    try:
        decode_labels(data)
    except Undecodable as error:
        found.append(str(error))
    return found


def make_stored(folder: Path) -> None:
    import tifffile

    values = np.random.default_rng(0).integers(0, 65536, (5, 20, 17), dtype=np.uint16)
    gray: dict[str, Any] = {"photometric": "minisblack"}
    tifffile.imwrite(folder / "plain.tif", values, **gray)
    tifffile.imwrite(folder / "tiles.tif", values, tile=(16, 16), compression="zlib", **gray)
    tifffile.imwrite(folder / "chunky.tif", values.transpose(1, 2, 0), planarconfig="contig", compression="lzw", **gray)
    names = {"axes": "CYX", "Channel": {"Name": list("abcde")}}
    tifffile.imwrite(folder / "named.ome.tif", values, metadata=names, **gray)
    tifffile.imwrite(folder / "stack.tif", values[:4], imagej=True, metadata={"axes": "ZYX"})
    (folder / "deep.png").write_bytes(encoded("PNG", "I;16"))
    np.save(folder / "image.npy", values)
    make_dicom(folder / "gray.dcm", values[0])
    make_dicom(folder / "frames.dcm", values)


def make_dicom(path: Path, values: np.ndarray) -> None:
    import pydicom

    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = pydicom.uid.CTImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3"
    data.Rows, data.Columns, data.SamplesPerPixel, data.PhotometricInterpretation = 20, 17, 1, "MONOCHROME1"
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 0
    data.RescaleSlope, data.RescaleIntercept, data.NumberOfFrames = "2", "-1024", values.size // 340
    data.PixelData = values.tobytes()
    data.save_as(path, enforce_file_format=True)


def enter_stored(path: Path) -> str:
    """As pretrain does, whole and by tiles, and from its bytes as the live page does."""
    from anechoic.config import PixelConfig
    from anechoic.data.decoding import Undecodable
    from anechoic.data.measure import measure
    from anechoic.data.stored import decode_stored
    from anechoic.errors import UserError
    from anechoic.storage.safe_io import read_regular

    found = []
    for tile in (0, 8):
        try:
            found.append(read_everything(measure(path, labels=False, channels="0", tile=tile).source))
        except UserError as problem:
            found.append(str(problem))
    try:
        decode_stored(read_regular(path), pixels=PixelConfig(type="uint16"), channels=5)
    except (Undecodable, OSError) as problem:
        found.append(str(problem))
    return " ".join(found)


# ---- sources


def read_everything(source: Any) -> str:
    """Names, pixels and labels, and a batch of a loader."""
    from anechoic.data import Augment, Loader

    names = [source.name(k) for k in range(min(len(source), 50))]
    pixels = source.read_many(range(min(len(source), 50)), min_side=16)
    loader = Loader(source, image_size=16, batch_size=4, augment=Augment(kind="center"), cache=False)
    batches = sum(1 for _ in loader)
    return f"{len(names)} {len(pixels)} {batches}"


def enter_source(path: Path) -> str:
    from anechoic.data import open_source

    unlabeled = read_everything(open_source(path))
    return unlabeled + read_everything(open_source(path, labels=True))


def enter_array(path: Path) -> str:
    from anechoic.data import open_source
    from anechoic.diffusion.generate import read_receipt

    read_receipt(str(path))
    return read_everything(open_source(path, labels=path.suffix == ".npz"))


def make_folder(folder: Path) -> None:
    for kind in "ab":
        (folder / "photos" / kind).mkdir(parents=True)
        for k in range(6):
            (folder / "photos" / kind / f"{k}.png").write_bytes(encoded("PNG"))


def make_list(folder: Path) -> None:
    (folder / "set").mkdir()
    for k in range(4):
        (folder / "set" / f"{k}.png").write_bytes(encoded("PNG"))
    (folder / "set" / "images.tsv").write_text("".join(f"{k}.png\tclass {k % 2}\n" for k in range(4)))


def enter_list(path: Path) -> str:
    return enter_source(path / "images.tsv")


def make_zips(folder: Path) -> None:
    for name, method in (("stored.zip", zipfile.ZIP_STORED), ("packed.zip", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(folder / name, "w", method) as archive:
            for k in range(4):
                archive.writestr(f"top/{'ab'[k % 2]}/{k}.bmp", encoded("BMP"))


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def make_tars(folder: Path) -> None:
    for name, form in (
        ("plain.tar", tarfile.USTAR_FORMAT),
        ("pax.tar", tarfile.PAX_FORMAT),
        ("gnu.tar", tarfile.GNU_FORMAT),
    ):
        with tarfile.open(folder / name, "w", format=form) as archive:
            for k in range(4):
                long = "x" * 120 if form != tarfile.USTAR_FORMAT else ""
                add(archive, f"{'ab'[k % 2]}/{k}{long}.png", encoded("PNG"))
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for k in range(4):
            add(archive, f"{k:03d}.png", encoded("PNG"))
            add(archive, f"{k:03d}.cls", b"%d" % (k % 3))


def make_shards(folder: Path) -> None:
    from anechoic.data import open_source
    from anechoic.data.shards import write_shards

    make_folder(folder)
    write_shards(open_source(folder / "photos", labels=True), folder / "shards", shard_bytes=1 << 16)
    shutil.rmtree(folder / "photos")


def make_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": encoded("PNG"), "path": f"{k}.png"} for k in range(4)]
    described = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    for name, labels in (("numbers.parquet", [0, 1, 0, 1]), ("words.parquet", ["a", "b", "a", "b"])):
        table = pa.table({"image": images, "label": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
        pq.write_table(table, folder / name, compression="snappy" if name == "numbers.parquet" else "none")


def make_npy(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(folder / "bytes.npy", rng.integers(0, 256, (6, 9, 8, 3), dtype=np.uint8))
    np.save(folder / "floats.npy", rng.random((6, 9, 8)).astype(np.float32))


def make_npz(folder: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (6, 9, 8, 3), dtype=np.uint8), np.arange(6) % 2
    np.savez(folder / "plain.npz", images=images, labels=labels, receipt=json.dumps({"seed": 0}))
    np.savez_compressed(folder / "packed.npz", images=images, labels=labels, classes=np.array(["a", "b"]))


def make_hub(folder: Path) -> None:
    import datasets

    columns = {"image": [{"bytes": encoded("PNG"), "path": None} for _ in range(4)], "label": [0, 1, 0, 1]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder / "saved"))


def make_latents(folder: Path) -> None:
    from anechoic.data.latents import CARD, FORMAT, LABELS, MOMENTS

    made = folder / "latents"
    made.mkdir()
    shape = (3, 2, 8, 4, 4)
    (made / MOMENTS).write_bytes(np.zeros(shape, np.float32).tobytes())
    np.save(made / LABELS, np.array([0, 1, 1]))
    card = {"scale": 0.2, "vae": "x", "vae_hash": "00", "image_size": 32, "shape": shape, "source": "00"}
    (made / CARD).write_text(json.dumps({**card, "classes": ["a", "b"], "format": FORMAT}))


def enter_latents(path: Path) -> str:
    from anechoic.data import Loader
    from anechoic.data.latents import Latents

    source = Latents(path, labels=True)
    batches = sum(1 for _ in Loader(source, image_size=4, batch_size=2, cache=False))
    return f"{len(source)} {source.read(0).shape} {batches}"


# ---- weights


def tiny(name: str, **options: Any) -> Any:
    from anechoic.models import build_model

    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, "dim": 16, "depth": 2, "num_heads": 2}
    return build_model(name, **{**sizes, **options})


def make_models(folder: Path) -> None:
    from anechoic.data.preprocess import Preprocess
    from anechoic.models import build_model
    from anechoic.runtime.checkpoint import model_card, write_model

    decoder = {"decoder_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}
    models = {
        "vit": tiny("vit_tiny_patch4", num_classes=3),
        "mae": tiny("mae_tiny_patch4", alpha_min=0.6, **decoder),
        "uvit": tiny("uvit_small", num_classes=3, label_dropout=0.1),
        "sit": tiny("sit_s_patch2", skips=True, alpha_min=0.8, num_classes=None, in_channels=3),
        "resnet": build_model("resnet18", image_size=16, width=4, num_classes=3),
    }
    for name, model in models.items():
        preprocess = Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3)
        write_model(folder / name, model.state_dict(), model_card(model, preprocess))
        # A malicious file has no checksum, so the checks behind it must hold too.
        card = json.loads((folder / name / "config.json").read_text())
        del card["weights_sha256"]
        (folder / name / "config.json").write_text(json.dumps(card))
    make_parts(folder / "parts", models["vit"].state_dict(), json.loads((folder / "vit" / "config.json").read_text()))


def make_parts(folder: Path, tensors: dict[str, torch.Tensor], card: dict[str, Any]) -> None:
    """A checkpoint of two processes, each of which wrote its rows and said where they belong."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(card))
    for rank in range(2):
        rows = {f"model/{name}": tensor.chunk(2)[rank] for name, tensor in tensors.items() if len(tensor) > rank}
        firsts = {f"model/{name}": rank * len(tensor.chunk(2)[0]) for name, tensor in tensors.items()}
        places = {name: {"saved_offsets": [firsts[name], *[0] * (part.ndim - 1)]} for name, part in rows.items()}
        contiguous = {name: part.clone() for name, part in rows.items()}
        file = folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file(contiguous, file, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


def enter_model(path: Path) -> str:
    from anechoic.runtime.checkpoint import load

    return type(load(path)).__name__


def plain_vit_tensors() -> dict[str, torch.Tensor]:
    from anechoic.adapters.timm import export_tensors

    return {name: value.contiguous().clone() for name, value in export_tensors(tiny("vit_tiny_patch4")).items()}


def make_weights(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = plain_vit_tensors()
    torch.save({"model": tensors, "args": argparse.Namespace(lr=1e-3, mask_ratio=0.75)}, folder / "training.pth")
    torch.save(tensors, folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(tensors, folder / "plain.safetensors")
    timm = folder / "timm"
    timm.mkdir()
    save_file(tensors, timm / "model.safetensors")
    settings = {
        "architecture": "vit",
        "model_args": {"num_heads": 2},
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [1] * 3},
    }
    (timm / "config.json").write_text(json.dumps(settings))


def enter_weights(path: Path) -> str:
    from anechoic.weights.importing import Choices, import_checkpoint

    return import_checkpoint(path, Choices(num_heads=None if path.is_dir() else 2)).kind


def make_transformers(folder: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))
    model.save_pretrained(folder / "vit")
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(statistics))


def enter_transformers(path: Path) -> str:
    from anechoic.eval.encoders import open_encoder

    return str(open_encoder(f"transformers:{path}").widths)


def make_vae(folder: Path) -> None:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    sizes = {"block_out_channels": (8, 8), "latent_channels": 2, "norm_num_groups": 2, "sample_size": 16}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(**sizes, **blocks).save_pretrained(folder / "vae")


def enter_vae(path: Path) -> str:
    from anechoic.diffusion.vae import load_vae

    return type(load_vae(str(path))).__name__


# ---- what evaluations read


def make_statistics(folder: Path) -> None:
    from anechoic.eval.frechet import Statistics, save_statistics

    found = Statistics(9, np.zeros(4), np.eye(4), np.zeros((5, 4)), {"metric": "fid"}, {"source": "x"})
    save_statistics(folder / "reference.npz", found)


def enter_statistics(path: Path) -> str:
    from anechoic.eval.frechet import is_statistics, load_statistics

    return str(load_statistics(path).count) if is_statistics(path) else "other"


def make_masks(folder: Path) -> None:
    root = folder / "scenes"
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
        for k in range(2):
            mask = Image.fromarray(np.arange(20 * 17, dtype=np.uint8).reshape(17, 20) % 5)
            (picture() if name == "images" else mask).save(root / name / f"{k}.png")
    (root / "classes.json").write_text(json.dumps({str(k): k // 2 for k in range(5)}))
    (root / "list.txt").write_text("0.png\n1.png\n")


def enter_masks(path: Path) -> str:
    from anechoic.data.preprocess import Preprocess
    from anechoic.eval.segmentation import find_pairs, read_all, read_mapping

    prepare = Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3)
    mapping = read_mapping(path / "classes.json", void=255)
    images, _ = read_all(find_pairs(path, listed=path / "list.txt"), prepare, mapping=mapping)
    return str(tuple(images.shape))


def make_index(folder: Path) -> None:
    from anechoic.data.decoding import decoders
    from anechoic.index.index import Part, write
    from anechoic.storage.cache import OpenEntry

    rows, vectors = np.arange(5), np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    (folder / "index").mkdir()
    keys = [bytes([row]) * 16 for row in range(5)]
    notes = {"encoder": "this one", "bad": {"ff" * 16: ["torn.jpg", "it is cut off"]}, "decoders": decoders()}
    write(OpenEntry(folder / "index", "a seed"), rows, [Part(vectors, rows, rows)], keys, temporary=[], **notes)


def enter_index(path: Path) -> str:
    """A corrupted index is never an error: it is rebuilt, with a reason."""
    from anechoic.index.index import Searchable, read
    from anechoic.storage.cache import OpenEntry

    known, reason = read(OpenEntry(path, ""), "this one")
    if known is None:
        return reason
    return str(len(Searchable.of(known.vectors, "standardized").nearest(known.vectors, k=1).indices) == len(known.keys))


DOORS = {
    "image": Door(make_images, enter_image),
    "stored": Door(make_stored, enter_stored),
    "folder": Door(make_folder, enter_source),
    "list": Door(make_list, enter_list),
    "zip": Door(make_zips, enter_source),
    "tar": Door(make_tars, enter_source),
    "shards": Door(make_shards, enter_source),
    "parquet": Door(make_parquet, enter_source),
    "npy": Door(make_npy, enter_array),
    "npz": Door(make_npz, enter_array),
    "hub": Door(make_hub, enter_source),
    "latents": Door(make_latents, enter_latents),
    "model": Door(make_models, enter_model),
    "weights": Door(make_weights, enter_weights),
    "transformers": Door(make_transformers, enter_transformers),
    "vae": Door(make_vae, enter_vae),
    "statistics": Door(make_statistics, enter_statistics),
    "masks": Door(make_masks, enter_masks),
    "index": Door(make_index, enter_index),
}


def make_seeds(folder: Path, doors: dict[str, Door]) -> None:
    for name, door in doors.items():
        (folder / name).mkdir()
        door.make(folder / name)


# ---- malicious inputs


class Trap:
    """What a pickle can do: call any function."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("sprung",)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def written(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        (home / name).write_bytes(data)
        return home / name

    return make


def zip_bomb(home: Path) -> Path:
    with zipfile.ZipFile(home / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", bytes(700 << 20))
    return home / "bomb.zip"


def npz_bomb(home: Path) -> Path:
    np.savez_compressed(home / "bomb.npz", images=np.zeros((700, 1024, 1024), np.uint8), labels=np.zeros(700, np.int64))
    return home / "bomb.npz"


def npz_claim(home: Path) -> Path:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 20, 1 << 10, 1 << 10)}
    )
    with zipfile.ZipFile(home / "claim.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + header.getvalue()[8:] + bytes(100))
    return home / "claim.npz"


def npy_claim(home: Path) -> Path:
    with open(home / "claim.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 8, 8)})
    return home / "claim.npy"


def list_of(line: str) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        (home / "set").mkdir()
        os.mkfifo(home / "set" / "pipe.png")
        (home / "set" / "images.tsv").write_text(line)
        return home / "set"

    return make


def parquet_of(path: str) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        os.mkfifo(home / "pipe.png")
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        column = pa.array([{"bytes": None, "path": path}] * 3, kind)
        pq.write_table(pa.table({"image": column, "label": [0, 1, 2]}), home / "rows.parquet")
        return home / "rows.parquet"

    return make


def labeled_parquet(labels: list) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"image": [encoded("PNG")] * len(labels), "label": labels}), home / "rows.parquet")
        return home / "rows.parquet"

    return make


def shard_with(label: bytes) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        with tarfile.open(home / "shard.tar", "w") as archive:
            add(archive, "0.png", encoded("PNG"))
            add(archive, "0.cls", label)
        return home / "shard.tar"

    return make


def claiming_tar(home: Path) -> Path:
    info = tarfile.TarInfo("a/0.png")
    info.size = 1 << 40
    (home / "claim.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    return home / "claim.tar"


def trapped_weights(home: Path) -> Path:
    torch.save({"model": plain_vit_tensors(), "args": Trap()}, home / "trap.pth")
    return home / "trap.pth"


def trapped_pickle(home: Path) -> Path:
    (home / "trap.pth").write_bytes(pickle.dumps({"model": Trap()}))
    return home / "trap.pth"


def endless_tensor(home: Path) -> Path:
    tensors = plain_vit_tensors()
    tensors["cls_token"] = torch.zeros(1, 1, 1).expand(1, 1, 1 << 30)
    torch.save(tensors, home / "view.pth")
    return home / "view.pth"


def packed_weights(home: Path) -> Path:
    torch.save({"cls_token": torch.zeros(1, 1, 150_000_000)}, home / "whole.pth")
    with (
        zipfile.ZipFile(home / "whole.pth") as whole,
        zipfile.ZipFile(home / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for info in whole.infolist():
            out.writestr(info.filename, whole.read(info))
    (home / "whole.pth").unlink()
    return home / "bomb.pth"


def claiming_safetensors(header: dict[str, Any] | None, *, length: int | None = None) -> Callable[[Path], Path]:
    """Return a maker of a file whose header claims tensors, or a header, far beyond the length of the file."""

    def make(home: Path) -> Path:
        text = json.dumps(header or {}).encode()
        data = (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(64)
        (home / "claim.safetensors").write_bytes(data)
        return home / "claim.safetensors"

    return make


def model_with(weights: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        make_models(home)
        shutil.move(weights(home), home / "vit" / "model.safetensors")
        return home / "vit"

    return make


def tensor_claim(shape: list[int], end: int) -> dict[str, Any]:
    return {"cls_token": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}


CLAIMS = {
    "header": claiming_safetensors(None, length=1 << 62),
    "overflow": claiming_safetensors(None, length=(1 << 64) - 1),
    "shape": claiming_safetensors(tensor_claim([1 << 31, 1 << 31], 64)),
    "offset": claiming_safetensors(tensor_claim([1 << 38], 1 << 40)),
    "negative": claiming_safetensors(tensor_claim([-1, 16], -64)),
}


def model_saying(**changes: Any) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        make_models(home)
        card = json.loads((home / "vit" / "config.json").read_text())
        for name, value in changes.items():
            card["preprocess" if name in card["preprocess"] else "config"][name] = value
        (home / "vit" / "config.json").write_text(json.dumps(card))
        return home / "vit"

    return make


def transformers_with_code(home: Path) -> Path:
    make_transformers(home)
    card = json.loads((home / "vit" / "config.json").read_text())
    card |= {"model_type": "other", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (home / "vit" / "config.json").write_text(json.dumps(card))
    (home / "vit" / "code.py").write_text("import os\nos.mkdir('sprung')\n")
    return home / "vit"


def transformers_of_other_weights(home: Path) -> Path:
    from safetensors.torch import save_file

    make_transformers(home)
    save_file({"strange": torch.zeros(3)}, home / "vit" / "model.safetensors", metadata={"format": "pt"})
    return home / "vit"


SPECIALS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "postscript": ("image", written("a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) print quit\n")),
    "wide-png": ("image", written("a.png", png_claiming(13_000, 13_000))),
    "line-png": ("image", written("a.png", png_claiming(60_000_000, 1))),
    "zip-bomb": ("zip", zip_bomb),
    "npz-bomb": ("npz", npz_bomb),
    "npz-claim": ("npz", npz_claim),
    "npy-claim": ("npy", npy_claim),
    "list-zero": ("list", list_of("/dev/zero\ta\n")),
    "list-pipe": ("list", list_of("pipe.png\ta\n")),
    "list-null": ("list", list_of("a\0b.png\ta\n")),
    "list-folder": ("list", list_of("..\ta\n")),
    "list-long": ("list", list_of("x" * 300_000 + "\ta\n")),
    "parquet-zero": ("parquet", parquet_of("/dev/zero")),
    "parquet-pipe": ("parquet", parquet_of("pipe.png")),
    "parquet-negative": ("parquet", labeled_parquet([0, -5, 1])),
    "parquet-huge": ("parquet", labeled_parquet([0, 2**62, 1])),
    "parquet-empty": ("parquet", labeled_parquet([0, None, 1])),
    "shard-negative": ("tar", shard_with(b"-3")),
    "shard-digits": ("tar", shard_with("²".encode())),
    "shard-huge": ("tar", shard_with(b"9" * 400)),
    "shard-bytes": ("tar", shard_with(b"\xff\xfe")),
    "tar-claim": ("tar", claiming_tar),
    "weights-trap": ("weights", trapped_weights),
    "weights-pickle": ("weights", trapped_pickle),
    "weights-view": ("weights", endless_tensor),
    "weights-bomb": ("weights", packed_weights),
    **{f"weights-{name}": ("weights", make) for name, make in CLAIMS.items()},
    **{f"model-{name}": ("model", model_with(make)) for name, make in CLAIMS.items()},
    "model-depth": ("model", model_saying(depth=10**6)),
    "model-size": ("model", model_saying(image_size=10**9)),
    "model-nan": ("model", model_saying(mean=[float("nan")] * 3)),
    "model-width": ("model", model_saying(dim=10**6, num_heads=1)),
    "transformers-code": ("transformers", transformers_with_code),
    "transformers-misfit": ("transformers", transformers_of_other_weights),
}
