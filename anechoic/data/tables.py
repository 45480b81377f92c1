"""Images in the rows of a table: parquet in the Hugging Face layout, and data sets of the `datasets` library (`hf:`).

Parquet is read by row groups, which is fast for one pass; later passes use the pixel cache. `datasets` maps Arrow files
into memory, which is fast for random access to sets that exceed the cache.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data.content_checksums import FileHashes
from anechoic.data.decoding import Undecodable
from anechoic.data.source import EncodedSource, check_labels, digest, number_classes
from anechoic.errors import UserError
from anechoic.storage.safe_io import is_inside, read_regular, reason, refuse_odd_files

# What `datasets` raises for names that do not exist and for damaged folders.
LOAD_ERRORS = (OSError, LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
LABEL_COLUMNS = ("label", "labels", "fine_label", "class")


class Parquet(EncodedSource):
    """Rows of parquet files with an image column of encoded bytes or {bytes, path}."""

    def __init__(self, paths: Sequence[Path], *, labels: bool, channels: int):
        super().__init__(channels=channels)
        self.paths, self.hashes = tuple(paths), FileHashes("", [str(path) for path in paths])
        self.named = NamedImages(self.paths[0].parent)
        versions = [path.stat() for path in paths]
        self.earlier_fingerprint = digest(
            "parquet", *(part for version in versions for part in (version.st_size, version.st_mtime_ns))
        )
        files = [_parquet_file(path) for path in self.paths]
        schema = files[0].schema_arrow
        self.column = _image_column(schema, self.paths[0])
        counts = [
            (f, g, rows) for f, file in enumerate(files) for g, rows in enumerate(_group_rows(file, self.paths[f]))
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

    def compute_fingerprint(self) -> str:
        """Of the tables, and of the image files that rows without bytes name."""
        named = []
        for group, (file, number) in enumerate(self._groups):
            with parquet_damage(self.paths[file]):
                columns = _parquet_file(self.paths[file]).metadata.row_group(number)
                if all(_holds_all(columns.column(k)) for k in range(columns.num_columns)):
                    continue  # without reading it
            try:
                named += [cell["path"] for cell in self._read_group(group) if _names_a_file(cell)]
            except (Undecodable, OSError):
                continue  # its rows are skipped as well
        return digest("parquet", self.hashes.all, *self.named.identify(named))

    def _load_group(self, group: int) -> list[Any]:
        file, number = self._groups[group]
        os.stat(self.paths[file])  # a missing file is not a damaged one
        self.hashes.check_file(file)
        try:
            with parquet_damage(self.paths[file]):
                rows = _parquet_file(self.paths[file]).read_row_group(number, columns=[self.column])
                return rows.column(0).to_pylist()
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno:  # pyarrow's errors about damage have no number
                raise OSError(cause.errno, reason(cause)) from error
            # The footer is intact, so other row groups may be.
            raise Undecodable(str(error)) from error

    def _cell(self, index: int) -> Any:
        group = int(np.searchsorted(self._ends, index, side="right"))
        rows, first = self._read_group(group), int(self._ends[group - 1]) if group else 0
        if index - first >= len(rows):
            raise Undecodable("the parquet file has fewer rows than its index")
        return rows[index - first]

    def name(self, index: int) -> str:
        try:
            cell = self._cell(index)
        except (Undecodable, OSError):
            return str(index)
        return str((isinstance(cell, dict) and cell.get("path")) or index)

    def data(self, index: int) -> bytes:
        return cell_bytes(self._cell(index), self.named)


def _holds_all(column: Any) -> bool:
    """Return whether a column chunk is known to have no empty cells, or holds no bytes of images."""
    if column.physical_type != "BYTE_ARRAY" or not column.path_in_schema.endswith(".bytes"):
        return True
    return column.statistics is not None and column.statistics.has_null_count and column.statistics.null_count == 0


def _names_a_file(cell: Any) -> bool:
    return isinstance(cell, dict) and not isinstance(cell.get("bytes"), bytes) and isinstance(cell.get("path"), str)


class NamedImages:
    """Image files that cells without bytes name, below a folder; known after `identify`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers: dict[str, int] = {}
        self.hashes = FileHashes(folder, [])

    def identify(self, names: Iterable[str]) -> tuple[str | np.ndarray, ...]:
        """Hash the files; return what a fingerprint is made of."""
        named = list(dict.fromkeys(names))
        self.numbers = {name: k for k, name in enumerate(name for name in named if is_inside(self.folder, name))}
        self.hashes = FileHashes(self.folder, list(self.numbers))
        return (*named, self.hashes.all)

    def read(self, name: str) -> bytes:
        if not is_inside(self.folder, name):
            raise OSError(errno.EACCES, "outside the folder of its table, where --allow-outside would read it")
        try:
            data = read_regular(self.folder / name)
        except ValueError as error:
            raise Undecodable(f"its path is not one of a file ({reason(error)})") from error
        if name in self.numbers:
            self.hashes.check_data(self.numbers[name], data)
        return data


