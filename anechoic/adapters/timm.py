"""timm: the blocks of its ViT, DeiT, EVA, BEiT, Swin and ResNet; its models as encoders; its ViT's weights in and out.

Blocks that run attention and MLP side by side are refused: there is one sum for two branches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.adapters.blocks import (
    DecayedBlock,
    class_path,
    describe,
    pre_norm,
    projection_of,
    refuse,
    replaces,
    resnet_stream,
    stream_to,
    through,
)
from anechoic.adapters.checkpoint_metadata import CheckpointMetadata
from anechoic.adapters.registry import ForeignEncoder
from anechoic.adapters.tensors import (
    EPS_FILE,
    Converted,
    Layout,
    Rules,
    Run,
    Tensors,
    alpha_min,
    count_blocks,
    is_sincos,
    patches,
    positions,
    rename,
    shaped,
    transformer_sizes,
    width_of,
)
from anechoic.adapters.torchvision_operators import allow_mismatch, import_library
from anechoic.data.preprocess import MARGIN, Preprocess
from anechoic.errors import UserError
from anechoic.models import VIT_SIZES
from anechoic.models.network import MARKS
from anechoic.models.vit import VisionTransformer, ViTConfig
from anechoic.shortcut import Branch, Event, Read, Restart, Slot, Stream

# ---- blocks: transformers

ATTENTIONS = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
    "timm.models.beit.Attention",
    "timm.models.swin_transformer.WindowAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
}
MLPS = {"timm.layers.mlp.Mlp", "timm.layers.mlp.GluMlp", "timm.layers.mlp.SwiGLU"}
READERS = ("qkv", "q_proj", "k_proj", "v_proj", "gate", "fc1", "fc1_g", "fc1_x")


def _kind(part: Any) -> str:
    kind = class_path(type(part))
    if kind not in ATTENTIONS | MLPS:
        raise UserError(
            f"A block with {type(part).__name__} can be decayed, but not folded: anechoic does not know its maps."
        )
    return kind


def _writer(part: Any) -> nn.Module:
    """Return the last affine map of an attention or MLP."""
    return part.proj if _kind(part) in ATTENTIONS else part.fc2


def _readers(part: Any) -> Read:
    """Return the maps with which an attention or MLP reads an unnormalized stream, without their biases."""
    assert _kind(part)
    return Read(maps=tuple(Slot(module, "weight") for name, module in part.named_children() if name in READERS))


class _PreNorm(DecayedBlock):
    """Both branches of a block called attn and mlp, read through norm1 and norm2."""

    def branches(self) -> list[Event]:
        return pre_norm(self, (self.norm1, _writer(self.attn)), (self.norm2, _writer(self.mlp)))


class _NormedBranches(DecayedBlock):
    """x + norm(f(x)): the branch reads the stream with its maps, and its norm writes."""

    parts = "attn norm1 drop_path1 mlp norm2 drop_path2"

    def branches(self) -> list[Event]:
        return [
            Branch(self.shortcut1, _readers(self.attn), self.norm1),
            Branch(self.shortcut2, _readers(self.mlp), self.norm2),
        ]


@replaces("timm.models.vision_transformer.Block")
class ViTBlock(_PreNorm):
    parts = "norm1 attn ls1 drop_path1 norm2 mlp ls2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **kwargs))))
        return self.shortcut2(x, self.drop_path2(self.ls2(self.mlp(self.norm2(x)))))


@replaces("timm.models.vision_transformer.ResPostBlock", "timm.models.eva.EvaBlockPostNorm")
class PostNormBlock(_NormedBranches):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.norm1(self.attn(x, *args, **kwargs))))
        return self.shortcut2(x, self.drop_path2(self.norm2(self.mlp(x))))


@replaces("timm.models.eva.EvaBlock", "timm.models.beit.Block")
class GatedBlock(_PreNorm):
    parts = "norm1 attn gamma_1 drop_path1 norm2 mlp gamma_2 drop_path2"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attended = self.attn(self.norm1(x), *args, **kwargs)
        x = self.shortcut1(x, self.drop_path1(_gated(self.gamma_1, attended)))
        return self.shortcut2(x, self.drop_path2(_gated(self.gamma_2, self.mlp(self.norm2(x)))))


def _gated(gamma: Tensor | None, fx: Tensor) -> Tensor:
    return fx if gamma is None else gamma * fx


@replaces("timm.models.swin_transformer.SwinTransformerBlock")
class SwinBlock(_PreNorm):
    parts = "norm1 attn drop_path1 norm2 mlp drop_path2"

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self._attn(self.norm1(x))))
        # Tokens in a row, as in the original, because drop path and compiled kernels see the shape.
        rows = x.flatten(1, 2)
        return self.shortcut2(rows, self.drop_path2(self.mlp(self.norm2(rows)))).reshape(x.shape)


@replaces("timm.models.swin_transformer_v2.SwinTransformerV2Block")
class SwinV2Block(_NormedBranches):
    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut1(x, self.drop_path1(self.norm1(self._attn(x))))
        rows = x.flatten(1, 2)
        return self.shortcut2(rows, self.drop_path2(self.norm2(self.mlp(rows)))).reshape(x.shape)


def vit_stream(model: Any) -> Stream:
    """Read by the final norm, or after pooling by fc_norm or the head: pooling lets a positive factor through."""
    norms = [norm for norm in (model.norm, model.fc_norm) if not isinstance(norm, nn.Identity)]
    pooled_by_attention = type(model).__name__ != "Beit" and model.attn_pool is not None
    if norms and (norms[0] is model.norm or not pooled_by_attention):
        return stream_to(model.blocks, norms[0])
    if isinstance(model.head, nn.Linear) and not pooled_by_attention:
        return Stream((*through(model.blocks), Read(maps=(Slot(model.head, "weight"),))), ends_raw=False)
    return stream_to(model.blocks, None)


def swin_stream(model: Any) -> Stream:
    events: list[Event] = []
    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            merging = stage.downsample
            # The first version normalizes, then maps; the second maps, then normalizes.
            first = class_path(type(merging)) == "timm.models.swin_transformer.PatchMerging"
            reads = Read(norms=(merging.norm,)) if first else Read(maps=(Slot(merging.reduction, "weight"),))
            events.append(Restart(reads))
        events += through(stage.blocks)
    return Stream((*events, Read(norms=(model.norm,))), ends_raw=False)


# ---- blocks: ResNets


class _Residual(DecayedBlock):
    kinds = ("convolution",)

    def join(self, x: Tensor, fx: Tensor) -> Tensor:
        if self.se is not None:
            fx = self.se(fx)
        if self.drop_path is not None:
            fx = self.drop_path(fx)
        return self.shortcut1(x if self.downsample is None else self.downsample(x), fx)

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


@replaces("timm.models.resnet.BasicBlock")
class BasicBlock(_Residual):
    parts = "conv1 bn1 drop_block act1 aa conv2 bn2 se act2 downsample drop_path"

    def forward(self, x: Tensor) -> Tensor:
        fx = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))
        return self.act2(self.join(x, self.bn2(self.conv2(fx))))

    def branches(self) -> list[Event]:
        return self.branch(self.bn2)


@replaces("timm.models.resnet.Bottleneck")
class Bottleneck(_Residual):
    parts = "conv1 bn1 act1 conv2 bn2 drop_block act2 aa conv3 bn3 se act3 downsample drop_path"

    def forward(self, x: Tensor) -> Tensor:
        fx = self.act1(self.bn1(self.conv1(x)))
        fx = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(fx)))))
        return self.act3(self.join(x, self.bn3(self.conv3(fx))))

    def branches(self) -> list[Event]:
        return self.branch(self.bn3)


for _model in ("vision_transformer.VisionTransformer", "deit.VisionTransformerDistilled", "eva.Eva", "beit.Beit"):
    describe(f"timm.models.{_model}", vit_stream)
for _model in ("swin_transformer.SwinTransformer", "swin_transformer_v2.SwinTransformerV2"):
    describe(f"timm.models.{_model}", swin_stream)
describe("timm.models.resnet.ResNet", resnet_stream)
for _block in ("ParallelScalingBlock", "DiffParallelScalingBlock", "ParallelThingsBlock"):
    refuse(f"timm.models.vision_transformer.{_block}", "its attention and MLP read the same tokens and share one sum")
for _block in ("PreActBasic", "PreActBottleneck"):
    refuse(
        f"timm.models.resnetv2.{_block}", "batch norms read its stream, and their statistics would have to change too"
    )


# ---- encoders


class TimmTransformer(nn.Module):
    """A timm vision transformer, read without its head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_prefix_tokens: int = model.num_prefix_tokens

    @property
    def blocks(self) -> nn.Module:
        return self.model.blocks

    def set_image_size(self, image_size: int) -> None:
        self.model.set_input_size(img_size=image_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)


