"""Experiment trackers: the config, the metrics and the pictures of a run in TensorBoard, wandb, trackio and MLflow.

Each library is a row of `LOGGERS` and an extra package. Everything stays on this machine unless the user's own
environment names a server. A run that was interrupted and resumes is one run there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from anechoic.choices import Tracker
from anechoic.errors import UserError
from anechoic.runtime.run import VALIDATION, read_metrics, read_pictures
from anechoic.storage.files import write_json
from anechoic.storage.safe_io import read_table

log = logging.getLogger("anechoic")

PROJECT = "anechoic"
# Ids of this run in each library, in the run directory.
IDS = "loggers.json"


class Logger(ABC):
    """One run in one library. needs: the packages of its extra.

    fresh: its files are new, so that everything recorded so far is sent again.
    """

    needs: ClassVar[tuple[str, ...]]
    fresh: bool

    @abstractmethod
    def __init__(self, about: About) -> None: ...
    @abstractmethod
    def scalars(self, values: Mapping[str, float], seen: int) -> None: ...
    @abstractmethod
    def picture(self, name: str, image: Any, seen: int) -> None: ...
    @abstractmethod
    def close(self, *, finished: bool) -> None: ...


@dataclass(frozen=True)
class About:
    """What a library learns of a run. new: it does not know this run yet."""

    path: Path
    config: Mapping[str, Any]
    id: str
    new: bool

    @property
    def name(self) -> str:
        return self.path.resolve().name


class TensorBoard(Logger):
    """Event files in `tensorboard`, written again when a run resumes."""

    needs = ("tensorboard",)

    def __init__(self, about: About) -> None:
        import json

        from torch.utils.tensorboard import SummaryWriter

        folder = about.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self.fresh = True
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("config", f"<pre>{json.dumps(about.config, indent=2)}</pre>")

    def scalars(self, values: Mapping[str, float], seen: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, seen)

    def picture(self, name: str, image: Any, seen: int) -> None:
        import numpy as np

        self.writer.add_image(name, np.asarray(image.convert("RGB")), seen, dataformats="HWC")

    def close(self, *, finished: bool) -> None:
        self.writer.close()


class Wandb(Logger):
    """Offline unless WANDB_MODE is set. Offline files cannot be appended to, so they are written again."""

    needs = ("wandb",)

    def __init__(self, about: About) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self.fresh = about.new or mode == "offline"
        if mode == "offline":
            for folder in (about.path / "wandb").glob(f"offline-run-*-{about.id}"):
                shutil.rmtree(folder, ignore_errors=True)
        self.image = wandb.Image
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=about.name,
            id=about.id,
            dir=str(about.path),
            config=dict(about.config),
            mode=mode,  # type: ignore[arg-type]
            resume=None if self.fresh else "allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def scalars(self, values: Mapping[str, float], seen: int) -> None:
        self.run.log(dict(values), step=seen)

    def picture(self, name: str, image: Any, seen: int) -> None:
        self.run.log({name: self.image(image)}, step=seen)

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class Trackio(Logger):
    """A database in TRACKIO_DIR, by default that of the library; TRACKIO_SPACE_ID names a server."""

    needs = ("trackio",)

    def __init__(self, about: About) -> None:
        import trackio

        self.fresh = about.new
        self.image, self.finish = trackio.Image, trackio.finish
        with contextlib.redirect_stdout(io.StringIO()):  # it advertises its dashboard
            self.run = trackio.init(
                project=PROJECT,
                name=f"{about.name}-{about.id}",
                config=dict(about.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def scalars(self, values: Mapping[str, float], seen: int) -> None:
        self.run.log(dict(values), step=seen)

    def picture(self, name: str, image: Any, seen: int) -> None:
        import numpy as np

        self.run.log({name: self.image(np.asarray(image.convert("RGB")))}, step=seen)

    def close(self, *, finished: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.finish()


class MLflow(Logger):
    """A database `mlflow.db` in the run directory, or the server that MLFLOW_TRACKING_URI names."""

    needs = ("mlflow", "sqlalchemy", "alembic")

    def __init__(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        path = about.path.resolve()
        self.metric = Metric
        remote = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=remote or f"sqlite:///{path / 'mlflow.db'}")
        self.fresh = about.new
        if about.new:
            found = self.client.get_experiment_by_name(PROJECT)
            files = None if remote else (path / "mlflow").as_uri()
            experiment = found.experiment_id if found else self.client.create_experiment(PROJECT, files)
            self.client.create_run(experiment, run_name=about.name, tags={"anechoic.id": about.id})
        self.run = self.find(about.id)
        self.client.update_run(self.run, status="RUNNING")
        self.client.log_dict(self.run, dict(about.config), "config.json")

    def find(self, id: str) -> str:
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        found = self.client.search_runs(experiments, filter_string=f"tags.`anechoic.id` = '{id}'")
        if not found:
            raise UserError(f"MLflow has no run with the tag anechoic.id = {id}: restore its database.")
        return found[0].info.run_id

    def scalars(self, values: Mapping[str, float], seen: int) -> None:
        now = int(1000 * time.time())
        self.client.log_batch(self.run, [self.metric(name, value, now, seen) for name, value in values.items()])

    def picture(self, name: str, image: Any, seen: int) -> None:
        self.client.log_image(self.run, image, artifact_file=f"{name}/{seen:012d}.png")

    def close(self, *, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


LOGGERS: dict[Tracker, type[Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


class Loggers:
    """All trackers of a run. sent: samples seen by the last record of each kind sent before an interruption."""

    def __init__(
        self, names: Sequence[Tracker], path: Path, config: Mapping[str, Any], *, sent: Mapping[str, int]
    ) -> None:
        known = read_table(path / IDS) if (path / IDS).exists() else {}
        ids: dict[Tracker, str] = {name: known.get(name) or uuid.uuid4().hex[:12] for name in dict.fromkeys(names)}
        self.open: dict[Tracker, Logger] = {}
        self.sent, self.failed = sent, set[str]()
        for name, id in ids.items():
            self.open[name] = LOGGERS[name](About(path, config, id, new=name not in known))
        if ids:
            write_json(path / IDS, {**known, **ids})
        fresh = [name for name, logger in self.open.items() if logger.fresh]
        pictures = dict(read_pictures(path)) if fresh else {}
        for record in read_metrics(path) if fresh else []:  # some libraries refuse steps that are not in order
            for name in fresh:
                self.send(name, record)
                if record["kind"] in VALIDATION and record["seen"] in pictures:
                    self.send_picture(name, pictures[record["seen"]], record["seen"])

    def record(self, record: dict[str, Any]) -> None:
        """Send a line of metrics.jsonl; what was sent before an interruption is not sent twice."""
        for name, logger in self.open.items():
            if logger.fresh or record["seen"] > self.sent.get(record["kind"], -1):
                self.send(name, record)

    def picture(self, image: Any, seen: int) -> None:
        for name, logger in self.open.items():
            if logger.fresh or seen > self.sent.get(VALIDATION[0], -1):
                self.send_picture(name, image, seen)

    def send(self, name: Tracker, record: dict[str, Any]) -> None:
        with self.surviving(name):
            self.open[name].scalars(scalars(record), record["seen"])

    def send_picture(self, name: Tracker, image: Any, seen: int) -> None:
        with self.surviving(name):
            self.open[name].picture("validation/pictures", image, seen)

    @contextlib.contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Warn, once, if the disk or a server refuses: the run has everything in metrics.jsonl."""
        try:
            yield
        except Exception as problem:  # every library has its own classes for a server that does not answer
            if name not in self.failed:
                log.warning("%s cannot be written now (%s); the run continues.", name, problem)
            self.failed.add(name)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        for name, logger in self.open.items():
            with self.surviving(name):
                logger.close(finished=kind is None)


def check_installed(names: Sequence[Tracker]) -> None:
    """Raise a UserError if a tracker's package is missing."""
    for name in names:
        missing = [package for package in LOGGERS[name].needs if find_spec(package) is None]
        if missing:
            raise UserError(f'--log {name} needs the package {missing[0]}: pip install "anechoic[{name}]".')


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """{"validation/loss": 0.7, "validation/rank/3": 12.5, ...}: a list becomes one curve per index."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat.update({f"{record['kind']}/{name}/{i}": item for i, item in enumerate(value) if item is not None})
        elif isinstance(value, int | float) and name != "seen":
            flat[f"{record['kind']}/{name}"] = value
    return flat
