"""The pixel cache: it changes nothing but time, notices every change and damage, and survives other processes and bad
disks."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip_a_bit
from PIL import Image

from anechoic.data import BadImage, Scenes, Source, Subset, decoding, files, open_source
from anechoic.data import pixel_cache as caching
from anechoic.data.pixel_cache import CachedPixels, with_pixel_cache
from anechoic.errors import UserError
from anechoic.storage.cache import OpenEntry, clear
from anechoic.storage.safe_io import read_regular

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty images of mixed sizes and formats."""
    root = tmp_path / "images"
    root.mkdir()
    rng = np.random.default_rng(0)
    for k in range(30):
        shape = (40 + k, 400 - 9 * k, 3) if k % 2 else (12, 12, 3)
        kind = ("png", "jpg", "bmp")[k % 3]
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(root / f"{k:02d}.{kind}")
    return root


def same(first: Source, second: Source, *, min_side: int) -> bool:
    pairs = zip(
        first.read_many(range(len(first)), min_side=min_side),
        second.read_many(range(len(second)), min_side=min_side),
        strict=True,
    )
    return all(torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


def test_pixels_with_and_without_cache_are_the_same(folder: Path) -> None:
    source = open_source(folder)
    for min_side in (16, 1000):
        kept = with_pixel_cache(source, min_side=min_side)
        assert isinstance(kept, CachedPixels)
        assert same(kept, source, min_side=min_side)
        assert [kept.name(k) for k in range(30)] == [source.name(k) for k in range(30)]
    assert torch.equal(with_pixel_cache(source, min_side=16).read(1), source.read(1, min_side=16))
    assert not torch.equal(source.read(15, min_side=16), source.read(15)) or source.read(15).shape[1] < 32


def test_scenes_are_cached_and_sources_in_memory_are_not(own_cache: Path) -> None:
    source = Scenes(130, size=16)
    assert same(with_pixel_cache(source, min_side=160), source, min_side=160)
    digits = open_source("digits")
    assert with_pixel_cache(digits, min_side=160) is digits
    assert len(list((own_cache / "pixels").glob("*/pixels.bin"))) == 1


def test_pixel_cache_decodes_again_only_after_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_pixel_cache(open_source(folder), min_side=16)
    writes: list[Path] = []
    write = caching._write
    monkeypatch.setattr(
        caching, "_write", lambda source, path, **options: (writes.append(path), write(source, path, **options))
    )
    with_pixel_cache(open_source(folder), min_side=16)
    assert not writes
    Image.new("RGB", (5, 5), "red").save(folder / "00.png")
    changed = with_pixel_cache(open_source(folder), min_side=16)
    assert len(writes) == 1
    assert changed.read(0)[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("part", ["pixels.bin", "table.npz"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damaged_cache_is_made_again(
    folder: Path, own_cache: Path, part: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source(folder)
    with_pixel_cache(source, min_side=16)
    (path,) = (own_cache / "pixels").glob(f"*/{part}")
    if damage == "flip":
        flip_a_bit(path)
    else:
        path.unlink()
    kept = with_pixel_cache(source, min_side=16)
    assert ("made again" in caplog.text) == (damage != "remove")
    assert same(kept, source, min_side=16)
    assert same(with_pixel_cache(source, min_side=16), source, min_side=16)


STARTER = """
import sys, torch
from anechoic.data import pixel_cache as cache
from anechoic.data import open_source
write = cache._write
cache._write = lambda *a, **k: (print("built", flush=True), write(*a, **k))
kept = cache.with_pixel_cache(open_source(sys.argv[1]), min_side=16)
print(sum(int(kept.read(i).sum()) for i in range(len(kept))))
"""


@pytest.mark.slow
def test_one_of_several_processes_builds_the_pixel_cache(folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", STARTER, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [process.communicate(timeout=120)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({found[-1] for found in lines}) == 1
    assert sum("built" in found for found in lines) == 1


@pytest.mark.parametrize("place", ["file", "kernel"])
def test_without_a_writable_cache_images_are_decoded_each_time(
    folder: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file where a folder should be")
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path / "occupied" / "below") if place == "file" else "/proc/nowhere")
    source = open_source(folder)
    with pytest.warns(RuntimeWarning, match="decoded at every visit; set ANECHOIC_CACHE"):
        assert with_pixel_cache(source, min_side=16) is source


HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_pixel_cache_is_not_used_while_a_stopped_process_holds_its_lock(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder was stopped, say; it does not get on, so nobody waits for it longer than the limit."""
    source = open_source(folder)
    kept = with_pixel_cache(source, min_side=16)
    assert isinstance(kept, CachedPixels)
    monkeypatch.setattr("anechoic.storage.cache.PATIENCE", 0.3)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, f"{kept._folder}.lock"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.warns(RuntimeWarning, match=r"made no progress for 0.3 s"):
            assert with_pixel_cache(source, min_side=16) is source
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


SLOW = """
import itertools, signal, sys, time
from anechoic.data import pixel_cache as cache
from anechoic.data import open_source
from anechoic.data.files import Files
from anechoic.runtime.signals import catch_signals
read, numbers = Files.data, itertools.count(1)
def read_slowly(self, index):
    number = next(numbers)
    print("read", flush=True)
    time.sleep(0.01 if number < 33 else 2)
    return read(self, index)
Files.data = read_slowly
with catch_signals():
    cache.with_pixel_cache(open_source(sys.argv[1]), min_side=16)
"""


@pytest.mark.slow
def test_signal_interrupts_decoding(folder: Path, own_cache: Path) -> None:
    """Images of two seconds each are to come: it does not wait for them, and leaves nothing half made."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(33):  # those of the sample, and the first of the pass
        assert process.stdout.readline() == "read\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 128 + signal.SIGINT
    assert time.monotonic() - started < 24
    process.stdout.close()
    assert not [path for path in (own_cache / "pixels").iterdir() if path.is_dir()]


def test_full_disk_disables_the_pixel_cache_only(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(folder)

    def write_to_full_device(source: Source, entry: OpenEntry, **options: int) -> None:
        (entry.path / "pixels.bin").symlink_to("/dev/full")
        with open(entry.path / "pixels.bin", "wb") as file:
            file.write(b"0" * 100_000)

    monkeypatch.setattr(caching, "_write", write_to_full_device)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert with_pixel_cache(source, min_side=16) is source
    assert not [path for path in (own_cache / "pixels").iterdir() if path.is_dir()]


def test_sets_beyond_the_limit_are_read_from_their_files(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "1000")
    source = open_source(folder)
    assert with_pixel_cache(source, min_side=16) is source
    assert not (own_cache / "pixels").exists()


def test_pixel_cache_keeps_reasons_of_unreadable_images(folder: Path) -> None:
    (folder / "05.bmp").write_bytes(b"")
    (folder / "07.jpg").write_text("<html>not found</html>")
    for _ in range(2):
        source = open_source(folder)
        kept = with_pixel_cache(source, min_side=16)
        assert source.skipped == kept.skipped
        assert [name for name, _ in kept.skipped] == ["05.bmp", "07.jpg"]
        with pytest.raises(BadImage, match="empty"):
            kept.read(5)
        assert torch.equal(kept.read(6), source.read(6))


def test_pixel_cache_retries_temporarily_unreadable_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was away for a while changes neither name, size nor time of a file."""

    def away(path: str, **how: int) -> bytes:
        if path.endswith("05.bmp"):
            raise PermissionError(13, "Permission denied", path)
        return read_regular(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_regular", away)
        with pytest.raises(BadImage, match="Permission denied") as caught:
            with_pixel_cache(open_source(folder), min_side=16).read(5)
        assert not pickle.loads(pickle.dumps(caught.value)).permanent
    source = open_source(folder)
    assert same(with_pixel_cache(source, min_side=16), source, min_side=16)
    assert source.skipped == []


def test_pixel_cache_retries_damaged_images_with_other_decoders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (12, 12)).save(folder / "05.bmp", format="GIF")
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "FORMATS", tuple(name for name in decoding.FORMATS if name != "GIF"))
        kept = with_pixel_cache(open_source(folder), min_side=16)
        assert [name for name, _ in kept.skipped] == ["05.bmp"]
    source = open_source(folder)
    assert same(with_pixel_cache(source, min_side=16), source, min_side=16)


def test_pixel_cache_refuses_more_than_a_tenth_unreadable(folder: Path, own_cache: Path) -> None:
    for k in (0, 3, 6, 9):
        (folder / f"{k:02d}.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"4 of 30 images cannot be read \(the first is '00.png': not an image"):
        with_pixel_cache(open_source(folder), min_side=16)
    assert not list(own_cache.glob("pixels/*/"))


def test_subset_uses_the_cache_of_the_whole(folder: Path, own_cache: Path) -> None:
    source = open_source(folder)
    parts = [with_pixel_cache(Subset(source, indices), min_side=16) for indices in ([3, 1], range(10))]
    assert torch.equal(parts[0].read(1), source.read(1, min_side=16))
    assert len(list((own_cache / "pixels").glob("*/pixels.bin"))) == 1


def test_worker_maps_cached_pixels(folder: Path) -> None:
    kept = with_pixel_cache(open_source(folder), min_side=1000)
    assert isinstance(kept, CachedPixels)
    data = pickle.dumps(kept)
    assert len(data) < kept._pixels.numel() / 10
    assert same(pickle.loads(data), kept, min_side=1000)
    clear()
    again = pickle.loads(data)  # evicted before the worker started
    assert not isinstance(again, CachedPixels)
    assert same(again, kept, min_side=1000)
