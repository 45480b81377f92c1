"""What `pretrain` finds out about images before it starts: type, channels, statistics, and which tiles are empty.

Everything is measured on a sample, chosen evenly, and rounded, so that equal data has an equal config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anechoic.choices import Stretch
from anechoic.config import EIGHT_BIT, DataConfig, PixelConfig
from anechoic.data import open_source, with_pixels
from anechoic.data.arrays import Array
from anechoic.data.files import Files
from anechoic.data.pixels import Undecodable
from anechoic.data.preprocess import curve
from anechoic.data.source import BadImage, EncodedSource, Source, log, refuse_too_many
from anechoic.data.stored import (
    READERS,
    STORED_SUFFIXES,
    TYPES,
    StoredImage,
    format_of,
    has_reader,
    numbered,
    open_stored,
    reader_remedy,
    suffix_of,
)
from anechoic.data.stored_files import deviation
from anechoic.errors import UserError

PROBED_FILES, SAMPLED_IMAGES, PIXELS_PER_IMAGE = 9, 256, 4096
# A tile is empty if it deviates less than this share of what tiles with much content do.
EMPTY_SHARE, CONTENT_PERCENTILE = 0.1, 90
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Probed:
    """What the headers of a few images say. picture: 8-bit gray or RGB holds all of it; wide: their own type, if they
    are read as float32, which may round them."""

    type: str
    names: tuple[str, ...]
    picture: bool
    wide: str = ""


@dataclass(frozen=True)
class Measured:
    """How the pixels of a data set are read and normalized; mean and std are None for RGB pictures, ImageNet's."""

    source: Source
    pixels: PixelConfig
    channels: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    text: str = ""


def probe(source: Source) -> Probed:
    """Look at the headers of a few images, evenly chosen; the commonest type and channels count."""
    if isinstance(source, Array):
        dtype, channels = source.images.dtype, source.images.shape[3]
        kind = f"{dtype.kind}{dtype.itemsize}"
        eight_bit = kind in ("u1", "b1") or (dtype.kind in "iu" and kind not in ("u2", "i2"))
        return Probed(TYPES.get(kind, "float32"), numbered(channels), eight_bit, wide_type(dtype))
    if not isinstance(source, EncodedSource):
        return Probed("uint8", numbered(source.channels), True)
    found: list[Probed] = []
    for index in np.unique(np.linspace(0, len(source) - 1, PROBED_FILES).astype(int)).tolist():
        try:
            found.append(probe_one(source, index))
        except (Undecodable, OSError):
            continue  # the loader reports it
    return Counter(found).most_common(1)[0][0] if found else Probed("uint8", numbered(3), True)


def probe_one(source: EncodedSource, index: int) -> Probed:
    name = source.name(index)
    suffix = format_of(source.root / name) if isinstance(source, Files) else suffix_of(name)
    if suffix in READERS:
        if not has_reader(suffix):
            log.warning("%s is read as an 8-bit picture: %s.", name, reader_remedy(suffix))
            return Probed("uint8", numbered(3), True)
        with open_stored(source.root / name if isinstance(source, Files) else source.data(index), name=name) as image:
            picture = suffix not in STORED_SUFFIXES and is_picture(image)
            return Probed(image.type, image.names, picture, wide_type(image.dtype))
    data = source.data(index)
    if data[:8] == PNG and data[24:25] == b"\x10":
        with open_stored(data, name=name) as image:
            return Probed(image.type, image.names, False)
    return Probed("uint8", numbered(3), True)


def wide_type(dtype: np.dtype) -> str:
    return dtype.name if dtype.itemsize >= 4 and dtype.name != "float32" else ""


def is_picture(image: StoredImage) -> bool:
    return image.type == "uint8" and len(image.names) in (1, 3, 4) and image.frames == 1


