"""transformers: the blocks of ViT, ViTMAE, DeiT, DINOv2, BEiT and BERT; its encoders; its ViT's weights in and out.

The decoder of ViTMAE stays plain. A post-norm sum is renormalized at once, so in BERT the decay weighs a branch against
its own input only, and no echo of the embedding fades with depth.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.adapters import facebook, timm
from anechoic.adapters.blocks import DecayedBlock, describe, keep_plain, pre_norm, replaces, stream_to
from anechoic.adapters.registry import ForeignEncoder
from anechoic.adapters.tensors import EPS_FILE, Layout, Run, Tensors, rename
from anechoic.adapters.torchvision_operators import allow_mismatch, import_library
from anechoic.config import IMAGENET_MEAN, IMAGENET_STD
from anechoic.data.preprocess import MARGIN, Preprocess
from anechoic.errors import UserError
from anechoic.models.vit import VisionTransformer, ViTConfig
from anechoic.shortcut import Branch, Event, Read, Restart, Stream
from anechoic.storage.safe_io import of_kind, read_table, reason, refuse_giants, refuse_odd_files, refuse_unbacked

# ---- blocks


def _path(family: str, name: str) -> str:
    return f"transformers.models.{family}.modeling_{family}.{name}"


class _Layer(DecayedBlock):
    parts = "attention layernorm_before layernorm_after mlp dropout"

    def branches(self) -> list[Event]:
        return pre_norm(self, (self.layernorm_before, self.attention.o_proj), (self.layernorm_after, self.mlp.fc2))


@replaces(_path("vit", "ViTLayer"), _path("deit", "DeiTLayer"), _path("vit_mae", "ViTMAELayer"))
class ViTLayer(_Layer):
    """One dropout for both branches."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        x = self.shortcut1(hidden_states, self.dropout(attended))
        return self.shortcut2(x, self.dropout(self.mlp(self.layernorm_after(x))))


