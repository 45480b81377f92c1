"""The exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from anechoic.runtime.fsdp import distribute, local

log = logging.getLogger("anechoic")

# Largest share of the initial weights in an average that is fit for use.
INITIAL_SHARE = 0.05


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

    def warn_if_slow(self, *, updates: int) -> None:
        """Warn if this number of updates is too small for the decay: the saved weights are those of the EMA."""
        share = self.decay**updates
        if share > INITIAL_SHARE:
            log.warning(
                "After %d updates the EMA with decay %g still has %.0f %% of the initial weights: train longer, or "
                "lower optim.ema to %.3f.",
                updates,
                self.decay,
                100 * share,
                math.floor(1e3 * INITIAL_SHARE ** (1 / updates)) / 1e3,
            )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.tensors.items():
            value.copy_(distribute(tensors[name], value))
