"""The paper's tables and figures at pocket scale: variants that train on two CPU cores.

The protocol, fixed before the grid was run: CIFAR-100 at 32 pixels in patches of 8, the paper's random resized crops
and flips, mask ratio 0.75, normalized pixels, AdamW with the paper's betas and weight decay, 5 % warm-up and a cosine,
batch 128. Evaluated on frozen features: a weighted 20-NN vote (on the features as they are, and standardized) and a
converged logistic regression, fitted to 5,000 training images and tested on 3,000 test images. Three seeds. Nothing is
chosen on test labels: settings come from the paper and from the time available.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anechoic.choices import Algorithm, AlphaMin, ShortcutForm
from anechoic.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    SaveConfig,
    ShortcutConfig,
    ValidationConfig,
)
from anechoic.recipes import recipe
from anechoic.recipes.pocket import MODEL
from anechoic.sweeps.trial import EvalPlan
from anechoic_lab.grids import HELD_OUT_LOSS, Grid, Row, Variant

SEEDS = (0, 1, 2)
ALPHAS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
TRAIN, TEST = "cifar100/train.parquet", "cifar100/test.parquet"
EVALUATION = EvalPlan(TRAIN, TEST, max_train=5000, max_test=3000)
# Samples of a table's trial, and of the trials of the map.
SAMPLES = 64_000
MAP_SAMPLES = 38_400
# A residual arm and a decayed one.
PAIR = (1.0, 0.6)


def mae(
    alpha_min: AlphaMin = 1.0,
    *,
    algorithm: Algorithm = "adamw",
    samples: int = SAMPLES,
    batch: int = 128,
    lr: float = 1e-3,
    source: str = TRAIN,
    form: ShortcutForm = "identity",
    schedule: str = "linear",
    anneal: float = 0.0,
    constant_lr: bool = False,
    checkpoints: int = 0,
    image_size: int = 32,
    channels: int = 3,
    flip: bool | None = None,
    **options: Any,
) -> Config:
    """Return a pocket autoencoder; checkpoints: the number kept during training."""
    samples = samples // batch * batch
    return Config(
        data=DataConfig(
            source,
            image_size=image_size,
            channels=channels,
            flip=channels == 3 if flip is None else flip,
            holdout=256,
            workers=0,
        ),
        model=ModelConfig("mae_tiny_patch4", {**MODEL, **options}),
        shortcut=ShortcutConfig(alpha_min=alpha_min, form=form, schedule=schedule, anneal=anneal),
        optim=OptimConfig(
            algorithm=algorithm,
            batch_size=batch,
            samples=samples,
            lr=lr,
            schedule="constant" if constant_lr else "cosine",
        ),
        validation=ValidationConfig(every=max(samples // 5, batch), report=max(samples // 40, batch)),
        save=SaveConfig(
            every=max(samples // max(4, checkpoints), batch), keep_every=samples // checkpoints if checkpoints else 0
        ),
        threads=1,
        devices=1,
    )


# ---- masked autoencoders: Tables 1, 2, 3a, 3b and Figure 5 share their trials


def mae_variants(
    make: Callable[..., Config] = mae, evaluation: EvalPlan = EVALUATION, alphas: Sequence[float] = ALPHAS
) -> dict[str, Variant]:
    """make: an autoencoder of a given alpha_min and other options of `mae`."""
    found = {
        f"alpha{alpha:g}": Variant(make(alpha, checkpoints=4), replace(evaluation, checkpoints=True))
        for alpha in alphas
    }
    return found | {
        "noskips-alpha1": Variant(make(1.0, skips=False, zero_init=True), evaluation),
        "noskips-alpha0.6": Variant(make(0.6, skips=False), evaluation),
        "branch": Variant(make(1.0, form="branch"), evaluation),
        "both": Variant(make(1.0, form="both"), evaluation),
        "attention": Variant(make(0.6, form="attention"), evaluation),
        "mlp": Variant(make(0.6, form="mlp"), evaluation),
    }


PROBES = {
    "probe_mean": "linear probe, mean token",
    "probe_class": "linear probe, class token",
    "knn_mean": "k-NN, mean token",
    "knn_class": "k-NN, class token",
    "knn_standardized_mean": "k-NN, mean token standardized",
    "knn_standardized_class": "k-NN, class token standardized",
    "entropy": "rank (entropy)",
}
# For runs in which decay leads: more images, and whitened features too.
LONG_EVALUATION = replace(EVALUATION, max_train=10_000, max_test=5000, whitened=True)
LONG_PROBES = PROBES | {
    "knn_whitened_mean": "k-NN, mean token whitened",
    "knn_whitened_class": "k-NN, class token whitened",
}


def probe(value: float) -> dict[str, float]:
    """Return the paper's linear probe as the reference of both tokens."""
    return {"probe_mean": value, "probe_class": value}


