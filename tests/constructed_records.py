"""Constructed records of trials, pages of them, and readers of such pages."""

import json

import numpy as np

from anechoic.sweeps.evaluation import BRANCH_RANKS, COMPONENT_SHARES, packed
from anechoic_lab import catalog
from anechoic_lab.paper import pocket
from anechoic_lab.records.pages import write_page
from anechoic_lab.records.statistics import Records
from anechoic_lab.studies import emoji_styles

POCKET_GRIDS = {grid.name: grid for grid in catalog.choose("all", "pocket")}

SEEDS = (0, 1, 2)
CHECKPOINTS = (1000, 2000, 4000)


def fake_metrics(rng):
    """Return random values for every metric that a page reads."""
    keys = [f"{kind}_{token}" for kind in ("knn", "knn_standardized") for token in ("mean", "class")]
    plain = [
        *pocket.LONG_PROBES,
        *(key for key in emoji_styles.MEASURES if "." not in key),
        "probe",
        "frechet",
        "precision",
        "recall",
        "accuracy",
        "same_shape",
    ]
    of_layers = ("entropy", "knn", "knn_whitened", "retrieval", "retrieval_whitened", "entropy_centered")
    images = rng.random((4, 8, 8, 3))
    votes = ("knn", "knn_whitened")
    return {
        "diverged": False,
        **{key: round(float(rng.uniform(20, 80)), 3) for key in plain},
        "layers": {
            token: {
                name: [round(float(x), 3) for x in rng.uniform(1, 5, 5)] for name in (*of_layers, *COMPONENT_SHARES)
            }
            for token in ("mean", "class")
        },
        "selection": {
            token: {"probe": 30.0, **{name: rng.uniform(1, 5, 5).tolist() for name in votes}}
            for token in ("mean", "class")
        },
        "beside": {"flat tokens": {"retrieval_mean": round(float(rng.uniform(20, 80)), 3)}},
        "probe_layers": {str(layer): float(rng.uniform(20, 80)) for layer in range(5)},
        "over_time": [
            {
                "seen": seen,
                **{key: float(rng.uniform(20, 80)) for key in [*keys, "entropy_mean", "entropy_class"]},
                **{name: rng.uniform(1, 9, 8).tolist() for name in BRANCH_RANKS},
            }
            for seen in CHECKPOINTS
        ],
        **{name: rng.uniform(1, 9, 8).tolist() for name in BRANCH_RANKS},
        "training": [{"seen": seen, "token_norm": [1.0, 2.0 * seen], "held_out_loss": 0.5} for seen in (0, 1280)],
        "pictures": {
            "map": {"points": rng.normal(size=(12, 2)).tolist(), "labels": [0, 1] * 6, "names": ["nought", "one"]},
            "colors": {"images": packed(images), "colors": packed(rng.random((4, 4, 4, 3)))},
            "reconstructions": {
                "images": packed(images),
                "hidden": packed((rng.random((4, 8, 8)) > 0.5).astype(np.float32)),
                "predictions": packed(rng.random((4, 8, 8, 3))),
            },
        },
    }


def write_record(folder, variant, seed, metrics):
    record = {
        "schema": 1,
        "name": f"{variant}-seed{seed}",
        "variant": variant,
        "config": {"optim": {"samples": 96_000}},
        "seed": seed,
        "commit": "fedcba9876543210",
        "machine": {"cpu": "abacus", "torch": "2.0"},
        "metrics": metrics,
        "seconds": 70.0,
        "cpu_seconds": 60.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{variant}-seed{seed}.json").write_text(json.dumps(record))


def fill(results, grid, *, names=None, seeds=SEEDS):
    rng = np.random.default_rng(sum(map(ord, grid.name)))
    for variant in names if names is not None else grid.needed():
        for seed in seeds:
            write_record(results / grid.group, variant, seed, fake_metrics(rng))


def page(grid, results, out):
    return write_page(grid, results, out, command=f"anechoic reproduce {grid.name}").read_text()


def tables_of(text):
    """Return the Markdown tables of a page as lists of rows of cells."""
    tables, current = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("| "):
            current.append(line.removeprefix("| ").removesuffix(" |").split(" | "))
        elif current:
            tables.append(current)
            current = []
    return tables


def pictures_of(text):
    return [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]


def with_probes(results, grid, table):
    """Write and return records; table: variant -> one probe accuracy per seed."""
    for variant, values in table.items():
        for seed, value in enumerate(values):
            write_record(results / grid.group, variant, seed, {"diverged": False, "probe_mean": value})
    return Records(results / grid.group)
