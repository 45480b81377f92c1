"""Effective rank, echo and correlation against closed forms, other routes and laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr
from sklearn.metrics import silhouette_score

from anechoic.errors import UserError
from anechoic.eval.correlation import pearson
from anechoic.eval.metrics.echo import linear_cka, mean_cosine
from anechoic.eval.metrics.rank import effective_rank
from anechoic.eval.metrics.silhouette import silhouette
from anechoic.eval.projections import eigenvector_colors, tsne
from anechoic.eval.tensors import doubled, exact_device


def centered_with_spectrum(energies, n, center, seed=0):
    """(n, n) features whose covariance has these eigenvalues: singular vectors orthogonal to the ones vector."""
    rng = np.random.default_rng(seed)
    vectors = []
    for _ in range(2):
        basis = np.concatenate([np.ones((n, 1)), rng.standard_normal((n, len(energies)))], axis=1)
        vectors.append(np.linalg.qr(basis)[0][:, 1:])
    left, right = vectors
    return left @ np.diag(np.sqrt(energies)) @ right.T


@pytest.mark.parametrize("center", ["columns", "rows"])
@pytest.mark.parametrize("rank", [1, 2, 7])
def test_flat_spectrum_of_size_r_has_rank_r(center, rank):
    found = effective_rank(centered_with_spectrum([3.0] * rank, 20, center), center=center)
    assert found.entropy == pytest.approx(math.log(rank), abs=1e-9)
    assert found.rank == pytest.approx(rank)


@pytest.mark.parametrize("center", ["columns", "rows"])
def test_any_spectrum_has_its_entropy(center):
    energies = np.array([5.0, 2.0, 1.0, 0.1])
    p = energies / energies.sum()
    found = effective_rank(centered_with_spectrum(energies, 12, center), center=center)
    assert found.entropy == pytest.approx(-(p * np.log(p)).sum())


def entropy_of(matrix):
    energies = np.clip(np.linalg.eigvalsh(matrix), 0, None)
    p = energies[energies > 0] / energies.sum()
    return -(p * np.log(p)).sum()


@pytest.mark.parametrize("shape", [(40, 9), (9, 40), (15, 15)])
def test_sample_and_channel_routes_are_equal(shape):
    """The paper's n x n matrix of covariances between samples, the d x d covariance, and the singular values."""
    z = np.random.default_rng(1).standard_normal(shape) + 0.5
    literal = np.cov(z)  # every row's own mean removed, divided by d - 1
    assert effective_rank(z, center="rows").entropy == pytest.approx(entropy_of(literal))
    by_channel = np.cov(z, rowvar=False)
    centered = z - z.mean(0)
    assert effective_rank(z).entropy == pytest.approx(entropy_of(by_channel))
    assert effective_rank(z).entropy == pytest.approx(entropy_of(centered @ centered.T))


matrices = st.tuples(st.integers(3, 20), st.integers(2, 12), st.integers(0, 10**6))


@given(matrices, st.floats(1e-6, 1e6))
@settings(max_examples=60, deadline=None)
def test_scale_changes_nothing_rotation_nothing_with_centered_columns(shape, scale):
    n, d, seed = shape
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, d)) + rng.standard_normal(d)
    rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
    for center in ("columns", "rows"):
        plain = effective_rank(z, center=center)
        assert effective_rank(scale * z, center=center).entropy == pytest.approx(plain.entropy, abs=1e-8)
        # A single direction has rank 1 up to rounding.
        assert 1 - 1e-9 <= plain.rank <= min(n, d) + 1e-9
    assert effective_rank(z @ rotation).entropy == pytest.approx(effective_rank(z).entropy, abs=1e-8)
    assert effective_rank(z + rng.standard_normal(d)).entropy == pytest.approx(effective_rank(z).entropy, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("center", ["columns", "rows"])
def test_constant_features_have_rank_zero_and_no_nan(dtype, center):
    for value in (0.0, 0.1, -3e4):
        assert effective_rank(torch.full((50, 8), value, dtype=dtype), center=center) == (0.0, 0.0)
    rows = torch.linspace(0, 1, 8, dtype=dtype).expand(50, 8)
    assert effective_rank(rows) == (0.0, 0.0)
    assert effective_rank(rows, center="rows").rank == pytest.approx(1)


def test_integers_count_as_numbers():
    assert effective_rank(np.array([[0, 1], [1, 0], [2, 2]])).rank > 1


@pytest.mark.parametrize(
    ("features", "message"),
    [(np.array([[1.0, math.nan]]), "NaN"), (np.zeros(3), "non-empty matrix"), (np.zeros((0, 3)), "non-empty matrix")],
)
def test_bad_features_are_one_clear_sentence(features, message):
    with pytest.raises(UserError, match=message):
        effective_rank(features)
    with pytest.raises(UserError, match="center"):
        effective_rank(np.ones((2, 2)), center="both")


# ---- echo


@pytest.mark.parametrize("n", [5, 60])
def test_cka_is_the_ratio_of_gram_matrices(n):
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((n, 7)), rng.standard_normal((n, 11))
    centering = np.eye(n) - 1 / n
    k, l = centering @ a @ a.T @ centering, centering @ b @ b.T @ centering  # noqa: E741
    assert linear_cka(a, b) == pytest.approx((k * l).sum() / np.linalg.norm(k) / np.linalg.norm(l))
    rotation = np.linalg.qr(rng.standard_normal((7, 7)))[0]
    assert linear_cka(a, 3 * a @ rotation + 1) == pytest.approx(1)
    assert linear_cka(a, np.ones((n, 2))) == 0


def test_cosine_is_the_mean_over_rows():
    a, b = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]), np.array([[2.0, 2.0], [-3.0, -4.0], [1.0, 0.0]])
    assert mean_cosine(a, b) == pytest.approx((math.sqrt(0.5) - 1 + 0) / 3)