TABLE1 = Grid(
    name="table1",
    title="Table 1: masked autoencoders with and without the method",
    claim="With decay and skips the frozen features of a masked autoencoder are far better than without "
    "(ImageNet-1K: linear probe 72.7 against 67.8 %, k-NN 63.9 against 27.4 %).",
    group="mae",
    rows=[
        Row("the original MAE: no skips, residual", "noskips-alpha1", {**probe(67.8), "knn_class": 27.4}),
        Row("skips, residual", "alpha1"),
        Row("skips, alpha_min 0.6", "alpha0.6", {**probe(72.7), "knn_class": 63.9}),
    ],
    metrics=PROBES,
    baseline="noskips-alpha1",
)
TABLE2 = Grid(
    name="table2",
    title="Table 2: linear probe against alpha_min",
    claim="Accuracy rises as alpha_min falls from 1 to about 0.6 (ImageNet-100, ViT-B/16).",
    group="mae",
    rows=[
        Row(f"alpha_min {alpha:g}", f"alpha{alpha:g}", probe(value))
        for alpha, value in zip(ALPHAS, (76.5, 79.2, 79.8, 81.8, 83.6, 82.3), strict=True)
    ],
    metrics=PROBES,
    baseline="alpha1",
)
TABLE3A = Grid(
    name="table3a",
    title="Table 3a: decay without skips",
    claim="Without skips to the decoder, decay destroys the features (61.5 against 83.6 %).",
    group="mae",
    rows=[
        Row("alpha_min 0.6, no skips", "noskips-alpha0.6", probe(61.5)),
        Row("alpha_min 0.6, skips", "alpha0.6", probe(83.6)),
        Row("residual, no skips", "noskips-alpha1"),
        Row("residual, skips", "alpha1", probe(76.5)),
    ],
    metrics=PROBES,
    baseline="alpha0.6",
)
TABLE3B = Grid(
    name="table3b",
    title="Table 3b: what is scaled",
    claim="Scaling the branch changes little, scaling both helps some, decaying attention or MLP alone less than both.",
    group="mae",
    rows=[
        Row("x + f", "alpha1", probe(76.5)),
        Row("x + sqrt(0.5) f", "branch", probe(76.9)),
        Row("sqrt(0.5) (x + f)", "both", probe(82.6)),
        Row("alpha x + f, attention only", "attention", probe(79.3)),
        Row("alpha x + f, MLP only", "mlp", probe(80.6)),
        Row("alpha x + f", "alpha0.6", probe(83.6)),
    ],
    metrics=PROBES,
    baseline="alpha1",
)
FIG5 = Grid(
    name="fig5",
    title="Figure 5: effective rank and accuracy over training",
    claim="At any time of training a smaller alpha_min has a lower effective rank and, at the paper's scale, a higher "
    "accuracy, so that the two are negatively correlated.",
    group="mae",
    rows=TABLE2.rows,
    metrics={"entropy": "rank (entropy)", "knn_mean": "k-NN, mean token"},
    baseline="alpha1",
    kind="dynamics",
)


BLOCKS = Grid(
    name="blocks",
    title="The map: accuracy after every block",
    claim="Decayed shortcuts let features become abstract with depth.",
    group="mae",
    rows=[row for row in TABLE2.rows if row.variant in ("alpha1", "alpha0.8", "alpha0.6")],
    metrics=PROBES,
    baseline="alpha1",
    kind="blocks",
)

# ---- diffusion: Table 4

UVIT_ALPHAS = (1.0, 0.8, 0.7, 0.6)


def uvit_digits(alpha_min: float) -> Config:
    base = recipe("pocket_uvit_digits")
    return replace(
        base,
        recipe="",
        shortcut=ShortcutConfig(alpha_min=alpha_min),
        optim=replace(base.optim, samples=1200 * 128, warmup=0.05),
        validation=ValidationConfig(every=76_800),
        save=SaveConfig(every=76_800),
        threads=1,
        devices=1,
    )


