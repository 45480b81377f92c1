"""A run as pages see it: what was trained on what for how long, its curves, its network, its images, its verdict.

It reads and measures; words and pictures of a page are run_page.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anechoic.config import Config, from_json
from anechoic.data import Source, Subset, is_embedded
from anechoic.data.latents import is_latents
from anechoic.data.split import hold_out
from anechoic.errors import UserError
from anechoic.eval.denoisers import open_noisy
from anechoic.eval.encoders import Encoder, run_encoder
from anechoic.eval.eval_data import EvalData, open_maybe_labeled
from anechoic.eval.verdict import Verdict, measure, verdict_of
from anechoic.runtime.checkpoint import hint, load
from anechoic.runtime.devices import pick_device
from anechoic.runtime.ownership import started_by_this_user
from anechoic.runtime.run import VALIDATION, read_environment, read_frozen_config, read_metrics
from anechoic.training.build import open_data


@dataclass(frozen=True)
class RunOnDisk:
    """records: the lines of metrics.jsonl; environment: where and how it was started."""

    path: Path
    config: Config
    records: list[dict[str, Any]]
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def seen(self) -> int:
        return max((record["seen"] for record in self.records), default=0)

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()

    @property
    def alpha_min(self) -> float | None:
        alpha = self.config.shortcut.alpha_min
        return None if isinstance(alpha, str) else alpha

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] in kinds]

    @property
    def validations(self) -> list[dict[str, Any]]:
        return self.of_kind(*VALIDATION)


def open_run(path: str | Path) -> RunOnDisk:
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"There is no run directory {path}{hint(path)}")
    config = read_frozen_config(path)
    if config is None:
        raise UserError(
            f"{path} is no run directory, it has no config.json: give the folder that was named with --out."
        )
    return RunOnDisk(path, from_json(config), read_metrics(path), read_environment(path))


# ---- what it is


def facts(run: RunOnDisk, *, weights: int | None = None) -> dict[str, Any]:
    """Named values for the table at the top of a page; None where it is not known."""
    config, data, optim = run.config, run.config.data, run.config.optim
    starts: Sequence[Mapping[str, Any]] = run.environment.get("starts", [])
    return {
        "model": config.model.name,
        "options": config.model.options,
        "weights": weights,
        "alpha_min": config.shortcut.alpha_min,
        "objective": config.objective.name,
        "data": data.source,
        "images": data.size,
        "held_out": data.holdout,
        "image_size": data.image_size,
        "pixels": f"{data.pixels.type} as stored" if data.pixels.stored else data.pixels.type,
        "channels": ", ".join(data.pixels.select) or data.channels,
        "seen": run.seen,
        "samples": optim.samples,
        "epochs": round(run.seen / epoch, 2) if (epoch := samples_per_epoch(run)) else None,
        "seconds": round(seconds(run), 1),
        "algorithm": optim.algorithm,
        "lr": optim.lr,
        "batch_size": optim.batch_size,
        "seed": config.seed,
        "finished": run.finished,
        "started": starts[0].get("time") if starts else None,
        "starts": len(starts),
        "machine": run.environment.get("machine"),
        "commit": run.environment.get("commit"),
    }


def samples_per_epoch(run: RunOnDisk) -> int:
    """The whole batches that the images trained on fill, as `--epochs` counts them; 0 if the number is not known."""
    batch = run.config.optim.batch_size
    return (run.config.data.size or 0) // batch * batch


def seconds(run: RunOnDisk) -> float:
    """Of training, over all the times it was started."""
    return sum(record.get("seconds") or 0.0 for record in run.of_kind("train"))


def curves(run: RunOnDisk) -> dict[str, Any]:
    """{"train": {"seen": [...], "loss": [...]}, "validation": {...}}: numbers, and lists with a value per block."""
    found = {}
    for name, records in (("train", run.of_kind("train")), ("validation", run.validations)):
        keys = dict.fromkeys(key for record in records for key in record if key not in ("kind", "seconds"))
        found[name] = {key: [record.get(key) for record in records] for key in keys}
    return found


# ---- its network and its images


def encoder_of(run: RunOnDisk, *, device: str = "auto", seed: int = 0) -> Encoder:
    """The run's network as it is now; a denoiser is read on images without noise."""
    if run.config.objective.name in ("noise_prediction", "flow_matching"):
        return open_noisy(run.path, device=pick_device(device)).at(0.0, seed=seed)
    return run_encoder(run.path)


def weights_of(run: RunOnDisk) -> int:
    return sum(parameter.numel() for parameter in load(run.path).parameters())


def is_own(run: RunOnDisk) -> bool:
    """Return whether what the config names may be opened unasked: any path or server, if another person wrote it."""
    source = run.config.data.source
    return is_embedded(source) or started_by_this_user(run.environment, source)


def own_source(run: RunOnDisk, data: str | None = None) -> str:
    """Return the run's own data source, for opening it; UserError unless it is `data`, which the user named, or own."""
    source = run.config.data.source
    if source == data or is_own(run):
        return source
    raise UserError(
        f"{run.path} bears no mark of a start by you on this machine, so its data, {source:.200}, is not opened "
        "unasked: name the images with --data."
    )


def images_for(run: RunOnDisk, data: str | None) -> EvalData:
    """The images to look at: those asked for, or the run's own; with labels if they have them."""
    where = data or own_source(run)
    if data is None and is_latents(where):
        raise UserError(f"{run.path} was trained on latents, which are no pictures: give images with --data.")
    return open_maybe_labeled(where, channels=run.config.data.channels, pixels=run.config.data.pixels)


def held_out_of(run: RunOnDisk, source: Source | None = None, *, data: str | None = None) -> Source:
    """The images the run was never trained on. data: what the user named, which may be the run's own."""
    if source is None:
        own_source(run, data)
        source = open_data(run.config)
    if not source.has_fingerprint(run.config.data.fingerprint or ""):
        raise UserError(f"The data of {run.path}, {run.config.data.source}, is not what it was trained on.")
    if not run.config.data.holdout:
        raise UserError(f"{run.path} held out no images.")
    return Subset(source, hold_out(len(source), run.config.data.holdout, group=source.group_size)[1])


def verdict_on(
    run: RunOnDisk,
    encoder: Encoder,
    *,
    data: str | None = None,
    source: Source | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Verdict:
    """Return the verdict on images held out of the training or, if there are none, on the given ones."""
    try:
        source = held_out_of(run, source, data=data)
    except UserError:
        if data is None:
            raise
        source = images_for(run, data).test
    return verdict_of(measure(encoder, source, run.records, device=device, seed=seed), alpha_min=run.alpha_min)
