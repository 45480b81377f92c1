"""Our networks as files that other programs open: timm, transformers, ONNX, torch.export, or our own model directory.

What is handed out is the encoder of a masked autoencoder, or the network itself. timm and transformers have plain
shortcuts and always a final norm, so for them the encoder gets one and is folded. Reading is in importing.py.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from anechoic.data.preprocess import MARGIN, Preprocess
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.mae import MaskedAutoencoder
from anechoic.models.network import MARKS
from anechoic.models.sit import SiT
from anechoic.models.uvit import UViT
from anechoic.models.vit import VisionTransformer, ViTConfig
from anechoic.runtime.checkpoint import load, model_card, write_model
from anechoic.shortcut import Read, Stream
from anechoic.storage.files import write_aside
from anechoic.surgery import fold, fold_along
from anechoic.weights.export_readme import model_card_text
from anechoic.weights.layouts import OURS_TO_TIMM, Tensors, rename, timm_to_transformers, transformers_module
from anechoic.weights.verify_export import open_with, set_eps

# timm's architecture that every size is an option of.
TIMM_ARCHITECTURE = "vit_base_patch16_224"
EPS_FILE = "norm_eps.json"


class Exported(NamedTuple):
    """The folder, and the largest differences from our network on the images that were given; compared: with what."""

    folder: Path
    differences: dict[str, float]
    compared: str


def encoder_of(model: nn.Module) -> Any:
    """What of a trained network is used afterwards."""
    if isinstance(model, MaskedAutoencoder):
        encoder: Any = model.encoder
        encoder.preprocess = model.preprocess
        return encoder
    return model


def is_decayed(model: Any) -> bool:
    return any(shortcut.factors != (1.0, 1.0) for shortcut in model.stream().shortcuts)


@torch.no_grad()
def largest_difference(a: Callable[..., Tensor], b: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    return float((a(*inputs) - b(*inputs)).abs().max())


# ---- our own directory, ONNX, torch.export


def to_safetensors(model: Any, folder: Path, images: Tensor) -> Exported:
    write_model(folder, model.state_dict(), model_card(model, model.preprocess))
    inputs = example_inputs(model, images)
    return Exported(folder, {"reloaded": largest_difference(model, load(folder), inputs)}, "anechoic.load opened it")


def example_inputs(model: Any, images: Tensor) -> tuple[Tensor, ...]:
    """Arguments of the network's forward for these images: diffusion networks also take a time, and labels."""
    if not isinstance(model, SiT | UViT):
        return (images,)
    t = torch.linspace(0.1, 0.9, len(images))
    labels = () if model.config.num_classes is None else (torch.arange(len(images)) % model.config.num_classes,)
    return (images, t, *labels)


def _traced(model: Any, images: Tensor) -> Any:
    """torch.export's program with a free batch size; the example has two images, because one could be a constant."""
    if len(images) < 2:
        raise UserError("Exporting needs at least two example images: give a source with more.")
    inputs = example_inputs(model, images[:2])
    batch = torch.export.Dim("batch", min=1)
    # Traced from the bytecode, so that len(x) stays free too.
    return torch.export.export(model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs), strict=True)


def to_torch_export(model: Any, folder: Path, images: Tensor) -> Exported:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.pt2"
    torch.export.save(_traced(model, images), path)
    reloaded = torch.export.load(path).module()
    difference = largest_difference(model, reloaded, example_inputs(model, images))
    return Exported(folder, {"reloaded": difference}, f"torch {torch.__version__} opened {path.name}")


