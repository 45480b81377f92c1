"""Digits against scikit-learn; scenes: deterministic, balanced, opaque to pixel comparison, masks that fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from anechoic.data import Scenes, open_source
from anechoic.data.embedded import KINDS, draw_scenes
from anechoic.errors import UserError


def test_digits_are_scikit_learns() -> None:
    source = open_source("digits", labels=True, channels=1)
    bunch = load_digits()
    pixels = torch.stack([source.read(k) for k in range(len(source))])[:, 0]
    assert np.array_equal((pixels.double() * 16 / 255).round().numpy(), bunch.images)
    assert source.labels is not None
    assert np.array_equal(source.labels, bunch.target)


def test_digits_split_is_disjoint_and_complete() -> None:
    parts = [open_source(f"digits:{split}", labels=True) for split in ("train", "test")]
    whole = open_source("digits", labels=True)
    assert len(parts[0]) + len(parts[1]) == len(whole) == 1797
    assert len(parts[1]) == 355
    merged = sorted(part.read(k).numpy().tobytes() for part in parts for k in range(len(part)))
    assert merged == sorted(whole.read(k).numpy().tobytes() for k in range(len(whole)))
    assert all(np.bincount(part.labels).min() > 0.095 * len(part) for part in parts)
    assert len({part.fingerprint for part in (*parts, whole)}) == 3


@settings(max_examples=15, deadline=None)
@given(
    indices=st.lists(st.integers(0, 10_000), min_size=1, max_size=9),
    size=st.sampled_from([16, 31, 32]),
    seed=st.integers(0, 2**40),
)
def test_scene_is_a_function_of_seed_number_and_size(indices: list[int], size: int, seed: int) -> None:
    together = Scenes(10_001, size=size, seed=seed).read_many(indices)
    for index, image in zip(indices, together, strict=True):
        assert torch.equal(image, Scenes(index + 1, size=size, seed=seed).read(index))


def test_scenes_read_many_equals_read() -> None:
    source = Scenes(200, size=16)
    assert all(torch.equal(image, source.read(k)) for k, image in enumerate(source.read_many(range(200))))


def test_splits_and_seeds_differ_and_names_count() -> None:
    train, test, other = open_source("scenes:train:50"), open_source("scenes:test:50"), open_source("scenes:50", seed=1)
    assert len({source.read(7).numpy().tobytes() for source in (train, test, other)}) == 3
    assert len({source.fingerprint for source in (train, test, other)}) == 3
    assert len(open_source("scenes")) == 10_000
    assert len(open_source("scenes:test")) == 2_000
    assert torch.equal(open_source("scenes:20").read(3), train.read(3))


def test_kinds_are_balanced_and_masks_show_them() -> None:
    source = open_source("scenes:100", labels=True, size=32)
    assert isinstance(source, Scenes)
    assert source.labels is not None
    assert np.bincount(source.labels).tolist() == [10] * 10
    assert source.classes == KINDS
    for k in range(40):
        mask = source.mask(k)
        assert set(mask.unique().tolist()) == {0, int(source.labels[k]) + 1}
        assert 0.01 < (mask > 0).float().mean() < 0.6


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_name_the_shape_that_is_shown(split: str) -> None:
    """The middle of a disc or square is covered, that of a ring or of two dots is not; a bar is long, a disc round."""
    source = open_source(f"scenes:{split}:200", labels=True, size=64)
    assert isinstance(source, Scenes)
    assert source.labels is not None
    for k in range(200):
        kind, mask = KINDS[source.labels[k]], source.mask(k) > 0
        assert source.name(k).endswith(kind)
        places = mask.nonzero().double()
        if mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any():
            continue  # cut by the edge, its middle is not the shape's
        row, column = places.mean(0).round().long().tolist()
        if kind in ("disc", "square", "triangle", "cross", "star", "bar", "half"):
            assert mask[row, column]
        if kind in ("ring", "dots"):
            assert not mask[row, column]
        short, long = torch.linalg.eigvalsh(torch.cov(places.T)).sqrt().tolist()
        assert (long > 1.8 * short) == (kind in ("bar", "dots")) or kind in ("crescent", "half")


def test_masks_cut_out_the_shape() -> None:
    """The colors inside and outside of the mask differ more than those of a mask moved elsewhere."""
    source = Scenes(60, size=32)
    for k in range(60):
        image, mask = source.read(k).float(), source.mask(k) > 0
        contrast = (image[:, mask].mean(1) - image[:, ~mask].mean(1)).abs().sum()
        moved = mask.roll((16, 16), (0, 1))
        assert contrast > (image[:, moved].mean(1) - image[:, ~moved].mean(1)).abs().sum()


def test_larger_scene_shows_the_same_shape() -> None:
    ids = torch.arange(20)
    small, large = draw_scenes(ids, size=32, seed=0)[0].float(), draw_scenes(ids, size=128, seed=0)[0].float()
    assert (torch.nn.functional.avg_pool2d(large, 4) - small).abs().mean() < 3


def test_pixel_neighbors_do_not_classify_scenes() -> None:
    parts = [open_source(name, labels=True, size=32) for name in ("scenes:train:2000", "scenes:test:500")]
    train, test = (torch.stack(part.read_many(range(len(part)))).flatten(1).numpy() / 255 for part in parts)  # type: ignore[arg-type]
    for neighbors in (1, 20):
        classifier = KNeighborsClassifier(neighbors, algorithm="brute").fit(train, parts[0].labels)
        assert classifier.score(test, parts[1].labels) < 0.2


def test_gray_scenes_and_wrong_requests() -> None:
    assert open_source("scenes:3", channels=1, size=16).read(0).shape == (1, 16, 16)
    with pytest.raises(UserError, match="1 or 3 channels"):
        open_source("scenes:3", channels=4)
    with pytest.raises(UserError, match="8 or more"):
        open_source("scenes:3", size=4)
