"""Sharded checkpoints, by torch.distributed.checkpoint: every rank writes its shards while training continues.

Shards are safetensors files with the rows they hold, so any number of ranks can read what any other number wrote, and
nothing can run code when it is read. checkpoint.py decides when a checkpoint is complete.
"""

from __future__ import annotations

import errno
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from anechoic.errors import UserError
from anechoic.runtime.distributed import World, broadcast
from anechoic.runtime.signals import InterruptedRun
from anechoic.storage.files import write_aside

try:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
except ImportError as missing:
    raise UserError(
        f"Sharded checkpoints (fsdp) need torch 2.8 or newer, not {torch.__version__}: pip install --upgrade torch."
    ) from missing

log = logging.getLogger("anechoic")


# ---- writing


class ShardWriter:
    """Write one checkpoint at a time in the background; every rank calls it at the same points."""

    def __init__(self, world: World) -> None:
        self.world = world
        # A separate group, so that a save does not interleave with collectives of the training.
        self.group = dist.new_group(backend="gloo")
        self.pending: Future[bool] | None = None

    def start(
        self,
        final: Path,
        tensors: Mapping[str, Tensor],
        *,
        before: Callable[[], None],
        finish: Callable[[Path], None],
        after: Callable[[], None],
        failed: Callable[[OSError], None],
    ) -> None:
        """Copy the tensors and write the directory `final` in the background, renamed when complete.

        Rank 0 calls before() now, finish(directory) to add other files, after() when it is renamed; or failed(problem).
        """
        self.wait()
        aside = ExitStack()

        def begin() -> str | None:
            try:
                before()
                final.parent.mkdir(parents=True, exist_ok=True)
                return str(aside.enter_context(write_aside(final, folder=True)))
            except OSError as problem:
                failed(problem)
                return None

        temporary = broadcast(self.world, begin)
        if temporary is None:
            self.pending = Future()
            self.pending.set_result(False)
            return
        writer = HuggingFaceStorageWriter(path=temporary, save_distributed=True)
        written = dcp.async_save(_rows(tensors), storage_writer=writer, process_group=self.group)
        assert isinstance(written, Future), "the copies are made by now"

        def end() -> bool:
            try:
                with aside:
                    written.result()
                    if self.world.is_rank_zero:
                        finish(Path(temporary))
                if self.world.is_rank_zero:
                    after()
            except (CheckpointException, OSError) as problem:
                refused = disk_error(problem)
                if self.world.is_rank_zero:
                    failed(refused)
                return False
            return True

        executor = ThreadPoolExecutor(1)
        self.pending = executor.submit(end)
        executor.shutdown(wait=False)

    def wait(self) -> bool:
        """Wait until the pending save is on disk (True) or failed (False); the same on all ranks."""
        pending, self.pending = self.pending, None
        if pending is None:
            return True
        saved = pending.result()
        return broadcast(self.world, lambda: saved)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        """Finish a pending save, unless another rank may be missing."""
        if self.pending is not None and (kind is None or issubclass(kind, UserError | InterruptedRun)):
            self.pending.result()


def _rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scalars (step counts) as one row, because a shard is a range of rows; same memory."""
    return {name: tensor.detach().reshape(1) if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}


def disk_error(problem: BaseException) -> OSError:
    """Return the disk error of any rank; raise anything else."""
    if isinstance(problem, CheckpointException):
        causes = [cause for cause, _ in problem.failures.values()]
        found = next((cause for cause in causes if isinstance(cause, OSError)), None)
        if found is None:
            raise problem
        return found
    assert isinstance(problem, OSError)
    return problem


# ---- reading


def sizes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every unsharded tensor; OSError if shards are missing or corrupted."""
    # The reader opens every shard, and opening a pipe would wait for a writer.
    odd = next((file for file in path.glob("*.safetensors") if not file.is_file()), None)
    if odd is not None:
        raise OSError(errno.EINVAL, f"{odd.name} is not a regular file", str(odd))
    try:
        tensors = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as problem:
        raise OSError(f"the files are not the shards of a checkpoint: {problem}") from problem
    found = {}
    for name, kept in tensors.items():
        assert isinstance(kept, TensorStorageMetadata)
        places = [place for chunk in kept.chunks for place in chunk.offsets]
        rows = sum(math.prod(chunk.sizes) for chunk in kept.chunks)
        if rows != math.prod(kept.size) or any(place < 0 for place in places):
            raise OSError(f"some rows of {name} are missing")
        found[name] = (kept.size, kept.properties.dtype)
    return found


def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors, each rank its own rows; a collective call."""
    dcp.load(_rows(tensors), storage_reader=HuggingFaceStorageReader(str(path)))


def read_full(path: Path, prefix: str) -> dict[str, Tensor]:
    """Return the unsharded tensors named "PREFIX/...", without the prefix, on this rank alone."""
    start = f"{prefix}/"
    found = {
        name: torch.empty(size, dtype=kind) for name, (size, kind) in sizes(path).items() if name.startswith(start)
    }
    if not found:
        raise OSError(f"the shards hold no {prefix}")
    with _alone():
        try:
            dcp.load(dict(found), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        except CheckpointException as problem:
            causes = [cause for cause, _ in problem.failures.values()]
            raise OSError(f"the shards do not fit together: {causes[0]}") from problem
    return {name.removeprefix(start): tensor for name, tensor in found.items()}


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
