"""Ranks by torch.distributed: launch them, broadcast, all-reduce, average gradients.

Works alike when this package launches the ranks, under torchrun or Slurm, and with a single process.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anechoic.errors import UserError
from anechoic.runtime.devices import own_device
from anechoic.runtime.signals import InterruptedRun, leave
from anechoic.runtime.subprocesses import Asked, end_with, noting_signals
from anechoic.storage.files import reserve

log = logging.getLogger("anechoic")

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process's rank, the world size, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


class RankFailedError(RuntimeError):
    """A rank raised an unexpected exception; the message holds its traceback."""


def under_launcher() -> bool:
    """Return whether a launcher (ours, torchrun, Slurm) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cores_and_processes() -> tuple[int, int]:
    """Return the CPU cores that this rank may use, and the number of ranks that share them.

    A launcher sets one thread per rank, so the number of threads is no hint. Slurm may give every task its own cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    started_by_slurm = os.environ.get("SLURM_NTASKS") == os.environ["WORLD_SIZE"]
    if started_by_slurm and os.environ.get("SLURM_CPUS_PER_TASK") == str(cores):
        return cores, 1
    return cores, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


# ---- starting


def launch(function: Callable[..., Result], *arguments: Any, devices: int) -> Result:
    """Call function(*arguments) on `devices` ranks of this machine and return the result of rank 0.

    A UserError of a rank is raised here. SIGTERM and Ctrl-C are passed on, and ranks may take their time to save; a
    second signal kills them. If one rank is killed, the others are terminated and UserError names it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, not in rank 0
    }
    asked = Asked()
    with noting_signals(asked):
        ranks = [_Rank(rank, variables, function, arguments) for rank in range(devices)]
        try:
            _follow(ranks, asked)
        finally:
            for rank in ranks:
                rank.end()
    kind, value = _outcome(ranks)
    if kind == "result":
        return value
    if kind == "user error":
        raise UserError(value)
    if kind == "interrupted" or asked.number:
        raise InterruptedRun(asked.number or value)
    if kind == "killed":
        raise UserError(killed_sentence(value.number, devices, value.killed_by))
    raise RankFailedError(value)


class _Rank:
    """A rank as its launcher sees it. said: (kind, value) that it sent before it exited."""

    def __init__(self, rank: int, variables: dict[str, str], function: Callable, arguments: tuple) -> None:
        own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        context, method = multiprocessing.get_context("spawn"), multiprocessing.get_start_method()
        self.number = rank
        self.ear, mouth = context.Pipe(duplex=False)
        self.process = context.Process(target=_worker, args=(os.getpid(), method, own, mouth, function, arguments))
        with ignoring_interrupts():  # the terminal's Ctrl-C is for the launcher, which passes it on
            self.process.start()
        mouth.close()
        self.said: tuple[str, Any] | None = None
        self.when = math.inf
        self.killed_by = 0  # the signal that killed it, unless the launcher sent it

    def listen(self) -> None:
        try:
            if self.said is None and self.ear.poll():
                self.when, *said = pickle.loads(self.ear.recv_bytes())
                self.said = tuple(said)
        except (EOFError, OSError):
            pass  # it was killed before it sent anything

    @property
    def failed(self) -> bool:
        return (self.said is not None and self.said[0] in ("user error", "defect")) or bool(self.process.exitcode)

    def end(self) -> None:
        self.killed_by = max(0, -(self.process.exitcode or 0))
        self.process.kill()
        self.process.join()
        self.listen()
        self.ear.close()


def _follow(ranks: list[_Rank], asked: Asked, *, grace: float = 1.0) -> None:
    """Wait until all ranks have exited, or one has failed and the others had time to send their errors."""
    passed_on, deadline = 0, math.inf
    while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < deadline:
        waiting: list[Any] = [rank.process.sentinel for rank in ranks if rank.process.is_alive()]
        waiting += [rank.ear for rank in ranks if rank.said is None and rank.process.is_alive()]
        connection.wait(waiting, timeout=0.2)
        for rank in ranks:
            rank.listen()
        if asked.times > passed_on:
            first, passed_on = not passed_on, asked.times
            for rank in ranks:
                (rank.process.terminate if first else rank.process.kill)()
        if deadline == math.inf and any(rank.failed for rank in ranks):
            deadline = time.monotonic() + grace


