"""Untrusted data: slow images, links that loop, and tables that name files elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anechoic.cli.main import main
from anechoic.data import BadImage, Source, Undecodable, decode, open_source
from anechoic.data.decoding import MAX_PIXELS, MAX_SCANNED_PIXELS, MAX_SCANS, SCAN, decode_labels
from anechoic.data.stored import open_stored
from anechoic.data.tables import HubSet, Parquet
from anechoic.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "images"
    place.mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return place


# ---- slow images


def progressive(side: int, *, repeat: int = 0) -> bytes:
    """A progressive JPEG whose last scan, a few bytes, is repeated."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(SCAN) : -2]
    return data[:-2] + last * repeat + data[-2:]


def opened_as_stored(data: bytes) -> None:
    with open_stored(data, name="a.jpg"):
        pass


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("side", "repeat"), [(16, MAX_SCANS), (4096, 64)], ids=["many scans", "many pixels"])
def test_jpeg_of_too_many_scans_is_refused(side: int, repeat: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr("anechoic.data.decoding.simplejpeg", None)
    data = progressive(side, repeat=repeat)
    for read in (decode, decode_labels, opened_as_stored):
        with pytest.raises(Undecodable, match=rf"^\d+ scans of {side} x {side} pixels would take too long to decode$"):
            read(data)


def test_progressive_jpeg_of_an_encoder_is_within_the_limits() -> None:
    data = progressive(16)
    assert decode(data).shape == (3, 16, 16)
    assert 2 * data.count(SCAN) * MAX_PIXELS <= MAX_SCANNED_PIXELS
    noisy = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", progressive=True, quality=95)
    assert file.getvalue().count(SCAN) * MAX_PIXELS <= MAX_SCANNED_PIXELS


def test_slow_image_of_a_folder_is_named_and_skipped(folder: Path) -> None:
    (folder / "slow.jpg").write_bytes(progressive(16, repeat=8000))
    found = open_source(folder).read_many(range(5))
    assert [isinstance(item, BadImage) for item in found] == [False] * 4 + [True]
    assert (found[4].name, "too long to decode" in found[4].reason) == ("slow.jpg", True)  # type: ignore[union-attr]


# ---- links


def test_links_that_lead_nowhere_are_named_and_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "loop").symlink_to("loop")
    (folder / "gone.png").symlink_to("nowhere.png")
    source = open_source(folder)
    assert [source.name(k) for k in range(len(source))] == ["0.png", "1.png", "2.png", "3.png"]
    assert f"2 links in {folder} lead nowhere and are skipped, such as gone.png." in caplog.text


# ---- tables


def table_of(paths: list[str], place: Path, name: str = "bytes") -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    place.mkdir(exist_ok=True)
    rows = [{name: None, "path": path} for path in paths]
    kind = pa.struct([(name, pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), place / "a.parquet")
    return place / "a.parquet"


def reasons(source: Source) -> list[str | None]:
    found = source.read_many(range(len(source)))
    return [item.reason if isinstance(item, BadImage) else None for item in found]


def test_table_names_files_below_its_folder_only(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "table"
    shutil.copytree(folder, place / "inside")
    names = ["inside/0.png", str(folder / "1.png"), "../images/2.png", "inside/../../images/3.png", "a\0b.png"]
    source = open_source(table_of(names, place))
    first, *outside, odd = reasons(source)
    assert first is None
    assert outside == ["outside the folder of its table, where --allow-outside would read it"] * 3
    assert odd == "its path is not one of a file (embedded null byte)"
    closed = source.fingerprint
    assert isinstance(source, Parquet)
    assert list(source.named.hashes.names) == ["inside/0.png", "a\0b.png"]  # nothing outside is even hashed
    monkeypatch.setenv("ANECHOIC_ALLOW_OUTSIDE", "1")
    again = open_source(place / "a.parquet")
    assert reasons(again)[:4] == [None] * 4
    assert again.fingerprint != closed


def test_link_of_the_table_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    """As in the cache of a hub, whose files are links to elsewhere."""
    place = tmp_path / "table"
    place.mkdir()
    (place / "0.png").symlink_to(folder / "0.png")
    assert reasons(open_source(table_of(["0.png"], place))) == [None]


def test_shard_copies_no_image_from_outside_unless_allowed(folder: Path, tmp_path: Path, capsys) -> None:
    table = table_of([str(folder / f"{k}.png") for k in range(4)], tmp_path / "table")
    assert main(["tools", "shard", str(table), "-o", str(tmp_path / "out")]) == 2
    assert "outside the folder of its table, where --allow-outside would read it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["tools", "shard", str(table), "-o", str(tmp_path / "out"), "--allow-outside"]) == 0
    assert len(open_source(tmp_path / "out")) == 4
    assert "ANECHOIC_ALLOW_OUTSIDE" not in os.environ


def test_table_whose_bytes_have_another_name_is_refused(folder: Path) -> None:
    """Its paths would be read, and not be part of its identity."""
    with pytest.raises(UserError, match="none of image bytes"):
        open_source(table_of(["0.png"], folder, name="data"))


def test_hub_set_names_files_below_its_folder_only(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"image": [str(folder / "0.png"), str(tmp_path / "1.png"), "2.png"]})
    shutil.copy(folder / "0.png", tmp_path / "1.png")
    source = HubSet(rows.cast_column("image", datasets.Image(decode=False)), folder, column="image", channels=3)
    outside = "outside the folder of its table, where --allow-outside would read it"
    assert reasons(source) == [None, outside, None]


# ---- remote files


@pytest.mark.parametrize("versions", [True, False], ids=["server knows versions", "server knows none"])
def test_remote_archive_of_other_content_is_another_set(
    folder: Path, versions: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of equal names, sizes and, where the server sends one, times."""
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    info = type(system).info
    time = {"created": "2026-01-01"} if versions else {}

    def without_versions(self: object, path: str, **options: object) -> dict[str, object]:
        return {name: value for name, value in info(self, path, **options).items() if name != "created"} | time

    monkeypatch.setattr(type(system), "info", without_versions)
    found = []
    for place, value in (("one", 0), ("two", 255), ("two", 0)):
        pixels, file = np.full((8, 8, 3), value, np.uint8), io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            image = io.BytesIO()
            Image.fromarray(pixels).save(image, "BMP")
            member = tarfile.TarInfo("a.bmp")
            member.size = image.tell()
            archive.addfile(member, io.BytesIO(image.getvalue()))
        system.pipe_file(f"/untrusted/{place}.tar", file.getvalue())
        source = open_source(f"memory://untrusted/{place}.tar")
        found.append(source.fingerprint)
        assert found[-1] == open_source(f"memory://untrusted/{place}.tar").fingerprint
        assert int(source.read(0).max()) == value
    assert found[0] != found[1]
    assert versions or (found[1] != found[2] and "knows no version" in caplog.text)
