"""The only file that knows torch.distributed: starting processes, who is who, what they agree on.

It works alike when this package starts the processes itself, under torchrun or Slurm's equivalent, and with one
process alone. It does not know what the processes compute.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anechoic.errors import UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process among its peers and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class InterruptedRun(SystemExit):
    """A signal ended the run after it had saved; the exit code is 128 + the signal's number, as shells have it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


def accelerators() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def under_launcher() -> bool:
    """Whether this process was started as one of several: by us, by torchrun, by Slurm with these variables set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


# ---- starting


def launch(function: Callable[..., Result], *arguments: Any, devices: int) -> Result:
    """Call function(*arguments) in `devices` processes of this machine and return what the first one returned.

    A UserError in the processes is raised here; a signal to this process is passed on, and they may save and end.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as notes:  # where the processes note an exception
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            logs_specs=DefaultLogsSpecs(log_dir=notes),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.2,
            start_method="spawn",
        )
        try:
            results = elastic_launch(config, _worker)(function, arguments)
        except SignalException as problem:
            raise InterruptedRun(problem.sigval) from None
    kind, value = results[0]
    if kind == "user error":
        raise UserError(value)
    if kind == "interrupted":
        raise InterruptedRun(value)
    return value


def _worker(function: Callable[..., Any], arguments: tuple) -> tuple[str, Any]:
    """Runs in each process; what the caller should hear of travels back as a value, so that no traceback is printed."""
    try:
        return "result", function(*arguments)
    except UserError as problem:
        return "user error", str(problem)
    except InterruptedRun as problem:
        return "interrupted", problem.signal_number


def die_with_parent(*, every: float = 0.2) -> None:
    """End this process soon after its launcher, however that died: a killed launcher leaves no orphans."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def join() -> Iterator[World]:
    """Find this process's rank; while open, the processes can talk to each other."""
    if not under_launcher():
        yield World(0, 1, own_device(0))
        return
    die_with_parent()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = own_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(dist.get_default_backend_for_device(device), rank=rank, world_size=world_size)
    try:
        yield World(rank, world_size, device)
    finally:
        dist.destroy_process_group()


def own_device(index: int) -> torch.device:
    """The accelerator of this number, from now on the current one; the processor if there is none."""
    accelerator = torch.accelerator.current_accelerator() if accelerators() else None
    if accelerator is None:
        return torch.device("cpu")
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


# ---- agreeing


def from_first(world: World, function: Callable[[], Result]) -> Result:
    """What function() returns in the first process, in all of them; its UserError is raised in all of them."""
    if world.size == 1:
        return function()
    box: list[Any] = [None, None]
    if world.is_first:
        try:
            box[0] = function()
        except UserError as problem:
            box[1] = str(problem)
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


def total(world: World, values: Tensor) -> Tensor:
    """The sum over all processes."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def parallel(world: World, module: nn.Module) -> nn.Module:
    """The module whose gradients are those of all processes together, once `average_gradients` was called on it."""
    if world.size == 1:
        return module
    if world.device.type == "cpu" and on_one_machine():
        return SharedGradients(world, module)
    return with_buckets(world, module)


def average_gradients(module: nn.Module) -> None:
    """To be called after the backward pass of a whole batch."""
    if isinstance(module, SharedGradients):
        module.average()


def without_averaging(module: nn.Module, *, active: bool) -> AbstractContextManager:
    """While open (and active), gradients stay local: all but the last part of an accumulated batch."""
    return module.no_sync() if active and isinstance(module, DistributedDataParallel) else nullcontext()


def with_buckets(world: World, module: nn.Module) -> DistributedDataParallel:
    """Gradients averaged over a network, during the backward pass.

    Looking for unused parameters keeps the gradients' buckets as they are; otherwise they would be arranged anew after
    the first update, and a resumed run would sum in another order than the run it goes on with.
    """
    # Both are remarks on speed: that no parameter was unused, and that a token's gradient has its own strides.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified", category=UserWarning)
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view", category=UserWarning)
    ids = None if world.device.type == "cpu" else [world.device.index]
    return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=True)


def on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


class SharedGradients(nn.Module):
    """Processes of one machine average gradients through memory they share: one copy in, one sum out.

    Sums are made in the order of ranks, so every process gets the same bits. All start from the first one's weights.
    """

    def __init__(self, world: World, module: nn.Module) -> None:
        super().__init__()
        self.module, self.rank = module, world.rank
        self.trained = [p for p in module.parameters() if p.requires_grad]
        # Behind the gradients a flag for each: whether this process had one.
        sizes = [p.numel() for p in self.trained]
        self.length = sum(sizes)
        self.slots = shared_memory(world, self.length + len(sizes)).view(world.size, -1)
        self.own = [
            part.view_as(p)
            for part, p in zip(self.slots[self.rank, : self.length].split(sizes), self.trained, strict=True)
        ]
        self.mean = torch.empty(self.length + len(sizes))
        self.means = [
            part.view_as(p) for part, p in zip(self.mean[: self.length].split(sizes), self.trained, strict=True)
        ]
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    @torch.no_grad()
    def average(self) -> None:
        found = {i: p.grad for i, p in enumerate(self.trained) if p.grad is not None}
        if len(found) < len(self.trained):
            self.slots[self.rank].zero_()
        torch._foreach_copy_([self.own[i] for i in found], list(found.values()))
        self.slots[self.rank, self.length :] = torch.tensor([float(i in found) for i in range(len(self.trained))])
        dist.barrier()
        torch.add(self.slots[0], self.slots[1], out=self.mean)
        for slot in self.slots[2:]:
            self.mean.add_(slot)
        dist.barrier()  # all have read before anybody writes again
        anywhere = self.mean[self.length :].tolist()
        self.mean.mul_(1 / len(self.slots))
        for parameter, mean, flag in zip(self.trained, self.means, anywhere, strict=True):
            parameter.grad = mean if flag else None


def shared_memory(world: World, size: int) -> Tensor:
    """world_size * size zeros that all processes of this machine see; it is freed with the last of them."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

    def create() -> str:
        handle, name = tempfile.mkstemp(dir=folder, prefix="anechoic-")
        os.close(handle)
        return name

    name = from_first(world, create)
    try:
        memory = torch.from_file(name, shared=True, size=world.size * size)
        dist.barrier()
    finally:
        if world.is_first:
            os.unlink(name)
    return memory