@replaces(_path("beit", "BeitLayer"))
class BeitLayer(_Layer):
    parts = f"{_Layer.parts} drop_path lambda_1 lambda_2 relative_position_bias"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.relative_position_bias is not None:
            assert resolution is not None, "the model passes the size of its images"
            window = (resolution[0] // self.patch_size, resolution[1] // self.patch_size)
            bias = self.relative_position_bias(window, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            attention_mask = bias if attention_mask is None else bias + attention_mask
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, attention_mask=attention_mask, **kwargs)
        x = self.shortcut1(hidden_states, self.drop_path(self.lambda_1 * self.dropout(attended)))
        mixed = self.dropout(self.mlp(self.layernorm_after(x)))
        return self.shortcut2(x, self.drop_path(self.lambda_2 * mixed))


@replaces(_path("dinov2", "Dinov2Layer"), _path("dinov2_with_registers", "Dinov2WithRegistersLayer"))
class Dinov2Layer(DecayedBlock):
    """norm, attention or mlp, layer scale, drop path."""

    parts = "norm1 attention layer_scale1 drop_path norm2 mlp layer_scale2"

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(self.norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        x = self.shortcut1(hidden_states, self.drop_path(self.layer_scale1(attended)))
        return self.shortcut2(x, self.drop_path(self.layer_scale2(self.mlp(self.norm2(x)))))

    def branches(self) -> list[Event]:
        last = self.mlp.down_proj if type(self.mlp).__name__.endswith("SwiGLUFFN") else self.mlp.fc2
        return pre_norm(self, (self.norm1, self.attention.o_proj), (self.norm2, last))


class _PostNorm(DecayedBlock):
    """LayerNorm(x + dense(h)): the last map of a branch and the sum, in a module of their own."""

    parts = "dense LayerNorm dropout"

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.shortcut1(input_tensor, self.dropout(self.dense(hidden_states))))

    def branches(self) -> list[Event]:
        return [Branch(self.shortcut1, Read(), self.dense), Restart(Read(norms=(self.LayerNorm,)))]


@replaces(_path("bert", "BertSelfOutput"))
class BertSelfOutput(_PostNorm):
    kinds = ("attention",)


@replaces(_path("bert", "BertOutput"))
class BertOutput(_PostNorm):
    kinds = ("mlp",)


def final_norm_stream(model: Any) -> Stream:
    return stream_to(model.layers, model.layernorm)


def dinov2_stream(model: Any) -> Stream:
    return stream_to(model.encoder.layer, model.layernorm)


def beit_stream(model: Any) -> Stream:
    """Read by the final norm, or by the one behind the mean of the patches."""
    pooled = None if model.pooler is None else model.pooler.layernorm
    return stream_to(model.layers, pooled if isinstance(model.layernorm, nn.Identity) else model.layernorm)


def between_layers(model: Any) -> Stream:
    """Heads that read hidden states between layers see the stream itself, so nothing inside can be rescaled."""
    return stream_to(model.beit.layers, None)


for _family, _name in (("vit", "ViTModel"), ("deit", "DeiTModel"), ("vit_mae", "ViTMAEModel")):
    describe(_path(_family, _name), final_norm_stream)
for _family, _name in (("dinov2", "Dinov2Model"), ("dinov2_with_registers", "Dinov2WithRegistersModel")):
    describe(_path(_family, _name), dinov2_stream)
describe(_path("beit", "BeitModel"), beit_stream)
describe(_path("beit", "BeitForSemanticSegmentation"), between_layers)
keep_plain(_path("vit_mae", "ViTMAEDecoder"))


# ---- encoders


class TransformersEncoder(nn.Module):
    """A transformers vision model, read without its head and without masking."""

    def __init__(self, model: Any, num_prefix_tokens: int, block_path: str) -> None:
        super().__init__()
        self.model = model
        self.num_prefix_tokens = num_prefix_tokens
        self.block_path = block_path

    @property
    def blocks(self) -> nn.Module:
        return self.model.get_submodule(self.block_path)

    def forward(self, images: Tensor) -> Tensor:
        return last_hidden_state(self.model, images)


def last_hidden_state(model: Any, images: Tensor) -> Tensor:
    own_size = images.shape[-1] == model.config.image_size
    other: dict[str, Any] = {} if own_size or not _interpolates(model) else {"interpolate_pos_encoding": True}
    if model.config.model_type == "vit_mae":
        # This class shuffles patches by noise even when it drops none: ascending noise leaves them in place.
        side: Any = model.config.patch_size
        patches = (images.shape[2] // side) * (images.shape[3] // side)
        other["noise"] = torch.arange(patches, device=images.device).expand(len(images), -1)
    return model(pixel_values=images, **other).last_hidden_state


def _interpolates(model: nn.Module) -> bool:
    """Return whether its positions can be made to fit another image size; some do so by themselves."""
    return "interpolate_pos_encoding" in inspect.signature(model.forward).parameters


def open_encoder(folder: str) -> ForeignEncoder:
    """Return the model of a folder written by save_pretrained, or of the hub."""
    transformers = import_library("transformers")
    AutoConfig, AutoModel = transformers.AutoConfig, transformers.AutoModel
    _refuse_code(folder)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if config.model_type == "vit_mae":
                config.mask_ratio = 0.0
            if Path(folder).is_dir():
                with torch.device("meta"):
                    count = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
                refuse_unbacked(count, Path(folder), where=f"transformers:{folder}")
            model, report = AutoModel.from_pretrained(
                folder, config=config, trust_remote_code=False, output_loading_info=True, weights_only=True
            )
    except UserError:
        raise
    # transformers raises almost any exception on a damaged folder.
    except Exception as error:
        raise UserError(f"transformers:{folder} cannot be loaded: {reason(error)}.") from error
    _refuse_misfit(folder, report)
    model.eval()
    size, patch, channels = (getattr(config, name, None) for name in ("image_size", "patch_size", "num_channels"))
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    paths = [name for name, part in lists.items() if len(part) == getattr(config, "num_hidden_layers", None)]
    if not isinstance(size, int) or not isinstance(patch, int) or not channels or not paths:
        raise UserError(f"transformers:{folder} holds a {type(model).__name__}, which is no plain vision transformer.")
    try:
        with torch.inference_mode():
            tokens = last_hidden_state(model, torch.zeros(1, channels, size, size))
    except Exception as error:  # as above
        raise UserError(
            f"transformers:{folder} cannot be used: its config does not describe a working model ({reason(error)})."
        ) from error
    prefix = tokens.shape[1] - (size // patch) ** 2
    mean, std = _statistics(folder, channels)

    def wrap(network: Any) -> nn.Module:
        return TransformersEncoder(network, prefix, paths[0])

    preprocess = Preprocess(mean, std, size, channels)
    untrained = lambda: wrap(AutoModel.from_config(config).eval())  # noqa: E731
    return ForeignEncoder(f"transformers:{Path(folder).name}", wrap(model), preprocess, untrained)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about the weights of a decoder or head, which are omitted on purpose."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _statistics(folder: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation that come with the model, or ImageNet's."""
    path = Path(folder) / "preprocessor_config.json"
    if not path.exists():
        return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    found = read_table(path)
    mean, std = (of_kind(found, f"image_{name}", list, where=str(path)) for name in ("mean", "std"))
    numbers = [*mean, *std]
    if not (
        len(mean) == len(std) == channels and all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
    ):
        raise UserError(f"{path} has image_mean = {mean!r:.60} and image_std = {std!r:.60} for {channels} channels.")
    if min(std) <= 0:
        raise UserError(f"{path} has image_std = {std!r:.60}, and images cannot be divided by it.")
    return tuple(mean), tuple(std)


def _refuse_code(folder: str) -> None:
    """Refuse a folder that asks for Python files of its own to be run, or for a network of any size."""
    path = Path(folder)
    if not path.is_dir():
        return  # a name on the hub: transformers reads it as data
    if not (path / "config.json").is_file():
        raise UserError(f"transformers:{folder} has no config.json: give a folder written by save_pretrained.")
    refuse_odd_files(path)
    card = read_table(path / "config.json")
    refuse_giants(card, where=str(path / "config.json"))
    if "auto_map" in card:
        raise UserError(
            f"transformers:{folder} asks for code of its own to be run (auto_map in its config.json), which is "
            f"refused: give a model of a class that transformers has."
        )


def _refuse_misfit(folder: str, report: Mapping[str, Any]) -> None:
    """Weights that are missing in the folder would be random. A pooler is never used."""
    lost = [str(name) for name in report.get("missing_keys", ()) if "pooler" not in str(name)]
    lost += [str(item[0] if isinstance(item, tuple) else item) for item in report.get("mismatched_keys", ())]
    if lost:
        raise UserError(
            f"The weights in transformers:{folder} do not fit the network its config.json describes: {min(lost)} is "
            f"missing or of another shape{f', and {len(lost) - 1} more' if len(lost) > 1 else ''}."
        )


# ---- weights in

# Names inside a layer: of files, of the modules of version 5, and of timm.
IN_LAYER = [
    ("layernorm_before", "layernorm_before", "norm1"),
    ("layernorm_after", "layernorm_after", "norm2"),
    ("attention.output.dense", "attention.o_proj", "attn.proj"),
    ("intermediate.dense", "mlp.fc1", "mlp.fc1"),
    ("output.dense", "mlp.fc2", "mlp.fc2"),
]
QKV = [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")]


def recognize(tensors: Tensors) -> Layout | None:
    """ViT or ViTMAE, under the names that timm and MAE have."""
    if not any(name.startswith(("vit.embeddings.", "embeddings.")) for name in tensors):
        return None
    renamed = to_timm(tensors)
    return facebook.recognize(renamed) or timm.recognize(renamed)


def to_timm(tensors: Mapping[str, Tensor]) -> Tensors:
    """Rename ViT and ViTMAE as their files name them, or as the modules of transformers 5 do."""
    rules: list[tuple[str, str]] = [
        (r"(?:vit\.)?embeddings\.cls_token", "cls_token"),
        (r"(?:vit\.)?embeddings\.position_embeddings", "pos_embed"),
        (r"(?:vit\.)?embeddings\.patch_embeddings\.projection\.(.*)", r"patch_embed.proj.\1"),
        (r"(?:vit\.)?layernorm\.(.*)", r"norm.\1"),
        (r"classifier\.(.*)", r"head.\1"),
        (r"decoder\.(mask_token|decoder_(?:pos_embed|embed|norm|pred).*)", r"\1"),
    ]
    # decoder_encoder.layer is what version 5 writes for the decoder's layers.
    layers = [
        (r"(?:vit\.)?(?:encoder\.layer|layers)", "blocks"),
        (r"decoder\.(?:decoder_layers|decoder_encoder\.layer)", "decoder_blocks"),
    ]
    for path, blocks in layers:
        for in_file, in_module, ours in IN_LAYER:
            names = f"(?:{re.escape(in_file)}|{re.escape(in_module)})"
            rules.append((rf"{path}\.(\d+)\.{names}\.(weight|bias)", rf"{blocks}.\1.{ours}.\2"))
        for i, (in_file, in_module) in enumerate(QKV):
            names = f"(?:attention\\.{in_file}|{in_module})"
            rules.append((rf"{path}\.(\d+)\.attention\.{names}\.(weight|bias)", rf"{blocks}.\1.attn.qkv.{i}.\2"))
    return _join_qkv(rename(tensors, rules))


def _join_qkv(tensors: Mapping[str, Tensor]) -> Tensors:
    """attn.qkv.{0,1,2}.weight -> attn.qkv.weight (3 D, D), where all three are there."""
    joined = dict(tensors)
    for name in tensors:
        found = re.fullmatch(r"(.*\.attn\.qkv)\.0\.(weight|bias)", name)
        parts = [f"{found[1]}.{i}.{found[2]}" for i in range(3)] if found else []
        if found and all(part in joined for part in parts):
            joined[f"{found[1]}.{found[2]}"] = torch.cat([joined.pop(part) for part in parts])
    return joined


# ---- weights out

OPENING = {
    False: """from transformers import AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
tokens = model(images).last_hidden_state""",
    True: """from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()
logits = model(images).logits""",
}


def embed_lines(classifies: bool, *, raw: bool, factor: str) -> str:
    """Return the lines that compute the vector of `embed`. raw: before the final norm."""
    base = "model.vit" if classifies else "model"
    norm = f"{base}.layernorm = torch.nn.Identity()\n" if raw else ""
    return f"{norm}vector = {factor}{base}(images).last_hidden_state[:, 0]"


def export_files(plain: VisionTransformer, preprocess: Preprocess) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and JSON files of a folder for AutoModel, or AutoModelForImageClassification with a head."""
    config = plain.config
    if plain.norm is None:
        raise UserError("transformers' ViT classifies by its class token: export this classifier to timm.")
    if config.size[0] != config.size[1]:
        raise UserError("transformers' ViT is declared for square images: export this network to timm.")
    tensors = from_timm(timm.export_tensors(plain))
    if config.num_classes == 0:
        # AutoModel always makes a pooler; with these weights it returns the class token.
        tensors["pooler.dense.weight"] = torch.eye(config.dim)
        tensors["pooler.dense.bias"] = torch.zeros(config.dim)
    prefix = "vit." if config.num_classes > 0 else ""
    eps = {_norm_module(name, prefix): value for name, value in timm.eps_by_norm(plain).items()}
    files = {
        "config.json": _model_config(config, eps=plain.norms()[0].eps),  # no decay has scaled the first norm's eps
        "preprocessor_config.json": _image_processor(preprocess),
        EPS_FILE: eps,
    }
    return tensors, files


def from_timm(tensors: Mapping[str, Tensor]) -> Tensors:
    """Rename a timm ViT as transformers' files do: ViTForImageClassification with a head, else ViTModel."""
    split = {}
    for name, value in tensors.items():
        found = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name)
        if found is None:
            split[name] = value
            continue
        for (in_file, _), part in zip(QKV, value.chunk(3), strict=True):
            split[f"encoder.layer.{found[1]}.attention.attention.{in_file}.{found[2]}"] = part
    prefix = "vit." if "head.weight" in tensors else ""
    rules: list[tuple[str, str]] = [
        (r"cls_token", f"{prefix}embeddings.cls_token"),
        (r"pos_embed", f"{prefix}embeddings.position_embeddings"),
        (r"patch_embed\.proj\.(.*)", rf"{prefix}embeddings.patch_embeddings.projection.\1"),
        (r"norm\.(.*)", rf"{prefix}layernorm.\1"),
        (r"head\.(.*)", r"classifier.\1"),
        (r"(encoder\.layer\..*)", rf"{prefix}\1"),
    ]
    for in_file, _, ours in IN_LAYER:
        rules.append((rf"blocks\.(\d+)\.{re.escape(ours)}\.(.*)", rf"{prefix}encoder.layer.\1.{in_file}.\2"))
    return rename(split, rules)


def _norm_module(timm_name: str, prefix: str) -> str:
    """Return the module of transformers 5 that corresponds to a norm of timm's ViT."""
    if timm_name == "norm":
        return f"{prefix}layernorm"
    _, number, norm = timm_name.split(".")
    return f"{prefix}layers.{number}.{ {'norm1': 'layernorm_before', 'norm2': 'layernorm_after'}[norm] }"


def _model_config(config: ViTConfig, *, eps: float) -> dict[str, Any]:
    settings = {
        "architectures": ["ViTForImageClassification" if config.num_classes > 0 else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": int(config.dim * config.mlp_ratio),
        "hidden_act": "gelu" if config.gelu == "none" else "gelu_pytorch_tanh",
        "layer_norm_eps": eps,
        "image_size": config.size[0],
        "patch_size": config.patch_size,
        "num_channels": config.in_channels,
        "qkv_bias": config.qkv_bias,
        "pooler_act": "linear",
        "pooler_output_size": config.dim,
    }
    if config.num_classes > 0:
        names = {str(i): f"LABEL_{i}" for i in range(config.num_classes)}
        settings |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    return settings


def _image_processor(preprocess: Preprocess) -> dict[str, Any]:
    """Resize the shorter side and crop the center; ViT's own image processor would squeeze images into a square.

    Stored values are not divided by 255; a curve before mean and std is in the README only.
    """
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": preprocess.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": round(preprocess.image_size * MARGIN)},
        "do_center_crop": True,
        "crop_size": {"height": preprocess.image_size, "width": preprocess.image_size},
        "resample": 3,
        "do_rescale": not preprocess.pixels.stored,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


def open_export(folder: Path, classifies: bool) -> tuple[nn.Module, Run]:
    allow_mismatch()
    import transformers
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        kind: Any = transformers.AutoModelForImageClassification if classifies else transformers.AutoModel
        network: Any = kind.from_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()

    def run(images: Tensor) -> Tensor:
        out = network(pixel_values=images)
        return out.logits if classifies else out.last_hidden_state

    return network, run
