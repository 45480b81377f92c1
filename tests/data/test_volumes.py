"""Zarr arrays, NIfTI volumes and DICOM without a suffix: the values of the file arrive, and bad ones are refused."""

from __future__ import annotations

import gzip
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import zarr
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform
from test_stored import FIVE, GENERATOR, NAMES, write_dicom

from anechoic.config import PixelConfig
from anechoic.data import BadImage, open_source
from anechoic.data.content_checksums import hash_path, stamp_at
from anechoic.data.files import scan
from anechoic.data.measure import measure
from anechoic.data.source import Source
from anechoic.data.stored import Box, decode_stored, has_reader, open_stored
from anechoic.errors import UserError

U16, F32 = PixelConfig(type="uint16"), PixelConfig(type="float32")


def reason_of(source: Source, index: int = 0) -> str:
    with pytest.raises(BadImage) as found:
        source.read(index)
    return found.value.reason


def write_zarr(path: Path, values: np.ndarray, **how: Any) -> Path:
    zarr.create_array(str(path), data=values, **{"chunks": (*values.shape[:-2], 32, 32), **how})
    return path


def write_ome(path: Path, values: np.ndarray, axes: str, *, version: str, names: list[str]) -> Path:
    """An image of two resolutions."""
    group = zarr.create_group(str(path), zarr_format=2 if version == "0.4" else 3)
    group.create_array("0", data=values, chunks=(*[1] * (values.ndim - 2), 32, 48))
    group.create_array("1", data=values[..., ::2, ::2])
    image = {"axes": [{"name": axis} for axis in axes], "datasets": [{"path": "0"}, {"path": "1"}], "version": version}
    about = {"multiscales": [image], "omero": {"channels": [{"label": name} for name in names]}}
    group.attrs.update({"ome": about} if version == "0.5" else about)
    return path


# ---- zarr


@pytest.mark.parametrize(
    "how",
    [
        {"zarr_format": 2},
        {"zarr_format": 3},
        {"zarr_format": 3, "chunks": (1, 16, 16), "shards": (5, 32, 48)},
        {"zarr_format": 3, "compressors": None},
    ],
    ids=["2", "3", "sharded", "plain"],
)
def test_every_zarr_layout_reads_the_same_channels_and_regions(how: dict[str, Any], tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "a.zarr", FIVE, **how)
    assert np.array_equal(open_source(path, channels=5, pixels=U16).read(0).numpy(), FIVE)
    tiles = open_source(tmp_path, channels=2, pixels=PixelConfig(type="uint16", select=("3", "0"), tile=40, overlap=8))
    assert len(tiles) == 6
    for index in range(len(tiles)):
        left, top, width, height = map(int, tiles.name(index).split("xywh=")[1].split(","))
        assert np.array_equal(tiles.read(index).numpy(), FIVE[[3, 0], top : top + height, left : left + width])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_ome_zarr_has_named_channels_and_frames(version: str, tmp_path: Path) -> None:
    stack = np.stack([FIVE, FIVE + 1])
    write_ome(tmp_path / "a.ome.zarr", stack.transpose(1, 0, 2, 3), "czyx", version=version, names=NAMES)
    source = open_source(tmp_path, channels=2, pixels=PixelConfig(type="uint16", select=("BF", "GFP")))
    assert [source.name(k) for k in range(len(source))] == ["a.ome.zarr#frame=0", "a.ome.zarr#frame=1"]
    assert np.array_equal(source.read(1).numpy(), stack[1, [4, 1]])
    assert measure(tmp_path, labels=False, channels=None).pixels.select == tuple(NAMES)


