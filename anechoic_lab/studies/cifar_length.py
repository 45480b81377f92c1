"""CIFAR-100 over the length of training: the pocket protocol, each arm at its own best of five peak learning rates.

The learning rates are chosen by the loss on 256 held-out images, never by a label, with a seed of their own. The claim
is tested with seeds that no choice used, on 10,000 training images and 5,000 test images. Folders of records keep their
first names (natural, natural-rates, natural-probe, natural-whitened).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from anechoic.config import Algorithm, Config
from anechoic.recipes.pretrain import pretrain_config
from anechoic.sweeps.trial import EvalPlan
from anechoic_lab.grids import CHOSEN, HELD_OUT_LOSS, KNN_PANELS, Grid, Row, Variant
from anechoic_lab.paper.pocket import LONG_EVALUATION, LONG_PROBES, mae
from anechoic_lab.studies.lr_search import FIRST_FRESH_SEED, WORDS, LearningRates, losses_grid, lr_search

SAMPLES = 96_000
LONG = (512_000, 2_048_000)


def photographs(
    alpha_min: float, *, algorithm: Algorithm = "muon", lr: float, samples: int = SAMPLES, checkpoints: int = 0
) -> Config:
    return mae(alpha_min, algorithm=algorithm, samples=samples, lr=lr, checkpoints=checkpoints)


# ---- the search for the learning rates

MUON_LRS = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
LRS: LearningRates = {
    ("muon", 1.0, SAMPLES): MUON_LRS,
    ("muon", 0.6, SAMPLES): MUON_LRS,
    ("adamw", 1.0, SAMPLES): (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    ("muon", 1.0, LONG[0]): MUON_LRS,
    ("muon", 0.6, LONG[0]): MUON_LRS,
}


def lr_name(algorithm: Algorithm, alpha: float, samples: int, lr: float) -> str:
    """Return the name of a trial; names of the first length have no length in them."""
    length = "" if samples == SAMPLES else f"{samples // 1000}k-"
    return f"{algorithm}-{length}lr{lr:g}-alpha{alpha:g}"


def lr_variants() -> dict[str, Variant]:
    return {
        lr_name(algorithm, alpha, samples, lr): Variant(
            photographs(alpha, algorithm=algorithm, lr=lr, samples=samples), EvalPlan()
        )
        for (algorithm, alpha, samples), lrs in LRS.items()
        for lr in lrs
    }


SEARCH = lr_search(
    "cifar-search",
    "CIFAR-100: peak learning rates by held-out loss",
    LRS,
    group="natural-rates",
    variant=lr_name,
    baseline=lr_name("muon", 1.0, SAMPLES, 8e-3),
)


# ---- the claim, and the same over length

# (algorithm, samples) -> peak learning rate, with Muon that of both alphas. Two are not searched yet: AdamW's, which is
# that of drawings, and that of the longest runs, which continues the step from the first length to the second.
BEST: dict[tuple[Algorithm, int], float] = {
    ("muon", SAMPLES): 8e-3,
    ("adamw", SAMPLES): 2e-3,
    ("muon", LONG[0]): 4e-3,
    ("muon", LONG[1]): 2e-3,
}
ALPHAS = (1.0, 0.9, 0.8, 0.6)
# alpha -> learning rates of the longest training, where the choice may cause a lead of decay
LONGEST_LRS = {1.0: (1e-3, 2e-3, 4e-3), 0.6: (2e-3, 4e-3)}


def name_of(algorithm: Algorithm, alpha: float, samples: int = SAMPLES) -> str:
    return f"{algorithm}-{samples // 1000}k-alpha{alpha:g}"


def longest_name(alpha: float, lr: float) -> str:
    """Return the name of a trial; names of the usual learning rate have none in them."""
    return name_of("muon", alpha, LONG[1]) if lr == BEST["muon", LONG[1]] else lr_name("muon", alpha, LONG[1], lr)


def length_variants() -> dict[str, Variant]:
    arms: list[tuple[Algorithm, float, int]] = [
        *(("muon", alpha, SAMPLES) for alpha in ALPHAS),
        ("adamw", 1.0, SAMPLES),
        *(("muon", alpha, samples) for samples in LONG for alpha in (1.0, 0.6)),
    ]
    return {
        name_of(algorithm, alpha, samples): Variant(
            photographs(alpha, algorithm=algorithm, lr=BEST[algorithm, samples], samples=samples), LONG_EVALUATION
        )
        for algorithm, alpha, samples in arms
    } | {
        longest_name(alpha, lr): Variant(photographs(alpha, lr=lr, samples=LONG[1]), LONG_EVALUATION)
        for alpha, lrs in LONGEST_LRS.items()
        for lr in lrs
    }


CIFAR = Grid(
    name="cifar",
    title="CIFAR-100: probe and k-NN at the best learning rate of each arm",
    claim="With decay and skips the frozen features of a masked autoencoder are far better than without "
    "(ImageNet-1K: linear probe 72.7 against 67.8 %, k-NN 63.9 against 27.4 %).",
    group="natural",
    rows=[
        *(Row(f"Muon, alpha_min {alpha:g}", name_of("muon", alpha)) for alpha in ALPHAS),
        Row("AdamW, alpha_min 1", name_of("adamw", 1.0)),
    ],
    metrics=LONG_PROBES,
    baseline=name_of("muon", 1.0),
    kind="early",
    first_seed=FIRST_FRESH_SEED,
    panels=KNN_PANELS | {"layers.mean.knn_whitened": "k-NN, mean token whitened (%)"},
)

LENGTH = Grid(
    name="cifar-length",
    title="CIFAR-100: the lead of decayed shortcuts over the length of training",
    group="natural",
    rows=[
        Row(f"Muon, alpha_min 0.6, {samples:,} samples", name_of("muon", 0.6, samples)) for samples in (SAMPLES, *LONG)
    ],
    metrics={key: LONG_PROBES[key] for key in ("probe_mean", "probe_class", "knn_mean", "knn_whitened_mean")},
    baseline=name_of("muon", 1.0),
    kind="lengths",
    baselines=[name_of("muon", 1.0, samples) for samples in LONG],
    others=("natural-probe", "natural-whitened"),
    first_seed=FIRST_FRESH_SEED,
)

LONGEST = Grid(
    name="cifar-longest",
    title="CIFAR-100: does the learning rate explain the lead after 2,048,000 samples?",
    group="natural",
    rows=[
        Row(f"Muon, alpha_min {alpha:g}, peak learning rate {lr:g}", longest_name(alpha, lr))
        for alpha, lrs in LONGEST_LRS.items()
        for lr in lrs
    ],
    metrics={key: words for key, words in LONG_PROBES.items() if key != "entropy"},
    baseline=name_of("muon", 1.0, LONG[1]),
    kind="table",
    first_seed=FIRST_FRESH_SEED,
)

# Seeds 10 and 11 suggest one lead of decayed shortcuts among six measures: the linear probe of the class token after
# 512,000 samples. Named before these seeds were run.


def pair_variants(samples: int) -> dict[str, Variant]:
    return {name: length_variants()[name] for name in (name_of("muon", alpha, samples) for alpha in (1.0, 0.6))}


PROBE = replace(
    CIFAR,
    name="cifar-probe",
    title="CIFAR-100: the class token's probe after 512,000 samples, on fresh seeds",
    group="natural-probe",
    rows=[Row(f"Muon, alpha_min {alpha:g}", name_of("muon", alpha, LONG[0])) for alpha in (1.0, 0.6)],
    baseline=name_of("muon", 1.0, LONG[0]),
    first_seed=20,
)

# The eight pairs at this length suggest another lead, as with drawings: k-NN of the whitened mean token. The first pair
# of the longest runs, seed 10, leads by three points. Named before seeds from 30 on were run.
WHITENED = replace(
    CIFAR,
    name="cifar-whitened",
    title="CIFAR-100: k-NN of the whitened mean token after 2,048,000 samples, on fresh seeds",
    group="natural-whitened",
    rows=[Row(f"Muon, alpha_min {alpha:g}", name_of("muon", alpha, LONG[1])) for alpha in (1.0, 0.6)],
    baseline=name_of("muon", 1.0, LONG[1]),
    first_seed=30,
)

# Each arm's best learning rate: by held-out loss, and by k-NN on held-out training images; after 2,048,000 samples and
# after 512,000, where a network takes about ten CPU minutes.
OWN_LRS = {LONG[1]: (1e-3, 5e-4, 4e-3, 2e-3), LONG[0]: (1e-3, 2e-3, 5e-4, 4e-3)}


OWN_LR_MEASURES = {
    HELD_OUT_LOSS: "held-out loss",
    **CHOSEN,
    **{key: LONG_PROBES[key] for key in ("knn_whitened_mean", "knn_whitened_class", "probe_mean", "probe_class")},
}


def own_lr_variants(samples: int) -> dict[str, Variant]:
    return {
        lr_name("muon", alpha, samples, lr): Variant(
            photographs(alpha, lr=lr, samples=samples), replace(LONG_EVALUATION, selection=True)
        )
        for lr in OWN_LRS[samples]
        for alpha in (1.0, 0.6)
    }


def own_lr_grid(name: str, samples: int, group: str) -> Grid:
    return Grid(
        name=name,
        title=f"CIFAR-100: each arm's own learning rate after {samples:,} samples",
        group=group,
        kind="own_lr",
        first_seed=FIRST_FRESH_SEED,
        metrics=OWN_LR_MEASURES,
        rows=[
            Row(f"Muon, alpha_min {alpha:g}, peak learning rate {lr:g}", lr_name("muon", alpha, samples, lr))
            for alpha in (1.0, 0.6)
            for lr in sorted(OWN_LRS[samples])
        ],
        baseline=lr_name("muon", 1.0, samples, 1e-3),
    )


LR = own_lr_grid("cifar-lr", LONG[1], "natural-lr")
SHORT_LR = own_lr_grid("cifar-short-lr", LONG[0], "natural-short-lr")

# The theory of docs/what-decay-is.md on trained features: the plain network with a learning rate per tensor must end
# where the decayed one ends. The measures are those of the search.
GROUPS_LR = 1e-3
DECAYED = lr_name("muon", 0.6, LONG[0], GROUPS_LR)
BY_GROUPS = f"{DECAYED}-groups"


def short_lr_variants() -> dict[str, Variant]:
    found = own_lr_variants(LONG[0])
    config = found[DECAYED].config
    by_groups = replace(config, shortcut=replace(config.shortcut, via="groups"))
    return {**found, BY_GROUPS: replace(found[DECAYED], config=by_groups)}


PARAM_GROUPS = replace(
    SHORT_LR,
    kind="table",
    metrics=LONG_PROBES,
    name="cifar-groups",
    title=f"CIFAR-100: decayed shortcuts and parameter groups beside each other after {LONG[0]:,} samples",
    rows=[
        Row("decayed shortcuts, alpha_min 0.6", DECAYED),
        Row("plain shortcuts, parameter groups of alpha_min 0.6", BY_GROUPS),
    ],
    baseline=DECAYED,
)

# ---- a folder of photographs, as `pretrain` trains it

FOLDER, FOLDER_SAMPLES = "imagenette/train", 16_640  # twenty epochs
FOLDER_LRS: dict[Algorithm, tuple[float, ...]] = {
    "adamw": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
    "muon": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
}


def folder_variants() -> dict[str, Variant]:
    """1,000 photographs by the rules of `pretrain`: 64 pixels in patches of 8, depth 8, batch 64, plain shortcuts."""
    found = {}
    for algorithm, lrs in FOLDER_LRS.items():
        for lr in lrs:
            config = pretrain_config(FOLDER, size=1000, side=160, gpus=0, algorithm=algorithm, lr=lr)
            config = replace(
                config,
                data=replace(config.data, holdout=128, workers=0),
                optim=replace(config.optim, epochs=None, samples=FOLDER_SAMPLES),
                threads=1,
                devices=1,
            )
            found[f"{algorithm}-lr{lr:g}"] = Variant(config, EvalPlan())
    return found


FOLDER_SEARCH = losses_grid(
    "folder-search",
    "A folder of 1,000 photographs: peak learning rates by held-out loss",
    "folder-rates",
    [
        Row(f"{WORDS[algorithm]}, {FOLDER_SAMPLES:,} samples, peak learning rate {lr:g}", f"{algorithm}-lr{lr:g}")
        for algorithm, lrs in FOLDER_LRS.items()
        for lr in lrs
    ],
    baseline="adamw-lr0.0005",
)

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {
    "natural": length_variants,
    "natural-probe": partial(pair_variants, LONG[0]),
    "natural-whitened": partial(pair_variants, LONG[1]),
    "natural-lr": partial(own_lr_variants, LONG[1]),
    "natural-short-lr": short_lr_variants,
    "natural-rates": lr_variants,
    "folder-rates": folder_variants,
}
GRIDS = {
    grid.name: grid
    for grid in (CIFAR, PROBE, WHITENED, LENGTH, LONGEST, LR, SHORT_LR, PARAM_GROUPS, SEARCH, FOLDER_SEARCH)
}
