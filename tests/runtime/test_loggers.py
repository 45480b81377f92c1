"""Trackers: an interrupted and resumed run is one run in each library, with every record and picture once."""

from __future__ import annotations

import json
import os
import sys
from typing import ClassVar

import pytest
from tiny_runs import BATCH, SMALLEST, Killed, killed_at_second_save, tiny_config

from anechoic.choices import Tracker, names
from anechoic.config import ModelConfig, SaveConfig, ValidationConfig
from anechoic.errors import UserError
from anechoic.runtime.loggers import LOGGERS, Logger, scalars
from anechoic.runtime.run import read_metrics
from anechoic.training import loop
from anechoic.training.loop import fit


def config():
    """Validation and a record at every second update; a checkpoint after four and after eight."""
    return tiny_config(
        steps=8,
        model=ModelConfig("mae_tiny_patch4", SMALLEST),
        validation=ValidationConfig(every=2 * BATCH, report=2 * BATCH),
        save=SaveConfig(every=4 * BATCH),
    )


def train_in_two_parts(path, name, monkeypatch):
    """Kill the run when it is about to save for the second time: records after the first checkpoint come twice."""
    with killed_at_second_save(monkeypatch) as saves:
        fit(config(), path, log_to=(name,))
    assert saves == [4 * BATCH, 8 * BATCH]
    fit(config(), path, log_to=(name,))


def expected(path):
    """(curve, samples seen) -> value of every number in metrics.jsonl, but those of the clock."""
    return {
        (curve, record["seen"]): value
        for record in read_metrics(path)
        for curve, value in scalars(record).items()
        if "second" not in curve
    }


