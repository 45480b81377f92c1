"""Save and restore a run: model, optimizer and EMA, unsharded by rank 0 or sharded by all ranks.

runtime/checkpoint.py has the files and checksums.
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
    """Checkpoints of a run; every rank calls it at the same points. Rank 0 has `run`, the run directory."""

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
        """folder: of the checkpoints. stack: while it is open, a save may run in the background."""
        self.run, self.folder, self.config, self.card = run, folder, config, card
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.writer: Any = None
        if is_sharded(config, world):
            from anechoic.runtime.sharded_checkpoint import ShardWriter

            self.writer = stack.enter_context(ShardWriter(world))

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return tensors by file name without suffix, which is the prefix of names in shards."""
        moved, marks = checkpoint.optimizer_tensors(self.optimizer), self.marks()
        tensors: dict[str, Mapping[str, Tensor]] = {
            "model": {**self.model.state_dict(), **marks},
            "optimizer": moved,
        }
        if self.ema is not None:
            tensors["ema"] = {**self.ema.tensors, **marks}
        return tensors

    def alphas(self) -> list[float] | None:
        """Return the current alphas while they are annealed; None once they are the architecture's."""
        if not self.config.shortcut.anneal:
            return None
        now = [shortcut.factors[0] for shortcut in self.model.stream().shortcuts]
        return None if now == [alpha for alpha, _ in self.model.config.factors] else now

    def marks(self) -> dict[str, Tensor]:
        """Return the buffers `alphas` with the current values, while they are annealed."""
        alphas = self.alphas()
        if alphas is None:
            return {}
        own = self.model.state_dict().items()
        return {name: torch.tensor(alphas).to(value) for name, value in own if is_mark(name)}

    def current_card(self) -> Mapping[str, Any]:
        """Return the card of the network with the current alphas."""
        alphas = self.alphas()
        return self.card if alphas is None else {**self.card, "config": {**self.card["config"], "schedule": alphas}}

    def restore(self, path: Path) -> None:
        """Resume from a checkpoint of any number of ranks, sharded or not."""
        if self.writer is not None and checkpoint.has_shards(path):
            self._restore_shards(path)
            return
        own = self.model.state_dict()
        tensors = checkpoint.read_tensors(path, "model")
        if self.config.shortcut.anneal:  # saved alphas are those of that time
            tensors |= {name: value for name, value in own.items() if is_mark(name)}
        self.model.load_state_dict({name: distribute(value, own.get(name, value)) for name, value in tensors.items()})
        checkpoint.restore_optimizer(self.optimizer, checkpoint.read_tensors(path, "optimizer"))
        if self.ema is not None:
            self.ema.load(checkpoint.read_tensors(path, "ema"))

    def _restore_shards(self, path: Path) -> None:
        from anechoic.runtime.sharded_checkpoint import read_into, sizes

        kept = [name.removeprefix("optimizer/") for name in sizes(path) if name.startswith("optimizer/")]
        checkpoint.prepare_optimizer(self.optimizer, kept)
        wanted = flat(self.tensors())
        if self.config.shortcut.anneal:
            wanted = {name: value for name, value in wanted.items() if not is_mark(name)}
        read_into(path, wanted)

    def save(self, *, seen: int, state: Mapping[str, Any], last: bool) -> bool:
        """Write a checkpoint and delete old ones; False, with a warning, if the disk refuses.

        Shards are written while training continues, except the last ones.
        """
        if self.writer is None:
            return self.run is None or self._save_full(seen, state)
        card = self.current_card()  # alphas change while it is written
        self.writer.start(
            checkpoint.path_of(self.folder, seen),
            flat(self.tensors()),
            before=lambda: self.run.flush() if self.run is not None else None,
            finish=lambda temporary: checkpoint.seal(temporary, seen=seen, card=card, state=state),
            after=self._prune,
            failed=lambda problem: not_saved(seen, problem),
        )
        return self.writer.wait() if last else True

    def _save_full(self, seen: int, state: Mapping[str, Any]) -> bool:
        assert self.run is not None
        try:
            self.run.flush()
            checkpoint.save(self.folder, seen=seen, tensors=self.tensors(), card=self.current_card(), state=state)
            self._prune()
        except OSError as problem:
            not_saved(seen, problem)
            return False
        return True

    def _prune(self) -> None:
        keep = self.config.save
        checkpoint.prune(self.folder, keep_last=keep.keep_last, keep_every=keep.keep_every, spacing=keep.every or 1)


def is_mark(name: str) -> bool:
    """Return whether the tensor of this name holds alphas."""
    return name.replace("/", ".").rpartition(".")[2] == "alphas"


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """{"model/NAME": ..., "optimizer/NAME/exp_avg": ..., "ema/NAME": ...}"""
    return {f"{first}/{name}": tensor for first, group in tensors.items() for name, tensor in group.items()}


def not_saved(seen: int, problem: OSError) -> None:
    log.warning(
        "The checkpoint at %d samples could not be saved (%s); the run continues and will try again.", seen, problem
    )


class UnshardedCopy:
    """The network that rank 0 validates: itself, or an unsharded copy."""

    def __init__(self, world: World, config: Config, model: nn.Module) -> None:
        self.world, self.model, self.copy = world, model, model
        self.sharded = is_sharded(config, world)
        if self.sharded and world.is_rank_zero:
            self.copy = make_model(config).to(world.device)

    def refresh(self) -> nn.Module:
        """Return on rank 0 the network with current weights; a collective call."""
        if self.sharded:
            weights = gather_to_rank_zero(self.world, self.model.state_dict())
            if self.world.is_rank_zero:
                self.copy.load_state_dict(weights)
        return self.copy


def is_sharded(config: Config, world: World) -> bool:
    return config.fsdp and world.size > 1