def _outcome(ranks: list[_Rank]) -> tuple[str, Any]:
    """Return the outcome: a user error, else an interruption, a killed rank, the first exception, or the result."""
    said = [rank.said for rank in sorted(ranks, key=lambda rank: rank.when) if rank.said is not None]
    killed = [("killed", rank) for rank in ranks if rank.killed_by]
    for wanted in ("user error", "interrupted", "killed", "defect"):
        for found in (*said, *killed):
            if found[0] == wanted:
                return found
    return ranks[0].said or ("defect", "Rank 0 exited without a result.")


def killed_sentence(rank: int, count: int, number: int) -> str:
    name = signal.Signals(number).name
    guess = {
        signal.SIGKILL: "the system does so when memory runs out",
        signal.SIGBUS: "shared memory, /dev/shm, is too small",
    }.get(signal.Signals(number), "most likely a crash in a compiled library")
    return (
        f"Rank {rank} of {count} was ended by {name} ({guess}): run the same command again to resume from the last "
        "checkpoint."
    )


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """While open, started processes ignore Ctrl-C from the beginning."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker(
    launcher: int,
    start_method: str,
    variables: dict[str, str],
    mouth: Any,
    function: Callable[..., Any],
    arguments: tuple,
) -> None:
    """Run a rank and send its outcome back as a value, so that it prints no traceback."""
    end_with(launcher)
    multiprocessing.set_start_method(start_method, force=True)  # of data workers, as in the launcher
    os.environ.update(variables)

    def say(kind: str, value: Any) -> NoReturn:
        mouth.send_bytes(pickle.dumps((time.monotonic(), kind, value)))  # tensors as bytes, too
        leave(0)

    try:
        say("result", function(*arguments))
    except UserError as problem:
        say("user error", str(problem))
    except InterruptedRun as problem:
        say("interrupted", problem.signal_number)
    except Exception:  # raised again by the launcher, once instead of by every rank
        say("defect", traceback.format_exc())


def alone() -> World:
    """Return this process's rank, for work in which ranks do not communicate; it exits with its launcher."""
    if not under_launcher():
        return World(0, 1, own_device(0))
    if not multiprocessing.parent_process():  # started by torchrun; our launcher passes its process id
        end_with(os.getppid())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return World(rank, world_size, own_device(int(os.environ.get("LOCAL_RANK", 0))))


@contextmanager
def join() -> Iterator[World]:
    """Join the process group while open; inside another `join`, use that one."""
    if not under_launcher():
        yield alone()
        return
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), own_device(int(os.environ.get("LOCAL_RANK", 0))))
        return
    world = alone()
    dist.init_process_group(dist.get_default_backend_for_device(world.device), rank=world.rank, world_size=world.size)
    try:
        yield world
    except (UserError, InterruptedRun):
        dist.destroy_process_group()
        raise
    # After an unexpected exception the group stays: waiting ranks would fail and report before the cause is reported.
    dist.destroy_process_group()


# ---- agreeing


def broadcast(world: World, function: Callable[[], Result]) -> Result:
    """Return on all ranks what function() returns on rank 0; its UserError is raised on all ranks."""
    if world.size == 1:
        return function()
    box: list[Any] = [None, None]
    if world.is_rank_zero:
        try:
            box[0] = function()
        except UserError as problem:
            box[1] = str(problem)
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


def barrier(world: World) -> None:
    """Wait for all ranks."""
    if world.size > 1:
        dist.barrier()