@pytest.mark.parametrize(
    ("shape", "frames", "channels"),
    [
        *[((40, 50), 1, 1), ((5, 40, 50), 1, 5), ((40, 50, 3), 1, 3), ((40, 50, 60), 40, 1), ((4, 3, 40, 50), 4, 3)],
        *[((4, 40, 50, 3), 4, 3), ((2, 3, 4, 40, 50), 8, 3)],
    ],
)
def test_axes_without_names_are_guessed_by_their_length(
    shape: tuple[int, ...], frames: int, channels: int, tmp_path: Path
) -> None:
    values = GENERATOR.integers(0, 999, shape, dtype=np.uint16)
    with open_stored(write_zarr(tmp_path / "a.zarr", values)) as image:
        assert (image.frames, len(image.names)) == (frames, channels)
        found = [image.read(k, Box(0, 0, image.height, image.width)) for k in range(frames)]
    if channels == 1:
        assert np.array_equal(np.stack(found).reshape(shape), values)
    elif len(shape) == 5:
        assert np.array_equal(found[7], values[1, :, 3])
    else:
        stack = values if len(shape) == 4 else values[None]
        assert np.array_equal(found[-1], stack[-1] if stack.shape[1] == channels else stack[-1].transpose(2, 0, 1))


def test_named_axes_of_xarray_decide(tmp_path: Path) -> None:
    values = GENERATOR.integers(0, 999, (6, 20, 30), dtype=np.uint16)
    group = zarr.create_group(str(tmp_path / "a.zarr"), zarr_format=2)
    group.create_array("time", data=np.arange(6))
    array = group.create_array("heat", data=values)
    array.attrs["_ARRAY_DIMENSIONS"] = ["time", "lat", "lon"]
    source = open_source(tmp_path, channels=1, pixels=U16)
    assert len(source) == 6
    assert np.array_equal(source.read(4)[0].numpy(), values[4])


def test_zarr_hash_and_stamp_follow_its_chunks(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "a.zarr", FIVE)
    before, stamp = hash_path(str(path))[1], stamp_at(str(path))
    shutil.copytree(path, tmp_path / "copy")
    assert hash_path(str(tmp_path / "copy"))[1] == before
    assert stamp_at(str(path)) == stamp
    zarr.open_array(str(path), mode="r+")[0, 0, 0] = 7
    assert hash_path(str(path))[1] != before
    assert stamp_at(str(path)) != stamp


def test_bad_zarr_is_refused_in_one_sentence(tmp_path: Path) -> None:
    made = {
        name: tmp_path / f"{name}.zarr" for name in ("cut", "chunk", "group", "empty", "nan", "pipe", "odd", "none")
    }
    write_zarr(made["cut"], FIVE)
    chunk = next(path for path in sorted(made["cut"].rglob("*")) if path.parent.name == "0" and path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:40])
    zarr.create_array(str(made["chunk"]), shape=(60_000, 60_000), chunks=(60_000, 60_000), dtype="uint16")
    group = zarr.create_group(str(made["group"]))
    for name in "ab":
        group.create_array(name, data=FIVE)
    made["empty"].mkdir()
    write_zarr(made["nan"], np.full((8, 8), np.nan, np.float32))
    write_zarr(made["pipe"], FIVE)
    (made["pipe"] / "zarr.json").unlink()
    os.mkfifo(made["pipe"] / "zarr.json")
    write_zarr(made["odd"], np.zeros((2,) * 6, np.uint16))
    zarr.create_array(str(made["none"]), shape=(0, 9), dtype="uint16")
    expected = {
        "cut": "",
        "chunk": "its chunks are 60000 x 60000, too many pixels; save it in chunks of 256 x 256",
        "group": "a group of arrays (a, b) that names no image; give the folder of one array",
        "empty": "it has no zarr array",
        "nan": "64 of its values are infinite or not a number; replace them",
        "pipe": "its zarr.json is not a regular file",
        "odd": "is no image; save",
        "none": "it has no pixels",
    }
    for name, words in expected.items():
        pixels = F32 if name == "nan" else U16
        source = open_source(made[name], channels=5 if name == "cut" else 1, pixels=pixels)
        found = reason_of(source)
        assert words in found
        assert "\n" not in found
    folder = open_source(tmp_path, channels=5, pixels=U16)
    assert sum(isinstance(found, BadImage) for found in folder.read_many(range(len(folder)))) == len(expected)


