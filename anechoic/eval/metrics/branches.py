"""Effective ranks of what residual branches write into the stream.

The matrix that writes a branch's output starts at zero, so it is the sum of all its updates: its effective rank is the
number of directions that the optimizer has used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anechoic.eval.features import blocks_of, evaluating, trunk
from anechoic.eval.metrics.rank import effective_rank
from anechoic.eval.metrics.stream import some_images

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


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
