"""k-NN: equal to brute force on random and on tied data, equal to scikit-learn's vote, and clear about bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from anechoic.errors import UserError
from anechoic.eval.metrics import knn


def brute_force(train, labels, queries, *, k, temperature=0.07):
    """(indices, votes) by a full stable sort: among equal similarities the smaller index comes first."""
    train = train / np.linalg.norm(train, axis=1, keepdims=True)
    queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    similarities = queries @ train.T
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    votes = np.zeros((len(queries), labels.max() + 1))
    for q, row in enumerate(order):
        for i in row:
            votes[q, labels[i]] += np.exp(np.float64(similarities[q, i]) / temperature)
    return order, votes


def test_votes_of_a_small_temperature_stay_apart():
    """exp(0.99 / 0.001) is infinite; of two infinite votes the smaller class would win."""
    near = knn.Neighbors(torch.tensor([[0.99, 0.98, 0.97]]), torch.tensor([[2, 0, 1]]))
    votes = knn.vote(near, np.array([0, 1, 2]), k=3, num_classes=3, temperature=0.001)
    assert votes.argmax().item() == 2
    np.testing.assert_allclose(votes.numpy(), np.exp([[-10, -20, 0]]), rtol=1e-3)


def quarters(rng, n, dim):
    """Rows with four entries of ±1/2: unit length, and every similarity an exact multiple of 1/4, so full of ties."""
    rows = np.zeros((n, dim), dtype=np.float32)
    for row in rows:
        row[rng.choice(dim, 4, replace=False)] = rng.choice([-0.5, 0.5], 4)
    return rows


@pytest.fixture(params=["full precision", "sieved"])
def route(request, monkeypatch):
    """Both routes to the neighbors, whatever this CPU would choose; the sieve for small data too."""
    monkeypatch.setattr(knn, "half_is_fast", lambda device: request.param == "sieved")
    monkeypatch.setattr(knn, "TILE", 64)
    monkeypatch.setattr(knn, "BLOCK", 4)
    return request.param


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("n", "k"), [(7, 3), (300, 20), (5000, 20), (5000, 1)])
@pytest.mark.usefixtures("route")
def test_votes_equal_brute_force(tied, n, k):
    rng = np.random.default_rng(n + k)
    make = quarters if tied else lambda rng, n, dim: rng.standard_normal((n, dim)).astype(np.float32)
    train, queries, labels = make(rng, n, 12), make(rng, 40, 12), rng.integers(0, 5, n)
    order, votes = brute_force(train, labels, queries, k=k)
    found = knn.nearest(train, queries, k=k)
    assert np.array_equal(found.indices, order)
    ours = knn.vote(found, labels, k=k, num_classes=labels.max() + 1).numpy()
    np.testing.assert_allclose(ours, votes, rtol=1e-4)
    if tied:
        assert np.array_equal(ours, votes)
        assert np.array_equal(ours.argmax(1), votes.argmax(1))


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_of_train_do_not_change_the_answer(monkeypatch, tied):
    rng = np.random.default_rng(1)
    make = quarters if tied else lambda rng, n, dim: rng.standard_normal((n, dim)).astype(np.float32)
    train, queries = make(rng, 9000, 16), make(rng, 50, 16)
    whole = knn.nearest(train, queries, k=30)
    monkeypatch.setattr(knn, "TRAIN_CHUNK", 2048)
    monkeypatch.setattr(knn, "QUERY_CHUNK", 7)
    parts = knn.nearest(train, queries, k=30)
    assert torch.equal(whole.indices, parts.indices)
    torch.testing.assert_close(whole.similarities, parts.similarities)


def alike(rng, n, dim):
    """Vectors with a large common part: their similarities differ in the third digit only."""
    return (1 + 0.05 * rng.standard_normal((n, dim))).astype(np.float32)


@pytest.mark.parametrize("make", [alike, lambda rng, n, dim: rng.standard_normal((n, dim)).astype(np.float32)])
def test_a_sieve_never_loses_a_neighbor(make, monkeypatch):
    """What it calls certain is right, and it is certain about most queries; the rest is computed in full."""
    rng = np.random.default_rng(0)
    train, queries = make(rng, 20000, 64), make(rng, 300, 64)
    units, unit_queries = (torch.nn.functional.normalize(torch.from_numpy(x), dim=1) for x in (train, queries))
    best, certain = knn.Sieve.of(units).nearest(unit_queries, k=10, table=knn.rough_table(unit_queries, 20000))
    exact = (unit_queries.double() @ units.double().T).topk(10, dim=1)
    assert certain.float().mean() > 0.5
    torch.testing.assert_close(best.similarities[certain].double(), exact.values[certain], rtol=0, atol=1e-6)
    monkeypatch.setattr(knn, "half_is_fast", lambda device: True)
    found = knn.nearest(train, queries, k=10)
    torch.testing.assert_close(found.similarities.double(), exact.values, rtol=0, atol=1e-6)


def test_sieve_is_skipped_for_vectors_that_are_all_alike(monkeypatch):
    monkeypatch.setattr(knn, "half_is_fast", lambda device: True)
    monkeypatch.setattr(knn, "QUERY_CHUNK", 8)
    rng = np.random.default_rng(0)
    train = (1 + 1e-6 * rng.standard_normal((9000, 16))).astype(np.float32)
    found = knn.nearest(train, train[:40], k=5)
    units = torch.nn.functional.normalize(torch.from_numpy(train), dim=1)
    expected = (units[:40] @ units.T).sort(dim=1, descending=True, stable=True).values[:, :5]
    torch.testing.assert_close(found.similarities, expected, rtol=0, atol=1e-6)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_size_equals_brute_force_on_ties(n, k, seed):
    rng = np.random.default_rng(seed)
    train, queries, labels = quarters(rng, n, 6), quarters(rng, 5, 6), rng.integers(0, 3, n)
    k = min(k, n)
    order, votes = brute_force(train, labels, queries, k=k)
    found = knn.nearest(train, queries, k=k)
    assert np.array_equal(found.indices, order)
    assert np.array_equal(knn.vote(found, labels, k=k, num_classes=labels.max() + 1), votes)


def test_equal_votes_go_to_the_smaller_class():
    train = np.eye(4, dtype=np.float32)[[0, 1]]
    query = np.array([[1, 1, 0, 0]], dtype=np.float32)
    for labels in (np.array([2, 1]), np.array([1, 2])):
        found = knn.nearest(train, query, k=2)
        assert knn.vote(found, labels, k=2, num_classes=3).argmax(1).item() == 1


def test_accuracy_is_that_of_scikit_learn_with_the_same_weights():
    rng = np.random.default_rng(3)
    centers = rng.standard_normal((10, 24))
    labels, test_labels = rng.integers(0, 10, 3000), rng.integers(0, 10, 1500)
    train = (centers[labels] + 2.2 * rng.standard_normal((3000, 24))).astype(np.float32)
    test = (centers[test_labels] + 2.2 * rng.standard_normal((1500, 24))).astype(np.float32)
    ours = knn.knn_accuracy(train, labels, test, test_labels, ks=(10, 20, 200))
    for k, accuracy in ours.items():
        # scikit-learn's cosine distance is 1 - similarity.
        peer = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07))
        theirs = peer.fit(train, labels).score(test, test_labels)
        assert 0.3 < theirs < 0.95
        assert abs(accuracy - theirs) <= 1e-4


def test_constant_features_have_an_answer():
    labels = np.array([1, 0, 1, 0])
    accuracy = knn.knn_accuracy(np.ones((4, 3)), labels, np.ones((2, 3)), np.array([0, 1]), ks=(1, 4))
    assert accuracy == {1: 0.5, 4: 0.5}
    assert knn.nearest(np.zeros((4, 3)), np.ones((2, 3)), k=2).indices.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("train", "labels", "test", "message"),
    [
        (np.ones((3, 2)), [0, 1, 0], np.ones((1, 2)), "3 train samples"),
        (np.full((9, 2), np.nan), [0, 1, 0] * 3, np.ones((1, 2)), "NaN"),
        (np.ones((9, 2)), [0, 1, 0] * 3, np.full((1, 2), np.inf), "NaN or infinity"),
        (np.ones((9, 2)), [0] * 9, np.ones((1, 2)), "same label"),
        (np.ones((9, 2)), [0, 1, 0] * 3, np.ones((1, 3)), "one encoder"),
        (np.ones((9, 2)), [0, 1, 0] * 3, np.ones((0, 2)), "non-empty"),
    ],
)
def test_bad_input_is_one_clear_sentence(train, labels, test, message):
    with pytest.raises(UserError, match=message):
        knn.knn_accuracy(train, np.array(labels), test, np.zeros(1, dtype=int), ks=(4,))


def test_the_benchmark_compares_with_faiss(monkeypatch):
    pytest.importorskip("faiss")
    from anechoic_lab.bench import knn as benchmark
    from anechoic_lab.bench.timing import Options

    for name, value in {"TRAIN": 600, "QUERIES": 40, "DIM": 16, "K": 5}.items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(benchmark, "gemm_flops", lambda: 1e12)
    monkeypatch.setattr(benchmark, "peak_memory_mb", lambda work: 1.0)
    rows = benchmark.run(Options(rounds=1))
    assert [row["peer_name"] for row in rows] == ["faiss", "faiss"]
    assert all(row["ratio"] > 0 for row in rows)
