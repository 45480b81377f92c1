"""ResNet-18 and its deeper relatives, one decayed shortcut a block: the supervised control of the paper's appendix B.3.

Depth grows by repeating blocks of the third stage. Parameter names are those of the common ResNet checkpoints.
Legend: B batch, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.choices import Stem
from anechoic.errors import UserError
from anechoic.models.layers import check_images, zero_branch_outputs
from anechoic.models.network import Network, NetworkConfig
from anechoic.shortcut import Branch, Event, Read, Shortcut, Slot, Stream


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(NetworkConfig):
    """num_blocks 8 to 16: two in each stage but the third, which takes the rest. width: channels of the first stage.
    stem "auto": the small one (3x3, no pooling) for images of up to 64 pixels."""

    num_blocks: int = 8
    width: int = 64
    num_classes: int = 1000
    stem: Stem = "auto"

    def __post_init__(self) -> None:
        if not 8 <= self.num_blocks <= 16:
            raise UserError(
                f"num_blocks must lie in 8 to 16, not {self.num_blocks}: the third stage takes what exceeds 6."
            )
        super().__post_init__()
        if self.stem == "auto":
            object.__setattr__(self, "stem", "cifar" if max(self.size) <= 64 else "imagenet")

    @property
    def branch_kinds(self) -> list[str]:
        return ["convolution"] * self.num_blocks


class BasicBlock(nn.Module):
    """relu(shortcut(projection(x), bn(conv(relu(bn(conv(x))))))); the projection only where the shape changes."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        fx = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = x if self.downsample is None else self.downsample(x)
        return F.relu(self.shortcut(x, fx))

    def branches(self) -> list[Branch]:
        projection = None
        if self.downsample is not None:
            projection = (Slot(self.downsample[0], "weight"), self.downsample[1])
        return [Branch(self.shortcut, Read(maps=(Slot(self.conv1, "weight"),)), self.bn2, projection)]


class ResNet(Network):
    """forward(images (B, C, H, W)) -> logits (B, num_classes)"""

    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        width = config.width
        if config.stem == "cifar":
            self.conv1 = nn.Conv2d(config.in_channels, width, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(config.in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        shortcuts = config.make_shortcuts()
        remaining = iter(shortcuts)
        channels = width
        for stage, count in enumerate((2, 2, config.num_blocks - 6, 2)):
            blocks = []
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(BasicBlock(channels, width * 2**stage, stride=stride, shortcut=next(remaining)))
                channels = width * 2**stage
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, config.num_classes)
        self.mark(shortcuts)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if self.config.zero_init:
            zero_branch_outputs(self.stream().events)

    @property
    def blocks(self) -> list[BasicBlock]:
        """Every block in execution order."""
        return [module for module in self.modules() if isinstance(module, BasicBlock)]

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.config.in_channels)
        x = F.relu(self.bn1(self.conv1(images)))
        if self.config.stem == "imagenet":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(dim=(2, 3)))

    def norms(self) -> list[nn.LayerNorm]:
        """None: a batch norm reads a convolution, not the stream, so its eps never changes."""
        return []

    def stream(self) -> Stream:
        events: list[Event] = [event for block in self.blocks for event in block.branches()]
        return Stream((*events, Read(maps=(Slot(self.fc, "weight"),))), ends_raw=False)
