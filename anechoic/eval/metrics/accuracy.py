"""Top-1 accuracy of a network that classifies, by its own head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from anechoic.errors import UserError
from anechoic.eval.feature_cache import batches
from anechoic.eval.features import evaluating

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


@torch.inference_mode()
def accuracy_metric(subject: Subject) -> dict[str, float]:
    """accuracy in 0 .. 1 on center crops of the readable test images."""
    model, labels = subject.encoder.model, subject.eval_data.test_labels
    assert labels is not None, "the evaluator checks what a metric needs"
    ids: list[np.ndarray] = []
    right = 0
    with evaluating(model):
        for images in batches(subject.encoder, subject.eval_data.test, device=str(subject.device), ids=ids):
            logits = model(images)
            if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
                raise UserError(f"{subject.encoder.name} has no classification head: use knn or probe instead.")
            right += int((logits.argmax(dim=1).numpy(force=True) == labels[ids[-1]]).sum())
    return {"accuracy": right / max(1, sum(map(len, ids)))}
