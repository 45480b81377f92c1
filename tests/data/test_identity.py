"""Identity by content: equal names, sizes and times do not make two data sets one, and other times do not make two."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from xxhash import xxh3_128_digest

from anechoic.data import Loader, Source, content_checksums, open_source
from anechoic.data.content_checksums import FileHashes, stamp_at
from anechoic.data.files import Files
from anechoic.data.latents import CARD, LatentCard, Latents
from anechoic.data.shards import write_shards
from anechoic.data.source import digest
from anechoic.errors import UserError

COUNT = 6
KINDS = ["folder", "list", "zip", "tar", "webdataset", "shards", "parquet", "parquet paths", "npz", "npy", "latents"]

pytestmark = pytest.mark.usefixtures("own_cache")


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)


def encoded(seed: int) -> dict[str, bytes]:
    """BMP files: of one size whatever they show."""
    files = {}
    for number, image in enumerate(pixels(seed)):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "BMP")
        files[f"{'ab'[number % 2]}/{number}.bmp"] = file.getvalue()
    return files


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write(kind: str, place: Path, seed: int, *, time: int = 1_000_000_000) -> Path | str:
    """Write a data set of a kind; everything but the pixels is the same for every seed. Return what to open."""
    place.mkdir(exist_ok=True)
    files, opened = encoded(seed), place
    if kind in ("folder", "list", "parquet paths"):
        for name, data in files.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(data)
    if kind == "list":
        opened = place / "list.txt"
        opened.write_text("\n".join(files))
    elif kind == "zip":
        opened = place / "a.zip"
        with zipfile.ZipFile(opened, "w") as archive:
            for name, data in files.items():
                archive.writestr(zipfile.ZipInfo(name), data)
    elif kind == "tar":
        opened = place / "a.tar"
        write_tar(opened, files)
    elif kind == "webdataset":
        for shard in range(2):
            write_tar(place / f"{shard}.tar", dict(list(files.items())[shard::2]))
        opened = place / "{0..1}.tar"
    elif kind == "shards":
        (place / "images").mkdir(exist_ok=True)
        np.save(place / "images" / "a.npy", pixels(seed))
        shutil.rmtree(place / "out", ignore_errors=True)
        write_shards(open_source(place / "images" / "a.npy"), place / "out")
        opened = place / "out"
    elif kind.startswith("parquet"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        inside = kind == "parquet"
        rows = [{"bytes": data if inside else None, "path": name} for name, data in files.items()]
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        opened = place / "a.parquet"
        pq.write_table(pa.table({"image": pa.array(rows, image)}), opened, compression="none", use_dictionary=False)
    elif kind == "npz":
        opened = place / "a.npz"
        np.savez(opened, images=pixels(seed))
    elif kind == "npy":
        opened = place / "a.npy"
        np.save(opened, pixels(seed))
    elif kind == "latents":
        card = LatentCard(0.5, "vae", "0", 8, (COUNT, 2, 2, 2, 2), "source")
        (place / CARD).write_text(json.dumps(asdict(card)))
        moments = np.random.default_rng(seed).normal(size=card.shape).astype(np.float32)
        (place / "moments.f32").write_bytes(moments.tobytes())
    for path in [*place.rglob("*"), place]:
        os.utime(path, (time, time))
    return str(opened) if kind == "webdataset" else opened


def opened(kind: str, path: Path | str) -> Source:
    return Latents(path) if kind == "latents" else open_source(path)


def batch_of(source: Source) -> torch.Tensor:
    """Through the loader, and so through the pixel cache."""
    if source.transform is not None:
        return torch.stack([source.read(k) for k in range(len(source))])
    return torch.cat([batch.images for batch in Loader(source, image_size=8, batch_size=4)])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_names_sizes_and_times_do_not_make_two_sets_one(kind: str, tmp_path: Path) -> None:
    one, two = (opened(kind, write(kind, tmp_path / f"set{seed}", seed)) for seed in (1, 2))
    assert len(one) == len(two)
    assert one.fingerprint != two.fingerprint
    assert not torch.equal(batch_of(one), batch_of(two))


@pytest.mark.parametrize("kind", KINDS)
def test_copy_with_other_times_is_the_same_data(kind: str, tmp_path: Path) -> None:
    one, two = (opened(kind, write(kind, tmp_path / f"set{k}", 1, time=1_000_000_000 + k)) for k in range(2))
    assert one.fingerprint == two.fingerprint
    assert torch.equal(batch_of(one), batch_of(two))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recorded", [True, False], ids=["hash recorded", "hash not recorded"])
def test_overwriting_at_equal_size_and_time_is_noticed(
    kind: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recorded:  # as if the files were older than the resolution of their times
        monkeypatch.setattr(content_checksums, "is_settled", lambda stamps, now: stamps.any(-1))
    before = opened(kind, write(kind, tmp_path / "set", 1))
    first = before.fingerprint
    old = batch_of(before)
    after = opened(kind, write(kind, tmp_path / "set", 2))
    assert after.fingerprint != first
    assert not torch.equal(batch_of(after), old)


@pytest.mark.parametrize("kind", ["folder", "tar", "npy", "parquet", "parquet paths"])
@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_change_during_a_command_end_it_with_one_sentence(kind: str, workers: int, tmp_path: Path) -> None:
    source = opened(kind, write(kind, tmp_path / "set", 1))
    assert source.fingerprint
    write(kind, tmp_path / "set", 2)
    with pytest.raises(UserError, match=r"^The content of '[^']*' has changed since this command [^\n]*$"):
        list(Loader(source, image_size=8, batch_size=3, cache=False, workers=workers))


def test_touched_archive_is_still_the_same(tmp_path: Path) -> None:
    source = opened("tar", write("tar", tmp_path / "set", 1))
    assert source.fingerprint
    os.utime(tmp_path / "set" / "a.tar")
    assert len(list(Loader(source, image_size=8, batch_size=3, cache=False))) == 2


def test_second_pass_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("folder", tmp_path / "set", 1)
    monkeypatch.setattr(content_checksums, "is_settled", lambda stamps, now: stamps.any(-1))
    first = open_source(path)
    assert first.fingerprint

    def refuse(path: str) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(content_checksums, "hash_path", refuse)
    monkeypatch.setattr(content_checksums, "hash_unchanged", lambda path, stamp: refuse(path))
    assert open_source(path).fingerprint == first.fingerprint
    shutil.move(path, tmp_path / "moved")  # inodes and times stay
    assert open_source(tmp_path / "moved").fingerprint == first.fingerprint


def test_recently_changed_files_are_hashed_again(tmp_path: Path) -> None:
    """They may change again within the resolution of their times."""
    path = write("folder", tmp_path / "set", 1)
    assert (FileHashes(path, ["a/0.bmp"]).rows["stamp"] == b"").all()


def test_file_changed_shortly_before_a_long_pass_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have changed again right after it was read, long before the pass ended."""
    monkeypatch.setattr(content_checksums, "devices_in_memory", frozenset)
    path, late = write("folder", tmp_path / "set", 1), time.time() + 60
    hash_unchanged = content_checksums.hash_unchanged

    def slowly(path: str, stamp: Sequence[int]) -> bytes | None:
        clock = SimpleNamespace(time=lambda: late, perf_counter=time.perf_counter)
        monkeypatch.setattr(content_checksums, "time", clock)
        return hash_unchanged(path, stamp)

    monkeypatch.setattr(content_checksums, "hash_unchanged", slowly)
    assert (FileHashes(path, ["a/0.bmp"]).rows["stamp"] == b"").all()


