"""Closed sets of names: every registry has exactly the names of choices.py, and no other file repeats a set."""

import ast
from pathlib import Path

import pytest

from anechoic import choices
from anechoic.choices import names

ROOT = Path(choices.__file__).parents[1]


def registries():
    from anechoic.cli._index import VECTORS
    from anechoic.cli.evaluate import PROTOCOL_POOLING
    from anechoic.cli.list import LISTS
    from anechoic.diffusion.process import PROCESSES
    from anechoic.diffusion.samplers import SAMPLERS
    from anechoic.models import FAMILIES
    from anechoic.shortcut import SCHEDULES
    from anechoic.storage.cache import KINDS
    from anechoic.training.cost import DEVICES
    from anechoic.training.objectives import OBJECTIVES
    from anechoic.weights.exporting import TARGETS

    return {
        "AlphaSchedule": SCHEDULES,
        "ModelFamily": FAMILIES,
        "Objective": OBJECTIVES,
        "Gpu": DEVICES,
        "Process": PROCESSES,
        "Sampler": SAMPLERS,
        "ExportTarget": TARGETS,
        "Vector": VECTORS,
        "ProbeProtocol": PROTOCOL_POOLING,
        "CacheKind": KINDS,
        "Listed": LISTS,
    }


@pytest.mark.parametrize("name", registries())
def test_registry_has_the_names_of_choices(name):
    assert set(registries()[name]) == set(names(getattr(choices, name)))


def test_knn_has_a_metric_for_every_scaling():
    from anechoic.eval.metrics.registry import METRICS

    assert {f"knn_{name}" for name in names(choices.KnnScaling) if name != "raw"} <= set(METRICS)
    assert set(names(choices.KnnScaling)) < set(names(choices.Scaling))


def literals(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            yield frozenset(item.value for item in ast.walk(node.slice) if isinstance(item, ast.Constant))


def test_no_file_repeats_a_set_of_choices():
    known = set(literals(Path(choices.__file__)))
    for package in ("anechoic", "anechoic_lab"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "choices.py":
                assert not known & set(literals(path)), path
