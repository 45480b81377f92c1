"""Checkpoints and model directories: written atomically, verified by checksums, loaded as a model.

A checkpoint is a directory of safetensors files (model, optimizer, and ema if there is one), `config.json` (the model
card) and `state.json` (progress, and the checksum of every file and its own). Sharded runs write shards instead
(sharded_checkpoint.py). Nothing here can run code when it is read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from anechoic.choices import Weights
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError, nearest_name
from anechoic.models import family_of, to_json
from anechoic.models.network import Network, check_marks
from anechoic.runtime.fsdp import distribute
from anechoic.runtime.model_card import FORMAT, network_of
from anechoic.runtime.run import read_environment
from anechoic.storage.files import (
    SEAL,
    checksum,
    digest_of,
    flush,
    permit,
    remove,
    sealed,
    unsealed,
    write_aside,
    write_json,
)
from anechoic.storage.safe_io import read_table, reason

log = logging.getLogger("anechoic")

# In a model directory's config.json: the SHA-256 of model.safetensors.
WEIGHTS_CHECKSUM = "weights_sha256"
# Trained networks that come with the package: a model directory with a record.json under each name.
PRETRAINED = Path(__file__).parents[1] / "pretrained"


class DamagedError(Exception):
    """The files of a checkpoint are not what was written."""


# ---- writing


def path_of(folder: Path, seen: int) -> Path:
    return folder / f"{seen:012d}"


def has_shards(path: Path) -> bool:
    """Return whether a checkpoint was written by several ranks, each its shards."""
    return any(path.glob("shard-*.safetensors"))


def model_card(model: Network, preprocess: Preprocess) -> dict[str, Any]:
    """Return the content of `config.json` beside the weights."""
    config, latents = to_json(model.config), model.latents
    card = {"format": FORMAT, "family": config["family"], "config": config, "preprocess": preprocess.to_json()}
    return card if latents is None else {**card, "latents": asdict(latents)}


def save(
    folder: Path, *, seen: int, tensors: Mapping[str, Mapping[str, Tensor]], card: Mapping[str, Any], state: Mapping
) -> Path:
    """Write and return the checkpoint `folder/SEEN`. tensors: by file name without suffix. OSError if it fails."""
    final = path_of(folder, seen)
    folder.mkdir(parents=True, exist_ok=True)
    with write_aside(final, folder=True) as temporary:
        for name, values in tensors.items():
            write_tensors(temporary / f"{name}.safetensors", values)
        seal(temporary, seen=seen, card=card, state=state)
    return final


def seal(folder: Path, *, seen: int, card: Mapping[str, Any], state: Mapping) -> None:
    """Add config.json, and state.json with the checksum of every file, to the tensors of a checkpoint."""
    write_json(folder / "config.json", card)
    checksums = {file.name: checksum(file) for file in sorted(folder.iterdir())}
    write_json(folder / "state.json", sealed({"seen": seen, **state, "checksums": checksums}))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write a file of tensors and metadata; OSError if it fails, such as on a full disk."""
    # Contiguous copies: safetensors refuses views, and tied tensors are written twice.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    try:
        save_file(copies, path, metadata=metadata or None)
    except SafetensorError as problem:  # only its text has the number of the system's error
        number = re.search(r"\(os error (\d+)\)", str(problem))
        if number is None:
            raise OSError(str(problem)) from problem
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from problem
    permit(path)
    flush(path)


def prune(folder: Path, *, keep_last: int, keep_every: int = 0, spacing: int = 1) -> None:
    """Delete all but the newest keep_last good checkpoints and the first one after each multiple of keep_every.

    keep_every 0: only the newest. spacing: the samples between two checkpoints. Damaged ones do not count as newest.
    """
    good = 0
    for path in reversed(checkpoints(folder)):
        if good < keep_last:
            good += is_good(path)
        elif not (keep_every and int(path.name) >= keep_every and int(path.name) % keep_every < spacing):
            remove(path)


# ---- reading


def checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir() and path.name.isdecimal())


