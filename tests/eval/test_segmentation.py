"""Spectral clustering and its scores: closed forms, laws of the matchings, a planted image set, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anechoic.config import PixelConfig
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval import segmentation as segment
from anechoic.eval.segmentation import (
    SIDE,
    SpectralOptions,
    pooled,
    soft_cells,
    spectral_loss,
    spectral_tables,
    symmetric_part,
    token_graph,
)

RGB = Preprocess((0.5,) * 3, (0.5,) * 3, 8, 3)


def dense_graph(tokens, *, neighbors, threshold):
    """The graph by the letter, on dense matrices."""
    per_image = tokens.shape[1]
    x = F.normalize(tokens.flatten(0, 1), dim=1).double()
    n = len(x)
    similarities = x @ x.T
    image = torch.arange(n) // per_image
    same = image[:, None] == image[None]
    w = torch.zeros(n, n, dtype=torch.float64)
    for eligible in (same & ~torch.eye(n, dtype=torch.bool), ~same):
        masked = torch.where(eligible, similarities, 0.0)
        values, where = masked.topk(min(neighbors, n), dim=1)
        w.scatter_add_(1, where, torch.where(values > threshold, values, 0.0))
    w = (w + w.T) / 2
    degree = w.sum(dim=1)
    scale = torch.where(degree > 0, 1 / degree.clamp(min=1e-12) + 1e-6, 0.0)
    return scale[:, None] * w


@pytest.mark.parametrize(("images", "side", "neighbors"), [(1, 3, 4), (3, 4, 5), (4, 3, 50)])
def test_graph_is_the_one_described(images, side, neighbors):
    tokens = torch.randn(images, side * side, 6, generator=torch.Generator().manual_seed(images))
    found = token_graph(tokens, neighbors=neighbors, threshold=0.1).to_dense().double()
    expected = dense_graph(tokens, neighbors=neighbors, threshold=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(symmetric_part(found.float().to_sparse()).to_dense(), (found + found.T).float() / 2)


def test_isolated_tokens_have_an_empty_row():
    tokens = torch.eye(4)[None]  # nobody resembles anybody
    assert torch.equal(token_graph(tokens).to_dense(), torch.zeros(4, 4))


def blocks(sizes):
    """Row-stochastic block-diagonal matrix with one component per size, and the components' indicator columns."""
    member = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    indicators = F.one_hot(member).float()
    a = indicators @ (indicators / indicators.sum(0)).T
    return a, indicators


def test_indicators_of_components_have_loss_zero():
    a, indicators = blocks([3, 5, 2, 7])
    assert spectral_loss(indicators, a).item() == pytest.approx(0, abs=1e-6)
    assert spectral_loss(indicators.roll(1, 0), a).item() > 0.1
    # Two equal columns are both eigenvectors, but they overlap.
    assert spectral_loss(indicators[:, [0, 0]], a).item() == pytest.approx(1, abs=1e-6)


def test_loss_and_gradient_are_the_formula_s():
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(12, 12, generator=generator)
    p = torch.rand(12, 4, generator=generator, requires_grad=True)
    z = p / p.norm(dim=0)
    eigenvalues = torch.stack([z[:, c] @ a @ z[:, c] for c in range(4)])
    overlaps = [w * (z[:, c] @ z[:, d]) ** 2 for w in (2.0,) for c in range(4) for d in range(4) if c != d]
    expected = (2.0 * (eigenvalues - 1)).abs().mean() + torch.stack(overlaps).mean()
    (gradient,) = torch.autograd.grad(expected, p)
    found = spectral_loss(p, (a + a.T) / 2, weight=2.0)
    (own,) = torch.autograd.grad(found, p)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, gradient)


