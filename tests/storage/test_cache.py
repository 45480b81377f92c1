"""The cache: bounded, evicting by last use, safe beside other processes, and never a source of damaged data."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from anechoic.errors import UserError
from anechoic.storage import cache
from anechoic.storage.cache import cache_dir, clear, entries, evict, has_entry, limit, open_entry

pytestmark = pytest.mark.usefixtures("own_cache")


def key_of(number: int) -> str:
    return f"{number:032x}"


def make(number: int, *, size: int = 1000, kind: str = "features", used: float | None = None) -> Path:
    with open_entry(kind, key_of(number), about=f"number {number}") as entry:
        (entry.path / "data").write_bytes(bytes(size))
        entry.commit(entry.hashes(["data"]), note=number)
    if used is not None:
        os.utime(entry.path / cache.CARD, (used, used))
    return entry.path


def kept() -> list[int]:
    return sorted(int(entry.key, 16) for entry in entries())


def test_entry_is_found_again_with_its_notes() -> None:
    make(1)
    assert has_entry("features", key_of(1))
    with open_entry("features", key_of(1), about="") as entry:
        assert entry.intact(["data", "other"]) == {"data"}
        assert entry.card()["note"] == 1
    (found,) = entries()
    assert (found.kind, found.key, found.about) == ("features", key_of(1), "number 1")
    assert 1000 < found.size < 2000


def test_least_recently_used_entries_are_evicted_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        make(number, used=1000 + number)
    with open_entry("features", key_of(0), about=""):
        pass  # a use
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "3000")
    make(9, kind="pixels")
    assert kept() == [0, 9]
    assert sum(entry.size for entry in entries()) <= limit()


def test_new_entry_beyond_the_limit_stays_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "1KB")
    make(1, size=5000)
    assert kept() == [1]
    make(2, size=5000)
    assert kept() == [2]


def test_mapped_file_of_an_evicted_entry_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_entry("index", key_of(1), about="") as entry:
        np.save(entry.path / "data.npy", np.arange(1000))
        entry.commit(entry.hashes(["data.npy"]))
    mapped = np.load(entry.path / "data.npy", mmap_mode="r")
    assert clear() > 8000
    assert not entry.path.exists()
    if sys.platform != "win32":
        assert mapped.sum() == 499_500


def test_entry_in_making_is_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "0")
    with open_entry("features", key_of(1), about="") as entry:
        (entry.path / "data").write_bytes(b"0")
        evict()
        assert clear() == 0
        assert (entry.path / "data").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "flip card", "cut card", "delete card"])
def test_damaged_entry_is_not_believed(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = make(1)
    file = path / (cache.CARD if damage.endswith("card") else "data")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage.startswith("delete"):
        file.unlink()
    else:
        file.write_bytes(data if damage.startswith("flip") else data[: len(data) // 2])
    with open_entry("features", key_of(1), about="") as entry:
        assert not entry.intact(["data"])
    assert ("is damaged; it is made again" in caplog.text) == (damage in ("flip", "cut"))


def test_files_that_are_no_entries_are_never_deleted(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ANECHOIC_CACHE may be a folder that holds other files."""
    for name in ("pixels/holiday.jpg", "photos/a.jpg", "notes.txt"):
        (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
        (own_cache / name).write_text("mine")
    make(1)
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "0")
    make(2)
    clear()
    assert kept() == []
    assert len(list(own_cache.rglob("*.jpg"))) == 2
    assert (own_cache / "notes.txt").exists()


def test_entries_of_earlier_versions_are_listed_and_evicted(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (f"pixels/{key_of(1)}/pixels.bin", f"contents/{key_of(2)}", f"listings/{key_of(3)}.tar.npz"):
        (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
        (own_cache / name).write_bytes(bytes(10))
        os.utime(own_cache / name, (1, 1))
    assert {(entry.kind, entry.about) for entry in entries()} == {
        (kind, "made by an earlier version") for kind in ("pixels", "contents", "listings")
    }
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "1000")
    make(4)
    assert [entry.kind for entry in entries()] == ["features"]


def test_cache_that_may_not_be_read_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert not has_entry("pixels", "0" * 32)


def test_clear_deletes_one_kind() -> None:
    make(1)
    make(2, kind="index")
    assert clear("index") > 1000
    assert kept() == [1]
    with pytest.raises(UserError, match=r"no kind 'pixel'; choose one of pixels, features"):
        clear("pixel")


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("500MB", 500 << 20), ("1.5 gb", 3 << 29), ("2TiB", 2 << 40)])
def test_limit_is_a_size(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", text)
    assert limit() == size


def test_limit_that_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANECHOIC_CACHE_LIMIT", "much")
    with pytest.raises(UserError, match=r"ANECHOIC_CACHE_LIMIT='much' is not a size; write .*20GB"):
        limit()


def test_cache_dir_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANECHOIC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_dir() == tmp_path / "anechoic"


ADD = """
import sys
from anechoic.storage.cache import open_entry
for _ in range(20):
    with open_entry("features", "a" * 32, about="shared") as entry:
        good = entry.intact(["count"])
        count = int((entry.path / "count").read_text()) if good else 0
        (entry.path / "count").write_text(str(count + 1))
        entry.commit(entry.hashes(["count"]))
"""


def test_processes_that_share_an_entry_take_turns() -> None:
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", ADD]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    with open_entry("features", "a" * 32, about="") as entry:
        assert (entry.path / "count").read_text() == "60"
