"""Configs: names, types and ranges are checked, JSON is exact, and whatever is left open is chosen once."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anechoic.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SaveConfig,
    ShortcutConfig,
    adopt,
    budget,
    default_holdout,
    default_workers,
    differences,
    from_json,
    parse_options,
    resolve,
    settings,
    to_json,
)
from anechoic.errors import UserError
from anechoic.recipes import recipe, table

MACHINE = {"fingerprint": "abc", "gpus": 0, "cores": 2}


@pytest.mark.parametrize("name", table())
def test_json_round_trip_of_every_recipe(name):
    config = recipe(name)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@given(
    lr=st.floats(0, 1, allow_nan=False),
    betas=st.tuples(*2 * [st.floats(0, 1, exclude_max=True)]),
    alpha_min=st.one_of(st.floats(0.01, 1), st.just("auto")),
    options=st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.booleans(), st.none(), st.text())),
    seed=st.integers(0, 2**70),
)
def test_json_is_exact(lr, betas, alpha_min, options, seed):
    config = Config(
        optim=OptimConfig(lr=lr, betas=betas),
        shortcut=ShortcutConfig(alpha_min=alpha_min),
        model=ModelConfig("m", options),
        seed=seed,
    )
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_options_are_kept_as_json_has_them():
    assert ModelConfig("m", {"norm_eps": (1e-6, 1e-5)}).options == {"norm_eps": [1e-6, 1e-5]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: from_json({"optm": {}}), "no setting optm; did you mean optim?"),
        (lambda: from_json({"optim": {"batchsize": 3}}), "no setting optim.batchsize; did you mean optim.batch_size?"),
        (lambda: from_json({"optim": {"batch_size": "many"}}), "optim.batch_size must be a whole number, not 'many'"),
        (lambda: OptimConfig(batch_size=0), "batch_size must be at least 1, not 0"),
        (lambda: OptimConfig(batch_size=True), "batch_size must be a whole number, not True"),
        (lambda: OptimConfig(warmup=1.5), "warmup must be between 0 and 1, not 1.5"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), "betas must be at least 0 and below 1, not"),
        (lambda: OptimConfig(betas=(0.9,)), "betas must be a list of 2 values"),
        (lambda: OptimConfig(schedule="linear"), "schedule must be one of cosine, constant, not 'linear'"),
        (lambda: ShortcutConfig(alpha_min="low"), "alpha_min must be a number or one of auto, not 'low'"),
        (lambda: ShortcutConfig(alpha_min=0.0), "alpha_min must be between"),
        (lambda: DataConfig(flip="yes"), "flip must be true or false, not 'yes'"),
        (lambda: Config(devices=0), "devices must be at least 1 or none, not 0"),
        (lambda: Config(data=DataConfig(channels=1, mean=(0.1, 0.2))), "data.mean needs one value for each of the 1"),
        (lambda: Config(optim=OptimConfig(samples=10, batch_size=20)), "less than a batch of 20"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_words_become_options():
    words = ["dim=48", "skips=false", "eps=1e-6", "pool=mean", "norm=None", "mlp-ratio=2.5"]
    assert parse_options(words) == {
        "dim": 48,
        "skips": False,
        "eps": 1e-6,
        "pool": "mean",
        "norm": None,
        "mlp_ratio": 2.5,
    }
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_options(["dim"])


def some_config(**changes):
    return replace(Config(data=DataConfig(source="x"), optim=OptimConfig(batch_size=8, epochs=3)), **changes)


@pytest.mark.parametrize("name", table())
def test_nothing_stays_open(name):
    config = recipe(name)
    frozen = resolve(config, size=200_000, **MACHINE)
    open_settings = {key for key, value in settings(frozen) if value is None}
    assert open_settings <= {"optim.epochs"}
    # What was said stays as it was said, and freezing again changes nothing.
    assert differences(frozen, adopt(config, frozen)) == []
    assert resolve(frozen, size=200_000, **MACHINE) == frozen


def test_rules_of_the_automatic_choices():
    frozen = resolve(some_config(), size=1000, **MACHINE)
    assert frozen.data.holdout == 64
    assert frozen.data.size == 936
    assert frozen.optim.samples == 3 * (936 // 8) * 8
    assert frozen.optim.lr == 1.5e-4 * 8 / 256
    assert frozen.data.mean == (0.485, 0.456, 0.406)
    assert (frozen.devices, frozen.threads, frozen.precision, frozen.data.workers) == (1, 2, "float32", 0)
    gray = resolve(some_config(data=DataConfig(source="x", channels=1)), size=1000, **MACHINE)
    assert (gray.data.mean, gray.data.std) == ((0.5,), (0.5,))
    many = resolve(some_config(devices=2), size=1000, **MACHINE)
    assert many.threads == 1
    accelerated = resolve(some_config(), size=1000, fingerprint="", gpus=4, cores=16)
    assert (accelerated.devices, accelerated.precision) == (4, "bfloat16")


def test_workers_of_each_process():
    assert [default_workers(cores, 1) for cores in (1, 2, 3, 16)] == [0, 0, 3, 8]
    assert [default_workers(64, processes) for processes in (1, 8, 16, 128)] == [8, 8, 4, 0]
    one_thread = {"fingerprint": "", "gpus": 8, "cores": 1}
    assert resolve(some_config(), size=1000, **one_thread).data.workers == 0
    assert resolve(some_config(), size=1000, **one_thread, workers=6).data.workers == 6
    own = some_config(data=DataConfig(source="x", workers=3))
    assert resolve(own, size=1000, **one_thread, workers=6).data.workers == 3


def test_learning_rate_of_the_paper():
    assert resolve(recipe("mae_in1k"), size=1_281_167, **MACHINE).optim.lr == pytest.approx(6e-4, rel=1e-12)


@given(size=st.integers(1, 10**7))
def test_held_out_part(size):
    held_out = default_holdout(size)
    assert 0 <= held_out <= min(1024, size // 10)
    assert held_out >= min(1024, size // 100)


@given(size=st.integers(1, 10**6), batch=st.integers(1, 2000), epochs=st.floats(0.01, 50))
def test_budget_is_whole_batches_near_the_epochs(size, batch, epochs):
    samples = budget(OptimConfig(batch_size=batch, epochs=epochs), size)
    assert samples % batch == 0
    assert samples >= batch
    assert abs(samples - epochs * (size // batch) * batch) <= batch


def test_budget_is_given_once():
    with pytest.raises(UserError, match="budget is missing"):
        budget(OptimConfig(batch_size=8), 100)
    with pytest.raises(UserError, match="set one of them to None"):
        budget(OptimConfig(batch_size=8, epochs=3, samples=8), 100)


def test_what_cannot_be_shared_or_filled_is_refused():
    with pytest.raises(UserError, match="cannot be shared by 3 devices"):
        resolve(some_config(devices=3), size=1000, **MACHINE)
    with pytest.raises(UserError, match="less than a batch of 8"):
        resolve(some_config(), size=7, **MACHINE)


def test_adopt_takes_only_what_is_open():
    frozen = resolve(some_config(), size=1000, **MACHINE)
    asked = some_config(save=SaveConfig(every=80))
    assert differences(frozen, adopt(asked, frozen)) == [
        f"save.every: {frozen.save.every} in the run, 80 asked for",
    ]
    assert adopt(some_config(), frozen) == frozen


def test_every_setting_has_an_explanation():
    """A line of help for each flag: the text under the field, which the command line shows."""
    import ast
    import inspect

    import anechoic.config

    tree = ast.parse(inspect.getsource(anechoic.config))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name != "Config":
            body = [item for item in node.body if not isinstance(item, ast.FunctionDef)]
            assert len(body) == 2 * len(fields(getattr(anechoic.config, node.name))), node.name
