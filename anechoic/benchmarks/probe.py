"""Ten regularisers of a logistic regression at once, against ten fits of scikit-learn, both to convergence.

Features of the size a small encoder gives: 4,000 samples, 192 channels, 50 classes. scikit-learn's tolerance is the
largest power of ten at which its loss is within 1e-4 of the best one for every regulariser.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from anechoic.benchmarks.timing import Options, interleave, row
from anechoic.evals.logistic import fit_logistic
from anechoic.evals.probe import REGULARISERS

PEERS = ("scikit-learn",)
SAMPLES, DIM, CLASSES = 4_000, 192, 50


def features() -> tuple[np.ndarray, np.ndarray]:
    """Standardised features with a decaying spectrum and overlapping classes, as encoders have."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, SAMPLES)
    hidden = rng.standard_normal((CLASSES, DIM))[labels] + 1.5 * rng.standard_normal((SAMPLES, DIM))
    spectrum = np.arange(1, DIM + 1) ** -0.75
    x = hidden * spectrum @ np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), labels


def run(options: Options) -> list[dict[str, Any]]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    x, y = features()

    def fit_peer(tolerance: float) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            return [
                LogisticRegression(C=1 / (SAMPLES * r), tol=tolerance, max_iter=20_000).fit(x, y) for r in REGULARISERS
            ]

    found = fit_logistic(x, y, regularisers=REGULARISERS)
    ours = [loss(found.weight[i], found.bias[i], x, y, r) for i, r in enumerate(REGULARISERS)]
    tolerance, gap = 1e-3, np.inf
    while gap > 1e-4:
        tolerance /= 10
        theirs = [loss(m.coef_, m.intercept_, x, y, r) for m, r in zip(fit_peer(tolerance), REGULARISERS, strict=True)]
        best = np.minimum(ours, theirs)
        gap = float((np.array(theirs) - best).max())
    timing = interleave(
        {"ours": lambda: fit_logistic(x, y, regularisers=REGULARISERS), "scikit-learn": lambda: fit_peer(tolerance)},
        rounds=options.rounds,
    )
    work = f"{len(REGULARISERS)} regularisers, {SAMPLES:,} x {DIM}, {CLASSES} classes"
    line = row(work, timing, peer="scikit-learn")
    # How far each is above the better of the two, at worst: what "converged" means here.
    return [
        line | {"loss_gap": float((np.array(ours) - best).max()), "peer_loss_gap": gap, "peer_tolerance": tolerance}
    ]


def loss(weight: Any, bias: Any, x: np.ndarray, y: np.ndarray, regulariser: float) -> float:
    """Mean cross-entropy plus regulariser, in double precision."""
    w, b, z = (torch.as_tensor(np.asarray(value)).double() for value in (weight, bias, x))
    value = torch.nn.functional.cross_entropy(z @ w.T + b, torch.as_tensor(y))
    return float(value + regulariser / 2 * w.square().sum())
