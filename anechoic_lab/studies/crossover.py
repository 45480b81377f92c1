"""The map of when decayed shortcuts pay: pairs that differ in alpha alone, over length, settings, remedies and depth.

All other settings are those of the pocket protocol (pocket.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anechoic.shortcut import alpha_min_for, effective_decay, linear
from anechoic.sweeps.trial import EvalPlan
from anechoic_lab.grids import Grid, Row, Variant
from anechoic_lab.paper.pocket import EVALUATION, MAP_SAMPLES, PAIR, PROBES, TEST, TRAIN, mae

# ---- one setting changed

LONG_SAMPLES = 512_000
# Samples seen at the checkpoints of the long runs, which have a constant learning rate: each is the end of a run too.
LENGTHS = tuple(LONG_SAMPLES * i // 8 // 128 * 128 for i in range(1, 9))

# name -> (the difference from the pocket protocol in words, the settings)
AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("the pocket setting", {}),
    "depth3": ("depth 3", {"depth": 3, "decoder_depth": 1}),
    "depth12": ("depth 12", {"depth": 12}),
    "width48": ("width 48", {"dim": 48}),
    "patch4": ("patches of 4", {"patch_size": 4}),
    "mask0.5": ("mask ratio 0.5", {"mask_ratio": 0.5}),
    "lr3e-4": ("learning rate 3e-4", {"lr": 3e-4}),
    "lr3e-3": ("learning rate 3e-3", {"lr": 3e-3}),
    "batch32": ("batch 32, half the learning rate", {"batch": 32, "lr": 5e-4}),
    "oneskip": ("one skip, from the last block", {"decoder_depth": 1}),
    "gray": ("in gray", {"channels": 1, "flip": True}),
    "scenes": ("procedural scenes", {"source": "scenes:train"}),
    "digits": ("digits", {"source": "digits:train", "image_size": 8, "patch_size": 2, "channels": 1}),
}
AXES_EVALUATIONS = {
    "scenes": EvalPlan("scenes:train:5000", "scenes:test:2000", max_train=5000, max_test=2000),
    "digits": EvalPlan("digits:train", "digits:test", max_test=2000),
}


def axes_variants() -> dict[str, Variant]:
    """Return pairs (residual, decayed) that differ from the pocket protocol in one setting."""
    found = {
        f"{name}-alpha{alpha:g}": Variant(
            mae(alpha, **{"samples": MAP_SAMPLES, **changes}), AXES_EVALUATIONS.get(name, EVALUATION)
        )
        for name, (_, changes) in AXES.items()
        for alpha in PAIR
    }
    equal = round(alpha_min_for(24, effective_decay=effective_decay_of(0.6, branches=12)), 3)
    found["depth12-equal"] = Variant(mae(equal, samples=MAP_SAMPLES, depth=12), EVALUATION)
    return found


def effective_decay_of(alpha_min: float, *, branches: int) -> float:
    return effective_decay(linear(branches, alpha_min))


AXES_GRID = Grid(
    name="axes",
    title="The map: one setting changed",
    group="axes",
    rows=[
        *(Row(f"{words}, alpha_min 0.6", f"{name}-alpha0.6") for name, (words, _) in AXES.items()),
        Row("depth 12, alpha_min for the same effective decay as depth 6", "depth12-equal"),
    ],
    metrics=PROBES,
    baseline="base-alpha1",
    kind="axes",
    baselines=[f"{name}-alpha1" for name in AXES],
)


def length_variants() -> dict[str, Variant]:
    evaluation = replace(EVALUATION, checkpoints=True)

    def long(alpha: float, **settings: Any) -> Variant:
        return Variant(mae(alpha, samples=LONG_SAMPLES, constant_lr=True, checkpoints=8, **settings), evaluation)

    return {
        **{f"alpha{alpha:g}": long(alpha) for alpha in (1.0, 0.8, 0.6)},
        "stopped": long(0.6, schedule="stopped"),
    }


LENGTH = Grid(
    name="length",
    title="The map: training length",
    group="length",
    rows=[Row(f"alpha_min {alpha:g}", f"alpha{alpha:g}") for alpha in PAIR],
    metrics=PROBES,
    baseline="alpha1",
    kind="length",
)

LONG_BLOCKS = Grid(
    name="long-blocks",
    title="The map: accuracy after every block of the long runs",
    group="length",
    rows=[
        *(Row(f"alpha_min {alpha:g}", f"alpha{alpha:g}") for alpha in (1.0, 0.8, 0.6)),
        Row("as alpha_min 0.6 until 0.4 of the input is left, then plain", "stopped"),
    ],
    metrics=PROBES,
    baseline="alpha1",
    kind="early",
)

# name -> (in words, settings): what might let a short run profit from decay
REMEDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "product0.4": (
        "decay until 0.4 of the input is left",
        {"alpha_min": round(alpha_min_for(12, effective_decay=0.4), 3)},
    ),
    "stopped": (
        "as alpha_min 0.6 until 0.4 of the input is left, then plain",
        {"alpha_min": 0.6, "schedule": "stopped"},
    ),
    "cosine": ("cosine schedule, alpha_min 0.6", {"alpha_min": 0.6, "schedule": "cosine"}),
    "constant": ("the same alpha everywhere, 0.9", {"alpha_min": 0.9, "schedule": "constant"}),
    "learnable": ("learnable alpha, starting at the schedule", {"alpha_min": 0.6, "form": "learnable"}),
    "attention": ("attention branches only", {"alpha_min": 0.6, "form": "attention"}),
    "mlp": ("MLP branches only", {"alpha_min": 0.6, "form": "mlp"}),
    "fade-in": ("alpha falls from 1 over half of the training", {"alpha_min": 0.6, "anneal": 0.5}),
    "lr3e-3": ("three times the learning rate", {"alpha_min": 0.6, "lr": 3e-3}),
}


def remedy_variants() -> dict[str, Variant]:
    plain: dict[str, dict[str, Any]] = {
        "residual": {"alpha_min": 1.0},
        "decayed": {"alpha_min": 0.6},
        "residual-lr3e-3": {"lr": 3e-3},
    }
    every = {**plain, **{name: changes for name, (_, changes) in REMEDIES.items()}}
    return {name: Variant(mae(**{"samples": MAP_SAMPLES, **changes}), EVALUATION) for name, changes in every.items()}


REMEDY_GRID = Grid(
    name="remedies",
    title="The map: remedies",
    group="remedies",
    rows=[
        Row("alpha_min 0.6", "decayed"),
        *(Row(words, name) for name, (words, _) in REMEDIES.items()),
        Row("residual, three times the learning rate", "residual-lr3e-3"),
    ],
    metrics=PROBES,
    baseline="residual",
)


# ---- the search for a setting that fits a laptop and profits

SEARCH_DEPTHS, SEARCH_ALPHAS = (2, 3, 4), (1.0, 0.8, 0.6)


def search_variants() -> dict[str, Variant]:
    """Return shallow encoders: decay makes the first blocks more abstract, so a network may end where it leads."""
    return {
        f"depth{depth}-alpha{alpha:g}": Variant(mae(alpha, depth=depth, decoder_depth=max(1, depth // 2)), EVALUATION)
        for depth in SEARCH_DEPTHS
        for alpha in SEARCH_ALPHAS
    }


SEARCH = Grid(
    name="search",
    title="The map: shallow encoders",
    group="search",
    rows=[
        Row(f"depth {depth}, alpha_min {alpha:g}", f"depth{depth}-alpha{alpha:g}")
        for depth in SEARCH_DEPTHS
        for alpha in SEARCH_ALPHAS
        if alpha != 1
    ],
    metrics=PROBES,
    baseline="depth3-alpha1",
    kind="axes",
    baselines=[f"depth{depth}-alpha1" for depth in SEARCH_DEPTHS],
)


# ---- the first third of a deep encoder

EARLY = 4  # of 12 blocks: fixed before the runs, where a prototype on other images was furthest ahead
EARLY_SAMPLES = 160_000


def early_variants() -> dict[str, Variant]:
    """Return encoders of the paper's depth on patches of 4: does decay lead in the first blocks?"""
    evaluation = EvalPlan(TRAIN, TEST, probe_layers=(2, 3, EARLY, 5, 6))
    settings: dict[str, Any] = {"patch_size": 4, "depth": 12, "batch": 64, "lr": 7e-4, "samples": EARLY_SAMPLES}
    return {f"alpha{alpha:g}": Variant(mae(alpha, **settings), evaluation) for alpha in PAIR}


EARLY_GRID = Grid(
    name="early",
    title="The map: the first third of a deep encoder",
    group="early",
    rows=[Row(f"alpha_min {alpha:g}", f"alpha{alpha:g}") for alpha in PAIR],
    metrics={
        f"layers.mean.knn.{EARLY}": f"k-NN after block {EARLY}",
        f"probe_layers.{EARLY}": f"linear probe after block {EARLY}",
        **PROBES,
    },
    baseline="alpha1",
    kind="early",
)

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {
    "length": length_variants,
    "early": early_variants,
    "axes": axes_variants,
    "remedies": remedy_variants,
    "search": search_variants,
}
GRIDS = {grid.name: grid for grid in (LENGTH, LONG_BLOCKS, EARLY_GRID, AXES_GRID, REMEDY_GRID, SEARCH)}
