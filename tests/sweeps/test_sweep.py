"""Sweeps of tiny trials on digits: what is varied, skipped, retried, interrupted, and how long it is said to take."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_runs import SMALLEST

from anechoic.config import Config, DataConfig, ModelConfig, OptimConfig, SaveConfig, ShortcutConfig, ValidationConfig
from anechoic.errors import UserError
from anechoic.outcome import machine, rough_duration
from anechoic.storage.files import read_json, write_json
from anechoic.sweeps import sweep as sweep_module
from anechoic.sweeps.sweep import (
    ATTEMPTS,
    Folders,
    Progress,
    Table,
    estimates,
    outdated,
    sweep,
    vary,
    with_settings,
)
from anechoic.sweeps.trial import EvalPlan, Trial, finished, run_trial
from anechoic.training.cost import training_flops
from anechoic.training.timing import OVERHEAD_SECONDS, cpu_seconds

OPTIONS = {**SMALLEST, "patch_size": 4}
EVALUATION = EvalPlan("digits:train", "digits:test", max_train=100, max_test=60)


def tiny(*, source="digits:train", updates=4, batch=16, **changes):
    config = Config(
        data=DataConfig(source, image_size=8, channels=1, flip=False, holdout=32, workers=0),
        model=ModelConfig("mae_tiny_patch4", OPTIONS),
        shortcut=ShortcutConfig(alpha_min=0.7),
        optim=OptimConfig(batch_size=batch, samples=updates * batch, lr=1e-3),
        validation=ValidationConfig(every=2 * batch, report=batch),
        save=SaveConfig(every=2 * batch),
        threads=1,
        devices=1,
    )
    return replace(config, **changes)


def trial_of(name, config, evaluation=EVALUATION):
    return Trial(f"{name}-seed0", name, config, evaluation)


# ---- which trials


def test_every_combination_has_its_own_name():
    trials = vary(
        tiny(), {"shortcut.alpha_min": [0.6, 1.0], "model.options.depth": [2, 4]}, seeds=(0, 3), evaluation=EVALUATION
    )
    assert [trial.name for trial in trials] == [
        f"alpha_min{alpha}-depth{depth}-seed{seed}" for alpha in ("0.6", "1") for depth in (2, 4) for seed in (0, 3)
    ]
    last = trials[-1]
    assert last.variant == "alpha_min1-depth4"
    assert (last.config.shortcut.alpha_min, last.config.model.options["depth"], last.config.seed) == (1.0, 4, 3)
    # everything else is the base's
    assert with_settings(last.config, {"shortcut.alpha_min": 0.7, "model.options.depth": 2, "seed": 0}) == tiny()


def test_nothing_varied_is_the_base_itself():
    (trial,) = vary(tiny(), {}, seeds=(0,), evaluation=EVALUATION)
    assert (trial.name, trial.config) == ("base-seed0", tiny())


def test_a_value_is_made_part_of_a_file_name():
    trials = vary(tiny(), {"data.source": ["a/b c.zip"]}, seeds=(0,), evaluation=EVALUATION)
    assert trials[0].name == "sourcea_bc.zip-seed0"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"shortcut.alhpa_min": 0.5}, "did you mean shortcut.alpha_min?"),
        ({"shortcuts.alpha_min": 0.5}, "There is no setting shortcuts.alpha_min: choose one of"),
        ({"alpha_min": 0.5}, "There is no setting alpha_min"),
        ({"optim.lr.peak": 0.5}, "There is no setting optim.lr.peak"),
        ({"shortcut.alpha_min": 2.0}, "The setting shortcut.alpha_min must be between"),
        ({"optim.batch_size": "many"}, "The setting optim.batch_size must be a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_with_one_sentence(values, words):
    with pytest.raises(UserError) as problem:
        with_settings(tiny(), values)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_settings_of_the_base_are_not_touched():
    base = tiny()
    with_settings(base, {"model.options.depth": 7})
    assert base == tiny()


def test_samples_replace_epochs_and_the_other_way_around():
    base = tiny(optim=OptimConfig(batch_size=16, epochs=3.0))
    assert with_settings(base, {"optim.samples": 64}).optim == replace(base.optim, epochs=None, samples=64)
    assert with_settings(tiny(), {"optim.epochs": 2}).optim == replace(tiny().optim, epochs=2.0, samples=None)
    both = with_settings(base, {"optim.samples": None, "optim.epochs": 2})
    assert both.optim == replace(base.optim, epochs=2.0)


def test_cells_of_the_same_name_are_refused(tmp_path):
    trials = vary(tiny(), {"shortcut.alpha_min": [0.6, 0.6]}, seeds=(0,), evaluation=EVALUATION)
    with pytest.raises(UserError, match="Two trials of this sweep have the same name"):
        sweep(trials, Folders(tmp_path / "records", tmp_path / "runs"))
    assert not list(tmp_path.iterdir())


def test_a_misspelt_option_is_refused_before_anything_is_started(tmp_path):
    trials = vary(tiny(), {"model.options.dpeth": [2]}, seeds=(0,), evaluation=EVALUATION)
    with pytest.raises(UserError, match="dpeth"):
        sweep(trials, Folders(tmp_path / "records", tmp_path / "runs"))
    assert not list(tmp_path.iterdir())


# ---- a sweep with a plain, a diverging and a broken trial


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(folders, trials by name, what the sweep came to, what it printed)"""
    root = tmp_path_factory.mktemp("swept")
    (root / "broken.npz").write_text("this is no archive")
    trials = {
        "broken": trial_of("broken", tiny(source="broken.npz")),
        "plain": trial_of("plain", tiny()),
        "wild": trial_of("wild", tiny(optim=replace(tiny().optim, lr=1e30))),
    }
    folders = Folders(root / "records", root / "runs", root)
    out = io.StringIO()
    return folders, trials, sweep(list(trials.values()), folders, out=out), out.getvalue()