def cell_bytes(cell: Any, named: NamedImages) -> bytes:
    """Return the encoded image of a table cell: bytes, or {bytes, path} where either may be missing."""
    if _names_a_file(cell):
        return named.read(cell["path"])
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(data, bytes):
        raise Undecodable("the cell is empty")
    return data


def _parquet_file(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError('Reading parquet needs pyarrow: pip install "anechoic[parquet]".') from error
    if not path.is_file():
        raise UserError(f"{str(path)!r} is not a file; give a parquet file.")
    with parquet_damage(path):
        return pyarrow.parquet.ParquetFile(path)


@contextmanager
def parquet_damage(path: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into a UserError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError, IndexError) as error:
        raise UserError(
            f"{str(path)!r} is not a complete parquet file ({reason(error)}); make or download it again."
        ) from error


def _group_rows(file: Any, path: Path) -> list[int]:
    """Return the rows of each group; a file with more rows than bytes is damaged."""
    with parquet_damage(path):
        rows = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
    if any(count < 0 for count in rows) or sum(rows) > path.stat().st_size:
        raise UserError(f"{str(path)!r} claims {sum(rows):,} rows, more than it has bytes: it is damaged.")
    return rows


def _image_column(schema: Any, path: Path) -> str:
    import pyarrow.types as kinds

    def holds_bytes(kind: Any) -> bool:
        return kinds.is_binary(kind) or kinds.is_large_binary(kind)

    for field in sorted(schema, key=lambda field: field.name not in ("image", "img")):
        nested = kinds.is_struct(field.type) and any(c.name == "bytes" and holds_bytes(c.type) for c in field.type)
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
    with parquet_damage(path):
        values = [value for file in files for value in file.read(columns=[column]).column(0).to_pylist()]
    return number_values(values, _described_classes(schema.metadata or {}, column), where=str(path))


def _described_classes(metadata: Mapping[bytes, bytes], column: str) -> list[str] | None:
    """Return the class names of a label column in Hugging Face's metadata; None if there are none."""
    try:
        described = json.loads(metadata.get(b"huggingface", b"{}"))
        names = described["info"]["features"][column]["names"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def number_values(
    values: list[Any], names: Sequence[str] | None, *, where: str
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return the labels of a column: integers unchanged, with the schema's names if any; text in sorted order."""
    if all(isinstance(value, str) for value in values):
        return number_classes(values)
    if not all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        raise UserError(
            f"The label column of {where} holds empty or other values than integers and text; give every row one label."
        )
    labels = check_labels(np.array(values, dtype=np.int64), where=where)
    fits = names and len(labels) and labels.max() < len(names)
    return labels, tuple(names) if names and fits else None


class HubSet(EncodedSource):
    """A split of a `datasets` data set; rows stay in its memory-mapped Arrow files."""

    def __init__(self, rows: Any, folder: Path, *, column: str, channels: int):
        super().__init__(channels=channels)
        self.rows, self.column, self.named = rows, column, NamedImages(folder)
        self.hashes = FileHashes("", sorted(file["filename"] for file in rows.cache_files))

    def compute_fingerprint(self) -> str:
        """Of the Arrow files, and of the image files that rows without bytes name."""
        cells = self.rows.data.table.column(self.column)
        named = [
            cell["path"]
            for chunk in cells.chunks
            if chunk.type.get_field_index("bytes") >= 0 and chunk.field("bytes").null_count
            for cell in chunk.to_pylist()
            if _names_a_file(cell)
        ]
        return digest("hub", len(self), self.hashes.all, *self.named.identify(named))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        try:
            return str((self._cell(index) or {}).get("path") or index)
        except (Undecodable, OSError):
            return str(index)

    def data(self, index: int) -> bytes:
        return cell_bytes(self._cell(index), self.named)

    def _cell(self, index: int) -> Any:
        import pyarrow

        try:
            return self.rows[int(index)][self.column]
        except (pyarrow.ArrowException, ValueError, OverflowError, IndexError, MemoryError) as error:
            raise Undecodable(f"the data set is damaged here ({reason(error)})") from error


def open_hub(name: str, *, labels: bool, channels: int) -> HubSet:
    """Open `NAME` or `NAME:split` (default train): a hub name, or a folder of parquet or by `save_to_disk`."""
    try:
        import datasets
        import pyarrow
    except ImportError as error:
        raise UserError('Reading Hugging Face data sets needs datasets: pip install "anechoic[hub]".') from error
    name, _, split = name.partition(":")
    refuse_script(name)
    rows, split = _load_rows(name, split)
    rows = rows.with_format(None)  # a saved data set may show a part of its columns, or show them as tensors
    column = next((key for key, feature in rows.features.items() if isinstance(feature, datasets.Image)), None)
    if column is None:
        raise UserError(
            f"The data set {name!r} has the columns {', '.join(rows.features)}, none of images; choose another."
        )
    try:
        # Offsets beyond the end of the file would be read without a check.
        rows.data.table.select([column]).validate(full=True)
    except (pyarrow.ArrowException, MemoryError) as error:
        raise UserError(f"The data set {name!r} is damaged ({reason(error)}); make or download it again.") from error
    files = sorted((Path(file["filename"]).name, Path(file["filename"]).stat().st_size) for file in rows.cache_files)
    found = HubSet(
        rows.select_columns([column]).cast_column(column, datasets.Image(decode=False)),
        # What was downloaded, and names its own files, is in the cache of `datasets`.
        Path(name if Path(name).is_dir() else datasets.config.HF_CACHE_HOME),
        column=column,
        channels=channels,
    )
    found.earlier_fingerprint = digest("hub", name, split, len(rows), rows._fingerprint, str(files))
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


def refuse_script(name: str) -> None:
    """Raise UserError for a folder that comes with a loading script: code is never run."""
    folder = Path(name)
    refuse_odd_files(folder)
    script = next(folder.glob("*.py"), None) if folder.is_dir() else None
    if script is not None:
        raise UserError(f"{name!r} comes with code ({script.name}), which is never run here; give the data alone.")


def _load_rows(name: str, split: str) -> tuple[Any, str]:
    import datasets
    import pyarrow

    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name)
    except LOAD_ERRORS as error:
        raise UserError(
            f"The data set {name!r} cannot be loaded ({reason(error)}); check its name, or give a local folder."
        ) from error
    except (pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"The data set {name!r} is damaged ({reason(error)}); make or download it again.") from error
    if isinstance(loaded, datasets.Dataset):
        if split:
            raise UserError(f"The data set {name!r} has no splits; omit {':' + split!r}.")
        return loaded, ""
    split = split or ("train" if "train" in loaded else next(iter(loaded)))
    if split not in loaded:
        raise UserError(f"The data set {name!r} has no split {split!r}; it has {', '.join(loaded)}.")
    return loaded[split], split