# ---- correlation


def test_pearson_and_its_interval_are_scipy_s():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(30)
    y = 0.6 * x + rng.standard_normal(30)
    peer = pearsonr(x, y)
    interval = peer.confidence_interval(0.95)
    assert pearson(x, y) == pytest.approx((peer.statistic, interval.low, interval.high))


def test_pearson_at_its_limits():
    assert pearson([1, 2, 3, 4, 5], [2, 4, 6, 8, 10]) == pytest.approx((1, 1, 1))
    assert pearson([1, 2, 3, 4], [4, 3, 2, 1]).r == pytest.approx(-1)
    three = pearson([1, 2, 3], [1, 3, 2])
    assert three.r == pytest.approx(0.5)
    assert math.isnan(three.low)
    assert math.isnan(pearson([1, 1, 1], [1, 2, 3]).r)
    with pytest.raises(UserError, match="same length"):
        pearson([1, 2], [1, 2, 3])


# ---- classes, maps


def test_silhouette_is_scikit_learn_s_on_unit_vectors():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    z = rng.standard_normal((60, 5)) + 2 * np.eye(3, 5)[labels]
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    assert silhouette(z, labels) == pytest.approx(silhouette_score(unit, labels))
    assert math.isnan(silhouette(z, np.zeros(60)))
    assert math.isnan(silhouette(z[:3], np.arange(3)))


def test_tsne_keeps_clusters_apart_and_repeats():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 20)
    z = rng.standard_normal((40, 6)) + 20 * labels[:, None]
    points = tsne(z)
    assert points.shape == (40, 2)
    assert silhouette_score(points, labels) > 0.5
    assert np.array_equal(points, tsne(z))
    with pytest.raises(UserError, match="at least 4"):
        tsne(z[:3])


def test_eigenvector_colors_are_scaled_left_singular_vectors():
    cells = torch.rand(3, 4, 5, 7, generator=torch.Generator().manual_seed(0))
    rgb = eigenvector_colors(cells)
    assert rgb.shape == (3, 4, 5, 3)
    flat = torch.nn.functional.normalize(cells.view(-1, 7).double(), dim=1)
    u = torch.linalg.svd(flat, full_matrices=False).U[:, :3]
    for channel in range(3):
        own = rgb.view(-1, 3)[:, channel].double()
        assert own.min() == 0
        assert own.max() == 1
        correlation = torch.corrcoef(torch.stack([own, u[:, channel]]))[0, 1].abs()
        assert correlation.item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(rgb, eigenvector_colors(cells))
    with pytest.raises(UserError, match="singular vectors 6 to 8"):
        eigenvector_colors(cells, first=6)


def test_what_needs_double_precision_leaves_a_device_without_it():
    assert exact_device(torch.device("mps")) == torch.device("cpu")
    assert exact_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert doubled(torch.ones(2, 3)).dtype == torch.float64


@pytest.mark.parametrize("features", [np.zeros((40, 8)), np.full((40, 8), 0.3), np.full((40, 8), 1e-30)])
def test_tsne_of_equal_vectors_is_one_point(features):
    """scikit-learn's initialization divides by their deviation, and its tree then crashes the process."""
    assert np.array_equal(tsne(features), np.zeros((40, 2)))


def test_tsne_takes_duplicates():
    features = np.ones((40, 8))
    features[0] = 2
    assert np.isfinite(tsne(features)).all()