def of_tensorboard(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    assert any("batch_size" in str(event) for event in events.Tensors("config/text_summary"))
    points = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    return points, [event.step for event in events.Images("validation/pictures")]


def leveldb_records(data, *, block=32768):
    """Yield the records of a log in LevelDB's format after 7 bytes: blocks of checksum, length, kind, data."""
    position, record = 7, b""
    while position + 7 <= len(data):
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if kind == 0 or block - position % block < 7:
            position += block - position % block
            continue
        record = (b"" if kind in (1, 2) else record) + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record


def of_wandb(path):
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # a process of its own writes the file, as a rule after the run's end
    (file,) = (path / "wandb").glob("offline-run-*/run-*.wandb")
    points, batch = [], None
    for data in leveldb_records(file.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(data)
        for item in message.run.config.update:
            batch = json.loads(item.value_json)["batch_size"] if item.key == "optim" else batch
        if message.WhichOneof("record_type") == "history":
            values = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in message.history.item
            }
            seen = message.history.step.num
            points += [(name, seen, value) for name, value in values.items() if not name.startswith("_")]
    pictures = [point for point in points if point[0].startswith("validation/pictures/")]
    assert batch == BATCH
    files = [(seen, value) for name, seen, value in pictures if name.endswith("/path")]
    assert all((file.parent / "files" / name).is_file() for _, name in files)
    return [point for point in points if point not in pictures], [seen for seen, _ in files]


def of_trackio(path):
    import sqlite3

    with sqlite3.connect(path.parent / "trackio" / "anechoic.db") as database:
        rows = database.execute("select run_id, step, metrics from metrics").fetchall()
        configs = database.execute("select config from configs").fetchall()
    assert len({row[0] for row in rows}) == 1
    assert [json.loads(text)["optim"]["batch_size"] for (text,) in configs] == [BATCH]
    points = [(name, seen, value) for _, seen, text in rows for name, value in json.loads(text).items()]
    return [p for p in points if not isinstance(p[2], dict)], [p[1] for p in points if isinstance(p[2], dict)]


def of_mlflow(path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{path / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FINISHED"
    points = [
        (name, m.step, m.value) for name in run.data.metrics for m in client.get_metric_history(run.info.run_id, name)
    ]
    pictures = client.list_artifacts(run.info.run_id, "validation/pictures")
    assert client.list_artifacts(run.info.run_id)[0].path == "config.json"
    return points, [int(item.path.split("/")[-1].split(".")[0]) for item in pictures]


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # other libraries' own
@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_is_one_run_in_the_library(name, tmp_path, monkeypatch):
    for package in LOGGERS[name].needs:
        pytest.importorskip(package)
    if name == "trackio":
        monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    path = tmp_path / "run"
    train_in_two_parts(path, name, monkeypatch)
    points, pictures = READERS[name](path)
    points = [(curve, seen, value) for curve, seen, value in points if "second" not in curve]
    found = {(curve, seen): value for curve, seen, value in points}
    assert found == pytest.approx(expected(path), rel=1e-6)
    assert len(points) == len(found), "a record was sent twice"
    assert sorted(pictures) == [0, 2 * BATCH, 4 * BATCH, 6 * BATCH, 8 * BATCH]


class Recorder(Logger):
    """A tracker in memory whose history stays, as that of a server."""

    runs: ClassVar[dict] = {}
    needs = ()

    def __init__(self, about):
        assert about.new == (about.id not in self.runs)
        self.fresh, self.points = about.new, self.runs.setdefault(about.id, [])

    def scalars(self, values, seen):
        self.points += [(name, seen, value) for name, value in values.items()]

    def picture(self, name, image, seen):
        self.points.append((name, seen, image.size))

    def close(self, *, finished):
        self.points.append(("closed", finished, None))


def test_records_are_sent_once_to_a_tracker_that_appends(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "runs", {})
    monkeypatch.setitem(LOGGERS, "wandb", Recorder)
    train_in_two_parts(tmp_path, "wandb", monkeypatch)
    (points,) = Recorder.runs.values()
    assert [point for point in points if point[0] == "closed"] == [("closed", False, None), ("closed", True, None)]
    sent = [point for point in points if point[0] not in ("closed", "validation/pictures") and "second" not in point[0]]
    assert {(name, seen): value for name, seen, value in sent} == expected(tmp_path)
    assert len(sent) == len(expected(tmp_path))


def test_a_tracker_that_joins_later_gets_everything_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "runs", {})
    monkeypatch.setitem(LOGGERS, "mlflow", Recorder)
    real = loop.Checkpointer.save
    monkeypatch.setattr(
        loop.Checkpointer, "save", lambda checkpointer, **values: real(checkpointer, **values) and stop(values)
    )
    with pytest.raises(Killed):
        fit(config(), tmp_path)
    monkeypatch.setattr(loop.Checkpointer, "save", real)
    fit(config(), tmp_path, log_to=("mlflow",))
    (points,) = Recorder.runs.values()
    assert {(name, seen) for name, seen, _ in points if "second" not in name} >= set(expected(tmp_path))


def stop(values):
    raise Killed


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_one_sentence_with_the_command(name, tmp_path, monkeypatch):
    package = LOGGERS[name].needs[-1]
    for other in LOGGERS[name].needs[:-1]:
        monkeypatch.setitem(sys.modules, other, json)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf'--log {name} needs the package {package}: pip install "anechoic\[{name}\]"\.'
    ):
        fit(config(), tmp_path / "run", log_to=(name,))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("problem", [OSError(28, os.strerror(28)), RuntimeError("the server does not answer")])
def test_a_tracker_that_fails_does_not_end_the_run(problem, tmp_path, monkeypatch, caplog):
    class Broken(Recorder):
        def scalars(self, values, seen):
            raise problem

    monkeypatch.setattr(Recorder, "runs", {})
    monkeypatch.setitem(LOGGERS, "trackio", Broken)
    fit(config(), tmp_path, log_to=("trackio",))
    assert (tmp_path / "results.json").exists()
    assert sum("trackio cannot be written now" in message for message in caplog.messages) == 1


def test_every_tracker_has_a_row():
    assert set(LOGGERS) == set(READERS) == set(names(Tracker))
