"""timm's vision transformers (ViT, DeiT, EVA, BEiT), Swin transformers and ResNets.

Blocks that run attention and MLP side by side are refused: there is one sum for two branches.
"""

from __future__ import annotations

from typing import Any

from timm.layers import GluMlp, Mlp, SwiGLU
from timm.layers.attention import Attention, AttentionRope
from timm.models import beit, deit, eva, resnet, resnetv2, swin_transformer, swin_transformer_v2, vision_transformer
from torch import Tensor, nn

from anechoic.adapters.blocks import Twin, describe, refuse, register, through
from anechoic.adapters.resnets import projection_of, resnet_stream
from anechoic.errors import UserError
from anechoic.shortcut import Branch, Event, Read, Restart, Shortcut, Slot, Stream

ATTENTIONS = (
    Attention,
    AttentionRope,
    eva.EvaAttention,
    beit.Attention,
    swin_transformer.WindowAttention,
    swin_transformer_v2.WindowAttention,
)
MLPS = (Mlp, GluMlp, SwiGLU)


def _checked(part: Any, known: tuple[type, ...]) -> Any:
    if type(part) not in known:
        raise UserError(
            f"A block with {type(part).__name__} can be decayed, but not folded: anechoic does not know its maps."
        )
    return part


def _writer(part: Any) -> nn.Module:
    """The last affine map of an attention or MLP."""
    return part.proj if type(part) in ATTENTIONS else _checked(part, MLPS).fc2


def _readers(part: Any) -> Read:
    """The maps with which an attention or MLP reads an unnormalized stream; their biases are not part of it."""
    known = (*ATTENTIONS, *MLPS)
    names = ("qkv", "q_proj", "k_proj", "v_proj", "gate", "fc1", "fc1_g", "fc1_x")
    maps = [module for name, module in _checked(part, known).named_children() if name in names]
    return Read(maps=tuple(Slot(module, "weight") for module in maps))


# ---- transformers


class _Blocks(Twin):
    """Both branches of a block called attn and mlp, read through norm1 and norm2."""

    shortcut1: Shortcut
    shortcut2: Shortcut
    attn: Any
    mlp: Any
    norm1: Any
    norm2: Any

    def branches(self) -> list[Event]:
        return [
            Branch(self.shortcut1, Read(norms=(self.norm1,)), _writer(self.attn)),
            Branch(self.shortcut2, Read(norms=(self.norm2,)), _writer(self.mlp)),
        ]


class _NormedBranches(_Blocks):
    """x + norm(f(x)): the branch reads the stream with its maps, and its norm writes."""

    def branches(self) -> list[Event]:
        return [
            Branch(self.shortcut1, _readers(self.attn), self.norm1),
            Branch(self.shortcut2, _readers(self.mlp), self.norm2),
        ]


@register
class DecayedViTBlock(_Blocks, vision_transformer.Block):
    parts = "norm1 attn ls1 drop_path1 norm2 mlp ls2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **kwargs))))
        return self.shortcut2(x, self.drop_path2(self.ls2(self.mlp(self.norm2(x)))))


@register
class DecayedResPostBlock(_NormedBranches, vision_transformer.ResPostBlock):
    parts = "attn norm1 drop_path1 mlp norm2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.norm1(self.attn(x, *args, **kwargs))))
        return self.shortcut2(x, self.drop_path2(self.norm2(self.mlp(x))))


@register
class DecayedEvaBlock(_Blocks, eva.EvaBlock):
    parts = "norm1 attn gamma_1 drop_path1 norm2 mlp gamma_2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attended = self.attn(self.norm1(x), *args, **kwargs)
        x = self.shortcut1(x, self.drop_path1(_gated(self.gamma_1, attended)))
        return self.shortcut2(x, self.drop_path2(_gated(self.gamma_2, self.mlp(self.norm2(x)))))


@register
class DecayedEvaBlockPostNorm(_NormedBranches, eva.EvaBlockPostNorm):
    parts = "attn norm1 drop_path1 mlp norm2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.norm1(self.attn(x, *args, **kwargs))))
        return self.shortcut2(x, self.drop_path2(self.norm2(self.mlp(x))))


@register
class DecayedBeitBlock(_Blocks, beit.Block):
    parts = "norm1 attn gamma_1 drop_path1 norm2 mlp gamma_2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attended = self.attn(self.norm1(x), *args, **kwargs)
        x = self.shortcut1(x, self.drop_path1(_gated(self.gamma_1, attended)))
        return self.shortcut2(x, self.drop_path2(_gated(self.gamma_2, self.mlp(self.norm2(x)))))


def _gated(gamma: Tensor | None, fx: Tensor) -> Tensor:
    return fx if gamma is None else gamma * fx


@register
class DecayedSwinBlock(_Blocks, swin_transformer.SwinTransformerBlock):
    parts = "norm1 attn drop_path1 norm2 mlp drop_path2"

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self._attn(self.norm1(x))))
        # Tokens in a row, as in the original, because drop path and compiled kernels see the shape.
        rows = x.flatten(1, 2)
        return self.shortcut2(rows, self.drop_path2(self.mlp(self.norm2(rows)))).reshape(x.shape)