def planted(images=6, side=8, seed=0):
    """Noisy tokens of two kinds, each filling a differently shaped part of every image; labels (N, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    kinds = F.normalize(torch.randn(2, 16, generator=generator), dim=1)
    labels = torch.zeros(images, side, side, dtype=torch.long)
    for i in range(images):
        cut = 2 + i % (side - 3)
        if i % 2:
            labels[i, :cut] = 1
        else:
            labels[i, :, :cut] = 1
    return kinds[labels] + 0.1 * torch.randn(images, side, side, 16, generator=generator), labels


def test_planted_regions_are_recovered():
    tokens, labels = planted()
    tables = spectral_tables(tokens, SpectralOptions(channels=8, epochs=100, batch=6, ema=0.9, seed=1))
    found = segment.cluster(tables, clusters=2)
    truth = labels.repeat_interleave(SIDE // 8, 1).repeat_interleave(SIDE // 8, 2).numpy()
    result = segment.score_maps(found, truth, clusters=2, classes=2, void=255)
    assert result["hungarian"]["miou"] > 0.98
    assert result["greedy"]["accuracy"] >= result["hungarian"]["accuracy"]


def test_tables_are_reproducible_and_only_of_their_seed():
    tokens, _ = planted(images=3, side=4)
    options = SpectralOptions(channels=4, epochs=2, batch=2)
    first, second = spectral_tables(tokens, options), spectral_tables(tokens, options)
    assert torch.equal(first, second)
    assert first.shape == (3, 4, SIDE, SIDE)
    assert soft_cells(first, side=64).shape == (3, 64, 64, 4)
    torch.testing.assert_close(pooled(first, 4).sum(dim=1), torch.ones(3 * 16))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_greedy_pixel_accuracy_is_never_below_hungarian(clusters, classes, seed):
    rng = np.random.default_rng(seed)
    found, labels = rng.integers(0, clusters, (2, 9, 9)), rng.integers(0, classes, (2, 9, 9))
    result = segment.score_maps(found, labels, clusters=clusters, classes=classes, void=255)
    assert result["greedy"]["accuracy"] >= result["hungarian"]["accuracy"]
    assert 0 <= result["hungarian"]["miou"] <= 1


def test_scores_by_hand():
    labels = np.array([[[0, 0, 0, 1, 1, 255, 2, 2]]])
    found = np.array([[[1, 1, 0, 0, 0, 0, 0, 2]]])
    result = segment.score_maps(found, labels, clusters=3, classes=3, void=255)
    # Clusters 0, 1, 2 become classes 1, 0, 2: class 0 has 2 hits of 3, class 1 2 of 4, class 2 1 of 2.
    assert result["hungarian"]["iou"] == pytest.approx([2 / 3, 2 / 4, 1 / 2])
    assert result["hungarian"]["accuracy"] == pytest.approx(5 / 7)
    absent = segment.score_maps(found, labels, clusters=3, classes=4, void=255)
    assert absent["hungarian"]["iou"][3] == 0
    assert absent["hungarian"]["miou"] == pytest.approx((2 / 3 + 2 / 4 + 1 / 2) / 4)


# ---- files


@pytest.fixture
def folder(tmp_path):
    """Three images of 20 x 16 pixels, their masks, split in the middle into labels 1 and 2."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    mask = np.ones((16, 20), dtype=np.uint8)
    mask[:, 10:] = 2
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (16, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"scene {i}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"scene {i}.png")
    return tmp_path


def test_files_beside_images_are_no_images(folder):
    before = segment.find_pairs(folder)
    for name in ("scene 1.txt", "scene 2.zip", "._scene 0.png"):
        (folder / "images" / name).write_text("beside")
        (folder / "masks" / name).write_text("beside")
    assert segment.find_pairs(folder) == before


def test_images_and_masks_are_cropped_alike(folder):
    pairs = segment.find_pairs(folder)
    assert [pair.image.stem for pair in pairs] == ["scene 0", "scene 1", "scene 2"]
    images, labels = segment.read_all(pairs, RGB, mapping=None)
    assert images.shape == (3, 3, 8, 8)
    assert (labels[:, :, :4] == 1).all()
    assert (labels[:, :, 4:] == 2).all()
    exact, _ = segment.read_pair(pairs[0], replace(RGB, image_size=16), mapping=None)
    whole = np.array(Image.open(pairs[0].image)).transpose(2, 0, 1)
    assert np.array_equal(exact.numpy(), whole[:, :, 2:18])


def test_mapping_by_file(folder):
    (folder / "coarse.json").write_text(json.dumps({"1": 26, "2": -1}))
    (folder / "coarse.txt").write_text("1 26\n2 -1\n")
    for name in ("coarse.json", "coarse.txt"):
        table = segment.read_mapping(folder / name, void=255)
        assert (table[1], table[2], table[3]) == (26, 255, 255)


def test_coco_layout_and_list(folder, tmp_path):
    coco = tmp_path / "coco"
    for name, old in (("images/val2017", "images"), ("annotations/val2017", "masks")):
        (coco / name).parent.mkdir(parents=True)
        (folder / old).rename(coco / name)
    (coco / "list.txt").write_text("scene 2.jpg\nscene 0\n")
    found = segment.find_pairs(coco, listed=coco / "list.txt")
    assert [pair.mask.stem for pair in found] == ["scene 2", "scene 0"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "uint32"])
@pytest.mark.parametrize("suffix", [".tif", ".npy"])
def test_stored_images_with_masks_of_any_integer_type(dtype, suffix, tmp_path):
    image = np.random.default_rng(0).integers(0, 65535, (5, 8, 8), dtype=np.uint16)
    mask = np.arange(64).reshape(8, 8).astype(dtype)
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    tifffile.imwrite(tmp_path / "images" / "a.tif", image, photometric="minisblack")
    if suffix == ".npy":
        np.save(tmp_path / "masks" / "a.npy", mask)
    else:
        tifffile.imwrite(tmp_path / "masks" / "a.tif", mask)
    prepare = Preprocess((0.0,) * 5, (1.0,) * 5, 8, 5, PixelConfig(type="uint16"))
    images, labels = segment.read_all(segment.find_pairs(tmp_path), prepare, mapping=None)
    assert np.array_equal(images[0].numpy(), image)
    assert np.array_equal(labels[0], mask)


def test_bad_folders_are_one_clear_sentence(folder):
    with pytest.raises(UserError, match="must hold the folders images and masks"):
        segment.find_pairs(folder / "images")
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(folder / "masks" / "scene 1.png")
    with pytest.raises(UserError, match="same size"):
        segment.read_all(segment.find_pairs(folder), RGB, mapping=None)
    (folder / "masks" / "scene 1.png").unlink()
    with pytest.raises(UserError, match="'scene 1'"):
        segment.find_pairs(folder)
    (folder / "bad.json").write_text("{1")
    with pytest.raises(UserError, match="no mapping"):
        segment.read_mapping(folder / "bad.json", void=255)


def test_more_clusters_than_points_and_unknown_labels():
    with pytest.raises(UserError, match="more than the 1024 cells"):
        segment.cluster(torch.zeros(1, 2, SIDE, SIDE), clusters=2000)
    with pytest.raises(UserError, match="label 7"):
        segment.score_maps(np.zeros((1, 2, 2), int), np.full((1, 2, 2), 7), clusters=2, classes=2, void=255)
    with pytest.raises(UserError, match="void"):
        segment.score_maps(np.zeros((1, 2, 2), int), np.full((1, 2, 2), 255), clusters=2, classes=2, void=255)
