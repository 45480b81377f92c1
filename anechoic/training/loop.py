"""Training: `fit(config, run_dir)`, one loop for every objective, which resumes bit for bit where it was interrupted.

Loss, schedule, EMA and validation are defined elsewhere. Progress is `seen`, the number of samples of finished updates;
every interval and budget is counted in it. (Appendix A.)
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anechoic.choices import Tracker
from anechoic.config import Config, from_json, to_json
from anechoic.data import Source
from anechoic.data.latents import Latents
from anechoic.data.loader import naming_killed_workers
from anechoic.data.split import hold_out
from anechoic.errors import UserError
from anechoic.models.layers import give_generator, set_block_options
from anechoic.rng import SampleGenerator
from anechoic.runtime import checkpoint
from anechoic.runtime.determinism import freeze_garbage, reproducible
from anechoic.runtime.devices import check_devices, num_gpus
from anechoic.runtime.distributed import (
    World,
    all_reduce_sum,
    average_gradients,
    barrier,
    broadcast,
    join,
    launch,
    parallel,
    shared_room,
    under_launcher,
    without_averaging,
)
from anechoic.runtime.fsdp import shard
from anechoic.runtime.loggers import Loggers, check_installed
from anechoic.runtime.progress import Progress
from anechoic.runtime.run import Run, read_frozen_config
from anechoic.runtime.signals import InterruptedRun, Stop, catch_signals
from anechoic.shortcut import Annealing
from anechoic.training.build import (
    check,
    check_labels,
    describe,
    learning_rate_profile,
    make_loader,
    make_model,
    make_optimizer,
    open_data,
    preprocess_of,
)
from anechoic.training.checkpointing import Checkpointer, UnshardedCopy, is_sharded
from anechoic.training.ema import EMA
from anechoic.training.objectives import Objective, make_objective
from anechoic.training.optim import gradient_norm, learning_rate, set_learning_rate
from anechoic.training.run_state import finish, finished, resolve_config, sent_before, start
from anechoic.training.validation import Samples, make_validator, open_labeled

log = logging.getLogger("anechoic")

# Bytes of shared memory for the queues between a rank and its workers.
QUEUES = 1 << 20


class DivergedError(UserError):
    """The loss or the gradient is not finite."""


# ---- the loop


def fit(
    config: Config,
    run_dir: str | Path,
    *,
    verbose: bool = False,
    brief: bool = False,
    source: Source | None = None,
    log_to: Sequence[Tracker] = (),
    validation_labels: str | None = None,
) -> dict[str, Any]:
    """Train the config in run_dir, or resume it, and return the content of its results.json.

    A finished run returns its results at once. After SIGTERM or Ctrl-C it saves, then raises InterruptedRun. verbose
    shows the frozen config (brief: one line of it) and the progress on the standard error stream.
    source: the data of the config, if it is open already; other processes open it again.
    log_to: trackers that get metrics, config and pictures, too.
    validation_labels: labeled images on which validations also measure accuracy; the training never reads them.
    """
    run_dir = Path(run_dir)
    trackers: list[Tracker] = [*log_to]
    if config.validation.tensorboard and "tensorboard" not in trackers:
        trackers.append("tensorboard")
    check_installed(trackers)
    labeled = None if validation_labels is None else open_labeled(config, validation_labels)
    devices = number_of_ranks(config, run_dir)
    if devices > 1 and not under_launcher():
        options: dict[str, Any] = {"verbose": verbose, "brief": brief, "log_to": log_to}
        return launch(partial(fit, **options, validation_labels=validation_labels), config, run_dir, devices=devices)

    with ExitStack() as stack:
        stack.enter_context(naming_killed_workers())
        stop = stack.enter_context(catch_signals(one_of_several=under_launcher()))
        world = stack.enter_context(join())

        # Rank 0 owns the run directory; all ranks open the data and agree on one frozen config.
        opened: list[Run] = []
        broadcast(world, lambda: opened.append(stack.enter_context(Run(run_dir))))
        run = opened[0] if opened else None
        source = open_data(config) if source is None else source
        config = from_json(broadcast(world, lambda: to_json(resolve_config(config, run, source, world))))
        results = broadcast(world, lambda: finished(run, config) if run else None)
        if results is not None:
            return results
        data, optim = config.data, config.optim
        assert data.holdout is not None
        assert optim.samples is not None
        assert optim.lr is not None
        check(config)
        check_labels(config, source)
        stack.enter_context(reproducible(threads=config.threads or 1, compiled=config.compile))

        # Build the model and its objective. Initial weights depend on the seed alone.
        torch.manual_seed(config.seed)
        model = make_model(config)
        profile = learning_rate_profile(config, model)
        found = broadcast(world, lambda: checkpoint.latest(run_dir / "checkpoints"))
        if config.init_from and found is None:
            checkpoint.start_from(model, config.init_from)
        set_block_options(model, fused=config.fused, recompute=config.recompute)
        preprocess = preprocess_of(config)
        objective = make_objective(config.objective.name, preprocess=preprocess, **config.objective.options)
        model.latents = source.card.space if isinstance(source, Latents) else None
        card = checkpoint.model_card(model, preprocess)

        # Ranks average the gradient of one module: the model under its objective.
        dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        task = Task(model, objective, seed=config.seed, compiled=config.compile)
        sharded = is_sharded(config, world)
        trained = shard(world, task, dtype=dtype) if sharded else parallel(world, task.to(world.device))
        autocast = torch.autocast(world.device.type, dtype=dtype) if dtype == torch.bfloat16 else nullcontext()

        # Optimizer, EMA and checkpoints.
        optimizer = make_optimizer(model, optim, profile=profile)
        lr_at = partial(
            learning_rate,
            samples=optim.samples,
            lr=optim.lr,
            warmup=optim.warmup,
            schedule=optim.schedule,
            min_lr=optim.min_lr,
        )
        ema = EMA(model, decay=optim.ema) if optim.ema else None
        checkpointer = Checkpointer(
            world,
            run,
            config,
            folder=run_dir / "checkpoints",
            model=model,
            optimizer=optimizer,
            ema=ema,
            card=card,
            stack=stack,
        )
        unsharded = UnshardedCopy(world, config, model)
        anneal = Annealing.of(model, unsharded.copy, share=config.shortcut.anneal) if config.shortcut.anneal else None

        # Resume: the newest good checkpoint, and the metrics up to it.
        seen, sums = 0, {"count": 0.0}
        if found is not None:
            path, state = found
            checkpointer.restore(path)
            seen, sums = state["seen"], state["sums"]
        before = sent_before(run_dir) if run is not None and trackers else {}
        broadcast(world, lambda: start(run, config, found))
        if run is not None and ema is not None:
            ema.warn_if_slow(updates=optim.samples // optim.batch_size)
        if run is not None and verbose:
            print(describe(config, model, run_dir, seen=seen, brief=brief), file=sys.stderr, flush=True)
        resumed = found is not None

        # Data: training samples in an order that is a function of (seed, seen), and held-out samples.
        train_indices, held_out_indices = hold_out(len(source), data.holdout, group=source.group_size)
        loader = make_loader(
            config,
            source,
            train_indices,
            start=seen,
            workers=workers_that_fit(config, world),
            rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
        batches = iter(loader)
        validation = None
        if run is not None and data.holdout:
            validation = make_validator(
                config, objective, source, train_indices, held_out_indices, preprocess=preprocess, labeled=labeled
            )

        loggers = stack.enter_context(Loggers(trackers if run else (), run_dir, to_json(config), sent=before))
        progress = stack.enter_context(Progress(samples=optim.samples, seen=seen, shown=verbose and run is not None))
        clock, clock_seen = time.perf_counter(), seen
        started = clock
        frozen_garbage = False
        model.train()
        stop.in_loop = True

        while True:
            done = seen >= optim.samples
            if anneal is not None:
                anneal.set(seen / optim.samples)

            # After resuming, everything due at this point was done before the checkpoint.
            if not resumed:
                # Report the means since the last report.
                if (
                    run is not None
                    and sums["count"]
                    and (due(seen, config.validation.report, optim.batch_size) or done)
                ):
                    count, now = sums.pop("count"), time.perf_counter()
                    record = {"kind": "train", "seen": seen, **{name: value / count for name, value in sums.items()}}
                    record["lr"] = lr_at(seen)
                    record["seconds"] = round(now - clock, 3)
                    record["images_per_second"] = round((seen - clock_seen) / (now - clock), 1)
                    run.append(record)
                    loggers.record(record)
                    sums, clock, clock_seen = {"count": 0.0}, now, seen

                # Validate on held-out samples.
                if data.holdout and (due(seen, config.validation.every, optim.batch_size) or done):
                    measured = unsharded.refresh()
                    if run is not None and validation is not None:
                        record = {"kind": "validation", "seen": seen, **validation.measure(measured)}
                        run.append(record)
                        progress.record(record)
                        loggers.record(record)
                        picture = validation.picture(measured, reconstructed=bool(trackers))
                        if picture is not None:
                            run.store_picture(picture, seen)
                            loggers.picture(picture, seen)

                # Save; a full disk does not end the run.
                if seen and (due(seen, config.save.every, optim.batch_size) or done or stop.agreed):
                    kept: dict[str, Any] = {"sums": dict(sums)}
                    if run is not None:
                        run.list_skipped(loader.skipped)
                        kept["metrics"] = run.metrics_digest
                    saved = checkpointer.save(seen=seen, state=kept, last=bool(done or stop.agreed))
                    if done and not saved:
                        raise UserError(
                            f"The trained weights could not be saved in {run_dir}: free space there and run the same "
                            "command again to resume from the last good checkpoint."
                        )
            resumed = False

            # Stop.
            if stop.agreed and not done:
                barrier(world)  # a launcher may kill rank 0 while it saves, once another rank has exited
                if run is not None:
                    log.warning("Interrupted after %d of %d samples; the same command resumes.", seen, optim.samples)
                raise InterruptedRun(stop.agreed)
            if done:
                break

            # Step: accumulate the gradient over micro-batches, then update the weights.
            set_learning_rate(optimizer, lr_at(seen))
            step: dict[str, Tensor] = {}
            parts = split(next(batches), optim.accumulate)
            for i, (images, ids, visits, labels) in enumerate(parts):
                with without_averaging(trained, active=i + 1 < len(parts)):
                    with autocast:
                        losses = trained(
                            preprocess.apply(images.to(world.device, non_blocking=True)),
                            *to_device(world.device, ids, visits, labels),
                        )
                    (losses["loss"] / len(parts)).backward()
                for name, value in losses.items():
                    step[name] = step.get(name, 0) + value.detach() / (len(parts) * world.size)
            average_gradients(trained)
            norm = gradient_norm(model.named_parameters(), clip=optim.clip, factors=profile)
            step["gradient_norm"] = norm / world.size
            values = agree(world, step, stop)
            if not all(math.isfinite(value) for value in values.values()):
                raise DivergedError(diverged_sentence(seen, config, run_dir))
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update(model)
            seen += optim.batch_size
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
            sums["count"] += 1
            if not frozen_garbage:
                freeze_garbage()
                frozen_garbage = True
            progress.advance(optim.batch_size, loss=values["loss"])

        # Finish: write the model directory and the results.
        return broadcast(world, lambda: finish(config, run, seconds=time.perf_counter() - started))


# ---- helpers, in the order of use


def number_of_ranks(config: Config, run_dir: Path) -> int:
    """Return the number of ranks: as set, else as the run was started, else one per GPU."""
    before = read_frozen_config(run_dir)
    devices = config.devices or (from_json(before).devices if before else None) or max(1, num_gpus())
    if not under_launcher():
        check_devices(devices)
    return devices


def workers_that_fit(config: Config, world: World) -> int:
    """Return the number of workers, or 0 if shared memory cannot hold their batches; results are the same."""
    data, workers = config.data, config.data.workers or 0
    batch = config.optim.batch_size // world.size * data.channels * data.image_size**2
    # Per rank: two batches ahead for each worker, one in use, and the queues.
    needed = (batch * (2 * workers + 1) + QUEUES) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if workers and needed > shared_room():
        log.warning(
            "Shared memory is too small for the %d MB that %d workers need: images are decoded without workers. "
            "A larger /dev/shm helps (docker run --shm-size).",
            needed >> 20,
            workers,
        )
        return 0
    return workers


class Task(nn.Module):
    """The model under its objective as one module."""

    def __init__(self, model: nn.Module, objective: Objective, *, seed: int, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.objective, self.seed = model, objective, seed
        # In a tuple, so that its weights are not registered twice.
        self.called = (torch.compile(model) if compiled else model,)

    def forward(self, images: Tensor, ids: Tensor, visits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        generator = SampleGenerator(self.seed, ids, visits)
        give_generator(self.model, generator)
        return self.objective(self.called[0], Samples(images, labels), generator)


def due(seen: int, every: int | None, batch_size: int) -> bool:
    """Return whether the last update passed a multiple of `every` samples."""
    assert every is not None, "the config is resolved before training"
    return seen % every < batch_size


def split(batch: Any, parts: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Split a batch into equal micro-batches (images, ids, visits, labels)."""
    size = len(batch.ids) // parts
    columns = [
        x.split(size) if x is not None else [None] * parts
        for x in (batch.images, batch.ids, batch.visits, batch.labels)
    ]
    return list(zip(*columns, strict=True))


def to_device(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(device, non_blocking=True) for x in tensors]


def agree(world: World, step: dict[str, Tensor], stop: Stop) -> dict[str, float]:
    """Return the sums over ranks of each number; all ranks learn whether one was asked to stop."""
    asked = torch.tensor(float(stop.asked), device=world.device)
    *values, anyone = all_reduce_sum(world, torch.stack([*(value.float() for value in step.values()), asked])).tolist()
    if anyone:
        stop.agreed = stop.asked or signal.SIGTERM
    return dict(zip(step, values, strict=True))


def diverged_sentence(seen: int, config: Config, run_dir: Path) -> str:
    remedies = ["a lower optim.base_lr", "optim.clip 1"]
    if config.shortcut.alpha_min != 1:
        remedies.insert(0, "a larger shortcut.alpha_min")
    if config.model.options.get("zero_init") is False:
        remedies.insert(0, "zero_init=true")
    return (
        f"The loss or its gradient is not finite after {seen} samples; the last good checkpoint is in {run_dir}. Start "
        f"a new run with {', '.join(remedies[:-1])} or {remedies[-1]}."
    )