class TimmStages(nn.Module):
    """A timm network of maps (B, C, H, W), read after each of its stages."""

    num_prefix_tokens = 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.stages: list[str] = [info["module"] for info in model.feature_info]

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self.stages]

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)


def open_encoder(name: str) -> ForeignEncoder:
    """Return the model NAME with its pretrained weights, or NAME:random with fresh ones."""
    timm = import_library("timm")
    TimmViT = timm.models.VisionTransformer
    name, _, weights = name.partition(":")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        raise UserError(f"timm has no model {name!r}; it has {', '.join(near) or 'others, see timm.list_models()'}.")
    if weights not in ("", "random"):
        raise UserError(f"After timm:{name} only :random may follow, not {weights!r}.")

    def create(pretrained: bool) -> Any:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0).eval()
        return TimmTransformer(model) if isinstance(model, TimmViT) else TimmStages(model)

    try:
        model = create(weights != "random")
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"The weights of timm:{name} are not available here ({error}); timm:{name}:random needs none."
        ) from error
    config = model.model.pretrained_cfg
    if isinstance(model, TimmStages):
        _check_maps(model, name, config["input_size"])
    channels, size, _ = config["input_size"]
    preprocess = Preprocess(tuple(config["mean"]), tuple(config["std"]), size, channels)
    return ForeignEncoder(f"timm:{name}", model, preprocess, lambda: create(False))


