"""What residual branches write into the stream, and what the first components of the features hold.

The matrix that writes a branch's output starts at zero, so it is the sum of all its updates: its effective rank says of
how many directions an optimizer has made use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anechoic.eval.feature_cache import batches
from anechoic.eval.features import Key, blocks_of, evaluating, trunk
from anechoic.eval.metrics.analysis import as_tensor, effective_rank
from anechoic.eval.metrics.layers import some_images

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

COMPONENTS = 3


def branches_metric(subject: Subject) -> dict[str, list[float]]:
    """Effective ranks, one per branch in the order of execution (attention, MLP, attention ...): output_rank of what it
    adds to the stream, over tokens; writer_rank of the matrix that writes it. Nothing for foreign networks."""
    model, writers = subject.encoder.model, []
    for block in blocks_of(model):
        branches: Any = getattr(block, "branches", list)
        writers += [branch.writer for branch in branches() if isinstance(branch.writer, nn.Linear)]
    outputs: dict[nn.Module, Tensor] = {}

    def keep(writer: nn.Module, _: Any, output: Tensor) -> None:
        outputs[writer] = output.flatten(0, -2)

    hooks = [writer.register_forward_hook(keep) for writer in writers]
    try:
        with torch.inference_mode(), evaluating(model):
            (subject.encoder.forward or trunk(model))(some_images(subject))
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "output_rank": [effective_rank(outputs[writer]).rank for writer in writers],
        "writer_rank": [effective_rank(writer.weight.detach(), center="none").rank for writer in writers],
    }


def components_metric(subject: Subject) -> dict[Key, dict[str, Any]]:
    """Shares in 0 .. 1. common_share: of the vectors' squared length, their mean's, which every cosine contains.
    first_share and three_share: of the variance, that of the first principal component and of the first three.
    look_share: of the variance of those three, what mean color and contrast of the image explain, by least squares."""
    images = batches(subject.encoder, subject.eval_data.test, device=str(subject.device))
    look = torch.cat([_look(part) for part in images]).double().cpu()
    look = torch.cat([look, torch.ones(len(look), 1, dtype=torch.float64)], dim=1)
    found: dict[Key, dict[str, Any]] = {}
    for key, features in subject.sets.items():
        x = as_tensor(features).double().cpu()
        mean = x.mean(dim=0)
        centered = x - mean
        variances, directions = torch.linalg.eigh(centered.T @ centered)
        total = variances.clamp(min=0).sum().clamp(min=1e-30)
        scores = centered @ directions[:, -COMPONENTS:]
        unexplained = scores - look @ torch.linalg.lstsq(look, scores).solution
        found[key] = {
            "common_share": float(mean.square().sum() / x.square().sum(dim=1).mean().clamp(min=1e-30)),
            "first_share": float(variances[-1] / total),
            "three_share": float(variances[-COMPONENTS:].sum() / total),
            "look_share": float(1 - unexplained.square().sum() / scores.square().sum().clamp(min=1e-30)),
        }
    return found


def _look(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C + 1): the mean of every channel, and the deviation of all pixels from it."""
    mean = images.mean(dim=(2, 3))
    contrast = (images - mean[:, :, None, None]).square().mean(dim=(1, 2, 3)).sqrt()
    return torch.cat([mean, contrast[:, None]], dim=1)
