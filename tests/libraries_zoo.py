"""Networks of other libraries at a size that runs in milliseconds, how to call them, and their branches written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOKENS = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
SWIN = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
    "num_classes": 5,
}
STAGES = {"layers": [1, 1, 2, 1], "channels": (8, 16, 24, 32), "stem_width": 8}
HF = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}


class Case(NamedTuple):
    """package: what must be installed. make(): a fresh network. call(network): its output on fixed inputs."""

    package: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Tensor]
    branches: int


def on_images(model: Any) -> Tensor:
    return model(IMAGES.to(next(model.parameters()).dtype))


def logits(model: Any) -> Tensor:
    return on_images(model).logits


def states(model: Any) -> Tensor:
    return on_images(model).last_hidden_state


def on_tokens(model: Any) -> Tensor:
    return model(TOKENS.to(next(model.parameters()).dtype))


def denoise(model: Any) -> Tensor:
    x = IMAGES[:, :1, :8, :8].repeat(1, 4, 1, 1).to(next(model.parameters()).dtype)
    return model(x, timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2])).sample


def reconstruct(model: Any) -> Tensor:
    noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(3))
    return model(IMAGES.to(next(model.parameters()).dtype), noise=noise).logits


def read_words(model: Any) -> Tensor:
    words = torch.arange(14).reshape(2, 7) * 3 % 50
    return model(words, attention_mask=torch.tensor([[1] * 7, [1] * 5 + [0] * 2])).last_hidden_state


def timm_model(name: str, class_name: str, **options: Any) -> nn.Module:
    import importlib

    return getattr(importlib.import_module(f"timm.models.{name}"), class_name)(**options)


def timm_resnet(block: str, **options: Any) -> nn.Module:
    from timm.models import resnet

    return resnet.ResNet(getattr(resnet, block), **{**STAGES, "num_classes": 5, **options})


def res_post_vit() -> nn.Module:
    from timm.models.vision_transformer import ResPostBlock

    return timm_model("vision_transformer", "VisionTransformer", **VIT, block_fn=ResPostBlock)


def rms_vit() -> nn.Module:
    from timm.layers import RmsNorm

    return timm_model("vision_transformer", "VisionTransformer", **VIT, norm_layer=RmsNorm)


def torchvision_resnet(block: str) -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), [1, 1, 2, 1], num_classes=5, width_per_group=64)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, 2, 24, 48, num_classes=5)


def transformers_model(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**{**HF, **options}))


def bert() -> nn.Module:
    import transformers

    words = {name: value for name, value in HF.items() if name not in ("image_size", "patch_size")}
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **words))


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )


def torch_encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(24), enable_nested_tensor=not norm_first)


def vit(**options: Any) -> nn.Module:
    return timm_model("vision_transformer", "VisionTransformer", **{**VIT, **options})


RICH = {"init_values": 0.5, "qk_norm": True, "reg_tokens": 2, "global_pool": "avg", "drop_path_rate": 0.2}
EVA = {
    **VIT,
    "init_values": 0.5,
    "qkv_fused": False,
    "swiglu_mlp": True,
    "scale_mlp": True,
    "use_rot_pos_emb": True,
    "drop_path_rate": 0.2,
}
CASES: dict[str, Case] = {
    "timm-vit": Case("timm", vit, on_images, 6),
    "timm-vit-scale-qknorm-registers": Case("timm", lambda: vit(**RICH), on_images, 6),
    "timm-vit-without-norm": Case(
        "timm", lambda: vit(global_pool="avg", fc_norm=False, final_norm=False), on_images, 6
    ),
    "timm-vit-rmsnorm": Case("timm", rms_vit, on_images, 6),
    "timm-vit-norm-behind-branch": Case("timm", res_post_vit, on_images, 6),
    "timm-deit": Case("timm", lambda: timm_model("deit", "VisionTransformerDistilled", **VIT), on_images, 6),
    "timm-eva": Case("timm", lambda: timm_model("eva", "Eva", **EVA), on_images, 6),
    "timm-eva-norm-behind-branch": Case(
        "timm", lambda: timm_model("eva", "Eva", **VIT, use_post_norm=True), on_images, 6
    ),
    "timm-beit": Case(
        "timm", lambda: timm_model("beit", "Beit", **VIT, init_values=0.3, use_rel_pos_bias=True), on_images, 6
    ),
    "timm-swin": Case("timm", lambda: timm_model("swin_transformer", "SwinTransformer", **SWIN), on_images, 8),
    "timm-swin-v2": Case("timm", lambda: timm_model("swin_transformer_v2", "SwinTransformerV2", **SWIN), on_images, 8),
    "timm-resnet": Case("timm", lambda: timm_resnet("BasicBlock"), on_images, 5),
    "timm-resnet-d": Case("timm", lambda: timm_resnet("Bottleneck", stem_type="deep", avg_down=True), on_images, 5),
    "timm-resnet-features": Case("timm", lambda: timm_resnet("BasicBlock", num_classes=0), on_images, 5),
    "torchvision-resnet": Case("torchvision", lambda: torchvision_resnet("BasicBlock"), on_images, 5),
    "torchvision-resnet-bottleneck": Case("torchvision", lambda: torchvision_resnet("Bottleneck"), on_images, 5),
    "torchvision-vit": Case("torchvision", torchvision_vit, on_images, 6),
    "transformers-vit": Case("transformers", lambda: transformers_model("ViTModel", "ViTConfig"), states, 6),
    "transformers-vit-classifier": Case(
        "transformers", lambda: transformers_model("ViTForImageClassification", "ViTConfig"), logits, 6
    ),
    "transformers-deit": Case("transformers", lambda: transformers_model("DeiTModel", "DeiTConfig"), states, 6),
    "transformers-dinov2": Case(
        "transformers",
        lambda: transformers_model("Dinov2Model", "Dinov2Config", layerscale_value=0.5, drop_path_rate=0.2),
        states,
        6,
    ),
    "transformers-dinov2-swiglu": Case(
        "transformers", lambda: transformers_model("Dinov2Model", "Dinov2Config", use_swiglu_ffn=True), states, 6
    ),
    "transformers-dinov2-registers": Case(
        "transformers",
        lambda: transformers_model("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
        states,
        6,
    ),
    "transformers-beit": Case(
        "transformers",
        lambda: transformers_model(
            "BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, layer_scale_init_value=0.5
        ),
        logits,
        6,
    ),
    "transformers-vit-mae": Case(
        "transformers", lambda: transformers_model("ViTMAEForPreTraining", "ViTMAEConfig", **DECODER), reconstruct, 6
    ),
    "transformers-bert": Case("transformers", bert, read_words, 6),
    "diffusers-dit": Case("diffusers", dit, denoise, 6),
    "torch-encoder": Case("torch", lambda: torch_encoder(True), on_tokens, 6),
    "torch-encoder-post-norm": Case("torch", lambda: torch_encoder(False), on_tokens, 6),
}


def fresh(case: str) -> Any:
    """The plain network in float64, weights and statistics away from their initial values."""
    pytest.importorskip(CASES[case].package, reason=f"{CASES[case].package} is what this test is about")
    torch.manual_seed(0)
    model = CASES[case].make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
            if name.endswith("running_mean"):
                buffer.normal_()
    if "torchvision-resnet" in case:  # its widths are fixed and large; keep the numbers near 1
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.mul_(1 / (0.1 * module.weight[0].numel() ** 0.5))
                if isinstance(module, nn.BatchNorm2d):
                    module.weight.mul_(0.5)
    return model.double().eval()


# ---- every block's branches, written out without any of our code: class name -> f1, f2, ... of (block, x, arguments)

BRANCHES: dict[str, Any] = {
    "timm.models.vision_transformer.Block": (
        lambda b, x: b.ls1(b.attn(b.norm1(x))),
        lambda b, x: b.ls2(b.mlp(b.norm2(x))),
    ),
    "timm.models.vision_transformer.ResPostBlock": (
        lambda b, x: b.norm1(b.attn(x)),
        lambda b, x: b.norm2(b.mlp(x)),
    ),
    "timm.models.eva.EvaBlock": (
        lambda b, x, **a: b.gamma_1 * b.attn(b.norm1(x), **a),
        lambda b, x, **a: b.gamma_2 * b.mlp(b.norm2(x)),
    ),
    "timm.models.eva.EvaBlockPostNorm": (
        lambda b, x, **a: b.norm1(b.attn(x, **a)),
        lambda b, x, **a: b.norm2(b.mlp(x)),
    ),
    "timm.models.beit.Block": (
        lambda b, x, **a: b.gamma_1 * b.attn(b.norm1(x), **a),
        lambda b, x, **a: b.gamma_2 * b.mlp(b.norm2(x)),
    ),
    "timm.models.swin_transformer.SwinTransformerBlock": (
        lambda b, x: b._attn(b.norm1(x)),
        lambda b, x: b.mlp(b.norm2(x)),
    ),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": (
        lambda b, x: b.norm1(b._attn(x)),
        lambda b, x: b.norm2(b.mlp(x)),
    ),
    "torchvision.models.vision_transformer.EncoderBlock": (
        lambda b, x: b.self_attention(*[b.ln_1(x)] * 3)[0],
        lambda b, x: b.mlp(b.ln_2(x)),
    ),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": (
        lambda b, x, *_, **a: b.layer_scale1(b.attention(b.norm1(x))[0]),
        lambda b, x, *_, **a: b.layer_scale2(b.mlp(b.norm2(x))),
    ),
    "transformers.models.beit.modeling_beit.BeitLayer": (
        lambda b, x, *_, **a: b.lambda_1 * b.attention(b.layernorm_before(x), _beit_bias(b, x))[0],
        lambda b, x, *_, **a: b.lambda_2 * b.mlp(b.layernorm_after(x)),
    ),
    "diffusers.models.attention.BasicTransformerBlock": (
        lambda b, x, **a: _dit(b, x, a)[1][:, None] * b.attn1(_dit(b, x, a)[0]),
        lambda b, x, **a: (
            _dit(b, x, a)[4][:, None] * b.ff(b.norm3(x) * (1 + _dit(b, x, a)[3][:, None]) + _dit(b, x, a)[2][:, None])
        ),
    ),
    "torch.nn.modules.transformer.TransformerEncoderLayer": (
        lambda b, x, **a: _attend(b.self_attn, b.norm1(x)),
        lambda b, x, **a: b.linear2(b.linear1(b.norm2(x)).relu()),
    ),
}
BRANCHES["transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer"] = (
    BRANCHES["transformers.models.dinov2.modeling_dinov2.Dinov2Layer"]
)
for _family, _name in (("vit", "ViT"), ("deit", "DeiT"), ("vit_mae", "ViTMAE")):
    BRANCHES[f"transformers.models.{_family}.modeling_{_family}.{_name}Layer"] = (
        lambda b, x, *_, **a: b.attention(b.layernorm_before(x))[0],
        lambda b, x, *_, **a: b.mlp(b.layernorm_after(x)),
    )


def _beit_bias(block: Any, x: Tensor) -> Tensor:
    return block.relative_position_bias((4, 4), False, dim_size=x.shape[1])


def _dit(block: Any, x: Tensor, arguments: dict[str, Any]) -> Any:
    return block.norm1(x, arguments["timestep"], arguments["class_labels"], hidden_dtype=x.dtype)


def _attend(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Two-head attention from its definition."""
    B, N, D = x.shape
    q, k, v = (part.view(B, N, 2, D // 2).transpose(1, 2) for part in _packed(attention, x).chunk(3, dim=-1))
    weights = (q @ k.transpose(-1, -2) / (D // 2) ** 0.5).softmax(dim=-1)
    return attention.out_proj((weights @ v).transpose(1, 2).reshape(B, N, D))


def _packed(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)


def _residual(block: Any, alphas: list[float], x: Tensor) -> Tensor:
    """A ResNet's block: alpha times the shortcut, projected where the shape changes, then ReLU."""
    fx = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
    if "Bottleneck" in type(block).__name__:
        fx = block.bn3(block.conv3(fx.relu()))
    return (alphas[0] * (x if block.downsample is None else block.downsample(x)) + fx).relu()


def _post_norm(block: Any, alphas: list[float], hidden: Tensor, x: Tensor) -> Tensor:
    return block.LayerNorm(alphas[0] * x + block.dense(hidden))


def _post_norm_layer(block: Any, alphas: list[float], x: Tensor, **_: Any) -> Tensor:
    x = block.norm1(alphas[0] * x + _attend(block.self_attn, x))
    return block.norm2(alphas[1] * x + block.linear2(block.linear1(x).relu()))


def qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def with_reference_blocks(model: Any, alphas: list[float]) -> Any:
    """Change the plain network in place so that its blocks return alpha x + f(x) as written above."""
    remaining = iter(alphas)
    for name, block in model.named_modules():
        if name.startswith("decoder"):
            continue
        kind = qualified(block)
        if kind.endswith(("resnet.BasicBlock", "resnet.Bottleneck")):
            answer = partial(_answer, _residual, [next(remaining)])
        elif kind.endswith(("BertSelfOutput", "BertOutput")):
            answer = partial(_answer, _post_norm, [next(remaining)])
        elif kind.endswith("TransformerEncoderLayer") and not block.norm_first:
            answer = partial(_answer, _post_norm_layer, [next(remaining), next(remaining)])
        elif kind in BRANCHES:
            answer = partial(_answer, partial(_joined, BRANCHES[kind]), [next(remaining), next(remaining)])
        else:
            continue
        block.register_forward_hook(answer, with_kwargs=True)
    assert next(remaining, None) is None
    return model


def _answer(formula: Any, alphas: list[float], block: Any, args: Any, kwargs: Any, _: Any) -> Tensor:
    return formula(block, alphas, *args, **kwargs)


def _joined(branches: Any, block: Any, alphas: list[float], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for alpha, branch in zip(alphas, branches, strict=True):
        x = alpha * x + branch(block, x, *args, **kwargs)
    return x