def test_hashes_are_those_of_one_thread_when_storage_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(path) for path in sorted(Path(write("folder", tmp_path / "set", 9)).rglob("*.bmp"))]
    monkeypatch.setattr(content_checksums, "FILES_PER_TASK", 2)
    expected = FileHashes(tmp_path, names).all
    monkeypatch.setattr(content_checksums, "SLOW", 0.0)
    assert (FileHashes(tmp_path, names).all == expected).all()


def test_file_that_changes_after_it_was_listed_has_the_hash_of_its_new_content(tmp_path: Path) -> None:
    path = Path(write("folder", tmp_path / "set", 1)) / "a" / "0.bmp"
    stamp = np.array([stamp_at(str(path))], np.int64)
    path.write_bytes(b"longer than before" + path.read_bytes())
    (row,) = FileHashes(path.parent, [path.name], stamp).rows
    assert row["hash"].tobytes() == xxh3_128_digest(path.read_bytes())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell who writes")
def test_array_written_through_mapped_memory_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two writes to a mapped page, the second changes no time."""
    monkeypatch.setattr(content_checksums, "is_settled", lambda stamps, now: stamps.any(-1))
    path = write("npy", tmp_path / "set", 1)
    mapped = np.load(path, mmap_mode="r+")
    found = set()
    for value in range(3):
        mapped[0] = value
        found.add(open_source(path).fingerprint)
    assert len(found) == 3
    del mapped
    assert open_source(path).fingerprint in found
    (stamp,) = FileHashes("", [str(path)]).rows["stamp"]
    assert stamp, "of a file that nobody writes the hash is recorded"


def test_hashes_of_files_in_memory_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a write to mapped memory changes no time."""
    path = write("npy", tmp_path / "set", 1)
    monkeypatch.setattr(content_checksums, "SETTLED", -60.0)
    for devices in (frozenset[int](), frozenset({os.stat(path).st_dev})):
        monkeypatch.setattr(content_checksums, "devices_in_memory", lambda devices=devices: devices)
        assert bool(FileHashes("", [str(path)]).rows["stamp"][0]) == (not devices)
        shutil.rmtree(os.environ["ANECHOIC_CACHE"])


