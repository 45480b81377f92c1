"""Doors for stored pixels: damaged zarr and NIfTI; folders with bad files among good ones, whose results are checked.

Every bad file must be skipped with its name and a remedy, and every good one read with its values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from doors import Door, enter_stored, make_dicom, read_everything

GOOD = 20
VALUES = np.random.default_rng(0).integers(0, 4096, (3, 20, 17), dtype=np.uint16)


def make_zarrs(folder: Path) -> None:
    import zarr

    zarr.create_array(str(folder / "two.zarr"), data=VALUES, chunks=(1, 16, 16), zarr_format=2)
    zarr.create_array(str(folder / "three.zarr"), data=VALUES, chunks=(3, 16, 16), zarr_format=3)
    group = zarr.create_group(str(folder / "ome.zarr"), zarr_format=2)
    group.create_array("0", data=VALUES, chunks=(1, 20, 17), compressors=None)
    image = {"axes": [{"name": axis} for axis in "cyx"], "datasets": [{"path": "0"}]}
    group.attrs.update({"multiscales": [image], "omero": {"channels": [{"label": name} for name in "abc"]}})


def make_niftis(folder: Path) -> None:
    import nibabel

    for name, values in {
        "plain.nii": VALUES.T,
        "packed.nii.gz": VALUES.astype(np.float32),
        "four.nii": np.stack([VALUES] * 4, -1).astype(np.int16),
    }.items():
        nibabel.save(nibabel.Nifti1Image(values, np.diag([-1, 2, 3, 1])), folder / name)
    nibabel.save(nibabel.Nifti2Image(VALUES.astype(np.float64), np.eye(4)), folder / "second.nii")


# ---- bad files among good ones


def write(path: Path, values: np.ndarray) -> None:
    """Write (C, H, W), or the first channel, in the format of the suffix."""
    import nibabel
    import tifffile
    import zarr

    if path.suffix == ".tif":
        tifffile.imwrite(path, values, photometric="minisblack", metadata=None)
    elif path.suffix == ".zarr":
        zarr.create_array(str(path), data=values, chunks=(1, 16, 16))
    elif path.suffix == ".nii":
        nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0)[:, :, None], np.eye(4)), path)
    else:
        make_dicom(path, values[0])


def make_mixed(folder: Path) -> None:
    for suffix in ("tif", "zarr", "nii", "dcm"):
        (folder / suffix).mkdir()
        for number in range(GOOD):
            write(folder / suffix / f"{number:02d}.{suffix}", VALUES)


def truncated(path: Path) -> None:
    write(path, VALUES)
    file = path if path.is_file() else next(item for item in sorted(path.rglob("*")) if item.parent.parent.name == "0")
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3 if path.is_file() else 20])


def other_channels(path: Path) -> None:
    write(path, VALUES[:2])


def other_type(path: Path) -> None:
    write(path, VALUES.astype(np.float32))


def not_finite(path: Path) -> None:
    values = VALUES.astype(np.float32)
    values[:, 3, 4], values[:, 5, 6] = np.nan, np.inf
    write(path, values)


def zero_channel(path: Path) -> None:
    write(path, VALUES * np.array([1, 0, 1], np.uint16)[:, None, None])


def huge(path: Path) -> None:
    """A page that declares 60,000 x 60,000 pixels; of NIfTI 30,000 x 30,000, the most it can."""
    import tifffile
    import zarr

    if path.suffix == ".zarr":
        zarr.create_array(str(path), shape=(3, 60_000, 60_000), chunks=(1, 256, 256), dtype="uint16")
        return
    write(path, VALUES)
    if path.suffix == ".tif":
        with tifffile.TiffFile(path, mode="r+b") as opened:
            for page in opened.pages:
                page.tags["ImageLength"].overwrite(60_000)
                page.tags["ImageWidth"].overwrite(60_000)
    else:
        data = bytearray(path.read_bytes())
        data[42:46] = np.array([30_000, 30_000], "<i2").tobytes()
        path.write_bytes(data)


def without_pixels(path: Path) -> None:
    import pydicom

    write(path, VALUES)
    data = pydicom.dcmread(path)
    del data.PixelData
    data.save_as(path)


def unsupported_syntax(path: Path) -> None:
    import pydicom

    write(path, VALUES)
    data = pydicom.dcmread(path)
    data.PixelData = pydicom.encaps.encapsulate([b"\0" * 64])
    data["PixelData"].VR = "OB"
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
    data.save_as(path)


COMMON = [truncated, other_channels, not_finite, zero_channel, huge]
KINDS: dict[str, list[Callable[[Path], None]]] = {
    "tif": [*COMMON, other_type],
    "zarr": [*COMMON, other_type],
    "nii": COMMON,  # values of any type are float32
    "dcm": [truncated, without_pixels, unsupported_syntax],
}


def damage_mixed(root: Path, rng: random.Random) -> None:
    """Add one or two bad files."""
    kinds = KINDS[root.name]
    for make in rng.sample(kinds, rng.choice([1, 2])):
        make(root / f"bad-{make.__name__}.{root.name}")


def enter_mixed(root: Path) -> str:
    from anechoic.data.measure import measure

    bad = {path.name for path in root.glob("bad-*") if "zero_channel" not in path.name}
    measured = measure(root, labels=False, channels=None)
    source = measured.source
    read_everything(source)
    reasons = dict(source.skipped)
    assert {name.split("#")[0] for name in reasons} == bad, f"{reasons} for {bad}"
    assert all("; " in reason for reason in reasons.values()), f"no remedy: {reasons}"
    good = [k for k in range(len(source)) if source.name(k).split("#")[0] not in bad]
    assert len(good) >= GOOD
    values: list[Any] = [source.read(k).double().numpy() for k in good if "bad" not in source.name(k)]
    assert all(np.array_equal(value, values[0]) for value in values), "good files are read differently"
    return f"{len(good)} {len(bad)} {measured.text}"


STORED_DOORS = {
    "zarr": Door(make_zarrs, enter_stored),
    "nifti": Door(make_niftis, enter_stored),
    "mixed": Door(make_mixed, enter_mixed, damage_mixed),
}
