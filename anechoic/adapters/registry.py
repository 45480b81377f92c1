"""The foreign libraries and layouts that anechoic knows: one row each, one file each.

A file is imported when it is needed and imports its library inside functions only, so that names of tensors can be
translated where the library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from anechoic.data.preprocess import Preprocess


@dataclass(frozen=True)
class Adapter:
    """A foreign library or layout, and the module that holds everything specific to it.

    name: the package of the library's classes, and the prefix of its models ("timm:NAME").
    blocks: the networks whose blocks the module registers when it is imported.
    encoder: how a pretrained model is named; the module then has open_encoder(name) -> ForeignEncoder.
    reads: the module has recognize(tensors) -> Layout | None.
    exports: the module has export_files(plain, preprocess), open_export(folder, classifies), embed_lines and OPENING.
    """

    name: str
    module: str
    blocks: str = ""
    encoder: str = ""
    reads: bool = False
    exports: bool = False

    def load(self) -> Any:
        return import_module(self.module)


class ForeignEncoder(NamedTuple):
    """A model of another library with `blocks` and `num_prefix_tokens`. untrained() makes it with fresh weights."""

    name: str
    model: nn.Module
    preprocess: Preprocess
    untrained: Callable[[], nn.Module]


# Layouts are tried in this order when a checkpoint is read.
ROWS = (
    Adapter(
        "transformers",
        "anechoic.adapters.transformers",
        blocks="transformers ViT, ViTMAE, DeiT, DINOv2, BEiT and BERT",
        encoder="transformers:FOLDER",
        reads=True,
        exports=True,
    ),
    Adapter("facebook", "anechoic.adapters.facebook", reads=True),
    Adapter(
        "timm",
        "anechoic.adapters.timm",
        blocks="timm ViT, DeiT, EVA, BEiT, Swin and ResNet",
        encoder="timm:NAME, timm:NAME:random",
        reads=True,
        exports=True,
    ),
    Adapter("torchvision", "anechoic.adapters.torchvision", blocks="torchvision ResNet and ViT"),
    Adapter("diffusers", "anechoic.adapters.diffusers", blocks="diffusers DiT"),
    Adapter("torch", "anechoic.adapters.torch", blocks="torch.nn.TransformerEncoderLayer"),
)
ADAPTERS: dict[str, Adapter] = {row.name: row for row in ROWS}


def known_blocks() -> str:
    """Return the networks that decay and fold recognize, for messages."""
    rows = [adapter.blocks for adapter in ADAPTERS.values() if adapter.blocks]
    return "; ".join([*rows, "blocks given to anechoic.surgery.register; and modules with a stream() method"])
