"""Decoding against Pillow's own conversions, and damaged files of every kind."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from anechoic.data import Undecodable, decode
from anechoic.data.decoding import MAX_PIXELS, ORIENTATION, reduction

SIZE = (23, 17)  # width, height: odd and unequal, so that a swapped axis shows


def noise(mode: str, size: tuple[int, int] = SIZE) -> Image.Image:
    width, height = size
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    # Smooth enough for JPEG to be meaningful.
    values = np.cumsum(values // 64, axis=1, dtype=np.uint8)
    return Image.frombytes(mode, size, values.tobytes())


def encode(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def as_tensor(image: Image.Image) -> torch.Tensor:
    array = np.array(image)
    return torch.from_numpy(array[:, :, None] if array.ndim == 2 else array).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*((kind, mode) for kind in ("PNG", "BMP", "TIFF", "JPEG") for mode in ("RGB", "L")), ("WEBP", "RGB")],
)
def test_decode_equals_pillow_for_every_format(kind: str, mode: str) -> None:
    data = encode(noise(mode), kind)
    with Image.open(io.BytesIO(data)) as image:
        assert torch.equal(decode(data), as_tensor(image.convert("RGB")))


def test_decode_equals_pillow_for_palette_bilevel_and_cmyk() -> None:
    palette = noise("RGB").quantize(16)
    assert torch.equal(decode(encode(palette, "PNG")), as_tensor(palette.convert("RGB")))
    bilevel = noise("L").convert("1")
    assert torch.equal(decode(encode(bilevel, "PNG")), as_tensor(bilevel.convert("RGB")))
    for kind in ("JPEG", "TIFF"):
        data = encode(noise("CMYK"), kind)
        with Image.open(io.BytesIO(data)) as image:
            assert torch.equal(decode(data), as_tensor(image.convert("RGB")))


def test_one_channel_is_pillows_luminance() -> None:
    image = noise("RGB")
    assert torch.equal(decode(encode(image, "PNG"), channels=1), as_tensor(image.convert("L")))


def test_decode_composes_alpha_on_white() -> None:
    image = noise("RGBA")
    white = Image.new("RGBA", SIZE, "white")
    white.alpha_composite(image)
    difference = decode(encode(image, "PNG")).int() - as_tensor(white.convert("RGB")).int()
    assert difference.abs().max() <= 1
    assert torch.equal(decode(encode(image, "PNG"), channels=4), as_tensor(image))
    clear = Image.new("LA", SIZE, (0, 0))
    assert (decode(encode(clear, "PNG")) == 255).all()
    assert (decode(encode(Image.new("RGB", SIZE), "PNG"), channels=4)[3] == 255).all()
    assert torch.equal(decode(encode(noise("LA"), "PNG"), channels=2), as_tensor(noise("LA")))


def test_decode_composes_a_transparent_color_on_white() -> None:
    image = Image.new("RGB", (2, 1), (10, 20, 30))
    image.putpixel((1, 0), (1, 2, 3))
    pixels = decode(encode(image, "PNG", transparency=(1, 2, 3)))
    assert pixels[:, 0, 0].tolist() == [10, 20, 30]
    assert pixels[:, 0, 1].tolist() == [255, 255, 255]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_black_white_and_order(kind: str) -> None:
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(8, 32)
    pixels = decode(encode(Image.fromarray(values), kind), channels=1)
    assert pixels.flatten().tolist() == list(range(256))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(noise("RGB"), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        assert torch.equal(decode(data), as_tensor(ImageOps.exif_transpose(image)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("width", "height"), [(400, 300), (401, 333), (64, 64), (1000, 161)])
def test_reduction_keeps_the_shorter_side(kind: str, width: int, height: int) -> None:
    data = encode(noise("RGB", (width, height)), kind)
    pixels = decode(data, min_side=64)
    factor = reduction(height, width, 64)
    assert factor in (1, 2, 4, 8)
    assert tuple(pixels.shape[1:]) == (-(-height // factor), -(-width // factor))
    assert min(pixels.shape[1:]) >= min(64, height, width)
    assert min(height, width) < 2 * factor * 64 or factor == 8


def test_reduced_image_is_the_average_of_the_full_one() -> None:
    smooth = noise("RGB", (40, 30)).resize((400, 300), Image.Resampling.BICUBIC)
    for kind in ("JPEG", "PNG"):
        data = encode(smooth, kind)
        full, reduced = decode(data).float(), decode(data, min_side=75).float()
        average = torch.nn.functional.avg_pool2d(full, 4)
        assert (reduced - average).abs().mean() < 1.5


def test_simplejpeg_equals_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    images = [(noise("RGB", (301, 203)), {}), (noise("L", (99, 64)), {}), (noise("RGB", (90, 77)), {"exif": exif})]
    encoded = [encode(image, "JPEG", **options) for image, options in images]
    fast = [decode(data, min_side=side) for data in encoded for side in (None, 32)]
    monkeypatch.setattr("anechoic.data.decoding.simplejpeg", None)
    plain = [decode(data, min_side=side) for data in encoded for side in (None, 32)]
    assert all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True))


def bomb() -> bytes:
    """A PNG of a few bytes that promises 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def jpeg_bomb() -> bytes:
    """A real JPEG whose header was changed to promise 60,000 x 60,000 pixels."""
    data = bytearray(encode(noise("RGB"), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    return bytes(data)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"This is not an image.", "not an image"),
        (b"<html><body>404</body></html>", "not an image"),
        (encode(noise("RGB", (200, 200)), "JPEG")[:3000], "truncated"),
        (encode(noise("RGB", (200, 200)), "PNG")[:-300], "truncated"),
        (encode(noise("RGB"), "JPEG")[:30], "[a-z]"),
        (bomb(), "too many pixels"),
        (jpeg_bomb(), "too many pixels"),
        (encode(Image.new("F", SIZE), "TIFF"), "floating-point"),
    ],
    ids=["empty", "text", "html", "cut jpeg", "cut png", "header only", "png bomb", "jpeg bomb", "float"],
)
def test_undecodable_bytes_have_a_reason(data: bytes, reason: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr("anechoic.data.decoding.simplejpeg", None)
    with pytest.raises(Undecodable, match=reason):
        decode(data)


def test_bomb_limit_is_pillows() -> None:
    assert 13_000 * 13_000 > MAX_PIXELS >= 61_000_000