def all_reduce_sum(world: World, values: Tensor) -> Tensor:
    """The sum over all processes."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def parallel(world: World, module: nn.Module) -> nn.Module:
    """Return the module whose gradients are means over ranks once `average_gradients` was called on it."""
    if world.size == 1:
        return module
    if world.device.type == "cpu" and on_one_machine():
        trained = [p for p in module.parameters() if p.requires_grad]
        memory = shared_memory(world, sum(p.numel() for p in trained) + len(trained))
        if memory is not None:
            return SharedGradients(world, module, memory)
    return with_buckets(world, module)


def average_gradients(module: nn.Module) -> None:
    """Average over ranks, after the backward pass of a whole batch."""
    if isinstance(module, SharedGradients):
        module.average()


def without_averaging(module: nn.Module, *, active: bool) -> AbstractContextManager:
    """Keep gradients local while open (and active): for all but the last micro-batch."""
    return module.no_sync() if active and isinstance(module, DistributedDataParallel) else nullcontext()


def with_buckets(world: World, module: nn.Module) -> DistributedDataParallel:
    """Return DDP, which averages gradients during the backward pass.

    find_unused_parameters keeps the gradients' buckets; otherwise DDP rearranges them after the first update, and a
    resumed run would sum in another order.
    """
    # Both warnings are about speed.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified", category=UserWarning)
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view", category=UserWarning)
    ids = None if world.device.type == "cpu" else [world.device.index]
    return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=True)


def on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


class SharedGradients(nn.Module):
    """Average the gradients of ranks on one machine through shared memory: one copy in, one sum out.

    Sums are in the order of ranks, so every rank gets the same bits. All ranks start with the weights of rank 0.
    """

    def __init__(self, world: World, module: nn.Module, memory: Tensor) -> None:
        super().__init__()
        self.module, self.rank = module, world.rank
        self.trained = [p for p in module.parameters() if p.requires_grad]
        # Behind the gradients, a flag for each: whether this rank has one.
        sizes = [p.numel() for p in self.trained]
        self.length = sum(sizes)
        self.slots = memory.view(world.size, -1)
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
        dist.barrier()  # all have read before any rank writes again
        anywhere = self.mean[self.length :].tolist()
        self.mean.mul_(1 / len(self.slots))
        for parameter, mean, flag in zip(self.trained, self.means, anywhere, strict=True):
            parameter.grad = mean if flag else None


def shared_memory(world: World, size: int) -> Tensor | None:
    """Return world_size * size zeros that all ranks of this machine share; None, with a warning, if they do not fit.

    Containers often have 64 MB, and touching more would kill the process.
    """

    holding = ExitStack()

    def create() -> str | None:
        try:
            handle, name = holding.enter_context(nameless_file())
            reserve(handle, 4 * world.size * size)
        except OSError as problem:
            holding.close()
            log.warning(
                "Shared memory is too small for the gradients, %d MB (%s): they are averaged over the local network, "
                "which is slower. A larger /dev/shm helps (docker run --shm-size).",
                4 * world.size * size >> 20,
                problem.strerror,
            )
            return None
        return name

    with holding:
        name = broadcast(world, create)
        if name is None:
            return None
        memory = torch.from_file(name, shared=True, size=world.size * size)
        dist.barrier()
    return memory


@contextmanager
def nameless_file() -> Iterator[tuple[int, str]]:
    """Open a file in shared memory; yield its descriptor and a path for other processes while this is open.

    Where the system allows it, it has no name, so that a killed process leaves no file.
    """
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    if folder is not None and hasattr(os, "O_TMPFILE"):
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        name = f"/proc/{os.getpid()}/fd/{handle}"
    else:
        handle, name = tempfile.mkstemp(dir=folder, prefix="anechoic-")
    try:
        yield handle, name
    finally:
        os.close(handle)
        if not name.startswith("/proc/"):
            os.unlink(name)


def shared_room() -> float:
    """Return the free bytes of /dev/shm, through which workers send images; infinity where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return math.inf
