"""The residual stream, layer by layer: norms, gains, share of the input, strength of branches (Sections 3.1 and 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from anechoic.data import Subset
from anechoic.eval.feature_cache import batches
from anechoic.eval.features import block_gains, block_ratios, block_statistics

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

# Every token of every layer is held in memory at once; this number of samples suffices.
STREAM_SAMPLES = 256


def stream_metric(subject: Subject) -> dict[str, list[float | None]]:
    """token_norm, gain (product of the alphas so far), input_share (gain ||x_0|| / ||x_k||) and branch_ratio (what a
    block adds over what it keeps), one per layer; None where a layer (the embedding, a final norm) has none."""
    encoder, images = subject.encoder, some_images(subject)
    norms: list[float | None] = [*block_statistics(encoder.model, images, forward=encoder.forward)["token_norm"]]
    gains: list[float | None] = [1.0, *np.cumprod(block_gains(encoder.model)).tolist()]
    shares = [
        None if gain is None or not norm else gain * (norms[0] or 0.0) / norm
        for gain, norm in zip(gains, norms, strict=True)
    ]
    ratios: list[float | None] = [None, *block_ratios(encoder.model, images, forward=encoder.forward)]
    found = {"token_norm": norms, "gain": gains, "input_share": shares, "branch_ratio": ratios}
    return {name: values + [None] * (len(encoder.widths) - len(values)) for name, values in found.items()}


def statistics_metric(subject: Subject) -> dict[str, list[float]]:
    """Return `block_statistics` of the mean token, as validation records them."""
    return block_statistics(subject.encoder.model, some_images(subject), forward=subject.encoder.forward)


def some_images(subject: Subject) -> Tensor:
    """The first tested samples, prepared, on the device."""
    first = Subset(subject.eval_data.test, np.arange(min(STREAM_SAMPLES, len(subject.eval_data.test))))
    return torch.cat(list(batches(subject.encoder, first, device=str(subject.device))))
