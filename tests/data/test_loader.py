"""The order of samples and the bits of batches: the same for any start, any workers and any number of processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from anechoic.data import Array, Augment, Batch, Loader, Scenes, Subset, loader, open_source
from anechoic.data.loader import min_side_for, permutation
from anechoic.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")


def numbered(count: int) -> Array:
    """Image k is filled with k."""
    images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 6, 6), np.uint8)
    return Array(images, labels=np.arange(count) * 10)


def take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(iter(loader), count))


def equal(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 50),
    skip=st.integers(0, 12),
    seed=st.integers(0, 2**40),
    drop_last=st.booleans(),
)
def test_loader_starts_at_any_sample(count: int, batch: int, skip: int, seed: int, drop_last: bool) -> None:
    if drop_last and batch > count:
        return
    options = {"image_size": 4, "batch_size": batch, "seed": seed, "shuffle": True, "drop_last": drop_last}
    source = numbered(count)
    whole = take(Loader(source, **options), skip + 3)
    assert equal(take(Loader(source, **options, start=skip * batch), 3), whole[skip:])
    epoch = count // batch * batch if drop_last else count
    ids = torch.cat([item.ids for item in whole])[: epoch * ((skip + 3) * batch // epoch)]
    for number, part in enumerate(ids.view(-1, epoch)):
        assert len(part.unique()) == epoch
        assert torch.equal(part, permutation(count, seed=seed, epoch=number)[:epoch])
    visits = torch.cat([item.visits for item in whole])
    assert torch.equal(visits, torch.arange(len(visits)) // epoch)
    assert all(torch.equal(item.labels, item.ids * 10) for item in whole)  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(world=st.sampled_from([1, 2, 3, 4]), share=st.integers(1, 5), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_ranks_split_the_batches_of_one_process(world: int, share: int, shuffle: bool, seed: int) -> None:
    options = {"image_size": 4, "batch_size": world * share, "seed": seed, "shuffle": shuffle}
    source = numbered(23)
    ranks = [take(Loader(source, **options, rank=rank, world_size=world), 5) for rank in range(world)]
    for number, batch in enumerate(take(Loader(source, **options), 5)):
        parts = [rank[number] for rank in ranks if number < len(rank)]
        for field in range(4):
            assert torch.equal(torch.cat([part[field] for part in parts]), batch[field])  # type: ignore[misc]


@pytest.mark.slow
def test_permutations_are_permutations_and_uniform() -> None:
    orders = torch.stack([permutation(5, seed=7, epoch=epoch) for epoch in range(2000)])
    assert all(sorted(order) == list(range(5)) for order in orders.tolist())
    counts = torch.stack([(orders == value).float().mean(0) for value in range(5)])
    assert (counts - 0.2).abs().max() < 0.04
    assert not torch.equal(permutation(50, seed=0, epoch=0), permutation(50, seed=1, epoch=0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for k in range(40):
        path = tmp_path / "images" / ("even" if k % 2 == 0 else "odd") / f"{k:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20 + k, 30, 3), dtype=np.uint8)).save(path)
    return tmp_path / "images"


@pytest.mark.parametrize("cache", [True, False])
def test_workers_and_cache_change_nothing(folder: Path, cache: bool) -> None:
    source = open_source(folder, labels=True)
    options = {"image_size": 16, "batch_size": 12, "shuffle": True, "start": 24}
    plain = take(Loader(source, **options, cache=False), 6)
    assert equal(take(Loader(source, **options, cache=cache, workers=2), 6), plain)
    assert len({batch.images.shape for batch in plain}) == 1


def test_evaluation_passes_once_in_order(folder: Path) -> None:
    source = open_source(folder, labels=True)
    for workers in (0, 2):
        loader = Loader(source, image_size=16, batch_size=12, workers=workers)
        batches = list(loader)
        assert torch.cat([batch.ids for batch in batches]).tolist() == list(range(40))
        assert len(batches) == loader.num_batches == 4
        assert (torch.cat([batch.visits for batch in batches]) == 0).all()
        assert torch.cat([batch.labels for batch in batches]).tolist() == [0] * 20 + [1] * 20  # type: ignore[misc]
    assert [len(batch.ids) for batch in Loader(source, image_size=16, batch_size=12, drop_last=True)] == [12] * 3
    assert len(list(Loader(source, image_size=16, batch_size=12, start=36))) == 1


def test_unlabeled_data_has_no_labels(folder: Path) -> None:
    assert next(iter(Loader(open_source(folder), image_size=16, batch_size=4))).labels is None


def test_visits_change_the_crop_but_not_the_evaluation(folder: Path) -> None:
    source = Subset(open_source(folder), [3])
    batch = next(iter(Loader(source, image_size=16, batch_size=8, shuffle=True)))
    assert batch.visits.tolist() == list(range(8))
    assert len({image.numpy().tobytes() for image in batch.images}) == 8
    fixed = next(iter(Loader(source, image_size=16, batch_size=8, shuffle=True, augment=Augment("center"))))
    assert len({image.numpy().tobytes() for image in fixed.images}) == 1


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_skips_and_lists_unreadable_images(folder: Path, cache: bool, workers: int) -> None:
    whole = (folder / "odd" / "01.png").read_bytes()
    (folder / "even" / "04.png").write_bytes(b"")
    (folder / "even" / "10.png").write_text("words, not pixels")
    (folder / "odd" / "39.png").write_bytes(whole[: len(whole) // 2])
    names = {"even/04.png", "even/10.png", "odd/39.png"}

    source = open_source(folder, labels=True)
    evaluation = Loader(source, image_size=16, batch_size=12, workers=workers, cache=cache)
    ids = torch.cat([batch.ids for batch in evaluation]).tolist()
    assert ids == [k for k in range(40) if k not in (2, 5, 39)]
    assert {name for name, _ in evaluation.skipped} == names
    assert source.skipped == evaluation.skipped

    training = Loader(open_source(folder), image_size=16, batch_size=20, shuffle=True, workers=workers, cache=cache)
    batches = take(training, 4)
    # The next good image stands in, after the last one the first.
    assert Counter(torch.cat([batch.ids for batch in batches]).tolist()) == Counter(
        {k: 4 if k in (3, 6, 0) else 2 for k in range(40) if k not in (2, 5, 39)}
    )
    assert {name for name, _ in training.skipped} == names
    clean = take(Loader(open_source(folder), image_size=16, batch_size=20, shuffle=True, cache=False), 4)
    assert all(torch.equal(a.images, b.images) for a, b in zip(batches, clean, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [True, False])
def test_loader_refuses_too_many_unreadable_images(folder: Path, workers: int, shuffle: bool) -> None:
    for k in range(0, 10, 2):
        (folder / "even" / f"{k:02d}.png").write_bytes(b"")
    with pytest.raises(UserError, match="of 40 images cannot be read") as caught:
        take(
            Loader(open_source(folder), image_size=16, batch_size=10, shuffle=shuffle, workers=workers, cache=False), 8
        )
    assert "\n" not in str(caught.value)


def test_loader_refuses_a_source_of_bad_images(tmp_path: Path) -> None:
    for k in range(15):
        (tmp_path / f"{k}.jpg").write_text("no")
    for cache in (True, False):
        with pytest.raises(UserError, match="cannot be read"):
            take(Loader(open_source(tmp_path), image_size=8, batch_size=4, shuffle=True, cache=cache), 9)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"image_size": 0},
        {"start": -1},
        {"workers": -1},
        {"rank": 2, "world_size": 2},
        {"batch_size": 5, "world_size": 2, "shuffle": True},
        {"batch_size": 50, "shuffle": True, "drop_last": True},
    ],
)
def test_impossible_loaders_are_refused(options: dict) -> None:
    with pytest.raises(UserError):
        Loader(numbered(10), **{"image_size": 4, "batch_size": 4, **options})


def test_reduction_leaves_enough_pixels_for_a_crop_of_a_third() -> None:
    for size in (8, 32, 64, 65, 96, 224, 256, 384):
        assert 1.75 * size <= min_side_for(size) <= max(112, 3.5 * size)
    assert min_side_for(32) == min_side_for(64)


PARENT = """
import sys, time
from anechoic.data import Loader, open_source
for batch in Loader(open_source(sys.argv[1]), image_size=16, batch_size=4, shuffle=True, workers=2):
    import torch.multiprocessing as mp
    print(*(child.pid for child in mp.active_children()), flush=True)
    time.sleep(60)
"""


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_exit_with_a_killed_parent(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
        parent.kill()
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(alive(pid) for pid in workers)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True), ("xpu:1", True), ("mps", False)])
def test_loader_pins_memory_for_gpus(device: str, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pinned memory a `non_blocking` copy to a GPU blocks. There is no GPU here: torch is asked, not tried."""
    asked = []

    def record(*args: Any, pin_memory: bool, **options: Any) -> Any:
        asked.append(pin_memory)
        return DataLoader(*args, **options)

    monkeypatch.setattr(loader, "DataLoader", record)
    batches = list(Loader(Scenes(6, size=8), image_size=8, batch_size=4, cache=False, device=device))
    assert asked == [pinned]
    assert [len(batch.images) for batch in batches] == [4, 2]


def test_pinned_batch_keeps_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's thread does to a batch: every tensor is replaced by its pinned copy, the rest stays."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor + 0)
    (whole,) = Loader(Scenes(4, size=8), image_size=8, batch_size=4, cache=False)
    batch, bad = pin_memory((whole, [("a", "damaged")]))
    assert isinstance(batch, Batch)
    assert all(torch.equal(a, b) for a, b in zip(batch[:3], whole[:3], strict=True))
    assert [tuple(item) for item in bad] == [("a", "damaged")]
