"""torchvision's ResNets and vision transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from anechoic.adapters.blocks import DecayedBlock, describe, pre_norm, projection_of, replaces, resnet_stream, stream_to
from anechoic.shortcut import Branch, Event, Read, Slot, Stream


@replaces("torchvision.models.resnet.BasicBlock")
class BasicBlock(DecayedBlock):
    kinds = ("convolution",)
    parts = "conv1 bn1 relu conv2 bn2 downsample"

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.shortcut1(identity, self.branch(x)))

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))

    def branches(self) -> list[Event]:
        reads = Read(maps=(Slot(self.conv1, "weight"),))
        return [Branch(self.shortcut1, reads, self.last_norm(), projection_of(self.downsample))]

    def last_norm(self) -> nn.Module:
        return self.bn2


@replaces("torchvision.models.resnet.Bottleneck")
class Bottleneck(BasicBlock):
    parts = "conv1 bn1 conv2 bn2 conv3 bn3 relu downsample"

    def branch(self, x: Tensor) -> Tensor:
        return self.bn3(self.conv3(self.relu(super().branch(x))))

    def last_norm(self) -> nn.Module:
        return self.bn3


@replaces("torchvision.models.vision_transformer.EncoderBlock")
class EncoderBlock(DecayedBlock):
    parts = "ln_1 self_attention dropout ln_2 mlp"

    def forward(self, input: Tensor) -> Tensor:
        normed = self.ln_1(input)
        attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
        x = self.shortcut1(input, self.dropout(attended))
        return self.shortcut2(x, self.mlp(self.ln_2(x)))

    def branches(self) -> list[Event]:
        last = [layer for layer in self.mlp if isinstance(layer, nn.Linear)][-1]
        return pre_norm(self, (self.ln_1, self.self_attention.out_proj), (self.ln_2, last))


def encoder_stream(encoder: Any) -> Stream:
    return stream_to(encoder.layers, encoder.ln)


describe("torchvision.models.resnet.ResNet", resnet_stream)
describe("torchvision.models.vision_transformer.Encoder", encoder_stream)
