"""Trainings and runs that take seconds, shared by tests: configs, commands as typed, and a written run directory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from processes import Command, wait_until
from zoo import make

from anechoic.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SaveConfig,
    ShortcutConfig,
    ValidationConfig,
)
from anechoic.data.preprocess import Preprocess
from anechoic.recipes import recipe
from anechoic.runtime import checkpoint
from anechoic.runtime.checkpoint import model_card, write_model
from anechoic.runtime.run import read_metrics
from anechoic.training.checkpointing import Checkpointer

# ---- configs for fit

MODEL = {
    "patch_size": 2,
    "dim": 24,
    "depth": 2,
    "num_heads": 2,
    "decoder_dim": 16,
    "decoder_depth": 2,
    "decoder_num_heads": 2,
}
SMALLEST = {**MODEL, "dim": 16, "decoder_depth": 1}
BATCH = 32


def tiny_config(*, steps=30, **changes):
    """Return a masked autoencoder on the embedded digits that records every update."""
    config = Config(
        data=DataConfig(source="digits", image_size=8, channels=1, holdout=64),
        model=ModelConfig("mae_tiny_patch4", MODEL),
        shortcut=ShortcutConfig(alpha_min=0.6),
        optim=OptimConfig(batch_size=BATCH, samples=steps * BATCH, lr=2e-3, warmup=0.1),
        validation=ValidationConfig(every=10 * BATCH, report=BATCH),
        save=SaveConfig(every=10 * BATCH),
        seed=7,
        threads=1,
    )
    return replace(config, **changes)


def train_records(path):
    return [record for record in read_metrics(path) if record["kind"] == "train"]


class Killed(Exception):
    pass


@contextmanager
def killed_at_second_save(monkeypatch):
    """Kill a training when it is about to save for the second time; yield the numbers of samples seen at its saves."""
    real, calls = Checkpointer.save, []

    def save(checkpointer, **values):
        calls.append(values["seen"])
        if len(calls) == 2:
            raise Killed
        return real(checkpointer, **values)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", save)
        with pytest.raises(Killed):
            yield calls


def cost_config(**options):
    """Return a config whose step is large enough to measure."""
    config = recipe("pocket_mae_scenes")
    sizes = {"dim": 96, "depth": 4, "num_heads": 4, "decoder_dim": 64, "decoder_depth": 2, "decoder_num_heads": 4}
    return replace(
        config,
        model=replace(config.model, options={**config.model.options, **sizes}),
        optim=replace(config.optim, batch_size=256, samples=256, epochs=None),
        precision="float32",
        fused=False,
        **options,
    )


# ---- commands

COMMAND_STEPS, COMMAND_BATCH = 120, 16
PLAIN: tuple[str, ...] = ()
PARTS = ("--optim.accumulate", "2", "--data.workers", "2")
GROUPS = ("--shortcut.via", "groups", "--optim.clip", "1")
TWO = ("--devices", "2", "--optim.accumulate", "2", "--data.workers", "1")
MASKED = (
    "pocket_mae_digits",
    "--model.options",
    "dim=16",
    "depth=2",
    "num_heads=2",
    "decoder_dim=16",
    "decoder_depth=1",
)
ORTHOGONAL = (*MASKED, "--optim.algorithm", "muon")
DENOISER = ("pocket_uvit_digits_cond", "--model.options", "dim=16", "depth=2", "num_heads=2")
SETTINGS = [
    *("--seed", "3", "--threads", "1", "--optim.ema", "0.97", "--validation.knn", "0"),
    *("--optim.batch-size", str(COMMAND_BATCH), "--optim.epochs", "None"),
    *("--optim.samples", str(COMMAND_STEPS * COMMAND_BATCH)),
    # Reports, validations and checkpoints at points that do not coincide.
    *("--validation.report", str(7 * COMMAND_BATCH), "--validation.every", str(50 * COMMAND_BATCH)),
    *("--save.every", str(12 * COMMAND_BATCH)),
]


def command_for(more, *, recipe=MASKED):
    return ["train", *recipe, *SETTINGS, *more]


def start(command, out):
    """Start the command and return it as soon as it has its first checkpoint."""
    process = Command([*command, "--out", str(out)])
    wait_until(
        lambda: process.returncode is not None or checkpoint.checkpoints(out / "checkpoints"),
        f"{out} has a checkpoint",
    )
    return process


# ---- run directories


def write_run(path, *, seed=0):
    """Write the model of a tiny masked autoencoder as a run directory and return its path."""
    model = make("mae", alpha_min=0.7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3, 16, 3)
    return write_model(path, model.state_dict(), model_card(model, preprocess))