def test_hash_of_a_file_dated_in_the_future_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_checksums, "devices_in_memory", frozenset)
    path = write("tar", tmp_path / "set", 1, time=4_000_000_000)
    monkeypatch.setattr(content_checksums, "SETTLED", -60.0)
    assert (FileHashes("", [str(path)]).rows["stamp"] != b"").all()


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_table_of_hashes_is_made_again(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(content_checksums, "is_settled", lambda stamps, now: stamps.any(-1))
    path = write("folder", tmp_path / "set", 1)
    expected = open_source(path).fingerprint
    (table,) = own_cache.glob("hashes/*/rows.npy")
    data = bytearray(table.read_bytes())
    data[-30] ^= 1
    table.write_bytes(data if damage == "flip" else data[:-40])
    assert open_source(path).fingerprint == expected
    assert "damaged" in caplog.text
    assert open_source(path).fingerprint == expected


def test_table_of_hashes_is_bounded(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_checksums, "is_settled", lambda stamps, now: stamps.any(-1))
    monkeypatch.setattr(content_checksums, "MAX_ROWS", COUNT + 2)
    for seed in range(3):
        assert open_source(write("folder", tmp_path / f"set{seed}", seed)).fingerprint
    (table,) = own_cache.glob("hashes/*/rows.npy")
    assert len(np.load(table)) == COUNT + 2


def test_unreadable_file_has_an_identity(tmp_path: Path) -> None:
    path = write("folder", tmp_path / "set", 1)
    source = open_source(path)
    (tmp_path / "set" / "a" / "2.bmp").unlink()
    assert source.fingerprint != open_source(write("folder", tmp_path / "whole", 1)).fingerprint


def relabel(kind: str, path: Path, labels: list[int]) -> Source:
    """Give the images of a set other labels, and nothing else; return the set with labels."""
    if kind == "list":
        names = [line.partition("\t")[0] for line in path.read_text().splitlines()]
        path.write_text("".join(f"{name}\t{'ab'[label]}\n" for name, label in zip(names, labels, strict=True)))
    elif kind == "shards":
        with np.load(path / "index.npz") as arrays:
            np.savez(path / "index.npz", **{**arrays, "labels": np.array(labels)})
    else:
        np.save(path / "labels.npy", np.array(labels))
    return Latents(path, labels=True) if kind == "latents" else open_source(path, labels=True)


@pytest.mark.parametrize("kind", ["list", "shards", "latents"])
def test_other_labels_of_the_same_images_are_other_training_data(kind: str, tmp_path: Path) -> None:
    path = Path(write(kind, tmp_path / "set", 1))
    unlabeled = opened(kind, path).fingerprint_with_labels
    one, two = (relabel(kind, path, labels).fingerprint_with_labels for labels in ([0, 1] * 3, [1, 0] * 3))
    assert len({unlabeled, one, two}) == 3
    again = relabel(kind, path, [0, 1] * 3)
    assert (again.has_fingerprint(one), again.has_fingerprint(two), again.has_fingerprint(unlabeled)) == (
        True,
        False,
        True,
    )


# ---- fingerprints of run directories that earlier versions wrote


def test_earlier_fingerprints_are_recognized(tmp_path: Path) -> None:
    """As version 0.1 computed them, from names, sizes and times."""
    folder = write("folder", tmp_path / "set", 1)
    source = open_source(folder)
    assert isinstance(source, Files)
    stats = [os.stat(os.path.join(folder, name)) for name in source.names]
    sizes, times = (np.array([getattr(s, n) for s in stats], np.int64) for n in ("st_size", "st_mtime_ns"))
    old = digest("files", source.names.blob, source.names.ends, sizes, times)
    assert source.has_fingerprint(old)
    assert source.has_fingerprint(source.fingerprint)
    assert not source.has_fingerprint(digest("files", source.names.blob, source.names.ends, sizes, times + 1))
    table = write("parquet", tmp_path / "table", 1)
    status = os.stat(table)
    assert open_source(table).has_fingerprint(digest("parquet", status.st_size, status.st_mtime_ns))