def test_zarr_that_declares_60000_pixels_a_side_is_read_by_tiles_only(tmp_path: Path) -> None:
    path = tmp_path / "huge.zarr"
    zarr.create_array(str(path), shape=(60_000, 60_000), chunks=(256, 256), dtype="uint16")
    assert "too many pixels" in reason_of(open_source(path, channels=1, pixels=U16))
    tiles = open_source(path, channels=1, pixels=PixelConfig(type="uint16", tile=500))
    assert len(tiles) == 120 * 120
    assert tiles.read(9).shape == (1, 500, 500)


# ---- NIfTI


def write_nifti(path: Path, values: np.ndarray, *, codes: str = "RAS", slope: float | None = None) -> Path:
    affine = inv_ornt_aff(ornt_transform(axcodes2ornt(codes), axcodes2ornt("RAS")), values.shape[:3])
    image = nibabel.Nifti1Image(values, np.linalg.inv(affine) @ np.eye(4))
    if slope is not None:
        image.header.set_slope_inter(slope, -5)
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("codes", ["RAS", "LPS", "LIP", "ASR", "PSL"])
def test_nifti_slices_are_axial_whatever_the_order_of_its_axes(codes: str, name: str, tmp_path: Path) -> None:
    values = GENERATOR.integers(-900, 3000, (9, 11, 13), dtype=np.int16)
    path = write_nifti(tmp_path / name, values, codes=codes)
    # nibabel's own reordering: axes to left, posterior, superior.
    opened = nibabel.load(path)
    turn = ornt_transform(nibabel.io_orientation(opened.affine), axcodes2ornt("LPS"))
    reference = np.asarray(opened.as_reoriented(turn).dataobj).transpose(2, 1, 0)
    source = open_source(tmp_path, channels=1, pixels=F32)
    assert [source.name(0), len(source)] == [f"{name}#frame=0", len(reference)]
    assert np.array_equal(np.stack([source.read(k)[0].numpy() for k in range(len(source))]), reference)
    tiles = open_source(path, channels=1, pixels=PixelConfig(type="float32", tile=6))
    for index in range(0, len(tiles), 5):
        frame, place = tiles.name(index).split("#frame=")[1].split("&xywh=")
        left, top, width, height = map(int, place.split(","))
        assert np.array_equal(tiles.read(index)[0], reference[int(frame), top : top + height, left : left + width])


def test_nifti_applies_scaling_and_reads_volumes_as_channels_or_frames(tmp_path: Path) -> None:
    values = GENERATOR.integers(0, 3000, (6, 7, 3, 40), dtype=np.int16)
    write_nifti(tmp_path / "four.nii.gz", values[..., :4])
    write_nifti(tmp_path / "film.nii", values)
    write_nifti(tmp_path / "one.nii", values[..., 0], slope=0.5)
    four = open_source(tmp_path / "four.nii.gz", channels=2, pixels=PixelConfig(type="float32", select=("3", "0")))
    assert np.array_equal(four.read(2).numpy(), values[::-1, ::-1, 2, [3, 0]].transpose(2, 1, 0))
    film = open_source(tmp_path / "film.nii", channels=1, pixels=F32)
    assert len(film) == 120
    assert np.array_equal(film.read(3 * 17 + 1)[0].numpy(), values[::-1, ::-1, 1, 17].T)
    one = open_source(tmp_path / "one.nii", channels=1, pixels=F32).read(0)[0].numpy()
    stored = np.asarray(nibabel.load(tmp_path / "one.nii").dataobj)
    assert np.allclose(one, stored[::-1, ::-1, 0].T)
    assert not np.array_equal(stored, values[..., 0])


