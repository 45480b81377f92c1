"""The same pictures through every kind of source, labels where asked for, and a sentence where there are none."""

from __future__ import annotations

import errno
import heapq
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip_a_bit
from PIL import Image

from anechoic.data import Array, BadImage, Scenes, Source, Subset, common_labels, files, open_source
from anechoic.data.archives import expand_braces, without_common_folder
from anechoic.data.files import scan
from anechoic.data.source import Names
from anechoic.errors import UserError
from anechoic.storage.safe_io import OUTSIDE

NAMES = ["cat/a b.png", "cat/é-ü.png", "dog/deep/er/图片.png", "dog/x.png", "dog/y.png"]


def picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "Bilder für alle"
    for number, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number)).save(root / name)
    (root / "cat" / "notes.txt").write_text("not an image")
    (root / "cat" / "._a b.png").write_text("a shadow file")
    return root


def check(source: Source, *, eval_data: bool = True) -> None:
    assert len(source) == 5
    for number in range(5):
        assert torch.equal(source.read(number).permute(1, 2, 0), torch.from_numpy(picture(number)))
    if eval_data:
        assert source.labels is not None
        assert source.labels.tolist() == [0, 0, 1, 1, 1]
        assert source.classes == ("cat", "dog")
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again.read(3), source.read(3))
    assert again.name(3) == source.name(3)


def test_folder(folder: Path) -> None:
    source = open_source(folder, labels=True)
    check(source)
    assert [source.name(k) for k in range(5)] == sorted(NAMES)
    assert open_source(folder).labels is None


def test_links_and_loops_end(folder: Path) -> None:
    (folder / "cat" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "dog" / "self").symlink_to(".", target_is_directory=True)
    (folder / "dog" / "broken.png").symlink_to("nowhere.png")
    check(open_source(folder, labels=True))


def test_links_to_folders_and_files_are_followed(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "linked").symlink_to(folder, target_is_directory=True)
    (other / "z.png").symlink_to(folder / "dog" / "x.png")
    assert len(open_source(other)) == 6


def test_list_of_paths(folder: Path) -> None:
    lines = [f"{name}\t{name.split('/')[0]}" for name in NAMES]
    (folder / "list.txt").write_text("# a comment\n" + "\n".join(lines) + "\n", encoding="utf-8")
    check(open_source(folder / "list.txt", labels=True))
    (folder / "absolute.txt").write_text("\n".join(str(folder / name) for name in NAMES), encoding="utf-8")
    check(open_source(folder / "absolute.txt"), eval_data=False)
    with pytest.raises(UserError, match=r"Line 1 .* has no label"):
        open_source(folder / "absolute.txt", labels=True)
    (folder / "wrong.txt").write_text("cat/none.png\n")
    with pytest.raises(UserError, match=r"none\.png"):
        open_source(folder / "wrong.txt")
    (folder / "none.txt").write_text("\n")
    with pytest.raises(UserError, match="empty"):
        open_source(folder / "none.txt")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("prefix", ["", "data/train/"])
def test_zip(folder: Path, tmp_path: Path, method: int, prefix: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        for path in sorted(folder.rglob("*.*")):
            archive.write(path, prefix + str(path.relative_to(folder)))
        archive.writestr("__MACOSX/cat/a b.png", b"shadow")
    source = open_source(tmp_path / "a.zip", labels=True)
    check(source)
    assert [source.name(k) for k in range(5)] == sorted(NAMES)


def test_zip_with_a_damaged_member_names_it(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_STORED) as archive:
        for name in NAMES:
            archive.write(folder / name, name)
        at = archive.getinfo(NAMES[1]).header_offset + 200
    flip_a_bit(tmp_path / "a.zip", at)
    source = open_source(tmp_path / "a.zip")
    with pytest.raises(BadImage, match="damaged") as caught:
        source.read(1)
    assert caught.value.name == NAMES[1]
    source.read(0)


def test_tar(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder, "./train")
    check(open_source(tmp_path / "a.tar", labels=True))
    with tarfile.open(tmp_path / "b.tar", "w:gz") as archive:
        archive.add(folder, "train")
    with pytest.raises(UserError, match="not a plain tar"):
        open_source(tmp_path / "b.tar")


def test_listing_of_a_long_tar_is_cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder, ".")
    monkeypatch.setattr("anechoic.data.archives.CACHE_LISTINGS_FROM", 1)
    monkeypatch.setattr("anechoic.data.archives.is_settled", lambda stamp, now: stamp.any())
    open_source(tmp_path / "a.tar")
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", None)
        check(open_source(tmp_path / "a.tar", labels=True))


