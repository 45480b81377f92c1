"""torchvision's ResNets and vision transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models import resnet, vision_transformer

from anechoic.adapters.blocks import Twin, describe, register, through
from anechoic.adapters.resnets import projection_of, resnet_stream
from anechoic.shortcut import Branch, Event, Read, Shortcut, Slot, Stream


@register
class DecayedBasicBlock(Twin, resnet.BasicBlock):
    kinds = ("convolution",)
    parts = "conv1 bn1 relu conv2 bn2 downsample"
    shortcut1: Shortcut

    def forward(self, x: Tensor) -> Tensor:
        fx = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.shortcut1(identity, fx))

    def branches(self) -> list[Event]:
        reads = Read(maps=(Slot(self.conv1, "weight"),))
        return [Branch(self.shortcut1, reads, self.bn2, projection_of(self.downsample))]


@register
class DecayedBottleneck(Twin, resnet.Bottleneck):
    kinds = ("convolution",)
    parts = "conv1 bn1 conv2 bn2 conv3 bn3 relu downsample"
    shortcut1: Shortcut

    def forward(self, x: Tensor) -> Tensor:
        fx = self.relu(self.bn1(self.conv1(x)))
        fx = self.relu(self.bn2(self.conv2(fx)))
        fx = self.bn3(self.conv3(fx))
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.shortcut1(identity, fx))

    def branches(self) -> list[Event]:
        reads = Read(maps=(Slot(self.conv1, "weight"),))
        return [Branch(self.shortcut1, reads, self.bn3, projection_of(self.downsample))]


@register
class DecayedEncoderBlock(Twin, vision_transformer.EncoderBlock):
    parts = "ln_1 self_attention dropout ln_2 mlp"
    shortcut1: Shortcut
    shortcut2: Shortcut

    def forward(self, input: Tensor) -> Tensor:
        normed = self.ln_1(input)
        attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
        x = self.shortcut1(input, self.dropout(attended))
        return self.shortcut2(x, self.mlp(self.ln_2(x)))

    def branches(self) -> list[Event]:
        last = [layer for layer in self.mlp if isinstance(layer, nn.Linear)][-1]
        return [
            Branch(self.shortcut1, Read(norms=(self.ln_1,)), self.self_attention.out_proj),
            Branch(self.shortcut2, Read(norms=(self.ln_2,)), last),
        ]


def encoder_stream(encoder: Any) -> Stream:
    return Stream((*through(encoder.layers), Read(norms=(encoder.ln,))), ends_raw=False)


def stages(model: Any) -> list[Any]:
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


describe(resnet.ResNet, lambda model: resnet_stream(model, stages(model)))
describe(vision_transformer.Encoder, encoder_stream)