@pytest.mark.slow
def test_a_failing_cell_is_retried_once_and_reported_and_the_others_finish(swept):
    folders, trials, progress, printed = swept
    assert sorted(progress.done) == ["plain-seed0", "wild-seed0"]
    assert progress.skipped == []
    assert list(progress.failed) == ["broken-seed0"]
    assert "broken.npz" in progress.failed["broken-seed0"]
    assert "anechoic.errors" not in progress.failed["broken-seed0"]
    assert not folders.record(trials["broken"]).exists()
    assert ATTEMPTS == 2
    log = (folders.run(trials["broken"]) / "log.txt").read_text()
    assert log.splitlines().count(progress.failed["broken-seed0"]) == ATTEMPTS
    assert printed.count("broken-seed0 failed: ") == ATTEMPTS
    assert printed.count("plain-seed0 done; about ") == 1


@pytest.mark.slow
def test_record_has_config_and_results(swept):
    folders, trials, *_ = swept
    record = read_json(folders.record(trials["plain"]))
    assert set(record) >= {"schema", "name", "variant", "config", "evaluation", "seed", "commit", "machine", "metrics"}
    assert {"seconds", "cpu_seconds"} <= set(record)
    assert record["metrics"]["diverged"] is False
    assert finished(trials["plain"], folders.record(trials["plain"]))
    assert not finished(trials["plain"], folders.record(trials["wild"]))
    assert {path.stem for path in folders.records.iterdir()} == {"plain-seed0", "wild-seed0"}


@pytest.mark.slow
def test_divergence_is_a_result(swept):
    folders, trials, *_ = swept
    metrics = read_json(folders.record(trials["wild"]))["metrics"]
    assert metrics["diverged"] is True
    assert 0 <= metrics["seen"] < trials["wild"].config.optim.samples
    assert str(folders.runs) not in metrics["reason"]
    assert "knn_mean" not in metrics


