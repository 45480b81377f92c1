"""Pixels as files store them: every layout of a format has the same values, and they arrive unchanged."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pydicom
import pytest
import tifffile
import torch
from PIL import Image
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, JPEGExtended12Bit, JPEGLSLossless, generate_uid

from anechoic.config import EIGHT_BIT, PixelConfig
from anechoic.data import Augment, BadImage, Loader, open_source
from anechoic.data.decoding import IMAGE_SUFFIXES
from anechoic.data.measure import measure
from anechoic.data.pixels import Undecodable
from anechoic.data.stored import READERS, Box, decode_stored, open_stored, read_region
from anechoic.data.stored_files import deviation, steps
from anechoic.errors import UserError

GENERATOR = np.random.default_rng(0)
FIVE = GENERATOR.integers(0, 65535, (5, 70, 90), dtype=np.uint16)
NAMES = ["DAPI", "GFP", "RFP", "Cy5", "BF"]
OME: dict[str, Any] = {"axes": "CYX", "Channel": {"Name": NAMES}}
# Arguments of tifffile.imwrite: the same five channels in every layout.
LAYOUTS: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "pages": (FIVE, {}),
    "planar": (FIVE, {"planarconfig": "separate"}),
    "chunky": (FIVE.transpose(1, 2, 0), {"planarconfig": "contig"}),
    "chunky-compressed": (
        FIVE.transpose(1, 2, 0),
        {"planarconfig": "contig", "compression": "zlib", "predictor": True},
    ),
    "planar-big-endian": (FIVE, {"planarconfig": "separate", "byteorder": ">", "compression": "lzw"}),
    "tiles": (FIVE, {"tile": (32, 48), "compression": "zstd"}),
    "strips": (FIVE, {"rowsperstrip": 7, "compression": "packbits"}),
    "ome": (FIVE, {"ome": True, "metadata": OME}),
    "ome-compressed": (FIVE, {"ome": True, "metadata": OME, "compression": "zlib"}),
    "imagej": (FIVE[None, None], {"imagej": True, "metadata": {"axes": "TZCYX"}}),
    "big": (FIVE, {"bigtiff": True}),
}
TYPES = {"uint8": np.uint8, "uint16": np.uint16, "int16": np.int16, "float16": np.float16, "float32": np.float32}


def write_tiff(path: Path, values: np.ndarray, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, values, **({} if how.get("imagej") else {"photometric": "minisblack"}), **how)
    return path


def write_dicom(path: Path, values: np.ndarray, **tags: Any) -> Path:
    """values (H, W) or (frames, H, W) of uint16 or int16."""
    data = pydicom.Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = tags.pop("syntax", ExplicitVRLittleEndian)
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = pydicom.uid.CTImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = generate_uid()
    data.Rows, data.Columns = values.shape[-2:]
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    data.PixelRepresentation = int(values.dtype == np.int16)
    if values.ndim == 3:
        data.NumberOfFrames = len(values)
    data.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tiff_layout_reads_the_same_channels_and_regions(layout: str, tmp_path: Path) -> None:
    values, how = LAYOUTS[layout]
    path = write_tiff(tmp_path / "a.tif", values, **how)
    whole = open_source(path, channels=5, pixels=PixelConfig(type="uint16"))
    assert np.array_equal(whole.read(0).numpy(), FIVE)
    assert np.array_equal(decode_stored(path.read_bytes(), pixels=PixelConfig(type="uint16"), channels=5).numpy(), FIVE)
    tiles = open_source(path, channels=2, pixels=PixelConfig(type="uint16", select=("3", "0"), tile=40, overlap=8))
    for index in range(len(tiles)):
        left, top, width, height = map(int, tiles.name(index).split("xywh=")[1].split(","))
        assert np.array_equal(tiles.read(index).numpy(), FIVE[[3, 0], top : top + height, left : left + width])


@pytest.mark.parametrize("name", TYPES)
def test_values_of_every_type_travel_from_file_to_batch_unchanged(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(TYPES[name])
    if dtype.kind == "f":
        images = GENERATOR.standard_normal((12, 2, 16, 16)).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        images = GENERATOR.integers(limits.min, limits.max, (12, 2, 16, 16), dtype=dtype, endpoint=True)
    for number, image in enumerate(images):
        write_tiff(tmp_path / f"{number:02d}.tif", image)
    source = open_source(tmp_path, channels=2, pixels=PixelConfig(type=name))  # type: ignore[arg-type]
    for cache in (False, True, True):
        loader = Loader(source, image_size=16, batch_size=5, augment=Augment("none"), cache=cache)
        found = torch.cat([batch.images for batch in loader]).numpy()
        assert found.dtype == (np.uint8 if name == "uint8" else np.float32)
        assert np.array_equal(found, images)


def test_reduced_images_keep_the_precision_of_their_means(tmp_path: Path) -> None:
    image = GENERATOR.integers(0, 65535, (1, 64, 64), dtype=np.uint16)
    source = open_source(write_tiff(tmp_path / "a.tif", image[0]), channels=1, pixels=PixelConfig(type="uint16"))
    means = image.reshape(1, 16, 4, 16, 4).astype(np.float64).mean(axis=(2, 4))
    assert np.allclose(source.read(0, min_side=16).numpy(), means, rtol=1e-6)


def test_frames_are_samples_with_labels_and_names(tmp_path: Path) -> None:
    stack = np.stack([FIVE, FIVE + 1])
    write_tiff(tmp_path / "one" / "z.ome.tif", stack, ome=True, metadata={**OME, "axes": "ZCYX"})
    write_tiff(tmp_path / "two" / "y.ome.tif", FIVE, ome=True, metadata=OME)
    source = open_source(tmp_path, labels=True, channels=2, pixels=PixelConfig(type="uint16", select=("BF", "GFP")))
    names = [source.name(k) for k in range(len(source))]
    assert names == ["one/z.ome.tif#frame=0", "one/z.ome.tif#frame=1", "two/y.ome.tif"]
    assert source.labels is not None
    assert source.labels.tolist() == [0, 0, 1]
    assert np.array_equal(source.read(1).numpy(), stack[1, [4, 1]])
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again.read(2).int(), source.read(2).int())
    assert len({*map(bytes, source.identities())}) == 3  # type: ignore[arg-type]


def test_geotiff_bands_have_the_names_of_gdal(tmp_path: Path) -> None:
    items = "".join(f'<Item name="DESCRIPTION" sample="{k}" role="description">B{k}</Item>' for k in range(5))
    tag = (42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)
    write_tiff(tmp_path / "a.tif", FIVE, planarconfig="separate", extratags=[tag])
    source = open_source(tmp_path, channels=1, pixels=PixelConfig(type="uint16", select=("B3",)))
    assert np.array_equal(source.read(0).numpy(), FIVE[3:4])


def test_sixteen_bit_png_gray_and_color(tmp_path: Path) -> None:
    color = GENERATOR.integers(0, 65535, (9, 11, 3), dtype=np.uint16)
    Image.fromarray(color[..., 0]).save(tmp_path / "gray.png")
    (tmp_path / "color.png").write_bytes(imagecodecs.png_encode(color))
    pixels = PixelConfig(type="uint16")
    gray = open_source(tmp_path / "gray.png", channels=1, pixels=pixels).read(0)
    assert np.array_equal(gray[0].numpy(), color[..., 0])
    found = open_source(tmp_path / "color.png", channels=3, pixels=pixels).read(0)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), color)


@pytest.mark.parametrize("first", [True, False])
def test_folder_of_npy_reads_channels_first_and_last(first: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", FIVE if first else FIVE.transpose(1, 2, 0))
    source = open_source(tmp_path, channels=5, pixels=PixelConfig(type="uint16"))
    assert np.array_equal(source.read(0).numpy(), FIVE)


def test_array_of_16_bit_images_is_not_divided(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", FIVE.transpose(1, 2, 0)[None])
    stored = open_source(tmp_path / "a.npy", channels=2, pixels=PixelConfig(type="uint16", select=("1", "4")))
    assert np.array_equal(stored.read(0).numpy(), FIVE[[1, 4]])
    eight = open_source(tmp_path / "a.npy", channels=5, pixels=EIGHT_BIT)
    assert np.array_equal(eight.read(0).numpy(), (FIVE.astype(np.uint32) + 128) // 257)


def test_stored_pixels_in_a_zip(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "a.tif", FIVE)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "a.tif")
    source = open_source(tmp_path / "a.zip", channels=5, pixels=PixelConfig(type="uint16"))
    assert np.array_equal(source.read(0).numpy(), FIVE)
    with pytest.raises(UserError, match="unpack the archive"):
        open_source(tmp_path / "a.zip", channels=5, pixels=PixelConfig(type="uint16", tile=32))


# ---- DICOM


def test_dicom_applies_rescaling_inversion_and_splits_frames(tmp_path: Path) -> None:
    values = GENERATOR.integers(0, 4096, (3, 12, 14), dtype=np.uint16)
    write_dicom(tmp_path / "ct.dcm", values[0], RescaleSlope="2", RescaleIntercept="-1024")
    write_dicom(tmp_path / "inverted.dcm", values[0], PhotometricInterpretation="MONOCHROME1")
    write_dicom(tmp_path / "movie.dcm", values)
    source = open_source(tmp_path, channels=1, pixels=PixelConfig(type="float32"))
    found = {source.name(k): source.read(k)[0].numpy() for k in range(len(source))}
    assert np.array_equal(found["ct.dcm"], 2.0 * values[0] - 1024)
    assert np.array_equal(found["inverted.dcm"], 4095.0 - values[0])
    assert np.array_equal(found["movie.dcm#frame=2"], values[2])
    assert len(found) == 5


def test_dicom_color_of_32_bits_is_not_cut_to_16(tmp_path: Path) -> None:
    values = np.array([[[0, 65_536, 70_000], [1, 2**24, 2**31]]], np.uint32)
    color = {
        "SamplesPerPixel": 3,
        "PhotometricInterpretation": "RGB",
        "PlanarConfiguration": 0,
        "Rows": 1,
        "Columns": 2,
    }
    bits = {"BitsAllocated": 32, "BitsStored": 32, "HighBit": 31}
    path = write_dicom(tmp_path / "a.dcm", values.reshape(1, -1), **color, **bits)
    found = decode_stored(path.read_bytes(), pixels=PixelConfig(type="float32"), channels=3)
    assert np.array_equal(found.numpy().transpose(1, 2, 0), values)


# ---- files of other people


def read_last_frame(path: Path, *, name: str = "") -> str:
    """Return type and channels of the last frame of a file, or why it is refused."""
    try:
        with open_stored(path, name=name) as image:
            whole, how = Box(0, 0, image.height, image.width), PixelConfig(type=image.type)  # type: ignore[arg-type]
            pixels = read_region(image, image.frames - 1, whole, pixels=how, channels=len(image.names), min_side=None)
            return f"{str(pixels.dtype).removeprefix('torch.')} x {len(pixels)}"
    except Undecodable as problem:
        return f"refused: {problem}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # pydicom warns about what its test files are for
def test_every_dicom_file_of_pydicom_is_read_or_refused_in_one_sentence() -> None:
    found: Counter[str] = Counter()
    for path in sorted(Path(pydicom.__file__).parent.rglob("*")):
        if path.suffix == ".dcm" or (path.is_file() and path.read_bytes()[128:132] == b"DICM"):
            found[read_last_frame(path, name="a.dcm")] += 1
    refused = {reason: count for reason, count in found.items() if reason.startswith("refused")}
    assert sum(count for reason, count in refused.items() if "has no pixels" in reason) >= 50
    assert found["float32 x 1"] >= 50
    assert found["uint8 x 3"] >= 15
    assert found["uint16 x 3"] >= 3
    assert all(re.search("; (install|save|remove|copy)", reason) for reason in refused)
    assert not [reason for reason in refused if "\n" in reason]


@pytest.mark.slow
def test_every_image_of_scikit_image_imageio_and_tifffile_is_read() -> None:
    imageio = pytest.importorskip("imageio", reason="files of other people are in its wheel")
    skimage = pytest.importorskip("skimage", reason="files of other people are in its wheel")
    found = {
        path.name: read_last_frame(path)
        for package in (skimage, imageio, tifffile)
        for path in sorted(Path(package.__file__).parent.rglob("*"))
        if path.suffix.lower() in {*IMAGE_SUFFIXES, *READERS} and path.parent.name != "morphology"
    }
    assert len(found) >= 25
    assert not [reason for reason in found.values() if reason.startswith("refused")]
    assert found["multipage_rgb.tif"] == "float32 x 3"
    assert found["motorcycle_left.png"] == found["chelsea.png"] == "uint8 x 3"
    assert found["multipage.tif"] == "uint8 x 2"


# ---- bad input: one sentence with the name and the remedy, and the rest is read


def bad_files(folder: Path) -> dict[str, str]:
    """Write one bad file of each kind beside good ones; return the reason expected for each."""
    for number in range(70):
        write_tiff(folder / f"good{number:02d}.tif", FIVE[:, :16, :16])
    whole = write_tiff(folder / "truncated.tif", FIVE).read_bytes()
    (folder / "truncated.tif").write_bytes(whole[: len(whole) // 2])
    write_tiff(folder / "channels.tif", FIVE[:3, :16, :16])
    write_tiff(folder / "type.tif", FIVE[:, :16, :16].astype(np.float32))
    (folder / "empty.tif").write_bytes(b"")
    write_tiff(folder / "huge.tif", np.zeros((5, 1, 16), np.uint16))
    with tifffile.TiffFile(folder / "huge.tif", mode="r+b") as opened:
        for page in opened.pages:
            page.tags["ImageLength"].overwrite(60_000)
            page.tags["ImageWidth"].overwrite(60_000)
    return {
        "truncated.tif": "ends before its pixels do",
        "channels.tif": "3 channels and 5 are expected",
        "type.tif": "float32 and those of the data set uint16",
        "empty.tif": "",
        "huge.tif": "",
    }


def test_bad_files_are_skipped_with_a_reason_and_the_rest_is_read(tmp_path: Path) -> None:
    expected = bad_files(tmp_path)
    source = open_source(tmp_path, channels=5, pixels=PixelConfig(type="uint16"))
    results = {source.name(k): result for k, result in enumerate(source.read_many(range(len(source))))}
    bad = {name: result.reason for name, result in results.items() if isinstance(result, BadImage)}
    assert bad.keys() == expected.keys()
    assert all(expected[name] in reason for name, reason in bad.items())
    loader = Loader(source, image_size=16, batch_size=16)
    assert sum(len(batch.ids) for batch in loader) == 70
    assert {name for name, _ in loader.skipped} == expected.keys()


def test_pages_that_are_cut_off_are_no_smaller_stack(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without the rest of its pages, or the text that names its axes, it would be another image."""
    names = {"axes": "ZCYX", "Channel": {"Name": NAMES}}
    stack = GENERATOR.integers(0, 9999, (4, 5, 16, 16), dtype=np.uint16)
    whole = write_tiff(tmp_path / "a.ome.tif", stack, ome=True, compression="zlib", metadata=names).read_bytes()
    plain = write_tiff(tmp_path / "b.tif", stack.reshape(20, 16, 16), compression="zlib", metadata=None).read_bytes()
    for name, data in (("a.ome.tif", whole), ("b.tif", plain)):
        for share in (0.4, 0.7, 0.95):
            (tmp_path / name).write_bytes(data[: int(share * len(data))])
            with pytest.raises(Undecodable, match="the file ends before its pixels do"), open_stored(tmp_path / name):
                pass
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize(
    ("kind", "offset", "warns"), [("uint32", 1e9, True), ("float64", 1e9, True), ("uint32", 0, False)]
)
def test_values_of_64_bits_and_their_loss_are_named(
    kind: str, offset: float, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        write_tiff(tmp_path / f"{number}.tif", (offset + GENERATOR.integers(0, 90, (16, 16))).astype(kind))
    found = measure(tmp_path, labels=False, channels=None)
    assert f"{kind} rounded to float32, 1 channel" in found.text
    assert ("float32 has steps of 64 at its" in caplog.text) == warns


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    image = np.zeros((8, 8), np.float32)
    image[0, :3] = np.nan, np.inf, -np.inf
    source = open_source(write_tiff(tmp_path / "a.tif", image), channels=1, pixels=PixelConfig(type="float32"))
    with pytest.raises(BadImage, match="3 of its values are infinite or not a number; replace them"):
        source.read(0)


def test_dicom_without_pixels_or_decoder_is_refused(tmp_path: Path) -> None:
    values = np.zeros((8, 8), np.uint16)
    path = write_dicom(tmp_path / "report.dcm", values)
    data = pydicom.dcmread(path)
    del data.PixelData
    data.save_as(path)
    write_dicom(tmp_path / "packed.dcm", values)
    data = pydicom.dcmread(tmp_path / "packed.dcm")
    data.PixelData = pydicom.encaps.encapsulate([b"\0" * 64])
    data["PixelData"].VR = "OB"
    data.file_meta.TransferSyntaxUID = JPEGLSLossless
    data.save_as(tmp_path / "packed.dcm")
    data.file_meta.TransferSyntaxUID = JPEGExtended12Bit  # Pillow decodes it, of 8 bits
    data.save_as(tmp_path / "extended.dcm")
    source = open_source(tmp_path, channels=1, pixels=PixelConfig(type="float32"))
    extended, packed, report = source.read_many([0, 1, 2])
    assert isinstance(extended, BadImage)
    assert re.fullmatch(r"no installed decoder reads its JPEG Extended .*; install python-gdcm or .*", extended.reason)
    assert isinstance(packed, BadImage)
    assert isinstance(report, BadImage)
    assert "transfer syntax JPEG-LS" in packed.reason
    assert "has no pixels" in report.reason


def test_pictures_have_no_stored_pixels_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes files that store such"):
        open_source("digits", channels=1, pixels=PixelConfig(type="uint16"))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="Pictures have 1 to 4 channels, not 5"):
        open_source(tmp_path, channels=5)


