"""What a run saves and goes on from: model, optimizer and averages, whole by the first process or in parts by all.

The loop says when; files and checksums are runtime's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.config import Config
from anechoic.models.network import Network
from anechoic.runtime import checkpoint
from anechoic.runtime.distributed import World
from anechoic.runtime.fsdp import distribute, gather_to_rank_zero
from anechoic.runtime.run import Run
from anechoic.training.build import make_model
from anechoic.training.ema import EMA

log = logging.getLogger("anechoic")


class Checkpointer:
    """Every process has one and calls it at the same points. A process with `run` owns the run directory."""

    def __init__(
        self,
        world: World,
        run: Run | None,
        config: Config,
        *,
        folder: Path,
        model: Network,
        optimizer: torch.optim.Optimizer,
        ema: EMA | None,
        card: Mapping[str, Any],
        stack: ExitStack,
    ) -> None:
        """folder: of the checkpoints. stack: while it is open, a save may go on in the background."""
        self.run, self.folder, self.config, self.card = run, folder, config, card
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.writer: Any = None
        if is_sharded(config, world):
            from anechoic.runtime.sharded_checkpoint import PartsWriter

            self.writer = stack.enter_context(PartsWriter(world))

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """File name without suffix, or first part of names -> its tensors."""
        moved, marks = checkpoint.optimizer_tensors(self.optimizer), self.marks()
        tensors: dict[str, Mapping[str, Tensor]] = {
            "model": {**self.model.state_dict(), **marks},
            "optimizer": moved,
        }
        if self.ema is not None:
            tensors["ema"] = {**self.ema.tensors, **marks}
        return tensors

    def alphas(self) -> list[float] | None:
        """Those of this moment, as long as they are annealed; None once they are the architecture's."""
        if not self.config.shortcut.anneal:
            return None
        now = [shortcut.factors[0] for shortcut in self.model.stream().shortcuts]
        return None if now == [alpha for alpha, _ in self.model.config.factors] else now

    def marks(self) -> dict[str, Tensor]:
        """What marks the weights of this moment, if it is not what marks the network."""
        alphas = self.alphas()
        if alphas is None:
            return {}
        own = self.model.state_dict().items()
        return {name: torch.tensor(alphas).to(value) for name, value in own if is_mark(name)}

    def card_of_now(self) -> Mapping[str, Any]:
        """So that whoever opens the checkpoint gets the network that these weights were trained in."""
        alphas = self.alphas()
        return self.card if alphas is None else {**self.card, "config": {**self.card["config"], "schedule": alphas}}

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint of any number of processes, shared out or not."""
        if self.writer is not None and checkpoint.in_parts(path):
            self._restore_parts(path)
            return
        own = self.model.state_dict()
        tensors = checkpoint.read_tensors(path, "model")
        if self.config.shortcut.anneal:  # alphas are a function of progress, and were marked as they were then
            tensors |= {name: value for name, value in own.items() if is_mark(name)}
        self.model.load_state_dict({name: distribute(value, own.get(name, value)) for name, value in tensors.items()})
        checkpoint.restore_optimizer(self.optimizer, checkpoint.read_tensors(path, "optimizer"))
        if self.ema is not None:
            self.ema.load(checkpoint.read_tensors(path, "ema"))

    def _restore_parts(self, path: Path) -> None:
        """Every process reads the rows it holds."""
        from anechoic.runtime.sharded_checkpoint import read_into, sizes

        kept = [name.removeprefix("optimizer/") for name in sizes(path) if name.startswith("optimizer/")]
        checkpoint.prepare_optimizer(self.optimizer, kept)
        wanted = flat(self.tensors())
        if self.config.shortcut.anneal:
            wanted = {name: value for name, value in wanted.items() if not is_mark(name)}
        read_into(path, wanted)

    def save(self, *, seen: int, state: Mapping[str, Any], last: bool) -> bool:
        """Write a checkpoint and delete old ones; False, with a warning, if the disk is full or does not allow it.

        In parts it is written while training goes on, unless it is the last one of this process.
        """
        if self.writer is None:
            return self.run is None or self._save_whole(seen, state)
        card = self.card_of_now()  # while it is written the alphas move on
        self.writer.start(
            checkpoint.path_of(self.folder, seen),
            flat(self.tensors()),
            before=lambda: self.run.flush() if self.run is not None else None,
            finish=lambda temporary: checkpoint.seal(temporary, seen=seen, card=card, state=state),
            after=self._prune,
            failed=lambda problem: not_saved(seen, problem),
        )
        return self.writer.wait() if last else True

    def _save_whole(self, seen: int, state: Mapping[str, Any]) -> bool:
        assert self.run is not None
        try:
            self.run.flush()
            checkpoint.save(self.folder, seen=seen, tensors=self.tensors(), card=self.card_of_now(), state=state)
            self._prune()
        except OSError as problem:
            not_saved(seen, problem)
            return False
        return True

    def _prune(self) -> None:
        keep = self.config.save
        checkpoint.prune(self.folder, keep_last=keep.keep_last, keep_every=keep.keep_every, spacing=keep.every or 1)


def is_mark(name: str) -> bool:
    """Whether a tensor of this name says with which alphas the others were trained."""
    return name.replace("/", ".").rpartition(".")[2] == "alphas"


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """{"model/NAME": ..., "optimizer/NAME/exp_avg": ..., "ema/NAME": ...}"""
    return {f"{first}/{name}": tensor for first, group in tensors.items() for name, tensor in group.items()}


def not_saved(seen: int, problem: OSError) -> None:
    log.warning(
        "The checkpoint at %d samples could not be saved (%s); the run goes on and will try again.", seen, problem
    )


class UnshardedCopy:
    """The network as it may be measured by one process: itself, or a whole copy of what is shared out."""

    def __init__(self, world: World, config: Config, model: nn.Module) -> None:
        self.world, self.model, self.copy = world, model, model
        self.sharded = is_sharded(config, world)
        if self.sharded and world.is_rank_zero:
            self.copy = make_model(config).to(world.device)

    def refresh(self) -> nn.Module:
        """In the first process the network with today's weights; all processes call it at the same point."""
        if self.sharded:
            weights = gather_to_rank_zero(self.world, self.model.state_dict())
            if self.world.is_rank_zero:
                self.copy.load_state_dict(weights)
        return self.copy


def is_sharded(config: Config, world: World) -> bool:
    """A process alone has nobody to share with."""
    return config.fsdp and world.size > 1
