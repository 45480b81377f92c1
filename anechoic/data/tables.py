"""Images in the rows of a table: parquet in the Hugging Face layout, and data sets of the `datasets` library (`hf:`).

Parquet is read by row groups, which suits one pass (then the pixel cache takes over). `datasets` maps Arrow files into
memory and suits random reading of sets too large for the cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data.decoding import Undecodable
from anechoic.data.source import EncodedSource, digest, number_classes
from anechoic.errors import UserError

LABEL_COLUMNS = ("label", "labels", "fine_label", "class")


class Parquet(EncodedSource):
    """Rows of parquet files with an image column of encoded bytes or {bytes, path}."""

    def __init__(self, paths: Sequence[Path], *, labels: bool, channels: int):
        super().__init__(channels=channels)
        self.paths = tuple(paths)
        self.fingerprint = digest(
            "parquet", *(part for path in paths for part in (path.stat().st_size, path.stat().st_mtime_ns))
        )
        files = [_parquet_file(path) for path in self.paths]
        schema = files[0].schema_arrow
        self.column = _image_column(schema, self.paths[0])
        counts = [
            (f, g, file.metadata.row_group(g).num_rows)
            for f, file in enumerate(files)
            for g in range(file.metadata.num_row_groups)
        ]
        self._groups = [(f, g) for f, g, _ in counts]
        self._ends = np.cumsum([rows for _, _, rows in counts])
        if not counts or not self._ends[-1]:
            raise UserError(f"{str(self.paths[0])!r} has no rows; give a parquet file that holds images.")
        if labels:
            self.labels, self.classes = _parquet_labels(files, schema, self.paths[0])
        self._read_group = lru_cache(maxsize=4)(self._load_group)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_read_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read_group = lru_cache(maxsize=4)(self._load_group)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _load_group(self, group: int) -> list[Any]:
        file, number = self._groups[group]
        return _parquet_file(self.paths[file]).read_row_group(number, columns=[self.column]).column(0).to_pylist()

    def _cell(self, index: int) -> Any:
        group = int(np.searchsorted(self._ends, index, side="right"))
        return self._read_group(group)[index - (int(self._ends[group - 1]) if group else 0)]

    def name(self, index: int) -> str:
        cell = self._cell(index)
        return (isinstance(cell, dict) and cell.get("path")) or str(index)

    def data(self, index: int) -> bytes:
        return cell_bytes(self._cell(index), self.paths[0].parent)


def cell_bytes(cell: Any, folder: Path) -> bytes:
    """The encoded image of a table cell: bytes, or {bytes, path} where either may be missing."""
    if isinstance(cell, dict):
        if cell.get("bytes") is not None:
            return cell["bytes"]
        if cell.get("path"):
            return (folder / cell["path"]).read_bytes()
    if isinstance(cell, bytes):
        return cell
    raise Undecodable("the cell is empty")


def _parquet_file(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError('Reading parquet needs pyarrow: pip install "anechoic[parquet]".') from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{str(path)!r} is not a complete parquet file ({str(error).splitlines()[0]}); make or download it again."
        ) from error


def _image_column(schema: Any, path: Path) -> str:
    import pyarrow.types as kinds

    def holds_bytes(kind: Any) -> bool:
        return kinds.is_binary(kind) or kinds.is_large_binary(kind)

    for field in sorted(schema, key=lambda field: field.name not in ("image", "img")):
        nested = kinds.is_struct(field.type) and any(holds_bytes(child.type) for child in field.type)
        if nested or holds_bytes(field.type):
            return field.name
    raise UserError(
        f"{str(path)!r} has the columns {', '.join(schema.names)}, none of image bytes; add a column 'image'."
    )


def _parquet_labels(files: Sequence[Any], schema: Any, path: Path) -> tuple[np.ndarray, tuple[str, ...] | None]:
    column = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    if column is None:
        raise UserError(
            f"{str(path)!r} has no column 'label' (only {', '.join(schema.names)}); add one, or do without labels."
        )
    values = [value for file in files for value in file.read(columns=[column]).column(0).to_pylist()]
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = described.get("info", {}).get("features", {}).get(column, {})
    return number_values(values, feature.get("names"), where=str(path))


def number_values(
    values: list[Any], names: Sequence[str] | None, *, where: str
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Labels of a column: integers as they are, with the schema's names if any; text numbered in sorted order."""
    if all(isinstance(value, str) for value in values):
        return number_classes(values)
    if not all(isinstance(value, int) for value in values):
        raise UserError(
            f"The label column of {where} holds empty or other values than integers and text; give every row one label."
        )
    return np.array(values, dtype=np.int64), tuple(names) if names else None


class HubSet(EncodedSource):
    """A split of a `datasets` data set; rows stay in its memory-mapped Arrow files."""

    def __init__(self, rows: Any, *, column: str, fingerprint: str, channels: int):
        super().__init__(channels=channels)
        self.rows, self.column, self.fingerprint = rows, column, fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.rows[int(index)][self.column].get("path") or str(index)

    def data(self, index: int) -> bytes:
        return cell_bytes(self.rows[int(index)][self.column], Path())


def open_hub(name: str, *, labels: bool, channels: int) -> HubSet:
    """`NAME` or `NAME:split` (train if not said): a hub name, or a folder of parquet or by `save_to_disk`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError('Reading Hugging Face data sets needs datasets: pip install "anechoic[hub]".') from error
    name, _, split = name.partition(":")
    rows, split = _load_rows(name, split)
    column = next((key for key, feature in rows.features.items() if isinstance(feature, datasets.Image)), None)
    if column is None:
        raise UserError(
            f"The data set {name!r} has the columns {', '.join(rows.features)}, none of images; choose another."
        )
    files = sorted((Path(file["filename"]).name, Path(file["filename"]).stat().st_size) for file in rows.cache_files)
    found = HubSet(
        rows.select_columns([column]).cast_column(column, datasets.Image(decode=False)),
        column=column,
        fingerprint=digest("hub", name, split, len(rows), rows._fingerprint, str(files)),
        channels=channels,
    )
    if labels:
        key = next((key for key in LABEL_COLUMNS if key in rows.features), None)
        if key is None:
            raise UserError(
                f"The data set {name!r} has no column 'label' (only {', '.join(rows.features)}); do without labels."
            )
        feature = rows.features[key]
        names = feature.names if isinstance(feature, datasets.ClassLabel) else None
        found.labels, found.classes = number_values(list(rows[key]), names, where=name)
    return found


def _load_rows(name: str, split: str) -> tuple[Any, str]:
    import datasets

    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name)
    except (OSError, ValueError, ConnectionError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"The data set {name!r} cannot be loaded ({cause}); check its name, or give a local folder."
        ) from error
    if isinstance(loaded, datasets.Dataset):
        if split:
            raise UserError(f"The data set {name!r} has no splits; leave out {':' + split!r}.")
        return loaded, ""
    split = split or ("train" if "train" in loaded else next(iter(loaded)))
    if split not in loaded:
        raise UserError(f"The data set {name!r} has no split {split!r}; it has {', '.join(loaded)}.")
    return loaded[split], split
