"""What the ResNets of several libraries share in the telling of their stream: stem, projections, classifier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from anechoic.adapters.blocks import through
from anechoic.errors import UserError
from anechoic.models.layers import weight_and_bias
from anechoic.shortcut import Read, Slot, Stream, Write


def projection_of(downsample: nn.Module | None) -> tuple[Slot, nn.Module] | None:
    """The convolution that reads the stream and the norm that writes it, on a shortcut that changes shape."""
    if downsample is None:
        return None
    layers = [layer for layer in downsample.modules() if list(layer.parameters(recurse=False))]
    if len(layers) != 2 or not isinstance(layers[0], nn.Conv2d) or layers[0].bias is not None:
        raise UserError("This ResNet's projection is not a convolution and a norm: it can be decayed, but not folded.")
    return Slot(layers[0], "weight"), layers[1]


def resnet_stream(model: Any, blocks: Iterable[Any]) -> Stream:
    """ReLU, pooling and batch norms inside branches let a positive factor through, so stem and classifier carry it."""
    events = through(blocks)
    if isinstance(model.fc, nn.Linear | nn.Conv2d):
        return Stream((*events, Read(maps=(Slot(model.fc, "weight"),))), ends_raw=False)
    return Stream((Write(weight_and_bias(model.bn1)), *events), ends_raw=True)
