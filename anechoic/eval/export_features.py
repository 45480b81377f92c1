"""Feature vectors as files for other programs: a row per image, with its name, as .npz, .npy, .parquet or .csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data import Source
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.feature_cache import features_of
from anechoic.eval.features import Pooling
from anechoic.eval.tensors import warn_if_constant
from anechoic.outcome import as_utf8
from anechoic.storage.files import write_together

FORMATS = (".npz", ".npy", ".parquet", ".csv")
CHUNK = 4096
FORMULA = tuple("=+-@\t\r\n")


def embed_source(
    encoder: Encoder,
    source: Source,
    output: Path,
    *,
    layer: int = -1,
    pooling: Pooling | None = None,
    device: str = "auto",
    workers: int = 0,
    about: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Embed every image of an open source in one pass, decoding, computing and writing at the same time."""
    chosen = pooling or encoder.poolings[0]
    features = features_of(
        encoder, source, layers=(layer,), poolings=(chosen,), device=device, workers=workers, keep_pixels=False
    )
    (((number, _), vectors),) = features.sets.items()
    warn_if_constant(vectors, f"of layer {number} ({chosen})")
    names = [source.name(int(i)) for i in features.ids]
    about = {**(about or {}), "layer": str(number), "pooling": chosen, "weights": encoder.fingerprint}
    write_vectors(output, vectors, names=names, about=about)
    skipped = [{"name": name, "reason": reason} for name, reason in features.skipped]
    return {"vectors": len(names), "dim": vectors.shape[1], "skipped": skipped, **about}


def write_vectors(path: Path, vectors: np.ndarray, *, names: Sequence[str], about: dict[str, str]) -> None:
    """Names and float32 vectors (n, D) as .npz, .npy, .parquet or .csv; `about`: encoder, layer and pooling.

    Rows are streamed, so `vectors` may be a file itself.
    """
    check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = {".npz": write_npz, ".npy": write_npy, ".parquet": write_parquet, ".csv": write_csv}[path.suffix.lower()]
    with write_together([path, names_file(path)] if writer is write_npy else [path]) as (temporary, *beside):
        writer(temporary, vectors, names, about)
        for file in beside:
            file.write_text(json.dumps({**about, "names": list(names)}, indent=2) + "\n")


def check_format(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"Vectors are written as {', '.join(FORMATS)}; {path.name!r} has none of these endings.")


def names_file(path: Path) -> Path:
    """Return where the names of the rows of an .npy file are: a .json beside it, since text lines cannot hold all."""
    return path.with_suffix(".json")


def write_npy(path: Path, vectors: np.ndarray, names: Sequence[str], about: dict[str, str]) -> None:
    with open(path, "wb") as file:
        np.save(file, vectors)


def write_npz(path: Path, vectors: np.ndarray, names: Sequence[str], about: dict[str, str]) -> None:
    texts: dict[str, Any] = {key: np.array(value) for key, value in about.items()}
    with open(path, "wb") as file:
        np.savez(file, names=np.array(names, dtype=str), features=vectors, **texts)


def parquet_modules() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError('Parquet files need an extra package: pip install "anechoic[parquet]".') from error
    return pa, pq


def write_parquet(path: Path, vectors: np.ndarray, names: Sequence[str], about: dict[str, str]) -> None:
    pa, pq = parquet_modules()
    dim = vectors.shape[1]
    schema = pa.schema(
        [("name", pa.string()), ("features", pa.list_(pa.float32(), dim))],
        metadata={key: as_utf8(value) for key, value in about.items()},
    )
    with pq.ParquetWriter(path, schema) as writer:
        for rows in chunks(len(vectors)):
            values = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(vectors[rows]).ravel()), dim)
            writer.write_table(pa.table([pa.array(map(as_utf8, names[rows]), pa.string()), values], schema=schema))


def write_csv(path: Path, vectors: np.ndarray, names: Sequence[str], about: dict[str, str]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *(f"layer{about['layer']}_{about['pooling']}_{j}" for j in range(vectors.shape[1]))])
        for rows in chunks(len(vectors)):
            # repr of a float32 is the shortest text that reads back as the same number.
            block = np.asarray(vectors[rows], dtype=np.float32)
            writer.writerows([csv_cell(name), *map(str, row)] for name, row in zip(names[rows], block, strict=True))


def csv_cell(text: str) -> str:
    """Return the text, after an apostrophe if a spreadsheet would compute it as a formula."""
    return f"'{as_utf8(text)}" if text.startswith(FORMULA) else as_utf8(text)


def chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, count, CHUNK))
