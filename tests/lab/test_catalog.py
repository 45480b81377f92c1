"""The grids at both scales, and the commands that list, refuse, summarize and draw them."""

import contextlib
import io
import json
import re

import pytest
from PIL import Image

from anechoic.cli.main import main
from anechoic.config import differences
from anechoic.errors import UserError
from anechoic.recipes import recipe
from anechoic.storage.files import write_json
from anechoic.sweeps.batch import refuse_failures
from anechoic.sweeps.sweep import Folders, vary
from anechoic.sweeps.trial import EvalPlan, Trial, is_file
from anechoic.training.build import check
from anechoic_lab import catalog
from anechoic_lab.paper import full, pocket
from anechoic_lab.records.map_pages import baseline_of
from anechoic_lab.studies import crossover

POCKET_GRIDS = {grid.name: grid for grid in catalog.choose("all", "pocket")}
POCKET_GROUPS = {name: make for module in catalog.SCALES["pocket"] for name, make in module.GROUPS.items()}

EVERY = [(grid.name, scale) for scale in catalog.SCALES for grid in catalog.choose("all", scale)]
PAPER = ["table1", "table2", "table3a", "table3b", "table4", "fig3", "fig4", "fig5", "fig6", "fig7"]


def cli(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def error_of(*arguments):
    """Return the error message of a refused command."""
    code, out, err = cli(*arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    return err


@pytest.fixture
def no_data(monkeypatch):
    """Fail when data is opened."""
    for place in ("anechoic.data.open_source", "anechoic.training.build.open_source"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("data was opened"))


# ---- grids


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_grid_shows_variants_that_can_be_trained(name, scale):
    (grid,) = catalog.choose(name, scale)
    variants = catalog.variants(grid, scale)
    assert grid.name == name
    assert set(grid.needed()) <= set(variants)
    labels = [row.label for row in grid.rows]
    assert len(set(labels)) == len(labels)
    for variant in grid.needed():
        check(variants[variant].config)
        assert variants[variant].config.optim.samples
    trials = grid.trials(variants, 2)
    assert len({trial.name for trial in trials}) == len(trials) == 2 * len(grid.needed())
    assert {trial.config.seed for trial in trials} == {grid.first_seed, grid.first_seed + 1}


@pytest.mark.parametrize("scale", catalog.SCALES)
def test_catalog_has_every_table_and_figure_of_the_paper(scale):
    names = [grid.name for grid in catalog.choose("all", scale)]
    assert [name for name in names if name in PAPER] == PAPER


@pytest.mark.parametrize("scale", catalog.SCALES)
def test_group_variants_are_shown_by_some_page(scale):
    grids = {grid.name: grid for grid in catalog.choose("all", scale)}
    groups = {name: make for module in catalog.SCALES[scale] for name, make in module.GROUPS.items()}
    assert {grid.group for grid in grids.values()} == set(groups)
    for group, variants in groups.items():
        assert {name for grid in grids.values() if grid.group == group for name in grid.needed()} == set(variants())


@pytest.mark.parametrize("name", [name for name, grid in POCKET_GRIDS.items() if grid.kind == "axes"])
def test_axes_grid_runs_the_baseline_of_every_row(name):
    grid = POCKET_GRIDS[name]
    assert {baseline_of(row) for row in grid.rows} <= set(grid.needed())


def only_alpha_differs(one, other):
    changed = [text.partition(":")[0] for text in differences(one.config, other.config)]
    assert changed == ["shortcut.alpha_min"]
    assert one.evaluation == other.evaluation


@pytest.mark.parametrize("scale", catalog.SCALES)
def test_alpha_min_is_the_only_difference_along_a_table(scale):
    mae = catalog.variants(catalog.choose("table2", scale)[0], scale)
    for alpha in pocket.ALPHAS[1:]:
        assert mae[f"alpha{alpha:g}"].config.shortcut.alpha_min == alpha
        only_alpha_differs(mae["alpha1"], mae[f"alpha{alpha:g}"])
    resnets = catalog.variants(catalog.choose("fig7", scale)[0], scale)
    for blocks in pocket.RESNET_BLOCKS:
        only_alpha_differs(resnets[f"blocks{blocks}-alpha1"], resnets[f"blocks{blocks}-alpha0.6"])
    uvits = catalog.variants(catalog.choose("table4", scale)[0], scale)
    for data in ("digits", "cifar100") if scale == "pocket" else ("cifar100", "latent", "conditional"):
        for alpha in pocket.UVIT_ALPHAS[1:]:
            only_alpha_differs(uvits[f"{data}-alpha1"], uvits[f"{data}-alpha{alpha:g}"])


def test_axis_of_the_map_is_a_pair():
    variants = crossover.axes_variants()
    for name in crossover.AXES:
        only_alpha_differs(variants[f"{name}-alpha1"], variants[f"{name}-alpha0.6"])
    only_alpha_differs(variants["depth12-alpha1"], variants["depth12-equal"])


def test_pictures_come_from_embedded_data_only():
    for variants in (groups() for groups in POCKET_GROUPS.values()):
        for variant in variants.values():
            if variant.evaluation.pictures:
                assert not is_file(variant.config.data.source)
                assert not is_file(variant.evaluation.test)


# ---- the paper's numbers


def papers(name, scale, metric):
    return {row.variant: row.paper[metric] for row in catalog.choose(name, scale)[0].rows if metric in row.paper}


ALPHAS = ("1", "0.9", "0.8", "0.7", "0.6", "0.5")
BASE, SMALL = (76.5, 79.2, 79.8, 81.8, 83.6, 82.3), (69.2, 73.5, 75.2, 78.1, 78.5, 78.6)


def test_table_2_has_the_numbers_of_the_paper():
    base = dict(zip((f"alpha{alpha}" for alpha in ALPHAS), BASE, strict=True))
    small = dict(zip((f"small-alpha{alpha}" for alpha in ALPHAS), SMALL, strict=True))
    assert papers("table2", "pocket", "probe_mean") == base
    assert papers("table2", "full", "probe_mean") == {**base, **small}


@pytest.mark.parametrize("scale", catalog.SCALES)
def test_tables_1_and_3_have_the_numbers_of_the_paper(scale):
    assert papers("table1", scale, "probe_class") == {"noskips-alpha1": 67.8, "alpha0.6": 72.7}
    assert papers("table1", scale, "knn_class") == {"noskips-alpha1": 27.4, "alpha0.6": 63.9}
    assert papers("table3a", scale, "probe_mean") == {"noskips-alpha0.6": 61.5, "alpha0.6": 83.6, "alpha1": 76.5}
    assert papers("table3b", scale, "probe_mean") == {
        "alpha1": 76.5,
        "branch": 76.9,
        "both": 82.6,
        "attention": 79.3,
        "mlp": 80.6,
        "alpha0.6": 83.6,
    }


TABLE4 = {
    "cifar100": {"probe": (62.47, 63.58, 66.86, 64.63), "frechet": (14.34, 11.65, 8.99, 11.71)},
    "latent": {"probe": (72.8, 74.5, 76.1, 75.8), "frechet": (44.40, 40.96, 41.17, 43.51)},
    "conditional": {"frechet": (6.93, 5.75, 5.11, 4.98)},
}


@pytest.mark.parametrize("metric", ["probe", "frechet"])
def test_table_4_has_the_numbers_of_the_paper(metric):
    expected = {
        f"{data}-alpha{alpha}": value
        for data, numbers in TABLE4.items()
        for alpha, value in zip(("1", "0.8", "0.7", "0.6"), numbers.get(metric, ()), strict=False)
    }
    assert papers("table4", "full", metric) == expected
    cifar = {name: value for name, value in expected.items() if name.startswith("cifar100")}
    assert papers("table4-cifar100", "pocket", metric) == cifar


# ---- dry runs and refusals


@pytest.mark.slow
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("scale", catalog.SCALES)
def test_dry_run_lists_every_trial_and_writes_nothing(scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = cli("reproduce", "all", "--scale", scale, "--dry-run", "--data-root", tmp_path, "--json")
    assert code == 0, error
    found = json.loads(out)["metrics"]
    grids = catalog.choose("all", scale)
    assert list(found) == [grid.name for grid in grids]
    for grid in grids:
        seeds = range(grid.first_seed, grid.first_seed + 3)
        assert found[grid.name]["trials"] == [f"{name}-seed{seed}" for name in grid.needed() for seed in seeds]
        if scale == "pocket":
            assert all(seconds > 0 for seconds in found[grid.name]["seconds"].values())
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_a_table(tmp_path):
    code, out, _ = cli("reproduce", "table3a", "--dry-run", "--seeds", 1, "--results", tmp_path)
    assert code == 0
    assert out.startswith(pocket.TABLE3A.title)
    assert "noskips-alpha0.6-seed0 " in out
    assert len(re.findall(r"\bto run$", out, flags=re.MULTILINE)) == 4
    assert " on " in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tabel2", "did you mean table2?"),
        ("fig9", "did you mean fig"),
        ("xyzzy", "there are table1, table2,"),
    ],
)
def test_misspelled_grid_gets_the_nearest_name(what, words):
    assert words in error_of("reproduce", what, "--dry-run")


def test_map_is_not_available_at_full_scale():
    with pytest.raises(UserError, match="There is no stability at full scale"):
        catalog.choose("stability", "full")


def test_missing_data_is_refused_before_training(tmp_path):
    arguments = ("--data-root", tmp_path, "--results", tmp_path / "results", "--runs", tmp_path / "runs")
    error = error_of("reproduce", "table2", *arguments)
    assert "There is no cifar100/" in error
    assert "--data" in error
    assert list(tmp_path.iterdir()) == []


def test_missing_evaluation_data_is_refused_before_training(tmp_path):
    folder = tmp_path / "data" / "cifar100"
    folder.mkdir(parents=True)
    (folder / "train.parquet").write_text("never opened")
    arguments = ("--data-root", tmp_path / "data", "--results", tmp_path / "results", "--runs", tmp_path / "runs")
    assert "There is no cifar100/test.parquet" in error_of("reproduce", "table2", *arguments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seeds", 0), "at least one seed and one job"),
        (("--jobs", 0), "at least one seed and one job"),
        (("--vary", "shortcut.alpha_min"), "has no values"),
        (("--vary", "shortcut.alpha_mni", 0.5), "did you mean shortcut.alpha_min?"),
        (("--vary", "alpha_min", 1, 0.6), "did you mean shortcut.alpha_min?"),
        (("--vary", "shortcut.alpha_min", 3), "must be between"),
        (("--vary", "seed", 1, 2), "--seeds N"),
        (("--test", "digits:test"), "give DATA"),
        (("fnord", "--test", "digits:test"), "There is no fnord in"),
    ],
)
def test_sweep_refuses_wrong_arguments(arguments, words, tmp_path):
    assert words in error_of("sweep", "pocket_mae_digits", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("test", [(), ("--test", "digits:test")])
def test_sweep_refuses_unlabeled_images_before_training(test, tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    arguments = (tmp_path / "photos", *test, "--out", tmp_path / "out")
    assert "make a folder per class" in error_of("sweep", "pocket_mae_digits", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ["--fix", "--vary"])
def test_sweep_over_samples_replaces_the_epochs_of_the_recipe(setting, tmp_path):
    words = ("sweep", "pocket_mae_digits", setting, "optim.samples", 3200, "--dry-run", "--out", tmp_path)
    code, out, err = cli(*words)
    assert (code, "3,200" in out, "128,000" in out) == (0, True, False), err


def test_sweep_without_test_data_is_planned(tmp_path):
    assert cli("sweep", "pocket_mae_digits", "digits:train", "--dry-run", "--out", tmp_path)[0] == 0


@pytest.mark.parametrize("words", [["sweep", "pocket_mae_digits", "--out"], ["reproduce", "table2", "--report"]])
def test_folder_that_cannot_be_created_is_named(words, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot be made" in error_of(*words, tmp_path / "file" / "out")


def test_sweep_time_depends_on_jobs(tmp_path):
    words = ("sweep", "pocket_mae_digits", "--seeds", 8, "--dry-run", "--out", tmp_path)
    assert "on 1 core for" in cli(*words, "--jobs", 1)[1]


def test_failed_trials_are_reported_with_what_to_do():
    with pytest.raises(UserError, match=r"a-seed0 and 1 more failed \(it broke\)\. The records of the others"):
        refuse_failures({"a-seed0": "it broke", "b-seed1": "too"})
    refuse_failures({})


def test_dry_sweep_lists_its_trials(tmp_path):
    vary = ("--vary", "shortcut.alpha_min", 0.6, 1.0, "--vary", "model.options.depth", 2, 4)
    code, out, error = cli("sweep", "pocket_mae_digits", *vary, "--seeds", 2, "--dry-run", "--out", tmp_path, "--json")
    assert code == 0, error
    found = json.loads(out)["metrics"]
    assert len(found["trials"]) == 8
    assert found["trials"][0] == "alpha_min0.6-depth2-seed0"
    # twice the depth is more work, and another alpha is not
    seconds = found["seconds"]
    assert seconds["alpha_min0.6-depth4-seed0"] > seconds["alpha_min0.6-depth2-seed0"]
    assert seconds["alpha_min0.6-depth2-seed0"] == seconds["alpha_min1-depth2-seed1"]


# ---- finished trials


def test_finished_sweep_is_summarized(tmp_path):
    """Records of exactly these trials exist, so the command trains nothing."""
    out = tmp_path / "out"
    base = ("--vary", "shortcut.alpha_min", 0.6, 1.0, "--vary", "optim.samples", 12_800, "--seeds", 2)
    code, listed, _ = cli("sweep", "pocket_mae_digits", *base, "--dry-run", "--out", out, "--json")
    assert code == 0
    config = json_config("pocket_mae_digits")
    grid = {"shortcut.alpha_min": [0.6, 1.0], "optim.samples": [12_800]}
    trials = vary(config, grid, seeds=range(2), evaluation=EvalPlan())
    assert [trial.name for trial in trials] == json.loads(listed)["metrics"]["trials"]
    folders = Folders(out / "records", out / "runs")
    folders.records.mkdir(parents=True)
    for i, trial in enumerate(trials):
        metrics = {"diverged": False, "knn_mean": 40.0 + i, "training": []}
        record = {**trial.to_json(), "seed": trial.config.seed, "metrics": metrics, "cpu_seconds": 1.0}
        write_json(folders.record(trial), record)
    code, text, error = cli("sweep", "pocket_mae_digits", *base, "--out", out)
    assert code == 0, error
    rows = [line.split() for line in text.splitlines()]
    assert ["variant", "knn_mean", "seeds"] in rows
    assert ["alpha_min0.6-samples12800", "40.50", "±", "6.35", "2"] in rows
    assert ["alpha_min1-samples12800", "42.50", "±", "6.35", "2"] in rows
    assert not (out / "runs").exists()


def json_config(name):
    """Return the recipe as `sweep` resolves it."""
    from dataclasses import replace
    from pathlib import Path

    from anechoic.cli.sweep import with_samples

    config = replace(recipe(name), threads=1, devices=1)
    return with_samples([Trial("any-seed0", "any", config)], Path())[0].config


def test_report_writes_pages_without_training(tmp_path):
    code, out, error = cli("reproduce", "table1", "--report", tmp_path / "pages", "--results", tmp_path / "none")
    assert code == 0, error
    assert out.strip() == str(tmp_path / "pages" / "table1.md")
    text = (tmp_path / "pages" / "table1.md").read_text()
    assert "Run `anechoic reproduce table1`." in text
    code, *_ = cli(
        *("reproduce", "table1", "--scale", "full", "--report", tmp_path / "full", "--results", tmp_path / "none")
    )
    assert code == 0
    assert "Run `anechoic reproduce table1 --scale full`." in (tmp_path / "full" / "table1.md").read_text()
    assert not (tmp_path / "none").exists()


def test_full_scale_configs_are_recipes_with_a_budget_in_samples():
    assert full.of("mae_in100", "x", size=1000, alpha_min=0.6).optim.samples == pytest.approx(800 * 1000, abs=1024)
    assert full.of("mae_in100", "x", size=1000).optim.epochs is None
    plain = full.in1k_variants()["noskips-alpha1"].config
    assert (plain.shortcut.alpha_min, plain.model.options["skips"]) == (1.0, False)