def verify(path: Path) -> dict[str, Any]:
    """Return the checkpoint's state; DamagedError unless its name and all checksums are right."""
    try:
        state = unsealed(read_table(path / "state.json"))
        if state["seen"] != int(path.name):
            raise DamagedError(f"it is the checkpoint of {state['seen']} samples")
        present = {file.name for file in path.iterdir()} - {"state.json"}
        odd = present ^ state["checksums"].keys()
        if odd:
            raise DamagedError(f"{min(odd)} is {'not one of its files' if min(odd) in present else 'missing'}")
        for name, expected in state["checksums"].items():
            if checksum(path / name) != expected:
                raise DamagedError(f"{name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DamagedError(f"state.json: {problem}") from problem
    return state


def is_good(path: Path) -> bool:
    try:
        verify(path)
    except DamagedError:
        return False
    return True


def latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest good checkpoint and its state; None if there is no checkpoint at all."""
    damaged: list[tuple[Path, DamagedError]] = []
    for path in reversed(checkpoints(folder)):
        try:
            state = verify(path)
        except DamagedError as problem:
            damaged.append((path, problem))
            continue
        for bad, why in damaged:
            log.warning("The checkpoint %s is damaged (%s); falling back to the one before.", bad, why)
        return path, state
    if damaged:
        raise UserError(
            f"Every checkpoint in {folder} is damaged (the newest: {damaged[0][1]}): restore one, or start again in "
            "another directory."
        )
    return None


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Return the unsharded tensors of model, optimizer or ema."""
    if has_shards(path):
        from anechoic.runtime.sharded_checkpoint import read_full

        return read_full(path, name)
    file = path / f"{name}.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file.name} is missing")
    return load_file(file)