def to_onnx(model: Any, folder: Path, images: Tensor) -> Exported:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UserError(f'Writing ONNX needs {", ".join(missing)}: pip install "anechoic[export]".')
    import onnxruntime

    program = _traced(model, images)
    names = ["images", "t", "labels"][: len(example_inputs(model, images))]
    with warnings.catch_warnings():
        # torch 2.13 deprecates a class that its own exporter still uses.
        warnings.simplefilter("ignore", FutureWarning)
        onnx_program: Any = torch.onnx.export(program, input_names=names, output_names=["output"], verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx_program.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        given = dict(zip(names, (value.numpy() for value in inputs), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    inputs, single = example_inputs(model, images), example_inputs(model, images[:1])
    differences = {
        "onnxruntime": largest_difference(model, run, inputs),
        "onnxruntime, one image": largest_difference(model, run, single),
    }
    return Exported(folder, differences, f"onnxruntime {onnxruntime.__version__} opened {path.name}")


# ---- timm and transformers


def as_plain_vit(model: Any) -> VisionTransformer:
    """A copy with plain shortcuts and a final norm (of weight 1 and bias 0 where ours has none)."""
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"timm and transformers have no counterpart of {type(model).__name__}: export it to safetensors, onnx or "
            f"torch-export."
        )
    normed = with_final_norm(model)
    if normed.norm is not None:
        return cast(VisionTransformer, fold(normed))
    # The norm behind the mean is all that reads the stream, so the stream may end in any scale and starts in its own.
    assert normed.head_norm is not None
    stream = Stream((*normed.stream().events, Read(norms=(normed.head_norm,))), ends_raw=False)
    return cast(VisionTransformer, fold_along(normed, stream))


def with_final_norm(model: VisionTransformer) -> VisionTransformer:
    """The network itself if a norm reads the end of its stream, else a copy that has one."""
    config = model.config
    if config.num_classes > 0 and config.norm == (config.pool == "mean"):
        times = "twice" if config.norm else "never"
        raise UserError(
            f"timm and transformers normalize once before they classify, and this network {times}: export it to "
            f"safetensors, onnx or torch-export."
        )
    if config.norm or model.head_norm is not None:
        return model
    eps = [norm.eps for norm in model.norms()]
    normed: Any = build(dataclasses.replace(config, norm=True, norm_eps=(*eps, 1e-6)))
    normed.load_state_dict({**normed.state_dict(), **model.state_dict()})
    return normed.to(next(model.parameters()).device).eval()


def timm_tensors(plain: VisionTransformer) -> Tensors:
    """The state dict of timm's ViT. Fixed positions become its table, with zeros for the class token."""
    state = {name: value for name, value in plain.state_dict().items() if name not in MARKS}
    if plain.config.positions == "sincos":
        positions = plain.positions * plain.position_scale
        state["positions"] = nn.functional.pad(positions, (0, 0, 1, 0))
    return rename(state, OURS_TO_TIMM)


def timm_arguments(config: ViTConfig) -> dict[str, Any]:
    """Arguments of timm.create_model beside the architecture's name."""
    mean = config.num_classes > 0 and config.pool == "mean"
    return {
        "img_size": list(config.size),
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "num_classes": config.num_classes,
        "global_pool": "avg" if mean else "token",
        **({} if config.gelu == "none" else {"act_layer": "gelu_tanh"}),
    }


def eps_by_norm(plain: VisionTransformer) -> dict[str, float]:
    """timm's name of each norm -> its eps, in execution order."""
    names = [f"blocks.{i}.norm{k}" for i in range(plain.config.depth) for k in (1, 2)]
    names += ["fc_norm" if plain.norm is None else "norm"]
    return dict(zip(names, (norm.eps for norm in plain.norms()), strict=True))


def with_one_eps(plain: VisionTransformer, eps: float) -> VisionTransformer:
    """What a program computes that knows a single eps."""
    copied = copy.deepcopy(plain)
    for norm in copied.norms():
        norm.eps = eps
    return copied


def _compared(
    library: str, folder: Path, model: VisionTransformer, plain: VisionTransformer, images: Tensor
) -> tuple[dict[str, float], str]:
    """The written folder, opened by the library, beside our network; where that cannot be, the weights in memory."""
    reference = with_final_norm(model)
    opened = open_with(library, folder, classifies=plain.config.num_classes > 0)
    if isinstance(opened, str):
        one_eps = largest_difference(reference, with_one_eps(plain, common_eps(plain)), (images,))
        each_eps = largest_difference(reference, plain, (images,))
        words = f"only our own copy of the weights in memory, since {opened}"
    else:
        one_eps = largest_difference(reference, opened.run, (images,))
        set_eps(opened.network, json.loads((folder / EPS_FILE).read_text()))
        each_eps = largest_difference(reference, opened.run, (images,))
        words = f"{opened.words} opened the written folder"
    return {"with an eps per norm": each_eps, "with one eps": one_eps}, words


def common_eps(plain: VisionTransformer) -> float:
    """The eps for programs that have one: the first norm's, which no decay has scaled."""
    return plain.norms()[0].eps


def to_timm(model: Any, folder: Path, images: Tensor) -> Exported:
    """A folder for timm.create_model("local-dir:FOLDER", pretrained=True)."""
    plain = as_plain_vit(model)
    arguments = timm_arguments(plain.config)
    how = model.preprocess
    channels, (height, width) = plain.config.in_channels, plain.config.size
    card = {
        "architecture": TIMM_ARCHITECTURE,
        "num_classes": arguments["num_classes"],
        "num_features": plain.config.dim,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "mean": list(how.mean),
            "std": list(how.std),
            "interpolation": "bicubic",
            "crop_mode": "center",
            "crop_pct": 1 / MARGIN,
            "num_classes": arguments["num_classes"],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    _write(folder, timm_tensors(plain), {"config.json": card, EPS_FILE: eps_by_norm(plain)})
    differences, compared = _compared("timm", folder, model, plain, images)
    card_text = model_card_text("timm", plain.config, differences, folded=is_decayed(model))
    (folder / "README.md").write_text(card_text)
    return Exported(folder, differences, compared)


def to_transformers(model: Any, folder: Path, images: Tensor) -> Exported:
    """A folder for transformers' AutoModel.from_pretrained: ViTModel, or ViTForImageClassification with a head."""
    plain = as_plain_vit(model)
    config = plain.config
    if plain.norm is None:
        raise UserError("transformers' ViT classifies by its class token: export this classifier to timm.")
    if config.size[0] != config.size[1]:
        raise UserError("transformers' ViT is declared for square images: export this network to timm.")
    classifies = config.num_classes > 0
    tensors = timm_to_transformers(timm_tensors(plain))
    if not classifies:
        # AutoModel always makes a pooler; with these weights it hands through the class token.
        tensors["pooler.dense.weight"] = torch.eye(config.dim)
        tensors["pooler.dense.bias"] = torch.zeros(config.dim)
    eps = {
        transformers_module(name, prefix="vit." if classifies else ""): value
        for name, value in eps_by_norm(plain).items()
    }
    files = {
        "config.json": transformers_settings(config, common_eps(plain)),
        "preprocessor_config.json": transformers_processor(model.preprocess),
        EPS_FILE: eps,
    }
    _write(folder, tensors, files)
    differences, compared = _compared("transformers", folder, model, plain, images)
    card_text = model_card_text("transformers", config, differences, folded=is_decayed(model))
    (folder / "README.md").write_text(card_text)
    return Exported(folder, differences, compared)


def transformers_settings(config: ViTConfig, eps: float) -> dict[str, Any]:
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


def transformers_processor(how: Preprocess) -> dict[str, Any]:
    """The processor that resizes the shorter side and cuts the middle; ViT's own would squeeze images into a square."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": how.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": round(how.image_size * MARGIN)},
        "do_center_crop": True,
        "crop_size": {"height": how.image_size, "width": how.image_size},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(how.mean),
        "image_std": list(how.std),
    }


def to_hub_folder(model: Any, folder: Path, images: Tensor) -> Exported:
    """The folder for transformers and, in `anechoic/`, the network as it was trained."""
    exported = to_transformers(model, folder, images)
    to_safetensors(model, folder / "anechoic", images)
    return exported


def _write(folder: Path, tensors: Tensors, files: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    # transformers opens a file only if it says that its tensors are torch's.
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


TARGETS: dict[str, Callable[[Any, Path, Tensor], Exported]] = {
    "timm": to_timm,
    "transformers": to_transformers,
    "hub-folder": to_hub_folder,
    "safetensors": to_safetensors,
    "onnx": to_onnx,
    "torch-export": to_torch_export,
}


def export_model(model: Any, folder: Path, *, to: str, images: Tensor) -> Exported:
    """Write a new folder, or nothing at all."""
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another --out.")
    with write_aside(folder, folder=True) as temporary:
        exported = TARGETS[to](model, temporary, images)
    return exported._replace(folder=folder)
