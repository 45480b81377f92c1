"""Choose the device to compute on: count GPUs (or MPS, XPU), and pick the current, a named or a rank's one."""

from __future__ import annotations

import torch

from anechoic.errors import UserError


def num_gpus() -> int:
    """Return the number of accelerators (GPU, MPS, XPU); 0 where torch was built for some and the machine has none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def own_device(index: int) -> torch.device:
    """Make the GPU of this number the current one and return it; the CPU if there is none.

    A rank may see only its own GPU (srun --gpus-per-task=1), which is then number 0 whatever the rank.
    """
    device = current_device()
    if device.type == "cpu":
        return device
    index %= num_gpus()
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def current_device() -> torch.device:
    """Return the current GPU; the CPU if there is none, whatever torch was built for."""
    gpu = torch.accelerator.current_accelerator() if num_gpus() else None
    return gpu or torch.device("cpu")


def pick_device(device: str) -> torch.device:
    """Return the device of this name; "auto" is a GPU if there is one."""
    if device == "auto":
        return current_device()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"There is no device {device!r} here; choose {current_device()} or auto.") from error


def check_devices(devices: int) -> None:
    """Raise UserError for more ranks than GPUs, where there are some: each rank takes one."""
    if 0 < (available := num_gpus()) < devices:
        raise UserError(f"This machine has {available} GPUs, so devices cannot be {devices}: lower it.")
