"""Linear probes: equal to scikit-learn and to torch's own training loop; LARS, norms and rates by closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from anechoic.errors import UserError
from anechoic.eval.metrics import probe_heads as probe
from anechoic.eval.metrics.logistic import fit_logistic
from anechoic.eval.metrics.probe_heads import LARS, Setting, in100_lr, in100_probe, logistic_probe, mae_lr, mae_probe


def digits():
    x, y = load_digits(return_X_y=True)
    return ((x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)).astype(np.float32), y


def objective(weight, bias, x, y, regularizer):
    x, weight, bias = (torch.as_tensor(np.asarray(value)).double() for value in (x, weight, bias))
    loss = F.cross_entropy(x @ weight.T + bias, torch.as_tensor(y))
    return (loss + regularizer / 2 * weight.square().sum()).item()


def compare_with_scikit_learn(x, y, regularizers):
    found = fit_logistic(x, y, regularizers=regularizers)
    for i, r in enumerate(regularizers):
        peer = LogisticRegression(C=1 / (len(x) * r), tol=1e-6, max_iter=5000).fit(x, y)
        theirs = objective(peer.coef_, peer.intercept_, x, y, r)
        ours = objective(found.weight[i], found.bias[i], x, y, r)
        assert ours == pytest.approx(found.loss[i].item(), abs=1e-6)
        assert abs(ours - theirs) < 1e-4
        agreement = (found.predict(x)[i].numpy() == peer.predict(x)).mean()
        assert agreement > 0.99


def test_logistic_regression_reaches_scikit_learn_s_loss_on_digits():
    x, y = digits()
    compare_with_scikit_learn(x, y, [1e-5, 1e-3, 1e-1, 10.0])


@pytest.mark.slow
def test_logistic_regression_reaches_scikit_learn_s_loss_on_cifar_features(shared_data):
    from anechoic.data import open_source

    source = open_source(shared_data / "cifar100" / "test.parquet", labels=True)
    images = torch.stack([source.read(i) for i in range(1500)]).float() / 255 - 0.5
    filters = torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    maps = F.adaptive_avg_pool2d(F.conv2d(images, filters).relu(), 2).flatten(1)
    x = ((maps - maps.mean(0)) / maps.std(0)).numpy()
    compare_with_scikit_learn(x, source.labels[:1500], [3e-4, 1e-2])


@pytest.mark.slow
def test_heads_fitted_together_are_those_fitted_alone():
    x, y = digits()
    # They start from different places, so they meet only where both have converged.
    together = fit_logistic(x[:300], y[:300], regularizers=[1e-3, 1e-1], tolerance=1e-9)
    for i, r in enumerate([1e-3, 1e-1]):
        alone = fit_logistic(x[:300], y[:300], regularizers=[r], tolerance=1e-9)
        assert alone.loss.item() == pytest.approx(together.loss[i].item(), abs=1e-6)
        torch.testing.assert_close(alone.weight[0], together.weight[i], rtol=0.05, atol=2e-3)


def test_gradient_at_the_solution_vanishes():
    x, y = digits()
    found = fit_logistic(x, y, regularizers=[1e-2], tolerance=1e-14)  # beyond what float32 can tell: it must still end
    weight, bias = found.weight[0].double().requires_grad_(), found.bias[0].double().requires_grad_()
    loss = F.cross_entropy(torch.from_numpy(x).double() @ weight.T + bias, torch.from_numpy(y))
    loss = loss + 0.5e-2 * weight.square().sum()
    gradients = torch.autograd.grad(loss, (weight, bias))
    assert max(g.abs().max().item() for g in gradients) < 2e-5


def test_the_regularizer_is_chosen_without_test_data():
    x, y = digits()
    found = logistic_probe(x[:800], y[:800], x[800:], y[800:])
    assert found.regularizer == max(found.held_out, key=lambda r: (found.held_out[r], r))
    assert found.accuracy > 0.85
    shuffled = logistic_probe(x[:800], y[:800], x[800:], np.random.default_rng(0).permutation(y[800:]))
    assert shuffled.regularizer == found.regularizer
    assert shuffled.accuracy < 0.3


def test_constant_features_score_as_guessing():
    y = np.arange(100) % 4
    found = logistic_probe(np.full((100, 3), 0.7), y, np.full((40, 3), 0.7), np.arange(40) % 4)
    assert found.accuracy == pytest.approx(0.25)


# ---- published protocols


def test_in100_rates_lag_one_epoch():
    rates = [in100_lr(epoch) for epoch in range(200)]
    assert rates[0] == rates[1] == 1e-2
    for epoch in range(1, 200):
        assert rates[epoch] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / 200)))
    assert rates[199] == pytest.approx(0.5 * 1e-2 * (1 + math.cos(math.pi * 198 / 200)))
    assert rates[199] == pytest.approx(2.5e-6, rel=0.02)


def test_mae_rates():
    assert mae_lr(0) == 0
    assert mae_lr(5) == pytest.approx(3.2)
    assert mae_lr(10) == pytest.approx(6.4)
    assert mae_lr(50) == pytest.approx(3.2)
    assert mae_lr(90) == pytest.approx(0)


def small_problem(seed=0, n=200, dim=6, classes=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return (rng.standard_normal((n, dim)) + 1.5 * np.eye(classes, dim)[y]).astype(np.float32), y


def reference_in100(x, y, *, epochs, batch_size, seed):
    """The protocol in plain torch, one head, drawing its randomness in the same order."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(x.shape[1], int(y.max()) + 1)
    bound = 1 / math.sqrt(x.shape[1])
    with torch.no_grad():
        head.weight.copy_(torch.empty(head.weight.T.shape).uniform_(-bound, bound, generator=generator).T)
        head.bias.uniform_(-bound, bound, generator=generator)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=generator)
        for rows in order.split(batch_size)[: len(y) // batch_size]:
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows]), y[rows]).backward()
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
    return head


