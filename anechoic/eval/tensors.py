"""Arrays and tensors of features: conversion, double precision and validation.

Every consumer refuses features that are not finite, and names the layer.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from anechoic.errors import NotFiniteError, UserError


def as_tensor(array: np.ndarray | Tensor) -> Tensor:
    """Return a tensor that shares the array's memory; a read-only array (a file of features) is copied."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = np.array(array)
    return torch.as_tensor(array)


def doubled(x: Tensor) -> Tensor:
    """Return x in double precision, on its device or, where that has none, on the CPU."""
    return x.to(exact_device(x.device)).double()


def exact_device(device: torch.device) -> torch.device:
    """Return the device for double precision: MPS has none."""
    return torch.device("cpu") if device.type == "mps" else device


def check_finite(features: np.ndarray | Tensor, name: str = "") -> None:
    """Raise NotFiniteError if the features hold NaN or infinity; name: which ones, such as "of layer 3 (mean)"."""
    x = as_tensor(features)
    # A sum is finite only if its terms are, and takes one pass.
    if not torch.isfinite(x.sum() if x.device.type == "mps" else x.sum(dtype=torch.float64)):
        raise NotFiniteError(
            f"The features{name and f' {name}'} contain NaN or infinity: the weights are damaged, so use an earlier "
            "checkpoint."
        )


def warn_if_constant(features: np.ndarray | Tensor, name: str) -> None:
    """Warn if all vectors (n, D) are equal: such features distinguish no images."""
    if len(features) > 1 and all(bool((row == features[0]).all()) for row in features):
        warnings.warn(
            f"The features {name} are the same for all {len(features)} images and distinguish none of them: the images "
            "are equal, the weights are damaged, the network has collapsed, or this layer ignores the image.",
            stacklevel=3,
        )


def as_matrix(features: np.ndarray | Tensor) -> Tensor:
    """Return features (n, d) in float64; refuse empty, misshapen or non-finite ones."""
    z = as_tensor(features)
    if z.ndim != 2 or z.numel() == 0:
        raise UserError(f"Features must be a non-empty matrix (samples, channels); got the shape {tuple(z.shape)}.")
    z = doubled(z)
    check_finite(z)
    return z
