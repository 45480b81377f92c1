"""Hashes of networks: a short one of weights, which is written to every result, and one of everything else, too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

Plain = bool | int | float | str | tuple | list | None


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of all names and values, independent of their order."""
    digest = hashlib.sha256()
    _update(digest.update, tensors)
    return digest.hexdigest()[:16]


def hash_network(network: nn.Module, about: str) -> str:
    """Return 32 hexadecimal digits that change with the weights, buffers and settings of a network, and with `about`.

    It is computed at every call, since weights and settings may change in memory.
    """
    settings = f"{network!r} {about} {list(_settings(network))}"
    state = xxh3_128(re.sub(r" at 0x[0-9a-fA-F]+", "", settings).encode())  # functions print their address
    _update(state.update, {**network.state_dict(), **dict(network.named_buffers())})
    return state.hexdigest()


def _settings(network: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the plain attributes of all modules: their text omits some, such as the number of heads."""
    for name, module in network.named_modules():
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and key != "training" and isinstance(value, Plain):
                yield name, key, value


def _update(update: Callable[[bytes], None], tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(tensors):
        update(name.encode())
        update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
