"""Shards: written once, read in any order here and by URL, the same samples as from the folder they came from."""

from __future__ import annotations

import json
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip_a_bit
from PIL import Image

from anechoic.cli.main import main
from anechoic.data import BadImage, Loader, archives, open_source
from anechoic.data.shards import INDEX, write_shards
from anechoic.errors import UserError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of two classes in four formats."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for k in range(40):
        folder = root / ("cats", "dogs")[k % 2]
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (20 + k % 5, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{k:02d}{('.jpg', '.png', '.webp', '.bmp')[k % 4]}")
    return root


@pytest.fixture(scope="module")
def shards(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    assert write_shards(open_source(photos, labels=True), out, shard_bytes=1 << 16).shards > 1
    return out


@pytest.fixture
def url(shards: Path) -> str:
    """The same shards on fsspec's file system in memory."""
    import fsspec

    system = fsspec.filesystem("memory")
    for path in shards.iterdir():
        system.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    return "memory://bucket"


def everything(source) -> list:
    return [(source.name(k), *source.read(k).flatten().tolist()) for k in range(len(source))]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at this process's maps")
def test_few_of_many_shards_stay_open(photos: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MAPS", 1)
    expected, source = everything(open_source(photos)), open_source(shards)
    assert len(source.archives) > 1
    assert everything(pickle.loads(pickle.dumps(source))) == everything(source) == expected
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if str(shards) in line}) == 1
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: source.read(k % len(source)), range(20 * len(source))))
    assert all(torch.equal(image, source.read(k % len(source))) for k, image in enumerate(found))


def test_shards_hold_the_images_names_and_labels_of_their_source(photos: Path, shards: Path) -> None:
    before, after = open_source(photos, labels=True), open_source(shards, labels=True)
    assert everything(after) == everything(before)
    assert after.classes == before.classes == ("cats", "dogs")
    assert np.array_equal(after.labels, before.labels)