# webdataset leaves its files for the garbage collector to close.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_written_by_webdataset(folder: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    for shard, numbers in enumerate([(0, 1, 2), (3, 4)]):
        with webdataset.TarWriter(str(tmp_path / f"part-{shard:03d}.tar")) as writer:
            for k in numbers:
                kind = 0 if k < 2 else 1
                writer.write({"__key__": f"sample{k}", "png": (folder / NAMES[k]).read_bytes(), "cls": kind})
    source = open_source(str(tmp_path / "part-{000..001}.tar"), labels=True)
    check(source, eval_data=False)
    assert source.labels is not None
    assert source.labels.tolist() == [0, 0, 1, 1, 1]
    assert len(open_source(tmp_path / "part-001.tar", labels=True)) == 2
    with pytest.raises(UserError, match=r"part-002\.tar' does not exist"):
        open_source(str(tmp_path / "part-{000..002}.tar"))
    theirs = webdataset.WebDataset(str(tmp_path / "part-000.tar"), shardshuffle=False, empty_check=False)
    assert [sample["png"] for sample in theirs] == [source.data(k) for k in range(3)]  # type: ignore[attr-defined]


def test_expand_braces() -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{0..1}/{0..1}") == ["0/0", "0/1", "1/0", "1/1"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    assert without_common_folder(["a/b/c.png", "a/b/d.png"]) == ["b/c.png", "b/d.png"]


def table(folder: Path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [str(folder / name) for name in NAMES], "label": [0, 0, 1, 1, 1]}
    return datasets.Dataset.from_dict(rows, features=features)


def test_parquet_and_hub_folders(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(OUTSIDE, "1")  # the tables name files of another folder
    rows = table(folder)
    parquet = tmp_path / "set" / "train.parquet"
    parquet.parent.mkdir()
    rows.to_parquet(parquet, batch_size=2)
    check(open_source(parquet, labels=True))
    check(open_source(parquet.parent, labels=True))
    check(open_source(f"hf:{parquet.parent}", labels=True))
    check(open_source(f"hf:{parquet.parent}:train", labels=True))
    rows.save_to_disk(tmp_path / "saved")
    rows.with_format("numpy", columns=["label"]).save_to_disk(tmp_path / "shown in part")
    check(open_source(f"hf:{tmp_path / 'shown in part'}", labels=True))
    check(open_source(f"hf:{tmp_path / 'saved'}", labels=True))
    check(open_source(tmp_path / "saved", labels=True))
    with pytest.raises(UserError, match="no split 'tset'; it has train"):
        open_source(f"hf:{parquet.parent}:tset")
    with pytest.raises(UserError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nothing'}")


def test_parquet_without_huggingface_metadata(folder: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    data = [(folder / name).read_bytes() for name in NAMES]
    kinds = [name.split("/")[0] for name in NAMES]
    pq.write_table(pa.table({"x": [1.0] * 5, "img": data, "label": kinds}), tmp_path / "a.parquet", row_group_size=2)
    check(open_source(tmp_path / "a.parquet", labels=True))
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="columns x"):
        open_source(tmp_path / "b.parquet")
    pq.write_table(pa.table({"image": data}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match="no column 'label'"):
        open_source(tmp_path / "c.parquet", labels=True)
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:50])
    with pytest.raises(UserError, match="not a complete parquet file"):
        open_source(tmp_path / "d.parquet")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_limit_of_open_files_is_reported(folder: Path, monkeypatch, number: int) -> None:
    """The image is not to blame, and leaving it out would train on less than was asked for."""

    def exhausted(path: str) -> bytes:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(files, "read_regular", exhausted)
    with pytest.raises(UserError, match=r"No more files can be opened .*ulimit -n"):
        open_source(folder).read_many([0])


def test_missing_parquet_is_temporarily_unreadable(folder: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [(folder / name).read_bytes() for name in NAMES]}), file)
    source = open_source(file)
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(BadImage, match="No such file") as caught:
        source.read(0)
    assert not caught.value.permanent
    file.write_bytes((tmp_path / "elsewhere").read_bytes()[:50])
    with pytest.raises(BadImage, match="not a complete parquet file") as caught:
        source.read(0)
    assert caught.value.permanent


def test_array_with_an_upper_case_suffix_is_mapped(tmp_path: Path) -> None:
    images = np.zeros((3, 4, 4, 3), np.uint8)
    np.save(tmp_path / "a.npy", images)
    (tmp_path / "a.npy").rename(tmp_path / "A.NPY")
    assert len(open_source(tmp_path / "A.NPY")) == 3