@pytest.mark.parametrize("packed", [False, True])
def test_nifti_of_one_slice_is_read_from_an_archive(packed: bool, tmp_path: Path) -> None:
    values = GENERATOR.random((8, 9), np.float32)
    path = write_nifti(tmp_path / "a.nii", values[..., None])
    data = gzip.compress(path.read_bytes()) if packed else path.read_bytes()
    found = decode_stored(data, name="a.nii.gz" if packed else "a.nii", pixels=F32, channels=1)
    assert np.array_equal(found[0].numpy(), values[::-1, ::-1].T)
    if not packed:
        assert np.array_equal(decode_stored(data, pixels=F32, channels=1), found)  # by its first bytes


def test_bad_nifti_is_refused_in_one_sentence(tmp_path: Path) -> None:
    values = GENERATOR.random((30, 31, 32), np.float32)
    for name in ("cut.nii", "cut.nii.gz"):
        path = write_nifti(tmp_path / name, values)
        path.write_bytes(path.read_bytes()[:60_000])
        source = open_source(path, channels=1, pixels=F32)
        assert "ends before its pixels do" in reason_of(source, len(source) - 1)
    write_nifti(tmp_path / "nan.nii", np.full((8, 8, 1), np.nan, np.float32))
    assert "64 of its values are infinite" in reason_of(open_source(tmp_path / "nan.nii", channels=1, pixels=F32))
    write_nifti(tmp_path / "complex.nii", np.zeros((8, 8, 1), np.complex64))
    assert "no pixels; save numbers" in reason_of(open_source(tmp_path / "complex.nii", channels=1, pixels=F32))
    (tmp_path / "text.nii").write_text("no image")
    assert reason_of(open_source(tmp_path / "text.nii", channels=1, pixels=F32))
    path = write_nifti(tmp_path / "huge.nii", np.zeros((2, 2, 1), np.int16))
    data = bytearray(path.read_bytes())
    data[42:46] = np.array([30_000, 30_000], "<i2").tobytes()
    path.write_bytes(data)
    assert "ends before its pixels do" in reason_of(open_source(path, channels=1, pixels=F32))


# ---- DICOM without a suffix


def test_dicom_without_a_suffix_is_found_by_its_content(tmp_path: Path) -> None:
    values = GENERATOR.integers(0, 4096, (12, 14), dtype=np.uint16)
    for name in ("IM0001", "1.2.840.113619.2", "series/I10", "DICOMDIR", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_dicom(tmp_path / name, values)
    (tmp_path / "README").write_text("no image" * 100)
    (tmp_path / "notes.txt").write_text("x")
    os.mkfifo(tmp_path / "PIPE")
    source = open_source(tmp_path, channels=1, pixels=F32)
    assert [source.name(k) for k in range(len(source))] == ["1.2.840.113619.2", "IM0001", "series/I10"]
    assert all(np.array_equal(source.read(k)[0].numpy(), values) for k in range(3))
    assert np.array_equal(open_source(tmp_path / "IM0001", channels=1, pixels=F32).read(0)[0].numpy(), values)
    assert measure(tmp_path, labels=False, channels=None).pixels.type == "float32"


def test_what_needs_an_extra_is_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    write_zarr(tmp_path / "a.zarr", FIVE)
    (tmp_path / "b.nii.gz").write_bytes(b"")
    has_reader.cache_clear()
    monkeypatch.setattr("anechoic.data.stored.find_spec", lambda name: None)
    try:
        assert scan(tmp_path).ignored == ["a.zarr", "b.nii.gz"]
        with pytest.raises(UserError, match="There is no image that is read here"):
            open_source(tmp_path)
    finally:
        has_reader.cache_clear()
    assert "anechoic[zarr]" in caplog.text
    assert "anechoic[nifti]" in caplog.text


def test_label_of_a_zarr_is_its_folder(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        write_zarr(tmp_path / name / "a.zarr", FIVE)
    source = open_source(tmp_path, labels=True, channels=5, pixels=U16)
    assert source.classes == ("cat", "dog")
    assert len(source) == 2
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.zarr", b"x")
    with pytest.raises(UserError):
        open_source(tmp_path / "a.zip", channels=5, pixels=U16)