def uvit_cifar(alpha_min: float) -> Config:
    base = recipe("pocket_uvit_cifar100")
    options = {"patch_size": 4, "dim": 64, "depth": 4, "num_heads": 2}
    return replace(
        base,
        recipe="",
        data=replace(base.data, source=TRAIN, workers=0),
        model=ModelConfig("uvit_small", options),
        shortcut=ShortcutConfig(alpha_min=alpha_min),
        optim=replace(base.optim, batch_size=64, samples=1200 * 64, warmup=0.05, ema=0.99),
        validation=ValidationConfig(every=38_400),
        save=SaveConfig(every=38_400),
        threads=1,
        devices=1,
    )


def uvit_variants() -> dict[str, Variant]:
    digits = EvalPlan("digits:train", "digits:test", samples=500, extractor="digits", noise=(0.05, 0.2))
    cifar = EvalPlan(TRAIN, TEST, samples=250, noise=(0.05, 0.2))
    return {
        **{f"digits-alpha{alpha:g}": Variant(uvit_digits(alpha), digits) for alpha in UVIT_ALPHAS},
        **{f"cifar100-alpha{alpha:g}": Variant(uvit_cifar(alpha), cifar) for alpha in UVIT_ALPHAS},
    }


def table4(data: str, title: str) -> Grid:
    paper = {
        1.0: {"probe": 62.47, "frechet": 14.34},
        0.8: {"probe": 63.58, "frechet": 11.65},
        0.7: {"probe": 66.86, "frechet": 8.99},
        0.6: {"probe": 64.63, "frechet": 11.71},
    }
    return Grid(
        name="table4" if data == "digits" else "table4-cifar100",
        title=title,
        claim="Diffusion models with decayed shortcuts have better features and better samples (CIFAR-100, U-ViT-S/2: "
        "probe 66.86 against 62.47 %, FID 8.99 against 14.34 at alpha_min 0.7).",
        group="uvit",
        rows=[Row(f"alpha_min {alpha:g}", f"{data}-alpha{alpha:g}", paper[alpha]) for alpha in UVIT_ALPHAS],
        metrics={"probe": "linear probe", "frechet": "Frechet distance", "precision": "precision", "recall": "recall"},
        baseline=f"{data}-alpha1",
    )


TABLE4 = table4("digits", "Table 4: U-ViT on digits, probe and Frechet distance")
TABLE4_CIFAR = table4("cifar100", "Table 4: U-ViT on CIFAR-100, probe and Frechet distance")


# ---- the supervised control: Figure 7

RESNET_ALPHAS, RESNET_BLOCKS = (1.0, 0.6), (8, 12, 16)


def resnet_variants() -> dict[str, Variant]:
    def config(alpha_min: float, blocks: int) -> Config:
        return Config(
            data=DataConfig(TRAIN, image_size=32, scale=(0.4, 1.0), labels=True, holdout=256, workers=0),
            model=ModelConfig("resnet18", {"num_blocks": blocks, "num_classes": 100, "width": 8}),
            shortcut=ShortcutConfig(alpha_min=alpha_min),
            objective=ObjectiveConfig("supervised", {"label_smoothing": 0.1}),
            optim=OptimConfig(batch_size=128, samples=12_800, lr=3e-3, betas=(0.9, 0.999), weight_decay=0.05),
            validation=ValidationConfig(every=2560, report=2560),
            save=SaveConfig(every=6400),
            threads=1,
            devices=1,
        )

    evaluation = EvalPlan(TRAIN, TEST, max_train=2, max_test=2000)
    return {
        f"blocks{blocks}-alpha{alpha:g}": Variant(config(alpha, blocks), evaluation)
        for blocks in RESNET_BLOCKS
        for alpha in RESNET_ALPHAS
    }


FIG7 = Grid(
    name="fig7",
    title="Figure 7: the supervised control, ResNets with labels",
    claim="Effective rank falls over depth and with alpha_min; accuracy hardly changes (94.4 against 93.6 %).",
    group="resnet",
    rows=[
        Row(f"{blocks} blocks, alpha_min {alpha:g}", f"blocks{blocks}-alpha{alpha:g}")
        for blocks in RESNET_BLOCKS
        for alpha in RESNET_ALPHAS
    ],
    metrics={"accuracy": "test accuracy", "layers.mean.entropy.-1": "rank of the last block (entropy)"},
    baseline="blocks8-alpha1",
    kind="layers",
)


