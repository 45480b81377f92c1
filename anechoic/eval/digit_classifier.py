"""A small scikit-learn classifier of handwritten digits, which evaluates generated digits and lends its features.

It reads 8 x 8 gray images and is fitted in seconds on the embedded digits; it is meaningful for digits only.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.eval.extractors import Extractor

if TYPE_CHECKING:
    from sklearn.neural_network import MLPClassifier

SIDE = 8


def to_pixels(images: Tensor) -> np.ndarray:
    """uint8 images (B, C, H, W) -> (B, 64) gray values in 0..1, averaged down to 8 x 8."""
    gray = images.to(torch.float32).mean(dim=1, keepdim=True) / 255
    if gray.shape[-2:] != (SIDE, SIDE):
        gray = F.interpolate(gray, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    return gray.flatten(1).numpy(force=True)


def read_digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 64) and labels (n,) of digits:train or digits:test."""
    from anechoic.data import open_source

    source = open_source(f"digits:{part}", labels=True, channels=1)
    images = torch.stack([source.read(i) for i in range(len(source))])
    return to_pixels(images), np.asarray(source.labels)


@cache
def classifier() -> MLPClassifier:
    """One hidden layer of 128, fitted on digits:train; the same every time."""
    from sklearn.neural_network import MLPClassifier

    fitted = MLPClassifier((128,), alpha=1e-3, learning_rate_init=2e-3, max_iter=500, random_state=0)
    return fitted.fit(*read_digits("train"))


def probabilities(images: Tensor) -> np.ndarray:
    """(B, 10) probabilities of the digits 0..9 for uint8 images (B, C, H, W)."""
    return classifier().predict_proba(to_pixels(images))


def hidden(images: Tensor) -> Tensor:
    """(B, 128) activations of the hidden layer for float images in 0..1."""
    fitted = classifier()
    values = to_pixels(images * 255) @ fitted.coefs_[0] + fitted.intercepts_[0]
    return torch.from_numpy(np.maximum(values, 0).astype(np.float32))


def digit_extractor() -> Extractor:
    """The hidden layer as features; the distance is fd-digits."""
    weights = hashlib.sha256(b"".join(part.tobytes() for part in (*classifier().coefs_, *classifier().intercepts_)))
    return Extractor(
        metric="fd-digits", network=hidden, weights_hash=weights.hexdigest()[:16], size=SIDE, channels=None
    )


def evaluate_digits(images: Tensor, *, asked: np.ndarray | None = None) -> dict[str, float | int | list[int]]:
    """How the classifier spreads images over the digits, how sure it is, and how often it sees what was asked for."""
    found = probabilities(images)
    chosen = found.argmax(axis=1)
    counts = np.bincount(chosen, minlength=10)
    verdict: dict[str, float | int | list[int]] = {
        # A digit is made if at least one image in a hundred shows it.
        "classes_seen": int((counts >= max(1, len(chosen) / 100)).sum()),
        "class_counts": counts.tolist(),
        "mean_confidence": float(found.max(axis=1).mean()),
    }
    if asked is not None:
        verdict["asked_class_share"] = float((chosen == asked).mean())
    return verdict


def real_accuracy() -> float:
    """Accuracy on digits:test, which it was not fitted on."""
    pixels, labels = read_digits("test")
    return float((classifier().predict(pixels) == labels).mean())
