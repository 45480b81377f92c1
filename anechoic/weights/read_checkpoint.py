"""Reading a foreign checkpoint: tensors by name and the JSON beside them, never code.

Which network the tensors belong to is decided in importing.py.
"""

from __future__ import annotations

import argparse
import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from anechoic.errors import UserError
from anechoic.storage.safe_io import MAX_UNPACKED, read_table, reason, refuse_bomb

# In this order of preference: averaged weights are what a diffusion checkpoint is released for.
WRAPPERS = ("ema", "model", "state_dict", "module")
PREFIXES = ("module.", "_orig_mod.")
# Tied weights and averages share bytes, but never all of them this often.
MAX_SHARED = 8
# What torch meets in a damaged file.
PICKLE_DAMAGE = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError),
    *(OverflowError, NotImplementedError, RecursionError, MemoryError, ImportError, BadZipFile, struct.error),
)
IN_FOLDER = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors")


class Checkpoint(NamedTuple):
    """tensors by name; settings: the folder's config.json; image_processor: its preprocessor_config.json; wrapper: the
    entry of the file with the tensors; arguments: the command line of the training, if the file has it."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    image_processor: dict[str, Any]
    wrapper: str | None
    arguments: dict[str, Any]


def read_checkpoint(path: Path) -> Checkpoint:
    """A .safetensors, .pth, .pt or .bin file, or a folder with one and its config.json."""
    if not path.exists():
        raise UserError(f"There is no checkpoint {path}.")
    if path.is_dir():
        return _read_folder(path)
    tensors, wrapper, arguments = _unwrap(_read_file(path), path)
    return Checkpoint(tensors, {}, {}, wrapper, arguments)


def _read_folder(folder: Path) -> Checkpoint:
    files = [folder / name for name in IN_FOLDER if (folder / name).is_file()]
    if not files:
        raise UserError(
            f"{folder} holds none of {', '.join(IN_FOLDER)}: give the folder of one model, or the file itself."
        )
    tensors, wrapper, arguments = _unwrap(_read_file(files[0]), files[0])
    settings, image_processor = _json(folder / "config.json"), _json(folder / "preprocessor_config.json")
    return Checkpoint(tensors, settings, image_processor, wrapper, arguments)


def _json(path: Path) -> dict[str, Any]:
    return read_table(path) if path.exists() else {}


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a checkpoint or the folder of one.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as problem:
            raise UserError(
                f"{path} is not a complete safetensors file ({reason(problem)}): copy or download it again."
            ) from problem
    # Training checkpoints of MAE and SiT carry their command line as a Namespace, which holds data only.
    _refuse_packed(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            # torch warns of protocols it may not read; the refusal below is clearer.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise UserError(
            f"{path} holds more than tensors and plain values, and loading it could run code: ask for a safetensors "
            f"file, or convert it where you trust it."
        ) from problem
    except PICKLE_DAMAGE as problem:
        raise UserError(
            f"{path} cannot be read as a checkpoint ({reason(problem)}): copy or download it again."
        ) from problem


def _refuse_packed(path: Path) -> None:
    """torch writes its zip files uncompressed, so one that unpacks to far more than its size was made to."""
    try:
        with ZipFile(path) as archive:
            refuse_bomb(archive, path)
    except UserError:
        raise
    except (BadZipFile, OSError, ValueError, EOFError, NotImplementedError, OverflowError, struct.error):
        return  # an old checkpoint, which is no zip file, or a damaged one: torch.load reports it


def _refuse_views(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A few bytes of a file can be given any shape, or many names; copies of them would fill the memory."""
    claimed, own = sum(value.numel() * value.element_size() for value in tensors.values()), path.stat().st_size
    if claimed > MAX_UNPACKED and claimed > MAX_SHARED * own:
        raise UserError(f"{path} has {own:,} bytes and claims tensors of {claimed:,}: it is damaged or malicious.")
    odd = next((name for name, value in tensors.items() if value.layout != torch.strided or value.is_quantized), None)
    if odd is not None:
        raise UserError(f"{path} holds {odd} as {tensors[odd].layout}; save plain tensors instead.")


def _unwrap(data: Any, path: Path) -> tuple[dict[str, Tensor], str | None, dict[str, Any]]:
    """The state dict inside a training checkpoint, without the prefixes of parallel and compiled modules; its entry;
    and the arguments of the training."""
    wrapper, arguments = None, {}
    if isinstance(data, Mapping) and not any(isinstance(value, Tensor) for value in data.values()):
        wrapper = next((name for name in WRAPPERS if isinstance(data.get(name), Mapping)), None)
        kept = data.get("args")
        if isinstance(kept, argparse.Namespace):
            arguments = dict(vars(kept))
        elif isinstance(kept, Mapping):
            arguments = dict(kept)
        data = data[wrapper] if wrapper else data
    if not isinstance(data, Mapping):
        raise UserError(f"{path} holds a {type(data).__name__}, not a dictionary of tensors.")
    tensors = {str(name): value for name, value in data.items() if isinstance(value, Tensor)}
    _refuse_views(tensors, path)
    if not tensors:
        raise UserError(
            f"{path} holds no tensors under {', '.join(WRAPPERS)} or at its top: it is no model checkpoint."
        )
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors, wrapper, arguments
