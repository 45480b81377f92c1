"""fold(model): a plain residual network with the same outputs as a decayed one."""

from __future__ import annotations

import copy
import dataclasses

from torch import nn

from anechoic.adapters import blocks
from anechoic.errors import UserError
from anechoic.models.network import Network, NetworkConfig
from anechoic.shortcut import Stream
from anechoic.surgery.streams import join_streams, refactor, refactored, shortcuts


def fold(model: nn.Module) -> nn.Module:
    """Return a plain residual network with the same outputs: x + f(x) everywhere, and the factors in the weights.

    Hidden states inside the network differ from the original's by the gain. Forms with a learned alpha fold as long as
    every alpha is positive. Blocks of other libraries have their own class again.
    """
    for info in shortcuts(model):
        if not info.alpha > 0:
            raise UserError(
                f"{info.name} has learned the alpha {info.alpha:.4g}, and only positive alphas can be folded into "
                f"weights: export the network as it is."
            )
    if isinstance(model, Network):
        return refactored(model, plain_config(model.config))
    folded = copy.deepcopy(model)
    for found in join_streams(folded):
        refactor(found, [(1.0, 1.0)] * len(found.shortcuts))
    blocks.release(folded)
    return folded


def fold_along(network: Network, stream: Stream) -> Network:
    """Fold one of our networks along another description of its stream: fewer outputs, say, and so more freedom."""
    return refactored(network, plain_config(network.config), stream=stream)


def plain_config(config: NetworkConfig) -> NetworkConfig:
    return dataclasses.replace(config, alpha_min=1.0, schedule="linear", form="identity")