@pytest.mark.slow
def test_weights_of_evaluated_runs_are_deleted(swept):
    folders, trials, *_ = swept
    run = folders.run(trials["plain"]) / "run"
    assert (run / "metrics.jsonl").exists()
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_a_second_sweep_touches_nothing(swept):
    folders, trials, *_ = swept
    done = [trials["plain"], trials["wild"]]

    def state():
        paths = sorted(path for part in (folders.records, folders.runs) for path in part.rglob("*"))
        return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}

    before = state()
    progress = sweep(done, folders, out=io.StringIO())
    assert (progress.done, progress.skipped, progress.failed) == ([], ["plain-seed0", "wild-seed0"], {})
    assert state() == before


@pytest.mark.slow
def test_another_config_or_evaluation_under_the_same_name_is_not_finished(swept):
    folders, trials, *_ = swept
    plain, path = trials["plain"], folders.record(trials["plain"])
    assert not finished(replace(plain, config=replace(plain.config, seed=5)), path)
    assert not finished(replace(plain, evaluation=replace(EVALUATION, max_test=61)), path)
    assert not finished(plain, path.with_name("fnord.json"))


@pytest.mark.slow
def test_changed_trial_is_trained_again(swept):
    """Its old run, of which the weights are gone, would be refused or would lack what is to be evaluated."""
    folders, trials, *_ = swept
    changed = replace(
        trials["wild"],
        config=tiny(updates=5, save=SaveConfig(every=32, keep_every=32)),
        evaluation=replace(EVALUATION, checkpoints=True, probe=False),
    )
    assert sweep([changed], folders, out=io.StringIO()).done == ["wild-seed0"]
    metrics = read_json(folders.record(changed))["metrics"]
    assert metrics["diverged"] is False
    assert [row["seen"] for row in metrics["over_time"]] == [32, 64, 80]

    run = folders.run(changed)
    assert not outdated(run, replace(changed, evaluation=EVALUATION))  # its weights still serve another evaluation
    assert outdated(run, changed)  # but not one who looks at checkpoints that are gone
    assert outdated(run, replace(changed, config=tiny()))
    write_json(run / "trial.json", {**changed.to_json(), "config": {"a setting of": "another version"}})
    assert not outdated(run, replace(changed, config=tiny()))  # nor is deleted what cannot be read


# ---- interrupted


