"""Images of any origin: `open_source` turns a name or path into a Source, `Loader` turns a Source into batches.

Labels are read only on request. This package is independent of models and training.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from anechoic.config import EIGHT_BIT, PixelConfig
from anechoic.data.archives import open_shard_pattern, open_tar, open_zip
from anechoic.data.arrays import Array, open_array
from anechoic.data.augment import Augment
from anechoic.data.decoding import Undecodable, decode
from anechoic.data.embedded import Scenes, open_digits, open_scenes
from anechoic.data.emoji import open_emoji
from anechoic.data.files import Files, open_folder, open_list, open_paths
from anechoic.data.loader import Batch, Loader
from anechoic.data.remote_files import is_url
from anechoic.data.shards import INDEX, open_indexed, open_remote
from anechoic.data.source import IMAGE_SUFFIXES, BadImage, EncodedSource, Source, Subset, common_labels
from anechoic.data.split import draw
from anechoic.data.stored import READERS, format_of, is_zarr, suffix_of
from anechoic.data.stored_files import StoredFiles
from anechoic.data.tables import Parquet, open_hub
from anechoic.errors import UserError, nearest_name
from anechoic.storage.safe_io import reason

__all__ = [
    "Array",
    "Augment",
    "BadImage",
    "Batch",
    "Loader",
    "Scenes",
    "Source",
    "Subset",
    "Undecodable",
    "common_labels",
    "decode",
    "is_embedded",
    "limited",
    "open_source",
    "with_pixels",
]

# Sources that are part of the package: no path or server is behind them.
EMBEDDED = ("digits", "scenes", "emoji")
# What opens NAME or NAME:WORD:WORD: a function of the words and, by keyword, of any of labels, channels, size and seed.
NAMED: dict[str, Callable[..., Source]] = {
    "digits": open_digits,
    "scenes": open_scenes,
    "emoji": open_emoji,
    "hf": lambda words, *, labels, channels: open_hub(":".join(words), labels=labels, channels=channels),
}
# In front of a source: this number of its images.
LIMIT = re.compile(r"limit:(\d+):(?=.)")
# What opens a file of a suffix.
FILE_READERS: dict[str, Callable[..., Source]] = {
    ".zip": open_zip,
    ".tar": open_tar,
    ".txt": open_list,
    ".lst": open_list,
    ".list": open_list,
    ".tsv": open_list,
}


def register_source(name: str, opener: Callable[..., Source]) -> None:
    """Add a kind of data to every command and function of this process.

    A name that begins with a dot is the suffix of a file: opener(path, *, labels, channels). Any other opens NAME and
    NAME:WORD:WORD: opener(words) with any of the keywords labels, channels, size and seed. It returns a `Source`, whose
    `read` returns pixels; labels only if labels is true.
    """
    table = FILE_READERS if name.startswith(".") else NAMED
    key = name.lower() if name.startswith(".") else name
    if key in {*table, ".npy", ".npz", ".parquet", *IMAGE_SUFFIXES, *READERS}:
        raise UserError(f"There is already a kind of data {key!r}: choose another name.")
    if not key.strip(".") or ":" in key or "/" in key:
        raise UserError(f"{name!r} cannot name a kind of data: give a word, or a suffix such as '.mine'.")
    table[key] = opener


def open_source(
    source: str | Path | Source,
    *,
    labels: bool = False,
    channels: int = 3,
    pixels: PixelConfig = EIGHT_BIT,
    size: int = 64,
    seed: int = 0,
) -> Source:
    """Open the images of a name or path; a Source is returned unchanged.

    `digits`, `scenes`, `emoji` (each with `:train` or `:test`, scenes also with `:NUMBER`, emoji with `:style=NAME` and
    `:label=object`); a folder, searched to any depth; a text list; .zip, .tar, shards-{000..127}.tar (also by URL); a
    folder of `anechoic tools shard`, or its URL; .parquet or a folder of them; .npz, .npy; `hf:NAME[:split]`; an image.
    channels: 3 RGB, 1 gray, 4 with alpha, any number for arrays and stored pixels. pixels: 8-bit pictures, or the
    values that files store. size and seed are for scenes only. limit:N:SOURCE is N images of a source, always
    the same, and where labels are read the same share of each label.
    """
    if isinstance(source, Source):
        return source
    prefix, rest = split_limit(source)
    if not rest:
        raise UserError("The name of the data is empty: give a folder, a file, or `.` for the current folder.")
    if prefix:
        whole = open_source(rest, labels=labels, channels=channels, pixels=pixels, size=size, seed=seed)
        found = first_of(whole, int(prefix.split(":")[1]))
        found.where = str(source)
        return found
    found = _open(source, labels=labels, channels=channels, pixels=pixels, size=size, seed=seed)
    found = with_pixels(found, pixels, channels=channels)
    found.where = str(source)
    return found


def is_embedded(source: str) -> bool:
    """Return whether a source is part of the package."""
    return split_limit(source)[1].split(":")[0] in EMBEDDED


def limited(source: str | Path, limit: int) -> str:
    """Return the name of `limit` images of a source, for `open_source` and wherever data is named."""
    if limit < 1:
        raise UserError(f"--limit is a number of images, at least 1, not {limit}.")
    return f"limit:{limit}:{split_limit(source)[1]}"


def split_limit(source: str | Path) -> tuple[str, str]:
    """limit:100:photos -> ("limit:100:", "photos"); ("", "photos") without a limit."""
    text = str(source)
    found = LIMIT.match(text)
    end = found.end() if found else 0
    return text[:end], text[end:]


def described(source: str | Path) -> str:
    """limit:1000:photos -> "1,000 images of photos", as people read it."""
    limit, rest = split_limit(source)
    return f"{int(limit.split(':')[1]):,} images of {rest}" if limit else rest


def first_of(source: Source, limit: int) -> Source:
    """Return `limit` images chosen by a fixed seed, with labels the same share of each; all if there are no more."""
    if limit >= len(source):
        return source
    return Subset(source, draw(len(source), limit, labels=source.labels, group=source.group_size))


def with_pixels(source: Source, pixels: PixelConfig, *, channels: int) -> Source:
    """Return a source of encoded images as one of stored pixels, if these are; files by frame or tile."""
    if not isinstance(source, EncodedSource):
        if pixels.stored and not source.pixels.stored:
            raise UserError(f"A model of {pixels.type} pixels takes files that store such; give a folder of them.")
        return source
    if not pixels.stored:
        if channels not in (1, 2, 3, 4):
            raise UserError(
                f"Pictures have 1 to 4 channels, not {channels}; other files are read by anechoic pretrain."
            )
        return source
    if isinstance(source, Files):
        return StoredFiles(source, pixels=pixels, channels=channels)
    if pixels.tile:
        raise UserError("Tiles are cut from files on disk; unpack the archive to a folder.")
    source.pixels = pixels
    return source


def _open(source: str | Path, *, labels: bool, channels: int, pixels: PixelConfig, size: int, seed: int) -> Source:
    text = str(source)
    name, *words = text.split(":")
    if name in NAMED:
        asked = inspect.signature(NAMED[name]).parameters
        given = {"labels": labels, "channels": channels, "size": size, "seed": seed}
        return NAMED[name](words, **{key: value for key, value in given.items() if key in asked})
    if is_url(text):
        return open_remote(text, labels=labels, channels=channels)
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _open_directory(path, labels=labels, channels=channels)
        if path.is_file():
            return _open_file(path, labels=labels, channels=channels, pixels=pixels)
    except PermissionError as error:
        raise UserError(f"{error.filename!r} may not be read; change its permissions.") from error
    except OSError as error:
        raise UserError(f"{text[:200]!r} cannot be read ({reason(error)}).") from error
    if "{" in text and ".." in text:
        return open_shard_pattern(str(path), labels=labels, channels=channels)
    raise UserError(f"There is no data at {text!r}; {_hint(text, path)}")


def _open_directory(path: Path, *, labels: bool, channels: int) -> Source:
    if is_zarr(path) and not labels:
        return open_paths(path.absolute().parent, [path.absolute().name], channels=channels, where=str(path))
    if (path / INDEX).is_file():
        return open_indexed(str(path), labels=labels, channels=channels)
    tables = sorted(path.glob("*.parquet"))
    if tables:
        return Parquet(tables, labels=labels, channels=channels)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return open_hub(str(path), labels=labels, channels=channels)
    return open_folder(path, labels=labels, channels=channels)


def _open_file(path: Path, *, labels: bool, channels: int, pixels: PixelConfig) -> Source:
    suffix = suffix_of(path)
    if suffix == ".parquet":
        return Parquet([path], labels=labels, channels=channels)
    if suffix in (".npy", ".npz"):
        return open_array(path, labels=labels, channels=channels, pixels=pixels)
    if suffix in FILE_READERS:
        return FILE_READERS[suffix](path, labels=labels, channels=channels)
    if (suffix in IMAGE_SUFFIXES or format_of(path) in READERS) and not labels:
        return open_paths(path.parent, [path.name], channels=channels, where=str(path))
    kinds = ", ".join([*FILE_READERS, ".npy", ".npz", ".parquet"])
    raise UserError(
        f"{str(path)!r} is not a kind of data set that is known here; give a folder of images or one of {kinds}."
    )


def _hint(text: str, path: Path) -> str:
    """Return a remedy with the nearest name that exists."""
    siblings = [str(item) for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest_name(text.split(":")[0], [*NAMED, *siblings])
    return near if near.startswith("did") else f"give an existing folder or file, or one of {', '.join(NAMED)}."