# ---- tiles


def test_tiles_cover_an_image_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    image = np.full((100, 130), 7, np.uint16)
    image[:50, :60] = GENERATOR.integers(0, 999, (50, 60))
    write_tiff(tmp_path / "slide.tif", image)
    every = open_source(tmp_path, channels=1, pixels=PixelConfig(type="uint16", tile=32, overlap=4))
    seen = np.zeros(image.shape, bool)
    for index in range(len(every)):
        left, top, width, height = map(int, every.name(index).split("xywh=")[1].split(","))
        seen[top : top + height, left : left + width] = True
    assert seen.all()
    full = [every.name(k) for k in range(len(every)) if deviation(every.read(k)) >= 5]
    for _ in range(2):  # computed, then from the cache
        some = open_source(tmp_path, channels=1, pixels=PixelConfig(type="uint16", tile=32, overlap=4, empty=5.0))
        assert [some.name(k) for k in range(len(some))] == full
    with pytest.raises(UserError, match="give images that are not empty"):
        open_source(tmp_path, channels=1, pixels=PixelConfig(type="uint16", tile=32, empty=1e6))


@pytest.mark.parametrize(("side", "overlap"), [(10, 0), (32, 0), (33, 0), (64, 0), (100, 8)])
def test_steps_stay_inside_and_leave_no_gap(side: int, overlap: int) -> None:
    starts, length = steps(side, PixelConfig(type="uint16", tile=32, overlap=overlap))
    assert starts[0] == 0
    assert starts[-1] + length == side
    assert (np.diff(starts) <= length - overlap).all()
    assert len(set(starts.tolist())) == len(starts)
