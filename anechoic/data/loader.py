"""Batches in an order that is a function of (seed, samples seen) alone, whatever the workers, ranks or where it starts.

There is no state to save: a run that has seen n samples resumes with `start=n`. Evaluation passes once, in order.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from anechoic.data.augment import Augment
from anechoic.data.pixel_cache import with_pixel_cache
from anechoic.data.source import BadImage, Source, Transform
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

# Larger images are reduced by 2, 4 or 8 while their shorter side stays at least 1.75 times image_size: a square crop of
# a third of the area then needs no enlargement, and the smallest usual one, a fifth, at most 1.28 times. The steps
# 112 * 2^k let image sizes share a cache.
SMALLEST_SIDE, SIDES_PER_SIZE = 112, 1.75


class Batch(NamedTuple):
    """images uint8 (B, C, H, W); ids and visits int64 (B,): the sample and its earlier visits; labels int64 (B,)."""

    images: Tensor
    ids: Tensor
    visits: Tensor
    labels: Tensor | None


def min_side_for(image_size: int) -> int:
    """Return the shorter side down to which images may be reduced before they are cropped."""
    side = SMALLEST_SIDE
    while side < SIDES_PER_SIZE * image_size:
        side *= 2
    return side


def permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch, int64 (count,): samples sorted by a random word each."""
    ids = torch.arange(count)
    words = SampleGenerator(seed, ids, torch.full_like(ids, epoch)).words("order", 1)[:, 0]
    return torch.argsort(words, stable=True)


@dataclass(eq=False)
class _Batches(Dataset):
    """Batch number to (batch, or None if no image was readable; unreadable images met); used in the workers.

    A UserError is returned: raised in a worker, it would arrive wrapped in a traceback.
    """

    source: Source
    image_size: int
    batch_size: int
    seed: int
    augment: Transform
    shuffle: bool
    epoch_length: int
    start: int
    rank: int
    world_size: int
    bad: dict[int, BadImage] = field(default_factory=dict)
    orders: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, number: int) -> tuple[Batch | None, list[tuple[str, str]]] | UserError:
        try:
            return self._batch(number)
        except UserError as mistake:
            return mistake

    def _batch(self, number: int) -> tuple[Batch | None, list[tuple[str, str]]]:
        known = len(self.bad)
        ids, visits = self.samples(number)
        rows, images = self._read(ids.tolist())
        bad = [(item.name, item.reason) for item in list(self.bad.values())[known:]]
        if not images:
            return None, bad
        ids, visits = torch.tensor([index for _, index in rows]), visits[[row for row, _ in rows]]
        pixels = self.augment(images, image_size=self.image_size, generator=SampleGenerator(self.seed, ids, visits))
        labels = None if self.source.labels is None else torch.from_numpy(self.source.labels[ids.numpy()])
        return Batch(pixels, ids, visits, labels), bad

    def samples(self, number: int) -> tuple[Tensor, Tensor]:
        """Return ids and visits of this rank's slice of a global batch."""
        first = self.start + number * self.batch_size
        stop = first + self.batch_size if self.shuffle else min(first + self.batch_size, self.epoch_length)
        length = stop - first
        low, high = first + length * self.rank // self.world_size, first + length * (self.rank + 1) // self.world_size
        positions = torch.arange(low, high)
        visits, slots = positions // self.epoch_length, positions % self.epoch_length
        if not self.shuffle:
            return slots, visits
        ids = torch.empty_like(slots)
        for epoch in visits.unique().tolist():
            ids[visits == epoch] = self._order(epoch)[slots[visits == epoch]]
        return ids, visits

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self.orders:
            self.orders = {k: order for k, order in self.orders.items() if k >= epoch - 1}
            self.orders[epoch] = permutation(len(self.source), seed=self.seed, epoch=epoch)
        return self.orders[epoch]

    def _read(self, ids: list[int]) -> tuple[list[tuple[int, int]], list[Tensor]]:
        """Return (row, id) and pixels of readable images.

        Evaluation skips bad images; training replaces them by the next good one in the source's order.
        """
        rows, images = [], []
        results = self._fetch(ids)
        for row, (index, result) in enumerate(zip(ids, results, strict=True)):
            attempts = 0
            while isinstance(result, BadImage) and self.shuffle and attempts <= len(self.source) // 10:
                attempts += 1
                index = (index + 1) % len(self.source)
                (result,) = self._fetch([index])
            if isinstance(result, Tensor):
                rows.append((row, index))
                images.append(result)
        return rows, images

    def _fetch(self, ids: list[int]) -> list[Tensor | BadImage]:
        wanted = [index for index in ids if index not in self.bad or not self.bad[index].permanent]
        found = dict(zip(wanted, self.source.read_many(wanted, min_side=min_side_for(self.image_size)), strict=True))
        self.bad.update((index, result) for index, result in found.items() if isinstance(result, BadImage))
        return [found.get(index, self.bad.get(index)) for index in ids]  # type: ignore[misc]