@torch.inference_mode()
def _check_maps(model: TimmStages, name: str, input_size: tuple[int, int, int]) -> None:
    channels_first = getattr(model.model, "output_fmt", "NCHW") == "NCHW"
    if not channels_first or model(torch.zeros(1, *input_size)).ndim != 4:
        raise UserError(f"timm:{name} is neither a plain vision transformer nor a network of (B, C, H, W) maps.")


# ---- weights in

TO_OURS: Rules = [
    (r"cls_token", "class_token"),
    (r"pos_embed", "positions"),
    (r"fc_norm\.(.*)", r"head_norm.\1"),
]


def recognize(tensors: Tensors) -> Layout | None:
    if "cls_token" in tensors and "blocks.0.attn.qkv.weight" in tensors:
        return Layout("ViT", tensors, read_vit)
    return None


def read_vit(tensors: Tensors, metadata: CheckpointMetadata) -> Converted:
    dim, depth = width_of(tensors, "cls_token"), count_blocks(tensors)
    unused = [name for name in tensors if name.startswith("pooler.")]
    used = {name: value for name, value in tensors.items() if name not in unused}
    table = positions(tensors, "pos_embed", dim, num_prefix_tokens=1)
    fixed = is_sincos(table, num_prefix_tokens=1)
    if fixed:
        unused.append("pos_embed")
        del used["pos_embed"]
    config = ViTConfig(
        **patches(tensors, table.shape[1] - 1),
        **transformer_sizes(tensors, metadata, VIT_SIZES, dim=dim, depth=depth),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        gelu=metadata.gelu(),
        alpha_min=alpha_min("ViT", metadata),
        norm_eps=metadata.eps(1e-6),
        positions="sincos" if fixed else "learned",
        norm="norm.weight" in tensors,
        num_classes=len(shaped(tensors, "head.weight", 2)) if "head.weight" in tensors else 0,
        pool="mean" if "fc_norm.weight" in tensors else "class",
    )
    return Converted(config, rename(used, TO_OURS), unused)


# ---- weights out

FROM_OURS: Rules = [
    (r"class_token", "cls_token"),
    (r"positions", "pos_embed"),
    (r"head_norm\.(.*)", r"fc_norm.\1"),
]
# The architecture of which every size is an option.
ARCHITECTURE = "vit_base_patch16_224"
_OPENING = """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
"""
OPENING = {False: f"{_OPENING}tokens = model.forward_features(images)", True: f"{_OPENING}logits = model(images)"}


def embed_lines(classifies: bool, *, raw: bool, factor: str) -> str:
    """Return the lines that compute the vector of `embed`. raw: before the final norm."""
    return (
        "model.norm = torch.nn.Identity()\n" if raw else ""
    ) + f"vector = {factor}model.forward_features(images)[:, 0]"


def export_files(plain: VisionTransformer, preprocess: Preprocess) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and JSON files of a folder for timm.create_model("local-dir:FOLDER", pretrained=True)."""
    config = plain.config
    shared = {
        "num_classes": config.num_classes,
        "global_pool": "avg" if config.num_classes > 0 and config.pool == "mean" else "token",
    }
    arguments = {
        "img_size": list(config.size),
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        **shared,
        **({} if config.gelu == "none" else {"act_layer": "gelu_tanh"}),
    }
    pretrained = {
        "input_size": [config.in_channels, *config.size],
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "interpolation": "bicubic",
        "crop_mode": "center",
        "crop_pct": 1 / MARGIN,
        "num_classes": config.num_classes,
        # timm converts this layer from 3 channels, also where it has the right number, and fails beyond 3.
        "first_conv": "patch_embed.proj" if config.in_channels <= 3 else None,
        "classifier": "head",
    }
    card = {
        "architecture": ARCHITECTURE,
        **shared,
        "num_features": config.dim,
        "model_args": arguments,
        "pretrained_cfg": pretrained,
    }
    return export_tensors(plain), {"config.json": card, EPS_FILE: eps_by_norm(plain)}


def export_tensors(plain: VisionTransformer) -> Tensors:
    """Return the state dict of timm's ViT. Fixed positions become its table, with zeros for the class token."""
    state = {name: value for name, value in plain.state_dict().items() if name not in MARKS}
    if plain.config.positions == "sincos":
        state["positions"] = nn.functional.pad(plain.positions * plain.position_scale, (0, 0, 1, 0))
    return rename(state, FROM_OURS)


def eps_by_norm(plain: VisionTransformer) -> dict[str, float]:
    """Return timm's name of each norm -> its eps, in execution order."""
    names = [f"blocks.{i}.norm{k}" for i in range(plain.config.depth) for k in (1, 2)]
    names += ["fc_norm" if plain.norm is None else "norm"]
    return dict(zip(names, (norm.eps for norm in plain.norms()), strict=True))


def open_export(folder: Path, classifies: bool) -> tuple[nn.Module, Run]:
    allow_mismatch()
    import timm

    network: Any = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return network, network.forward if classifies else network.forward_features