@register
class DecayedSwinV2Block(_NormedBranches, swin_transformer_v2.SwinTransformerV2Block):
    parts = "attn norm1 drop_path1 mlp norm2 drop_path2"

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.norm1(self._attn(x))))
        rows = x.flatten(1, 2)
        return self.shortcut2(rows, self.drop_path2(self.norm2(self.mlp(rows)))).reshape(x.shape)


def vit_stream(model: Any) -> Stream:
    """Read by the final norm, or after pooling by fc_norm or the head: pooling lets a positive factor through."""
    events = through(model.blocks)
    norms = [norm for norm in (model.norm, model.fc_norm) if not isinstance(norm, nn.Identity)]
    pooled_by_attention = type(model) is not beit.Beit and model.attn_pool is not None
    if norms and (norms[0] is model.norm or not pooled_by_attention):
        return Stream((*events, Read(norms=(norms[0],))), ends_raw=False)
    if isinstance(model.head, nn.Linear) and not pooled_by_attention:
        return Stream((*events, Read(maps=(Slot(model.head, "weight"),))), ends_raw=False)
    return Stream(tuple(events), ends_raw=True)


def swin_stream(model: Any) -> Stream:
    events: list[Event] = []
    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            merging = stage.downsample
            # The first version normalizes, then maps; the second maps, then normalizes.
            first = type(merging) is swin_transformer.PatchMerging
            reads = Read(norms=(merging.norm,)) if first else Read(maps=(Slot(merging.reduction, "weight"),))
            events.append(Restart(reads))
        events += through(stage.blocks)
    return Stream((*events, Read(norms=(model.norm,))), ends_raw=False)


# ---- ResNets


class _Residual(Twin):
    kinds = ("convolution",)
    shortcut1: Shortcut
    conv1: Any
    se: Any
    act1: Any
    downsample: Any

    def branch(self, writer: nn.Module) -> list[Event]:
        if self.se is not None:
            raise UserError(
                f"A ResNet with {type(self.se).__name__} can be decayed, but not folded: a factor does not pass it."
            )
        if not isinstance(self.act1, nn.ReLU):
            raise UserError(
                f"A ResNet with {type(self.act1).__name__} can be decayed, but not folded: a factor passes only ReLU."
            )
        reads = Read(maps=(Slot(self.conv1, "weight"),))
        return [Branch(self.shortcut1, reads, writer, projection_of(self.downsample))]


@register
class DecayedBasicBlock(_Residual, resnet.BasicBlock):
    parts = "conv1 bn1 drop_block act1 aa conv2 bn2 se act2 downsample drop_path"

    def forward(self, x: Tensor) -> Tensor:
        fx = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))  # type: ignore[misc]
        fx = self.bn2(self.conv2(fx))
        return self.act2(_joined(self, x, fx))

    def branches(self) -> list[Event]:
        return self.branch(self.bn2)


@register
class DecayedBottleneck(_Residual, resnet.Bottleneck):
    parts = "conv1 bn1 act1 conv2 bn2 drop_block act2 aa conv3 bn3 se act3 downsample drop_path"

    def forward(self, x: Tensor) -> Tensor:
        fx = self.act1(self.bn1(self.conv1(x)))
        fx = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(fx)))))  # type: ignore[misc]
        fx = self.bn3(self.conv3(fx))
        return self.act3(_joined(self, x, fx))

    def branches(self) -> list[Event]:
        return self.branch(self.bn3)


def _joined(block: Any, x: Tensor, fx: Tensor) -> Tensor:
    if block.se is not None:
        fx = block.se(fx)
    if block.drop_path is not None:
        fx = block.drop_path(fx)
    return block.shortcut1(x if block.downsample is None else block.downsample(x), fx)


def stages(model: Any) -> list[Any]:
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


describe(vision_transformer.VisionTransformer, vit_stream)
describe(deit.VisionTransformerDistilled, vit_stream)
describe(eva.Eva, vit_stream)
describe(beit.Beit, vit_stream)
describe(swin_transformer.SwinTransformer, swin_stream)
describe(swin_transformer_v2.SwinTransformerV2, swin_stream)
describe(resnet.ResNet, lambda model: resnet_stream(model, stages(model)))

IN_PARALLEL = "its attention and MLP read the same tokens and share one sum"
PRE_ACTIVATION = "batch norms read its stream, and their statistics would have to follow"
refuse(vision_transformer.ParallelScalingBlock, IN_PARALLEL)
refuse(vision_transformer.DiffParallelScalingBlock, IN_PARALLEL)
refuse(vision_transformer.ParallelThingsBlock, IN_PARALLEL)
refuse(resnetv2.PreActBasic, PRE_ACTIVATION)
refuse(resnetv2.PreActBottleneck, PRE_ACTIVATION)
