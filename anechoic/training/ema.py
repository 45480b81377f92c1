"""The exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from anechoic.runtime.fsdp import distribute, local


class EMA:
    """Average the parameters, from the initial ones on: m <- decay * m + (1 - decay) * w.

    Buffers (batch-norm statistics, alphas) are copied. Sharded parameters have a sharded average.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        state, buffers = model.state_dict(), dict(model.named_buffers())
        averaged = [name for name in state if name not in buffers]
        mine = [local(self.tensors[name]) for name in averaged]
        torch._foreach_lerp_(mine, [local(state[name]) for name in averaged], 1 - self.decay)
        for name in state.keys() & buffers.keys():
            self.tensors[name].copy_(state[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.tensors.items():
            value.copy_(distribute(tensors[name], value))
