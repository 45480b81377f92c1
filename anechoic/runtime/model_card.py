"""Build the network that a model directory's config.json describes; card and tensors may be corrupted or malicious.

Types, sizes, names and shapes are checked before memory is allocated. checkpoint.py reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anechoic.data.latents import LatentSpace
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models import build, from_json
from anechoic.models.network import Network, NetworkConfig, check_marks
from anechoic.storage.safe_io import of_kind

FORMAT = "anechoic/1"
# Library -> a key of its config.json.
FOREIGN = {"timm": "pretrained_cfg", "transformers": "model_type", "diffusers": "_diffusers_version"}


class WithoutInitialization(TorchFunctionMode):
    """Draw no random numbers while modules are built: without data, torch would import its compiler for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def network_of(card: Any, tensors: Mapping[str, Tensor], *, where: str) -> Network:
    """Return the network in eval mode, with `.preprocess` and `.latents` (None for images).

    UserError with the cause if card and tensors are not those of one network.
    """
    config = config_of(card, where=where)
    preprocess = check_preprocess(of_kind(card, "preprocess", dict, where=where), config, where=where)
    with torch.device("meta"), WithoutInitialization():
        skeleton = build(config)
    check_tensors(skeleton, tensors, where=where)
    network: Any = build(config)
    network.load_state_dict(tensors)
    network.preprocess = preprocess
    latents = of_kind(card, "latents", dict, where=where) if "latents" in card else None
    network.latents = None if latents is None else LatentSpace.from_json(latents, where=where)
    return network.eval()


def config_of(card: Any, *, where: str) -> NetworkConfig:
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        found = card.get("format") if isinstance(card, dict) else card
        library = next((name for name, mark in FOREIGN.items() if isinstance(card, dict) and mark in card), None)
        if library is not None:
            raise UserError(
                f"{where} is written for {library}: load the run it was exported from (of a hub-folder the folder "
                f"`anechoic` in it), or import it with anechoic import {where} --out models/new."
            )
        raise UserError(f"{where} has the format {found!r:.60}; this version reads {FORMAT!r}.")
    return from_json(of_kind(card, "config", dict, where=where))


def check_preprocess(values: Mapping[str, Any], config: NetworkConfig, *, where: str) -> Preprocess:
    """Return the preprocessing; UserError if it does not fit the network."""
    channels, size = (of_kind(values, name, int, where=where) for name in ("channels", "image_size"))
    if channels != config.in_channels or not 1 <= size <= 1 << 16:
        raise UserError(
            f"{where} has channels = {channels}, image_size = {size}; its network has {config.in_channels} channels."
        )
    return Preprocess.from_json(values)


def check_tensors(skeleton: Network, tensors: Mapping[str, Tensor], *, where: str) -> None:
    check_marks(skeleton, tensors)
    wanted = skeleton.state_dict()
    odd = sorted(wanted.keys() ^ tensors.keys())
    odd += [name for name, value in wanted.items() if name in tensors and tensors[name].shape != value.shape]
    odd += [
        name
        for name, value in wanted.items()
        if name in tensors and tensors[name].dtype.is_floating_point != value.dtype.is_floating_point
    ]
    if odd:
        what = (
            "missing"
            if odd[0] not in tensors
            else "not part of it"
            if odd[0] not in wanted
            else "of another shape or type"
        )
        raise UserError(
            f"The weights in {where} do not fit the network its config.json describes: {odd[0]} is {what}"
            f"{f', and {len(odd) - 1} more differ' if len(odd) > 1 else ''}; restore the file they were written with."
        )
