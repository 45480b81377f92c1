"""Accuracy on labeled images during training: recorded at every validation, without any effect on the training."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from tiny_runs import BATCH, SMALLEST, killed_at_second_save, tiny_config

import anechoic
from anechoic.cli.main import main
from anechoic.config import DataConfig, ModelConfig, SaveConfig, ValidationConfig
from anechoic.errors import UserError
from anechoic.pages.runs import open_run
from anechoic.pages.summary import ONLINE
from anechoic.runtime.run import CLOCK_FIELDS, read_metrics
from anechoic.server.page import status_of
from anechoic.training.loop import fit

LABELS = "limit:300:digits:test"


def config():
    return tiny_config(
        steps=8,
        model=ModelConfig("mae_tiny_patch4", SMALLEST),
        validation=ValidationConfig(every=4 * BATCH, report=2 * BATCH),
        save=SaveConfig(every=4 * BATCH),
    )


def records(path, *, labels=True):
    """Return the records without times, and on request without what was measured on labeled images."""
    left_out = (*CLOCK_FIELDS, *(() if labels else ONLINE))
    return [{name: x for name, x in record.items() if name not in left_out} for record in read_metrics(path)]


def weights(path):
    return (path / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("labeled") / "run"
    fit(config(), path, validation_labels=LABELS)
    return path


def test_every_validation_records_both_accuracies(run):
    validations = [record for record in read_metrics(run) if record["kind"] == "validation"]
    assert [record["seen"] for record in validations] == [0, 4 * BATCH, 8 * BATCH]
    assert all(0 <= record[name] <= 1 for record in validations for name in ONLINE)
    (row,) = anechoic.evaluate(
        run, LABELS, metrics=["knn", "probe"], k=[20], pooling=["mean"], baselines=False
    ).metrics["rows"]
    assert (validations[-1]["labels_knn"], validations[-1]["labels_probe"]) == (row["knn"], row["probe"])
    results = json.loads((run / "results.json").read_text())["metrics"]
    assert {name: results[name] for name in ONLINE} == {name: validations[-1][name] for name in ONLINE}
    charts = status_of(open_run(run), state="finished", resume_command="")["charts"]
    assert all(title.replace("&", "&amp;") in charts for title in ONLINE.values())


def test_labels_do_not_change_weights_or_losses(run, tmp_path):
    fit(config(), tmp_path / "run")
    assert weights(tmp_path / "run") == weights(run)
    assert records(tmp_path / "run") == records(run, labels=False)
    assert (tmp_path / "run" / "config.json").read_bytes() == (run / "config.json").read_bytes()


def test_an_interrupted_run_resumes_exactly(run, tmp_path, monkeypatch):
    with killed_at_second_save(monkeypatch):
        fit(config(), tmp_path / "run", validation_labels=LABELS)
    fit(config(), tmp_path / "run", validation_labels=LABELS)
    assert records(tmp_path / "run") == records(run)
    assert weights(tmp_path / "run") == weights(run)


def test_data_without_labels_is_refused_in_one_sentence(tmp_path, capsys):
    for i in range(20):
        (tmp_path / "loose").mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / "loose" / f"{i}.png")
    words = ["train", "pocket_mae_digits", "--out", str(tmp_path / "run")]
    assert main([*words, "--validation-labels", str(tmp_path / "loose")]) == 2
    assert "label" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_without_validation_is_refused(tmp_path):
    without = tiny_config(data=DataConfig(source="digits", image_size=8, channels=1, holdout=0))
    with pytest.raises(UserError, match=r"data\.holdout above 0"):
        fit(without, tmp_path / "run", validation_labels=LABELS)
    assert not (tmp_path / "run").exists()