def test_arrays(tmp_path: Path) -> None:
    images = np.stack([picture(k) for k in range(5)])
    labels = np.array([0, 0, 1, 1, 1])
    np.savez(tmp_path / "a.npz", images=images, labels=labels, classes=np.array(["cat", "dog"]))
    check(open_source(tmp_path / "a.npz", labels=True))
    np.save(tmp_path / "a.npy", images)
    check(open_source(tmp_path / "a.npy"), eval_data=False)
    np.save(tmp_path / "f.npy", images.astype(np.float32) / 255)
    check(open_source(tmp_path / "f.npy"), eval_data=False)
    np.save(tmp_path / "w.npy", images.astype(np.uint16) * 257)
    check(open_source(tmp_path / "w.npy"), eval_data=False)
    np.save(tmp_path / "i.npy", images.astype(np.int64))
    check(open_source(tmp_path / "i.npy"), eval_data=False)
    np.save(tmp_path / "gray.npy", images[..., 0])
    gray = open_source(tmp_path / "gray.npy").read(2)
    assert gray.shape == (3, 9, 12)
    assert (gray == gray[:1]).all()
    np.save(tmp_path / "many.npy", np.zeros((4, 8, 8, 13), np.uint8))
    assert open_source(tmp_path / "many.npy", channels=13).read(0).shape == (13, 8, 8)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros((4, 8, 8, 13), np.uint8), "13 channels and 3 are wanted; ask for channels=13"),
        (np.zeros((4, 3, 8, 8), np.uint8), "channels first"),
        (np.full((4, 8, 8, 3), 2.0), "from 2 to 2"),
        (np.full((4, 8, 8, 3), np.nan), "from nan to nan"),
        (np.full((4, 8, 8, 3), 300), "from 300 to 300"),
        (np.zeros((8, 8), np.uint8), r"shape \(8, 8\)"),
        (np.zeros((0, 8, 8), np.uint8), r"shape \(0, 8, 8, 1\)"),
        (np.zeros((2, 8, 8), complex), "not pixels"),
    ],
)
def test_arrays_that_are_not_images(array: np.ndarray, sentence: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=sentence):
        open_source(tmp_path / "a.npy")


