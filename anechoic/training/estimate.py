"""How long a training will take here, timed on a few updates of a part of a batch; reading the data is not counted."""

from __future__ import annotations

import time

import torch

from anechoic.config import Config
from anechoic.eval.feature_cache import pick_device
from anechoic.rng import SampleGenerator
from anechoic.training.build import make_model, make_optimizer
from anechoic.training.objectives import make_objective
from anechoic.training.validation import Samples

# Images of an update that is timed, and how many are timed after the first, which is slow.
IMAGES, UPDATES = 32, 2


def seconds_per_image(config: Config) -> float:
    """Of one process that computes alone, without labels."""
    device = pick_device("auto")
    with torch.random.fork_rng(devices=[]):
        model = make_model(config).to(device).train()
    optimizer = make_optimizer(model, config.optim)
    objective = make_objective(config.objective.name, **config.objective.options)
    count = min(IMAGES, config.optim.batch_size)
    shape = (count, config.data.channels, config.data.image_size, config.data.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(count, device=device)
    spent = 0.0
    for update in range(UPDATES + 1):
        started = time.perf_counter()
        losses = objective(model, Samples(images, None), SampleGenerator(0, ids, torch.full_like(ids, update)))
        losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses["loss"].item()  # an accelerator is waited for
        spent += time.perf_counter() - started if update else 0.0
    return spent / (UPDATES * count)
