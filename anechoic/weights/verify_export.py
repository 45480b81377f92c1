"""An exported folder opened by the library it was written for: what a user of that library will compute.

Where the library is not installed, or does not work here, there is nothing to open it with.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anechoic.storage.safe_io import reason


class Opened(NamedTuple):
    """network: as the library opens it; run: images -> tokens or logits; words: who opened it."""

    network: nn.Module
    run: Callable[[Tensor], Tensor]
    words: str


def open_with(library: str, folder: Path, *, classifies: bool) -> Opened | str:
    """The folder as `library` opens it, or why it cannot be."""
    try:
        network, run = {"timm": _timm, "transformers": _transformers}[library](folder, classifies)
    except (ImportError, RuntimeError) as problem:  # the second: parts of another version of torch
        if isinstance(problem, ModuleNotFoundError) and problem.name == library:
            return f"{library} is not installed"
        return f"{library} does not work here: {reason(problem)}"
    return Opened(network.eval(), run, f"{library} {version(library)}")


def _timm(folder: Path, classifies: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    import timm

    network: Any = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return network, network.forward if classifies else network.forward_features


def _transformers(folder: Path, classifies: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from transformers import AutoModel, AutoModelForImageClassification
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        kind: Any = AutoModelForImageClassification if classifies else AutoModel
        network: Any = kind.from_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()

    def run(images: Tensor) -> Tensor:
        out = network(pixel_values=images)
        return out.logits if classifies else out.last_hidden_state

    return network, run


@torch.no_grad()
def set_eps(network: nn.Module, eps: dict[str, float]) -> None:
    """An eps for each norm by its name, as the folder's README shows."""
    for name, value in eps.items():
        norm: Any = network.get_submodule(name)
        norm.eps = value