# ---- optimizer state as named tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return {"blocks.0.norm1.weight/exp_avg": ..., ...}; groups and learning rates follow from config and progress."""
    return {
        f"{name}/{key}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    parameters = _parameters(optimizer)
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        # A fused optimizer keeps the step count on the parameter's device.
        value = value.reshape(()) if key == "step" else value
        optimizer.state[parameters[name]][key] = distribute(value, parameters[name])


def prepare_optimizer(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Fill the state with zeros under these names, into which a sharded checkpoint is read."""
    parameters = _parameters(optimizer)
    for full_name in names:
        name, key = full_name.rsplit("/", 1)
        like = parameters[name].detach()
        optimizer.state[parameters[name]][key] = (
            torch.zeros((), device=like.device) if key == "step" else torch.zeros_like(like)
        )


def _parameters(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


# ---- models


def export_weights(run: str | Path) -> Path:
    """Write and return `RUN/model` from the run's newest good checkpoint; the EMA if it has one."""
    run = Path(run)
    found = latest(run / "checkpoints")
    if found is None:
        raise UserError(f"{run} has no checkpoint yet: train it first.")
    return write_model(run / "model", *_weights(found[0]))


def write_model(path: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> Path:
    """Write a model directory atomically: model.safetensors, and config.json with its checksum and its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_aside(path, folder=True) as temporary:
        write_tensors(temporary / "model.safetensors", tensors)
        weights = checksum(temporary / "model.safetensors")
        write_json(temporary / "config.json", sealed({**card, WEIGHTS_CHECKSUM: weights}))
    return path


def _weights(path: Path, wanted: Weights | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights (by default the EMA if there is one) and the card of a model directory or checkpoint."""
    card = read_card(path)
    try:
        name = "ema" if wanted != "raw" and _has_ema(path) else "model"
        expected = card.pop(WEIGHTS_CHECKSUM, None)
        if expected is not None and checksum(path / f"{name}.safetensors") != expected:
            raise UserError(
                f"The weights in {path} are damaged, model.safetensors is not the file that config.json was written "
                "for: restore it, or write it again from a checkpoint."
            )
        return read_tensors(path, name), card
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} holds no readable weights ({reason(problem)}).") from problem


def read_card(path: Path) -> dict[str, Any]:
    """Return config.json of a model directory or checkpoint; UserError if it is not what was written.

    A card without any checksum was made by hand.
    """
    file = path / "config.json"
    card = read_table(file)
    own = card.pop(SEAL, None) if WEIGHTS_CHECKSUM in card else None
    elsewhere = _card_checksum(path)
    if own not in (None, digest_of(card)) or (own is None and elsewhere not in (None, checksum(file))):
        raise UserError(
            f"{file} was edited or damaged after it was written: restore it, or write the model again from a "
            "checkpoint."
        )
    if WEIGHTS_CHECKSUM in card and own is None and elsewhere is None:
        log.warning("%s has no checksum, like those of version 0.1: nobody can tell whether it was edited.", file)
    return {name: value for name, value in card.items() if name != SEAL}


def _card_checksum(path: Path) -> Any:
    """Return the checksum of config.json in a checkpoint's state.json, or in the env.json of a finished run."""
    if (path / "state.json").is_file():
        listed = read_table(path / "state.json").get("checksums")
        return listed.get("config.json") if isinstance(listed, dict) else None
    return read_environment(path.parent).get("files", {}).get("model/config.json") if path.name == "model" else None


def _has_ema(path: Path) -> bool:
    if has_shards(path):
        from anechoic.runtime.sharded_checkpoint import sizes

        return any(name.startswith("ema/") for name in sizes(path))
    return (path / "ema.safetensors").exists()


def run_path(run: str | Path) -> Path:
    """Return the directory of a run: a path, or the name of a network that comes with the package."""
    path = Path(run)
    shipped = PRETRAINED / path
    return shipped if not path.exists() and len(path.parts) == 1 and shipped.is_dir() else path


def model_directory(path: str | Path) -> Path:
    """Return where the weights are: the path itself, a finished run's `model`, or the newest good checkpoint."""
    path = run_path(path)
    if not path.is_dir():
        if str(path).startswith(("timm:", "transformers:")):
            raise UserError(
                f"{path} is a network of another library, and this needs a model directory: `anechoic import` writes "
                "one from saved weights."
            )
        raise UserError(f"There is no run or model directory {path}{hint(path)}")
    if (path / "model.safetensors").exists() or has_shards(path):
        return path
    # A run that resumed after its weights were exported has newer ones.
    finished = (path / "results.json").exists() or not checkpoints(path / "checkpoints")
    if finished and (path / "model").is_dir():
        return path / "model"
    found = latest(path / "checkpoints")
    if found is None:
        for_others = [name for name in ("model.onnx", "model.pt2") if (path / name).exists()]
        if for_others:
            raise UserError(f"{path} holds {for_others[0]}, for other programs: load the run it was exported from.")
        raise UserError(f"{path} holds no weights: it is no run, model or checkpoint directory, or has not saved yet.")
    return found[0]


def is_model(path: str | Path) -> bool:
    """Return whether the names of its files are those of a run, model or checkpoint."""
    path = run_path(path)
    return any((path / name).exists() for name in ("model.safetensors", "ema.safetensors", "model", "checkpoints"))


def hint(path: Path) -> str:
    """Return the end of a message about a run that does not exist: the nearest existing names."""
    near = sorted(str(item) for item in path.parent.iterdir() if is_model(item)) if path.parent.is_dir() else []
    return f"; {nearest_name(str(path), near)}" if near else "."


def load(path: str | Path, *, weights: Weights | None = None) -> Any:
    """Return the model of a run, model or checkpoint directory in eval mode, with `.config` and `.preprocess`.

    weights: raw or ema; by default the EMA if there is one.
    """
    folder = model_directory(path) if weights is None else _checkpoint_with(weights, path)
    tensors, card = _weights(folder, weights)
    return network_of(card, tensors, where=str(path))


def _checkpoint_with(weights: Weights, path: str | Path) -> Path:
    """Return the newest checkpoint of a run, or the one given; other directories have one set of weights only."""
    folder = model_directory(path)
    if not (folder / "state.json").is_file():
        found = latest(run_path(path) / "checkpoints")
        if found is None:
            raise UserError(
                f"{path} has no checkpoint with raw and EMA weights: name a run that has, or omit --weights."
            )
        folder = found[0]
    if weights == "ema" and not _has_ema(folder):
        raise UserError(f"{path} was trained without an EMA: omit --weights, or set optim.ema when you train.")
    return folder


@torch.no_grad()
def start_from(model: Any, path: str | Path) -> None:
    """Copy the weights of a run, model or checkpoint directory into a new model of the same architecture.

    A vision transformer also takes a masked autoencoder's encoder: head and norms may be new, and learned positions
    start from fixed ones.
    """
    source: Any = load(path)
    into_vit = family_of(model.config) == "vit"
    if into_vit and family_of(source.config) == "mae":
        source = source.encoder
    weights = source.state_dict()
    if into_vit and model.config.positions == "learned" and "positions" not in weights:
        weights["positions"] = F.pad(source.positions * source.config.position_scale, (0, 0, 1, 0))
    own = model.state_dict()
    misfits = [name for name in own.keys() ^ weights.keys() if not (into_vit and name.startswith(("head", "norm.")))]
    misfits += [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    check_marks(model, weights)
    if misfits:
        raise UserError(
            f"The weights in {path} do not fit this network (they differ in {min(misfits)} and {len(misfits) - 1} "
            "more): give the run the same model and options."
        )
    model.load_state_dict(weights, strict=False)