def parse_channels(words: int | str | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of channels and the selected ones: 3 -> (3, ()), "0,2" -> (2, ("0", "2")), "DAPI" by name."""
    if words is None or isinstance(words, int) or words.strip().isdecimal():
        return (None if words is None else int(words)), ()
    select = tuple(word.strip() for word in words.split(",") if word.strip())
    if not select or len(set(select)) != len(select):
        raise UserError(f"--channels {words!r} names no channel, or one twice; write numbers or names, such as 0,1,3.")
    return len(select), select


def choose_pixels(
    found: Probed, *, channels: int | str | None, tile: int, overlap: int, stretched: bool
) -> tuple[PixelConfig, int]:
    """Return how pixels are read, and the number of channels, from what was found and what is asked for."""
    number, select = parse_channels(channels)
    have = len(found.names)
    asked = bool(select or tile or overlap or stretched or (number or 0) > 4)
    if found.picture and not asked and not number == have == 4:
        return EIGHT_BIT, number or 3
    if number in (1, 3) and number != have and not asked and found.type in ("uint8", "uint16"):
        return EIGHT_BIT, number  # converted to 8-bit gray or RGB, as asked for
    if not select and number not in (None, have):
        raise UserError(
            f"The images have {have} channels, not {number}: choose some by number or name, such as --channels "
            f"{','.join(found.names[:2])}."
        )
    if not select and found.names != numbered(have):
        select = found.names
    pixels = PixelConfig(type=found.type, select=select, tile=tile, overlap=overlap)  # type: ignore[arg-type]
    return pixels, number or have


def open_to_probe(data: str | Path, *, labels: bool, channels: int | None) -> Source:
    """Open the data as 8-bit pictures; an array by its first channel, since it may have any number and values."""
    if Path(data).suffix.lower() in (".npy", ".npz") and Path(data).is_file():
        return open_source(data, channels=1, pixels=PixelConfig(type="float32", select=("0",)))
    return open_source(data, labels=labels, channels=channels if channels in (1, 2, 4) else 3)


def measure(
    data: str | Path,
    *,
    labels: bool,
    channels: int | str | None,
    tile: int = 0,
    overlap: int = 0,
    stretch: Stretch = "linear",
    clip_percentiles: tuple[float, float] | None = None,
) -> Measured:
    """Choose how pixels are read, open the data and measure what the config freezes."""
    if clip_percentiles and not 0 <= clip_percentiles[0] < clip_percentiles[1] <= 100:
        raise UserError(f"--clip-percentiles are two of 0 to 100, low < high, not {clip_percentiles}.")
    opened = open_to_probe(data, labels=labels, channels=parse_channels(channels)[0])
    stretched = clip_percentiles is not None or stretch != "linear"
    probed = probe(opened)
    pixels, number = choose_pixels(probed, channels=channels, tile=tile, overlap=overlap, stretched=stretched)
    if isinstance(opened, Array):
        opened = source = open_source(data, labels=labels, channels=number, pixels=pixels)
    else:
        source = with_pixels(opened, pixels, channels=number)
    if not pixels.stored and number == 3:
        return Measured(source, pixels, number)
    before = len(source)
    if pixels.tile:
        pixels = replace(pixels, empty=empty_threshold(source))
        source = with_pixels(opened, pixels, channels=number)
    values = sample_values(source)
    as_stored = f"{probed.wide} rounded to float32" if probed.wide else f"{pixels.type} as stored"
    notes = [as_stored if pixels.stored else pixels.type]
    if probed.wide:
        warn_coarse(values, pixels, probed.wide)
    notes.append(f"{number} channel{'s' * (number > 1)}" + (f" ({', '.join(pixels.select)})" if pixels.select else ""))
    if pixels.tile:
        notes.append(f"tiles of {pixels.tile}, {before - len(source):,} of {before:,} skipped as empty")
    if clip_percentiles:
        low, high = np.percentile(values, clip_percentiles, axis=1)
        if not (low < high).all():
            raise UserError(
                f"The percentiles {clip_percentiles[0]:g} and {clip_percentiles[1]:g} of channel "
                f"{int((low >= high).argmax())} are equal: choose wider ones with --clip-percentiles."
            )
        pixels = replace(pixels, clip_low=rounded(low), clip_high=rounded(high))
        notes.append(f"clipped to the percentiles {clip_percentiles[0]:g} and {clip_percentiles[1]:g}")
    if stretch != "linear":
        center, spread = curve_parameters(values, stretch)
        pixels = replace(pixels, stretch=stretch, center=rounded(center), spread=rounded(spread))
        notes.append(f"{stretch} stretch")
    if pixels.stored:
        values = curve(torch.from_numpy(values)[None, :, :, None].float(), pixels)[0, :, :, 0].double().numpy()
    else:
        values = values / 255
    mean, std = values.mean(axis=1), values.std(axis=1)
    warn_constant(mean, std, pixels)
    std = np.where(std > 0, std, 1.0)
    text = f"Pixels: {', '.join(notes)}; mean {words(mean)} and deviation {words(std)}, measured on a sample."
    return Measured(source, pixels, number, rounded(mean), rounded(std), text)


def reopened(
    data: str | Path, frozen: DataConfig, *, labels: bool, channels: int | str | None, **asked: Any
) -> Measured:
    """Open the data as the frozen config of a run reads it; UserError if other pixels are asked for."""
    number, select = parse_channels(channels)
    pixels = frozen.pixels
    wanted = {"tile": pixels.tile, "overlap": pixels.overlap, "stretch": pixels.stretch}
    other = [name for name, value in wanted.items() if asked[name] != value]
    other += ["clip_percentiles"] * (bool(asked["clip_percentiles"]) != bool(pixels.clip_low))
    other += ["channels"] * bool(select and select != pixels.select)
    if other:
        option = other[0].replace("_", "-")
        raise UserError(f"The run reads pixels with another --{option}: use the same to resume it, or another --out.")
    source = open_source(data, labels=labels, channels=number or frozen.channels, pixels=pixels)
    return Measured(source, pixels, number or frozen.channels, frozen.mean, frozen.std)


def sample_values(source: Source) -> np.ndarray:
    """Return values (channels, n) of random pixels of evenly chosen images; UserError if too many are unreadable."""
    indices = np.unique(np.linspace(0, len(source) - 1, SAMPLED_IMAGES).astype(int)).tolist()
    generator, found, bad = np.random.default_rng(0), [], []
    for first in range(0, len(indices), 16):
        for image in source.read_many(indices[first : first + 16]):
            if isinstance(image, BadImage):
                bad.append((image.name, image.reason))
                continue
            flat = image.reshape(len(image), -1).to(torch.float64)
            if flat.shape[1] > PIXELS_PER_IMAGE:
                flat = flat[:, torch.from_numpy(generator.integers(flat.shape[1], size=PIXELS_PER_IMAGE))]
            found.append(flat.numpy())
    refuse_too_many(bad, of=len(indices))
    return np.concatenate(found, axis=1)


def empty_threshold(source: Source) -> float:
    """Return the deviation below which a tile is empty."""
    indices = np.unique(np.linspace(0, len(source) - 1, SAMPLED_IMAGES).astype(int)).tolist()
    tiles: list[Tensor | BadImage] = []
    for first in range(0, len(indices), 16):
        tiles += source.read_many(indices[first : first + 16])
    found = [deviation(tile) for tile in tiles if isinstance(tile, Tensor)]
    if not found:
        bad = [tile for tile in tiles if isinstance(tile, BadImage)]
        refuse_too_many([(tile.name, tile.reason) for tile in bad], of=len(tiles))
    return float(f"{EMPTY_SHARE * np.percentile(found, CONTENT_PERCENTILE):.4g}")


def curve_parameters(values: np.ndarray, stretch: Stretch) -> tuple[np.ndarray, np.ndarray]:
    """Return center and spread per channel: log from the lowest value in units of the median above it; asinh from the
    median in units of the median absolute deviation. Where that is 0, in units of the standard deviation."""
    median = np.median(values, axis=1)
    center = values.min(axis=1) if stretch == "log" else median
    spread = median - center if stretch == "log" else np.median(np.abs(values - median[:, None]), axis=1)
    deviations = values.std(axis=1)
    spread = np.where(spread > 0, spread, deviations)
    return center, np.where(spread > 0, spread, 1.0)


def warn_constant(mean: np.ndarray, std: np.ndarray, pixels: PixelConfig) -> None:
    names = pixels.select or numbered(len(std))
    if not (std > 0).all() and pixels.stored:
        constant = [name for name, value in zip(names, std, strict=True) if value == 0]
        rest = [name for name in names if name not in constant]
        remedy = f"choose the others with --channels {','.join(rest)}" if rest else "give other images"
        log.warning("Channel %s is constant in all sampled images and has no content: %s.", ", ".join(constant), remedy)


def warn_coarse(values: np.ndarray, pixels: PixelConfig, wide: str) -> None:
    """Warn of channels (C, n) that vary little in comparison with the steps of float32 at their values."""
    steps = np.spacing(np.abs(values).max(axis=1).astype(np.float32))
    lossless = steps <= (0 if wide == "float64" else 1)
    coarse = ~lossless & (steps > values.std(axis=1) / 256)
    names = [name for name, bad in zip(pixels.select or numbered(len(values)), coarse, strict=True) if bad]
    if names:
        log.warning(
            "Channel %s: float32 has steps of %.3g at its %s values, much of their deviation: subtract an offset.",
            ", ".join(names),
            steps.max(),
            wide,
        )


def rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)


def words(values: Sequence[float] | np.ndarray) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