# ---- stability: norms with and without zero-initialized branches

STABLE_ALPHAS = (1.0, 0.7, 0.4, 0.3)


def stability_variants() -> dict[str, Variant]:
    def config(alpha_min: float, zero_init: bool) -> Config:
        base = mae(alpha_min, samples=12_800, depth=12, zero_init=zero_init, decoder_depth=2)
        return replace(base, validation=ValidationConfig(every=1280, report=1280))

    return {
        f"{'zero' if zero else 'xavier'}-alpha{alpha:g}": Variant(config(alpha, zero), EvalPlan())
        for zero in (True, False)
        for alpha in STABLE_ALPHAS
    }


STABILITY = Grid(
    name="stability",
    title="Stability: norms with and without zero-initialized branches",
    claim="Below about 0.7 the norm of the features explodes unless every branch starts at zero.",
    group="stability",
    rows=[
        Row(f"{words}, alpha_min {alpha:g}", f"{kind}-alpha{alpha:g}")
        for kind, words in (("zero", "zero-initialized"), ("xavier", "Xavier"))
        for alpha in STABLE_ALPHAS
    ],
    metrics={
        "training.-1.token_norm.-1": "norm after 100 updates",
        "training.0.token_norm.-1": "norm at the start",
        HELD_OUT_LOSS: "held-out loss",
    },
    baseline="zero-alpha1",
    kind="norms",
)


# ---- pictures: Figures 3, 4 and 6, on data that is embedded and may therefore be kept in a record


def picture_variants() -> dict[str, Variant]:
    shown = EvalPlan(pictures=True, probe=False, max_train=1000, max_test=600)
    digits = replace(shown, train="digits:train", test="digits:test")
    scenes = replace(shown, train="scenes:train:1000", test="scenes:test:600", same_shape=600)
    found = {}
    for alpha in PAIR:
        small: dict[str, Any] = {"source": "digits:train", "image_size": 8, "patch_size": 2, "channels": 1}
        found[f"digits-alpha{alpha:g}"] = Variant(mae(alpha, **small), digits)
        pixels: dict[str, Any] = {"source": "scenes:train", "patch_size": 4, "norm_pix": False, "samples": MAP_SAMPLES}
        found[f"scenes-alpha{alpha:g}"] = Variant(mae(alpha, **pixels), scenes)
    return found


def pictured(name: str, title: str, claim: str, data: str, score: Mapping[str, str] | None = None) -> Grid:
    return Grid(
        name=name,
        title=title,
        claim=claim,
        group="pictures",
        rows=[Row(f"alpha_min {alpha:g}", f"{data}-alpha{alpha:g}") for alpha in PAIR],
        metrics={**(score or {}), "knn_mean": "k-NN, mean token", "entropy": "rank (entropy)"},
        baseline=f"{data}-alpha1",
        kind="pictures",
    )


FIG3 = pictured(
    "fig3", "Figure 3: t-SNE of the last layer", "With decay the classes lie apart on a map of the features.", "digits"
)
FIG4 = pictured(
    "fig4",
    "Figure 4: patches colored by their features",
    "With decay patches of one object share a color; unsupervised segmentation of COCO improves from 4.10 to 10.41.",
    "scenes",
    {"same_shape": "two patches of a shape are more alike than one and the ground (%)"},
)
FIG6 = pictured(
    "fig6",
    "Figure 6: reconstructions",
    "Decay does not harm the reconstruction of hidden patches.",
    "scenes",
    {HELD_OUT_LOSS: "held-out loss of hidden patches"},
)
SHOWN = {"fig3": "map", "fig4": "colors", "fig6": "reconstructions"}


# ---- everything by name

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {
    "mae": mae_variants,
    "uvit": uvit_variants,
    "resnet": resnet_variants,
    "stability": stability_variants,
    "pictures": picture_variants,
}
GRIDS = {
    grid.name: grid
    for grid in (
        TABLE1,
        TABLE2,
        TABLE3A,
        TABLE3B,
        TABLE4,
        TABLE4_CIFAR,
        FIG3,
        FIG4,
        FIG5,
        FIG6,
        FIG7,
        STABILITY,
        BLOCKS,
    )
}
