"""Our networks as files that other programs open: timm, transformers, ONNX, torch.export, or our own model directory.

Exported is the encoder of a masked autoencoder, or the network itself. timm and transformers have plain shortcuts and
always a final norm, so for them the encoder gets one and is folded. What they call the tensors is in adapters.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from anechoic.adapters.registry import ADAPTERS
from anechoic.adapters.tensors import EPS_FILE
from anechoic.errors import UserError
from anechoic.models import build
from anechoic.models.mae import MaskedAutoencoder
from anechoic.models.sit import SiT
from anechoic.models.uvit import UViT
from anechoic.models.vit import VisionTransformer
from anechoic.runtime.checkpoint import load, model_card, write_model, write_tensors
from anechoic.shortcut import Read, Stream
from anechoic.storage.files import write_aside
from anechoic.storage.safe_io import reason
from anechoic.surgery import fold, fold_along, shortcuts
from anechoic.weights.export_readme import readme


class Exported(NamedTuple):
    """The folder, and the largest differences from our network on the images that were given; compared: with what."""

    folder: Path
    differences: dict[str, float]
    compared: str


def exported_network(model: nn.Module) -> Any:
    """Return the part of a trained network that is used after training."""
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


def to_library(library: str, model: Any, folder: Path, images: Tensor) -> Exported:
    """Write a folder that the library opens, and compare what it computes with our network."""
    plain = as_plain_vit(model)
    tensors, files = ADAPTERS[library].load().export_files(plain, model.preprocess)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers opens only files with this mark of torch's tensors.
    write_tensors(folder / "model.safetensors", tensors, format="pt")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    differences, compared = _compare(library, folder, model, plain, images)
    text = readme(
        library,
        plain.config,
        model.preprocess,
        differences,
        folded=is_decayed(model),
        normed=model.config.norm and not model.config.num_classes,
        gain=shortcuts(model)[-1].gain,
    )
    (folder / "README.md").write_text(text)
    return Exported(folder, differences, compared)


def _compare(
    library: str, folder: Path, model: VisionTransformer, plain: VisionTransformer, images: Tensor
) -> tuple[dict[str, float], str]:
    """Compare the written folder, opened by its library, with our network; without the library, the weights in memory.

    A library has one eps for all norms: the first norm's, which no decay has scaled.
    """
    reference = with_final_norm(model)
    try:
        opened, run = ADAPTERS[library].load().open_export(folder, plain.config.num_classes > 0)
        compared = f"{library} {version(library)} opened the written folder"
        eps_of = json.loads((folder / EPS_FILE).read_text())
    except (ImportError, RuntimeError) as problem:  # the second: parts of another version of torch
        missing = isinstance(problem, ModuleNotFoundError) and problem.name == library
        why = f"{library} is not installed" if missing else f"{library} does not work here: {reason(problem)}"
        compared = f"only our own copy of the weights in memory, since {why}"
        opened = run = copy.deepcopy(plain)
        names = {norm: name for name, norm in opened.named_modules()}
        eps_of = {names[norm]: norm.eps for norm in opened.norms()}
        for name in eps_of:
            opened.get_submodule(name).eps = plain.norms()[0].eps  # type: ignore[assignment]
    opened.eval()
    one_eps = largest_difference(reference, run, (images,))
    for name, eps in eps_of.items():
        opened.get_submodule(name).eps = eps
    return {"with an eps per norm": largest_difference(reference, run, (images,)), "with one eps": one_eps}, compared


def to_hub_folder(model: Any, folder: Path, images: Tensor) -> Exported:
    """Write the folder for transformers and, in `anechoic/`, the network as it was trained."""
    exported = to_library("transformers", model, folder, images)
    to_safetensors(model, folder / "anechoic", images)
    return exported


TARGETS: dict[str, Callable[[Any, Path, Tensor], Exported]] = {
    **{name: partial(to_library, name) for name in ("timm", "transformers")},
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
