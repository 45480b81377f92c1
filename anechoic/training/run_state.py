"""How a training starts, resumes and ends in its run directory: one frozen config, the metrics so far, the results."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anechoic.config import Config, adopt, check_shares, default_workers, differences, from_json, resolve, to_json
from anechoic.data import Source
from anechoic.errors import UserError
from anechoic.outcome import Outcome
from anechoic.runtime import checkpoint
from anechoic.runtime.devices import num_gpus
from anechoic.runtime.distributed import World, cores_and_processes, under_launcher
from anechoic.runtime.run import Run, read_metrics

log = logging.getLogger("anechoic")


def resolve_config(config: Config, run: Run | None, source: Source, world: World) -> Config:
    """Return the frozen config: open settings chosen, or those of the existing run; UserError if settings differ.

    Only the numbers of ranks, threads and workers may change: samples and their order do not depend on them.
    """
    assert run is not None, "only rank 0 resolves"
    if config.devices not in (None, world.size):
        raise UserError(f"The launcher started {world.size} ranks, but devices is {config.devices}: make them equal.")
    asked = replace(config, devices=world.size, data=replace(config.data, fingerprint=source.fingerprint_with_labels))
    saved = run.read_config()
    if saved is None:
        return resolve(
            asked,
            size=len(source),
            fingerprint=source.fingerprint_with_labels,
            gpus=num_gpus(),
            cores=torch.get_num_threads(),
            workers=default_workers(*cores_and_processes()) if under_launcher() else None,
        )
    frozen = from_json(saved)
    if asked.data.workers is not None:
        frozen = replace(frozen, data=replace(frozen.data, workers=asked.data.workers))
    if asked.threads not in (None, frozen.threads):
        log.warning(
            "Resuming with %d threads instead of %s: sums, and so the last bits, may differ.",
            asked.threads,
            frozen.threads,
        )
        frozen = replace(frozen, threads=asked.threads)
    if frozen.devices != world.size:
        check_shares(asked.optim, world.size)
        log.warning(
            "Resuming on %d ranks instead of %s: the samples and their order are the same, %s.",
            world.size,
            frozen.devices,
            effect_of_ranks(frozen, world.size),
        )
        frozen = replace(frozen, devices=world.size)
    if frozen.data.fingerprint is not None and source.has_fingerprint(frozen.data.fingerprint):
        if frozen.data.source != asked.data.source:
            log.warning("Reading the same data from %s instead of %s.", asked.data.source, frozen.data.source)
        frozen = replace(frozen, data=replace(frozen.data, source=asked.data.source))
        asked = replace(asked, data=replace(asked.data, fingerprint=frozen.data.fingerprint))
    elif frozen.data.fingerprint is not None and frozen.data.source == asked.data.source:
        raise UserError(
            f"{config.data.source} is not the data that the run {run.path} was started with (names or content of its "
            "files, or labels, differ): restore that, or choose another directory."
        )
    changed = differences(frozen, adopt(asked, frozen))
    if changed:
        raise UserError(
            f"The run {run.path} has other settings ({'; '.join(changed)}): use the same ones to resume it, choose "
            f"another directory, or start a new run from its weights with --init-from {run.path}."
        )
    return frozen


def effect_of_ranks(config: Config, ranks: int) -> str:
    """Return what another number of ranks changes beside the order of samples."""
    if config.model.name.startswith("resnet"):
        return "but batch norm has statistics of other micro-batches"
    sizes = [config.optim.batch_size // (count * config.optim.accumulate) for count in (config.devices or 1, ranks)]
    if config.objective.name == "finetuning" and any(size % 2 for size in sizes):
        return "but mixup and cutmix make other pairs, because a micro-batch has an odd size"
    return "but sums, and so the last bits, differ"


def finished(run: Run, config: Config) -> dict[str, Any] | None:
    """Return the results of a finished, intact run; None if it must be resumed."""
    if not (run.path / "results.json").exists():
        return None
    damage = run.damage()
    if damage is None:
        return run.results
    last = checkpoint.latest(run.checkpoints)
    if last is None or last[1]["seen"] != config.optim.samples:
        raise UserError(
            f"The finished run {run.path} is damaged ({damage}) and has no final checkpoint to restore it from: "
            "restore the file from a copy, or train again in another directory."
        )
    log.warning("The finished run %s was damaged (%s); it is written again from its last checkpoint.", run.path, damage)
    return None


def sent_before(run_dir: Path) -> dict[str, int]:
    """Return the samples seen by the last record of each kind that trackers may have, perhaps beyond the checkpoint."""
    try:
        return {record["kind"]: record["seen"] for record in read_metrics(run_dir)}
    except UserError:  # rewinding deletes damaged records, or refuses them
        return {}


def start(run: Run | None, config: Config, found: tuple[Path, dict[str, Any]] | None) -> None:
    """Rewind the run directory to the checkpoint, or to its beginning, and record this start."""
    assert run is not None, "only rank 0 owns the directory"
    if found is None:
        run.rewind(None)
    else:
        run.rewind(found[1]["seen"], digest=found[1]["metrics"])
    run.start(to_json(config))


def finish(config: Config, run: Run | None, *, seconds: float) -> dict[str, Any]:
    """Write the model directory and results.json with the last value of every metric."""
    assert run is not None, "only rank 0 finishes"
    try:
        run.flush()
        metrics: dict[str, Any] = {}
        for record in read_metrics(run.path):
            metrics |= {name: value for name, value in record.items() if name not in ("kind", "seconds")}
        checkpoint.export_weights(run.path)
        results = Outcome(
            config=to_json(config), metrics=metrics, seed=config.seed, seconds=round(seconds, 3)
        ).to_json()
        run.finish(results)
    except OSError as problem:
        raise UserError(
            f"The results could not be written in {run.path} ({problem}): run the same command again."
        ) from problem
    return results