def test_shards_without_index_are_plain_webdataset(photos: Path, shards: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.tar"))
    for name in names:
        (tmp_path / name).write_bytes((shards / name).read_bytes())
    bare = open_source(tmp_path / f"shard-{{000000..{len(names) - 1:06d}}}.tar", labels=True)
    whole = open_source(photos, labels=True)
    assert np.array_equal(bare.labels, whole.labels)
    assert all(torch.equal(bare.read(k), whole.read(k)) for k in range(40))


def test_equal_images_make_equal_shards(photos: Path, shards: Path, tmp_path: Path) -> None:
    write_shards(open_source(photos, labels=True), tmp_path / "again", shard_bytes=1 << 16)
    for path in shards.iterdir():
        if path.suffix == ".tar":
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert open_source(tmp_path / "again").fingerprint == open_source(shards).fingerprint


def test_shards_by_url_are_the_same_samples(shards: Path, url: str) -> None:
    here = open_source(shards, labels=True)
    count = len(list(shards.glob("*.tar")))
    for where in (url, f"{url}/shard-{{000000..{count - 1:06d}}}.tar"):
        there = open_source(where, labels=True)
        assert np.array_equal(there.labels, here.labels)
        assert all(torch.equal(a, here.read(k)) for k, a in enumerate(there.read_many(range(40))))
        assert torch.equal(there.read(7), here.read(7))
    assert open_source(url).fingerprint == open_source(shards).fingerprint


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_shards_resumes_at_the_exact_sample(photos: Path, shards: Path, url: str, workers: int) -> None:
    """Sample ids and pixels from any start, with workers or without, are those of the folder."""

    def batches(where: Path | str, start: int, count: int, workers: int = 0) -> list:
        loader = Loader(
            open_source(where),
            image_size=16,
            batch_size=8,
            shuffle=True,
            seed=3,
            start=start,
            workers=workers,
            cache=False,
        )
        return [batch for batch, _ in zip(loader, range(count), strict=False)]

    whole = batches(photos, 0, 12)
    # Forked workers see what this process has in memory, so the URL works for them too.
    for where in (shards, url):
        rest = batches(where, 8 * 5, 7, workers)
        assert [batch.ids.tolist() for batch in rest] == [batch.ids.tolist() for batch in whole[5:]]
        assert all(torch.equal(a.images, b.images) for a, b in zip(rest, whole[5:], strict=True))


def test_damage_in_a_shard_is_noticed(shards: Path, tmp_path: Path) -> None:
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = tmp_path / "shard-000000.tar"
    flip_a_bit(first, int(open_source(tmp_path).members[0]["start"]) + 40)
    (bad, *good) = open_source(tmp_path).read_many(range(3))
    assert str(bad.reason) == "the archive is damaged here"
    assert all(isinstance(image, torch.Tensor) for image in good)
    first.write_bytes(first.read_bytes()[:-512])
    with pytest.raises(UserError, match="bytes its index promises"):
        open_source(tmp_path)


@pytest.mark.parametrize("change", ["archive", "start", "length", "ends", "labels", "shards"])
def test_a_damaged_index_is_refused(change: str, shards: Path, tmp_path: Path) -> None:
    with np.load(shards / INDEX) as loaded:
        arrays = {name: loaded[name] for name in loaded.files}
    if change in ("archive", "start", "length"):
        arrays["members"][change][3] = 2**30
    elif change == "shards":
        arrays["shards"] = np.array(["../../etc/passwd", *arrays["shards"][1:]])
    else:
        arrays[change] = arrays[change][:-1]
    np.savez(tmp_path / INDEX, **arrays)
    with pytest.raises(UserError, match=r"index of the shards .* is damaged"):
        open_source(tmp_path, labels=True)


@pytest.mark.slow
def test_two_writers_of_the_same_shards_do_not_conflict(photos: Path, tmp_path: Path) -> None:
    """Each writes aside under a name of its own."""
    out, seen = tmp_path / "out", []

    def begun(count: int) -> None:
        if not seen:
            seen.append(count)
            write_shards(open_source(photos), tmp_path / "other" / "out")
            (tmp_path / "other" / "out").rename(tmp_path / "first")
            write_shards(open_source(photos), out)

    write_shards(open_source(photos), out, progress=begun)
    names = [path.name for path in out.iterdir()]
    assert all((out / name).read_bytes() == (tmp_path / "first" / name).read_bytes() for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "other", "out"]


def test_shards_skip_and_list_unreadable_images(photos: Path, tmp_path: Path, capsys) -> None:
    root = tmp_path / "photos"
    for path in photos.rglob("*.*"):
        target = root / path.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (root / "cats" / "00.jpg").write_bytes(b"no image")
    assert main(["tools", "shard", str(root), "-o", str(tmp_path / "out"), "--labels", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["images"] == 39
    assert [item["name"] for item in metrics["skipped"]] == ["cats/00.jpg"]
    assert len(open_source(tmp_path / "out", labels=True).labels) == 39


def test_arrays_become_png(tmp_path: Path, capsys) -> None:
    assert main(["tools", "shard", "digits:test", "-o", str(tmp_path / "out"), "--labels", "--channels", "1"]) == 0
    before, after = (
        open_source("digits:test", labels=True, channels=1),
        open_source(tmp_path / "out", labels=True, channels=1),
    )
    assert all(torch.equal(before.read(k), after.read(k)) for k in range(len(before)))
    assert np.array_equal(before.labels, after.labels)
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as archive:
        assert archive.getnames()[:2] == ["000000000.png", "000000000.cls"]


def test_refused_shards_leave_no_files(photos: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "there").mkdir()
    assert main(["tools", "shard", str(photos), "-o", str(tmp_path / "there")]) == 2
    assert main(["tools", "shard", str(photos), "-o", str(tmp_path / "new"), "--shard-bytes", "10"]) == 2
    assert main(["tools", "shard", str(photos), "-o", str(tmp_path / "new"), "--labels"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there"]
    write_shards(open_source(photos), tmp_path / "bare")
    with pytest.raises(UserError, match="have no labels"):
        open_source(tmp_path / "bare", labels=True)
    with pytest.raises(UserError, match=r"no index\.npz"):
        open_source("memory://nothing/here")
    with pytest.raises(UserError, match="cannot be reached"):
        open_source("gopher://old/shard.tar")


def test_pattern_of_millions_of_shards_is_refused() -> None:
    with pytest.raises(UserError, match="names 3,000,001 shards"):
        open_source("shard-{0..3000000}.tar")


def test_image_of_an_unreachable_server_is_temporarily_unreadable(url: str, shards: Path) -> None:
    import fsspec

    source = open_source(url)
    system, name = fsspec.filesystem("memory"), "/bucket/shard-000000.tar"
    system.rm_file(name)
    (away,) = source.read_many([0])
    content = bytearray((shards / "shard-000000.tar").read_bytes())
    content[int(source.members[0]["start"]) + 20] ^= 1
    system.pipe_file(name, bytes(content))
    (damaged,) = source.read_many([0])
    assert [(type(bad), bad.permanent) for bad in (away, damaged)] == [(BadImage, False), (BadImage, True)]
    with pytest.raises(BadImage) as caught:
        source.read(0)
    assert caught.value.permanent
