"""Inside the branches: what AdamW and Muon make of matrices that start at zero, with and without an echo of the input.

The CIFAR-100 runs of cifar_length.py with sixteen checkpoints. By the fold a decayed network is a residual one whose
branches have higher learning rates: if the first updates have few directions, so do its features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anechoic_lab.grids import Grid, Row, Variant
from anechoic_lab.paper.pocket import LONG_EVALUATION
from anechoic_lab.studies.cifar_length import BEST, SAMPLES, photographs
from anechoic_lab.studies.lr_search import WORDS

ARMS = {f"{algorithm}-alpha{alpha:g}": (algorithm, alpha) for algorithm in WORDS for alpha in (1.0, 0.6)}


def anatomy_variants() -> dict[str, Variant]:
    evaluation = replace(LONG_EVALUATION, max_train=5000, max_test=2000, checkpoints=True, anatomy=True)
    return {
        name: Variant(photographs(alpha, algorithm=algorithm, lr=BEST[algorithm, SAMPLES], checkpoints=16), evaluation)
        for name, (algorithm, alpha) in ARMS.items()
    }


ANATOMY = Grid(
    name="anatomy",
    title="Inside the branches: ranks and components, AdamW and Muon",
    group="anatomy",
    rows=[Row(f"{WORDS[algorithm]}, alpha_min {alpha:g}", name) for name, (algorithm, alpha) in ARMS.items()],
    metrics={
        "probe_mean": "linear probe, %",
        "knn_mean": "k-NN, %",
        "knn_whitened_mean": "k-NN whitened, %",
        "layers.mean.entropy_centered.-1": "rank of the features (entropy)",
        "layers.mean.common_share.-1": "share of the common part",
        "layers.mean.first_share.-1": "share of the first component",
        "layers.mean.three_share.-1": "share of the first three",
        "layers.mean.look_share.-1": "of those, color and contrast",
    },
    baseline="muon-alpha1",
    kind="anatomy",
)

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {"anatomy": anatomy_variants}
GRIDS = {ANATOMY.name: ANATOMY}