def test_arrays_without_or_with_wrong_labels(tmp_path: Path) -> None:
    images = np.zeros((3, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", images=images)
    with pytest.raises(UserError, match="no array 'labels'"):
        open_source(tmp_path / "a.npz", labels=True)
    np.savez(tmp_path / "b.npz", images=images, labels=np.array([1, 2]))
    with pytest.raises(UserError, match="3 images but 2 labels"):
        open_source(tmp_path / "b.npz", labels=True)
    np.savez(tmp_path / "c.npz", a=images, b=images)
    with pytest.raises(UserError, match="arrays a, b"):
        open_source(tmp_path / "c.npz")
    np.save(tmp_path / "a.npy", images)
    with pytest.raises(UserError, match="no labels"):
        open_source(tmp_path / "a.npy", labels=True)
    (tmp_path / "d.npz").write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a complete NumPy file"):
        open_source(tmp_path / "d.npz")


def test_open_source_takes_one_image_and_a_source(folder: Path) -> None:
    source = open_source(folder / "dog" / "x.png")
    assert len(source) == 1
    assert source.name(0) == "x.png"
    assert open_source(source) is source


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digts", "did you mean digits"),
        ("scene:train", "did you mean scenes"),
        ("digits:valid", "digits:train or digits:test"),
        ("scenes:train:many", "scenes:train:20000"),
        ("scenes:0", "scenes:train:20000"),
        ("/no/such/place", "give an existing folder or file"),
    ],
)
def test_wrong_name_has_the_nearest_remedy(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        open_source(name)


def test_wrong_paths(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean .*Bilder für alle"):
        open_source(tmp_path / "Bilder fuer alle")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no image that is read here \(JPEG, PNG"):
        open_source(tmp_path / "empty")
    (tmp_path / "texts").mkdir()
    for k in range(3):
        (tmp_path / "texts" / f"{k}.txt").write_text("words")
    with pytest.raises(UserError, match="no image that is read here"):
        open_source(tmp_path / "texts")
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(UserError, match="not a kind of data set"):
        open_source(tmp_path / "a.xyz")
    shutil.copy(folder / "dog" / "x.png", folder / "loose.png")
    with pytest.raises(UserError, match=r"'loose\.png' .* is in none"):
        open_source(folder, labels=True)
    with pytest.raises(UserError, match="1 to 4 channels"):
        open_source(folder, channels=7)
    (tmp_path / "bad.zip").write_bytes(b"PK nothing")
    with pytest.raises(UserError, match="not a complete zip"):
        open_source(tmp_path / "bad.zip")


@pytest.mark.parametrize(
    ("module", "extra", "name"), [("pyarrow", "parquet", "a.parquet"), ("datasets", "hub", "hf:x")]
)
def test_missing_package_names_its_extra(
    module: str, extra: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UserError, match=rf"anechoic\[{extra}\]"):
        open_source(name)


def test_names_hold_any_bytes() -> None:
    names = ["", "a", "é", "图", os.fsdecode(b"\xff\xfe")]
    packed = Names.of(names)
    assert list(packed) == names
    assert packed[-1] == names[-1]
    assert packed[1:3] == names[1:3]
    with pytest.raises(IndexError):
        packed[5]


def test_subset_and_common_labels() -> None:
    images = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    whole = Array(images, labels=np.array([0, 1, 2, 1, 0]), classes=("a", "b", "c"))
    part = Subset(whole, [4, 1])
    assert [int(part.read(k)[0, 0, 0]) for k in range(2)] == [4, 1]
    assert part.labels is not None
    assert part.labels.tolist() == [0, 1]
    assert part.name(0) == whole.name(4)
    assert part.fingerprint != Subset(whole, [1, 4]).fingerprint
    other = Array(images[:2], labels=np.array([0, 1]), classes=("c", "z"))
    first, second, classes = common_labels(whole, other)
    assert classes == ("a", "b", "c", "z")
    assert first.tolist() == [0, 1, 2, 1, 0]
    assert second.tolist() == [2, 3]
    with pytest.raises(UserError, match="needs labels"):
        common_labels(whole, Scenes(3, labels=False))


def test_cifar_parquet(shared_data: Path) -> None:
    source = open_source(shared_data / "cifar100" / "test.parquet", labels=True)
    assert len(source) == 10_000
    assert source.labels is not None
    assert np.bincount(source.labels).tolist() == [100] * 100
    assert source.classes is not None
    assert source.classes[0] == "apple"
    assert source.read(9_999).shape == (3, 32, 32)


def test_imagenette_folder(shared_data: Path) -> None:
    source = open_source(shared_data / "imagenette" / "val", labels=True)
    assert len(source) == 500
    assert source.classes is not None
    assert len(source.classes) == 10
    assert source.read(0).shape == (3, 224, 224)


def test_folders_are_entered_in_the_order_of_their_names(tmp_path: Path) -> None:
    """The smallest name of all that wait, however deep: of links to one folder the same one is entered every time."""
    for name in ("b", "a/c", "a-b/x", "a/b/y", "a/c/d", "B/z", "a b/c", "c/" + "d/" * 5):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / name / "1.png")
        (tmp_path / name / "2.png").symlink_to("1.png")
    for link, target in (("a/again", "../b"), ("c/up", ".."), ("0", "c"), ("a/b/0", "../../B"), ("z", "a/c")):
        (tmp_path / link).symlink_to(target, target_is_directory=True)
    expected: list[str] = []
    waiting, entered = [""], set()
    while waiting:
        waiting.sort(reverse=True)
        folder = waiting.pop()
        place = os.stat(tmp_path / folder)
        if place.st_ino not in entered:
            entered.add(place.st_ino)
            expected.append(folder)
            below = [entry.name for entry in os.scandir(tmp_path / folder) if entry.is_dir()]
            waiting += [f"{folder}/{name}" if folder else name for name in below]
    found = scan(tmp_path)
    assert list(found.folders) == expected
    images = [f"{folder}/{name}" for folder in expected for name in ("1.png", "2.png")]
    assert list(found.names) == sorted(name for name in images if (tmp_path / name).exists())


def test_many_folders_are_listed_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting folders are kept in a heap, not sorted again for every folder."""
    for k in range(300):
        (tmp_path / f"{k:03d}").mkdir()
    compared = []

    class Counting(str):
        __slots__ = ()

        def __lt__(self, other: str) -> bool:
            compared.append(1)
            return str.__lt__(self, other)

    push = heapq.heappush
    monkeypatch.setattr(files.heapq, "heappush", lambda waiting, name: push(waiting, Counting(name)))
    assert len(scan(tmp_path).folders) == 301
    assert len(compared) < 300 * 30
