"""Estimate how long a training takes on this machine, from its FLOPs or from a few timed updates.

cost.py counts operations and memory, and estimates GPUs that are not here.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch
from torch import Tensor

from anechoic.config import Config
from anechoic.data import Source
from anechoic.data.loader import min_side_for
from anechoic.data.pixel_cache import is_cacheable
from anechoic.rng import SampleGenerator
from anechoic.runtime.devices import pick_device
from anechoic.training.build import make_model, make_optimizer, needs_labels, transform_of
from anechoic.training.cost import training_flops
from anechoic.training.objectives import make_objective
from anechoic.training.validation import Samples

# What is timed: images that are read, and updates after the first, which is slow, until they took this long. Their
# median counts: on a busy machine single updates take ten times as long as others.
READ_IMAGES, TIMED_SECONDS, MIN_UPDATES, MAX_UPDATES = 64, 1.0, 5, 30
# Of one CPU core in one-thread runs of the pocket size, evaluation included.
FLOPS_PER_SECOND = 25e9
OVERHEAD_SECONDS = 40.0


def cpu_seconds(config: Config) -> float:
    """Return a rough estimate of the CPU seconds (1 core) that training and evaluating take."""
    return OVERHEAD_SECONDS + training_flops(config) / FLOPS_PER_SECOND


def training_seconds(config: Config, source: Source, *, samples: int) -> float:
    """Return the wall time of a training as this machine is now, from timed reading, cropping and updates.

    Images are decoded once where the pixel cache holds them.
    """
    min_side = min_side_for(config.data.image_size)
    chosen = np.unique(np.linspace(0, len(source) - 1, READ_IMAGES).astype(int)).tolist()
    started = time.perf_counter()
    images = [image for image in source.read_many(chosen, min_side=min_side) if isinstance(image, Tensor)]
    reading = (time.perf_counter() - started) / len(chosen)
    if not images:
        return samples * seconds_per_image(config)
    ids = torch.arange(len(images))
    transform, started = transform_of(config, source), time.perf_counter()
    transform(images, image_size=config.data.image_size, generator=SampleGenerator(0, ids, torch.zeros_like(ids)))
    loading = (time.perf_counter() - started) / len(images)
    once = 0.0
    if source.in_memory or is_cacheable(source, min_side=min_side):
        once = len(source) * reading
    else:
        loading += reading
    step, workers = seconds_per_image(config), config.data.workers or 0
    return once + samples * (max(step, loading / workers) if workers else step + loading)


def seconds_per_image(config: Config) -> float:
    """Time updates with the threads of the run; loading data is not included."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        return timed_updates(config)
    finally:
        torch.set_num_threads(threads)


def timed_updates(config: Config) -> float:
    device, data = pick_device("auto"), config.data
    with torch.random.fork_rng(devices=[]):
        model = make_model(config).to(device).train()
    optimizer = make_optimizer(model, config.optim)
    objective = make_objective(config.objective.name, **config.objective.options)
    count = max(1, config.optim.batch_size // config.optim.accumulate)
    shape = (count, data.channels, data.image_size, data.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(count, device=device)
    labels = torch.zeros_like(ids) if data.labels or needs_labels(config) else None

    def update(number: int) -> None:
        losses = objective(model, Samples(images, labels), SampleGenerator(0, ids, torch.full_like(ids, number)))
        losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses["loss"].item()  # waits for a GPU

    update(0)
    spent: list[float] = []
    while len(spent) < MIN_UPDATES or (sum(spent) < TIMED_SECONDS and len(spent) < MAX_UPDATES):
        started = time.perf_counter()
        update(len(spent) + 1)
        spent.append(time.perf_counter() - started)
    return median(spent) / count