def test_in100_is_the_published_loop():
    x, y = small_problem()
    test_x, test_y = small_problem(seed=1)
    head = reference_in100(torch.from_numpy(x), torch.from_numpy(y), epochs=6, batch_size=64, seed=3)
    expected = (head(torch.from_numpy(test_x)).argmax(1).numpy() == test_y).mean()
    found = in100_probe({"f": x}, y, {"f": test_x}, test_y, epochs=6, batch_size=64, seed=3)
    assert found.accuracy["f"] == [pytest.approx(expected)]
    assert list(found.curve) == [0, 5]


def test_heads_of_the_published_loop_do_not_disturb_each_other():
    x, y = small_problem()
    other = np.random.default_rng(5).standard_normal(x.shape).astype(np.float32)
    heads = probe.Heads(2, 6, 3, [Setting(1e-2, 0.0), Setting(1e-3, 0.1)], norm=False)
    heads.initialize(torch.Generator().manual_seed(0), std=None)
    both = torch.stack([torch.from_numpy(x), torch.from_numpy(other)])
    heads.loss(both, torch.from_numpy(y)).backward()
    for h, (weight, bias) in enumerate(zip(heads.weights, heads.biases, strict=True)):
        for f in range(2):
            w, b = weight[f].detach().requires_grad_(), bias[f].detach().requires_grad_()
            F.cross_entropy(both[f] @ w + b, torch.from_numpy(y)).backward()
            torch.testing.assert_close(heads.weights[h].grad[f], w.grad)
            torch.testing.assert_close(heads.biases[h].grad[f], b.grad)


def test_batch_norm_is_torch_s_without_affine_part():
    heads = probe.Heads(2, 5, 3, [Setting(0.1, 0.0)], norm=True)
    heads.initialize(torch.Generator().manual_seed(0), std=0.01)
    x = torch.randn(2, 9, 5)
    peers = [nn.BatchNorm1d(5, affine=False, eps=1e-6, momentum=0.1) for _ in range(2)]
    for _ in range(2):
        logits = heads(x)
        expected = [
            peer(part) @ weight + bias
            for peer, part, weight, bias in zip(peers, x, heads.weights[0], heads.biases[0], strict=True)
        ]
        torch.testing.assert_close(logits[:, :, 0], torch.stack(expected))
    heads.eval()
    torch.testing.assert_close(heads(x)[0, :, 0], peers[0].eval()(x[0]) @ heads.weights[0][0] + heads.biases[0][0])


