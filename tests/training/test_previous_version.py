"""Run directories, a model directory and a record of version 0.1 load, resume to the end, evaluate and report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import anechoic
from anechoic.cli.main import main
from anechoic.config import from_json
from anechoic.diffusion.generate import Request, generate
from anechoic.runtime.run import VALIDATION, read_metrics
from anechoic.storage.files import read_json
from anechoic.sweeps.evaluation import evaluate_classifier, evaluate_encoder
from anechoic.sweeps.trial import EvalPlan, finished, read_record, run_trial, trial_from_json
from anechoic.training.loop import fit

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs-0.1"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
PLAN = EvalPlan("digits:train", "digits:test", max_train=100, max_test=60, probe=False)


@pytest.fixture(params=sorted(EXPECTED))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an interrupted run: 480 of 768 samples seen."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / request.param))


def evaluated(run: Path) -> bool:
    match run.name:
        case "diffusion":
            return generate(Request(run=str(run), num=2, steps=2), progress=False).pixels.shape == (2, 1, 8, 8)
        case "supervised":
            return 0 <= evaluate_classifier(run, PLAN, seed=0)["accuracy"] <= 100
        case _:
            return 0 < evaluate_encoder(run, PLAN, seed=0)["knn_mean"] <= 100


@pytest.mark.slow
def test_interrupted_run_loads_resumes_evaluates_and_reports(run: Path, capsys: pytest.CaptureFixture) -> None:
    before = read_metrics(run)
    assert sum(parameter.numel() for parameter in anechoic.load(run).parameters()) > 0
    assert evaluated(run)

    config = from_json(read_json(run / "config.json"))
    results = fit(config, run)
    after = read_metrics(run)
    assert after[: len(before)] == before
    assert [record["seen"] for record in after if record["kind"] in VALIDATION] == [0, 256, 512, 768]
    assert len(read_json(run / "env.json")["starts"]) == 2
    for name, value in EXPECTED[run.name].items():
        if name not in ("images_per_second", "knn_accuracy", "held_out_accuracy", "accuracy"):
            # Another instruction set sums in another order, so the last digits may differ.
            assert results["metrics"][name] == pytest.approx(value, rel=2e-3, abs=1e-6), name

    assert fit(config, run) == results
    assert evaluated(run)
    if run.name in ("mae-muon-ema", "supervised"):  # a page takes long
        assert main(["report", str(run)]) == 0, capsys.readouterr().err
        assert (run / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_model_directory_loads_and_computes_the_same() -> None:
    model = anechoic.load(FIXTURES / "model")
    assert (model.config.dim, model.preprocess.mean, model.latents) == (8, (0.5,), None)
    with torch.no_grad():
        assert model(torch.zeros(2, 1, 8, 8)).loss.isfinite()


@pytest.mark.slow
def test_record_is_read_under_current_names_and_repeats_its_numbers(tmp_path: Path) -> None:
    record = read_record(FIXTURES / "record.json")
    trial = trial_from_json(record)
    assert finished(trial, FIXTURES / "record.json")
    assert (trial.evaluation.neighbors, trial.evaluation.max_train, trial.config.data.augment) == (5, 200, "center")
    metrics = run_trial(trial, tmp_path / "run", root=tmp_path)["metrics"]
    assert metrics.keys() == record["metrics"].keys()
    last, expected = metrics["training"][-1], record["metrics"]["training"][-1]
    assert last["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-3)
    assert metrics["knn_mean"] == pytest.approx(record["metrics"]["knn_mean"], abs=3)  # votes of 100 digits
