"""Which devices there are: how many accelerators, the one in use, the one of a process."""

from __future__ import annotations

import torch

from anechoic.errors import UserError


def accelerators() -> int:
    """How many there are here; none where torch was built for some and the machine has none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def own_device(index: int) -> torch.device:
    """The accelerator of this number, from now on the current one; the processor if there is none.

    A process may see only its own (srun --gpus-per-task=1), which is then the first, whatever the process's number.
    """
    device = current_device()
    if device.type == "cpu":
        return device
    index %= accelerators()
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def current_device() -> torch.device:
    """The current accelerator; the processor if there is none here, whatever torch was built for."""
    accelerator = torch.accelerator.current_accelerator() if accelerators() else None
    return accelerator or torch.device("cpu")


def check_devices(devices: int) -> None:
    """UserError for more processes than accelerators, where there are some: each takes one."""
    if 0 < (available := accelerators()) < devices:
        raise UserError(f"There are {available} accelerators here, so devices cannot be {devices}: lower it.")