def run_script(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_terminated_sweep_goes_on_and_ends_with_the_same_numbers(tmp_path):
    config = tiny(updates=200, batch=32, validation=ValidationConfig(every=3200, report=320))
    trial = trial_of("long", config, replace(EVALUATION, probe=False))
    folders = Folders(tmp_path / "records", tmp_path / "runs")
    run = folders.run(trial) / "run"
    write_json(tmp_path / "trial.json", trial.to_json())
    script = """if True:
        import sys
        from pathlib import Path
        from anechoic.sweeps.trial import trial_from_json
        from anechoic.sweeps.sweep import Folders, sweep
        from anechoic.storage.files import read_json
        here = Path(sys.argv[1])
        sweep([trial_from_json(read_json(here / "trial.json"))], Folders(here / "records", here / "runs"))
    """
    process = run_script(script, str(tmp_path))
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, error
    assert not (run / "results.json").exists(), "the trial had finished before the signal came: make it longer"
    assert any((run / "checkpoints").iterdir())
    assert not folders.record(trial).exists()

    progress = sweep([trial], folders, out=io.StringIO())
    assert (progress.done, progress.failed) == (["long-seed0"], {})
    assert len(read_json(run / "env.json")["starts"]) == 2
    whole = run_trial(trial, tmp_path / "whole", root=tmp_path)
    assert read_json(folders.record(trial))["metrics"] == json.loads(json.dumps(whole["metrics"]))


# ---- how long it takes


def test_trials_get_one_gpu_each_and_are_pinned_to_a_core_and_thread_only_without_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sweep_module, "available_cores", lambda: list(range(8)))
    started, pinned = [], []

    class Started:
        def start(self, command, *, env, **streams):
            started.append({name: env[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") if name in env})
            return SimpleNamespace(pid=12345)

    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append((pid, cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folders = Folders(tmp_path / "records", tmp_path / "runs")

    def start(slot):
        sweep_module.start(trial_of("one", tiny()), folders, 3, Started(), slot=slot)
        return started[-1]

    assert sweep_module.cores_for(None) == list(range(8))
    assert start(0) == {"OMP_NUM_THREADS": "1"}
    assert pinned == [(12345, {3})]
    monkeypatch.setattr(sweep_module, "num_gpus", lambda: 2)
    assert sweep_module.cores_for(None) == [0, 1]
    assert sweep_module.cores_for(4) == [0, 1, 2, 3]
    assert [start(slot) for slot in range(3)] == [{"CUDA_VISIBLE_DEVICES": number} for number in "010"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [start(slot) for slot in range(3)] == [{"CUDA_VISIBLE_DEVICES": number} for number in "575"]
    assert len(pinned) == 1


def test_the_work_of_a_vision_transformer_in_closed_form():
    dim, depth, patch, size, classes, samples = 16, 3, 4, 8, 5, 320
    options = {"patch_size": patch, "dim": dim, "depth": depth, "num_heads": 2, "num_classes": classes}
    config = replace(
        tiny(), model=ModelConfig("vit_tiny_patch16", options), optim=OptimConfig(batch_size=32, samples=samples)
    )
    patches = (size // patch) ** 2
    tokens = 1 + patches
    embed = 2 * patches * dim * patch**2
    block = 2 * tokens * dim * 3 * dim + 2 * 2 * tokens**2 * dim + 2 * tokens * dim**2 + 2 * 2 * tokens * dim * 4 * dim
    head = 2 * dim * classes
    assert training_flops(config) == 3 * samples * (embed + depth * block + head)


def test_work_and_estimates_grow_with_the_samples(tmp_path):
    once, thrice = (replace(tiny(), optim=replace(tiny().optim, samples=16 * n)) for n in (100_000, 300_000))
    assert training_flops(once) > 0
    assert training_flops(thrice) == pytest.approx(3 * training_flops(once))
    folders = Folders(tmp_path / "records", tmp_path / "runs")
    found = estimates([trial_of("once", once), trial_of("thrice", thrice)], folders)
    assert found["once-seed0"] > OVERHEAD_SECONDS
    work = [found[name] - OVERHEAD_SECONDS for name in ("once-seed0", "thrice-seed0")]
    assert work[1] == pytest.approx(3 * work[0])


def test_estimates_learn_from_what_finished_trials_took_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("anechoic.training.timing.seconds_per_image", lambda config: 0.5)
    folders = Folders(tmp_path / "records", tmp_path / "runs")
    trials = [trial_of("one", tiny()), trial_of("two", tiny(updates=8))]
    timed = estimates(trials, folders)
    assert timed["two-seed0"] == pytest.approx(OVERHEAD_SECONDS + 0.5 * 8 * 16)
    folders.records.mkdir()
    took = 7 * cpu_seconds(trials[0].config)
    for cpu, expected in ((machine(), 7 * cpu_seconds(trials[1].config)), ({"cpu": "other"}, timed["two-seed0"])):
        write_json(folders.record(trials[0]), {**trials[0].to_json(), "seconds": took, "machine": cpu})
        assert estimates(trials, folders)["two-seed0"] == pytest.approx(expected)


def test_the_time_left_of_a_sweep_follows_the_pace_of_what_ran(tmp_path):
    trials = [trial_of(name, tiny()) for name in ("one", "two")]
    folders, progress = Folders(tmp_path / "records", tmp_path / "runs"), Progress()
    table = Table(trials, folders, progress, io.StringIO(), estimates={t.name: 600.0 for t in trials}, jobs=1)
    assert table.left() == "20 min"
    progress.done.append(trials[0].name)
    table.started[trials[0].name], table.took[trials[0].name] = (0.0, 0.0), 1800.0
    assert table.left() == "30 min"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3, "10 s"), (94, "90 s"), (150, "2 min"), (3540, "59 min"), (3600, "1 h 00 min"), (11_100, "3 h 05 min")],
)
def test_durations_for_people(seconds, words):
    assert rough_duration(seconds) == words