class Loader:
    """Iterate over `Batch`es of a source.

    shuffle=True is training: endless, each epoch in a new order, `visits` counting the epochs. Epochs follow each other
    without a gap; drop_last=True ends an epoch at its last full batch, so that no batch holds two epochs.
    shuffle=False is evaluation: once, in order; drop_last=True omits an incomplete last batch.
    build_cache=False uses cached pixels but caches none.
    start: samples seen before. rank, world_size: this process gets its contiguous slice of every batch of batch_size.
    device: where batches are copied to; for a GPU they are in pinned memory, so that `non_blocking` copies overlap.
    """

    def __init__(
        self,
        source: Source,
        *,
        image_size: int,
        batch_size: int,
        seed: int = 0,
        augment: Transform | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        start: int = 0,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cache: bool = True,
        build_cache: bool = True,
        device: torch.device | str = "cpu",
    ):
        if image_size < 1 or batch_size < 1 or workers < 0 or start < 0:
            raise UserError(
                "A loader needs image_size and batch_size of at least 1, and workers and start of at least 0."
            )
        if not 0 <= rank < world_size:
            raise UserError(f"There is no rank {rank} in a world size of {world_size}; ranks count from 0.")
        if shuffle and batch_size % world_size:
            raise UserError(
                f"A batch of {batch_size} cannot be split over {world_size} ranks; choose a multiple of {world_size}."
            )
        count = len(source)
        if shuffle and drop_last and batch_size > count:
            raise UserError(
                f"A batch of {batch_size} is more than the {count} images there are; choose a smaller batch."
            )
        self.source = (
            with_pixel_cache(source, min_side=min_side_for(image_size), build=build_cache) if cache else source
        )
        self.batch_size, self.shuffle, self.workers = batch_size, shuffle, workers
        self.pin_memory = copies_from_pinned_memory(device)
        self.num_samples = count // batch_size * batch_size if drop_last else count
        self._batches = _Batches(
            self.source,
            image_size=image_size,
            batch_size=batch_size,
            seed=seed,
            augment=source.transform or augment or Augment("crop" if shuffle else "center"),
            shuffle=shuffle,
            epoch_length=self.num_samples,
            start=start,
            rank=rank,
            world_size=world_size,
        )

    @property
    def num_batches(self) -> int | None:
        """Return the number of batches of an evaluation from its start; None for training, which does not end."""
        return None if self.shuffle else max(0, -(-(self.num_samples - self._batches.start) // self.batch_size))

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Return (name, reason) of every image found unreadable so far."""
        return self.source.skipped

    def __iter__(self) -> Iterator[Batch]:
        numbers: Iterable[int] = itertools.count() if self.num_batches is None else range(self.num_batches)
        # Workers take batches in turn, so their number does not change the result.
        loader = DataLoader(
            self._batches,
            sampler=numbers,
            batch_size=None,
            num_workers=self.workers,
            worker_init_fn=partial(_start_worker, parent=os.getpid()),
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
        )
        for item in loader:
            if isinstance(item, UserError):
                raise item
            batch, bad = item
            if bad:
                self.source.add_skipped(bad)
            if batch is not None:
                yield batch


def copies_from_pinned_memory(device: torch.device | str) -> bool:
    """Return whether the device copies asynchronously from pinned memory: GPUs do; a CPU, MPS and meta do not."""
    return torch.device(device).type not in ("cpu", "mps", "meta")


@contextmanager
def naming_killed_workers() -> Iterator[None]:
    """Turn the error of a killed worker into one sentence; torch raises it anywhere in the main thread.

    A thread that was reading from the worker meets a lost connection instead.
    """
    try:
        yield
    except (RuntimeError, ConnectionResetError, EOFError) as problem:
        if isinstance(problem, RuntimeError) and "DataLoader worker" not in str(problem):
            raise
        ignore_sigchld()
        raise UserError(
            "A process that decodes images was killed, as the system does when memory runs out: give the same command "
            "again, or fewer data.workers."
        ) from problem


def ignore_sigchld() -> None:
    """Keep torch from raising the same error again when the next worker ends, possibly while the program exits."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _unchanged(item: Any) -> Any:
    return item


def _start_worker(worker: int, *, parent: int) -> None:
    """Replace the signal handlers that a forked worker inherits: only the run saves and exits on a signal.

    A signal to the process group does not end the workers, which the run needs to finish its update; the same signal
    from the run does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    sys.excepthook = _ignore_lost_connections
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _ignore_lost_connections(kind: type[BaseException], *problem: Any) -> None:
    """A run that ends closes the connections to its workers, whose threads would each print a traceback."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, *problem)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process does; torch's own check can hang at exit, in a queue that has no reader."""
    while os.getppid() == parent:
        if not hasattr(signal, "sigtimedwait"):
            time.sleep(0.5)
            continue
        received = signal.sigtimedwait([signal.SIGTERM], 0.5)
        if received is not None and received.si_pid == parent:
            break
    os._exit(1)