def test_lars_by_hand():
    weight = nn.Parameter(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]))  # two heads; the second has norm 0
    bias = nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    optimizer = LARS([{"params": [weight, bias]}], lr=2.0)
    weight.grad = torch.tensor([[[0.0, 2.0]], [[1.0, 0.0]]])
    bias.grad = torch.tensor([[0.5, 0.0], [0.0, 0.25]])
    optimizer.step()
    q = 0.001 * 5 / 2
    torch.testing.assert_close(weight.detach(), torch.tensor([[[3.0, 4 - 2 * q * 2]], [[-2.0, 0.0]]]))
    torch.testing.assert_close(bias.detach(), torch.tensor([[0.0, 2.0], [0.0, 0.5]]))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    bias.grad = torch.zeros_like(bias)
    optimizer.step()  # only momentum moves on: 0.9 of the last step
    torch.testing.assert_close(weight.detach() - before, torch.tensor([[[0.0, -2 * 0.9 * q * 2]], [[-1.8, 0.0]]]))


def test_mae_probe_learns_and_reports_last_and_best():
    x, y = small_problem(n=400)
    test_x, test_y = small_problem(seed=1)
    tensors = torch.from_numpy(x), torch.from_numpy(y)

    def batches(epoch):
        order = torch.randperm(400, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(100):
            yield {"f": tensors[0][rows]}, tensors[1][rows]

    found = mae_probe(
        batches,
        {"f": test_x},
        test_y,
        num_classes=3,
        batches_per_epoch=4,
        batch_size=100,
        base_lrs=(200.0, 1e-9),
        epochs=30,
        warmup=2,
    )
    best, last = found.best["f"], found.accuracy["f"]
    assert last[0] > max(0.6, last[1] + 0.1)  # the second head hardly moves
    assert best[0] == max(values["f"][0] for values in found.curve.values())
    assert len(found.curve) == 30


@pytest.mark.parametrize(
    ("labels", "test_labels", "features", "message"),
    [
        ([0] * 8, [0], np.ones((8, 2)), "same label"),
        ([0, 1] * 3, [0], np.ones((8, 2)), "8 feature vectors but 6 labels"),
        ([0, 1] * 4, [0], np.full((8, 2), np.nan), "NaN"),
        ([0, 1] * 4, [], np.ones((8, 2)), "no test samples"),
    ],
)
def test_bad_input_is_one_clear_sentence(labels, test_labels, features, message):
    test = np.ones((len(test_labels), 2))
    with pytest.raises(UserError, match=message):
        logistic_probe(features, np.array(labels), test, np.array(test_labels))
    with pytest.raises(UserError, match=message):
        in100_probe({"f": features}, np.array(labels), {"f": test}, np.array(test_labels), epochs=1)


def test_too_few_samples_to_choose_the_regularizer_are_called_too_few():
    x = np.eye(2, 8, dtype=np.float32)
    with pytest.raises(UserError, match=r"2 train samples are too few.*more samples of each class"):
        logistic_probe(x, np.array([0, 1]), x, np.array([0, 1]))


def test_layers_of_other_widths_and_regularizers_out_of_range():
    with pytest.raises(UserError, match="different widths"):
        probe.stack({"a": np.ones((2, 3)), "b": np.ones((2, 4))}, "cpu")
    with pytest.raises(UserError, match="positive"):
        fit_logistic(np.ones((4, 2)), np.array([0, 1, 0, 1]), regularizers=[0.0])


@pytest.mark.slow
def test_the_benchmark_compares_converged_fits():
    from anechoic_lab.bench.probe import compare, image_features

    x, y = image_features(120)
    found = compare("a few images", x[:, :24], y, rounds=1)
    assert found["loss_gap"] < 1e-4
    assert found["peer_loss_gap"] < 1e-4
    assert found["ratio"] > 0
