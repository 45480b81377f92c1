"""The paper's tables and figures at the paper's scale: the recipes of anechoic.recipes under every setting they had.

Meant for GPUs; nothing here was trained by us. Data is expected as imagenet/train, imagenet/val,
imagenet100/train, imagenet100/val, cifar100/train.parquet, cifar100/test.parquet, in100-latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anechoic.config import Config
from anechoic.recipes import recipe
from anechoic.sweeps.trial import EvalPlan
from anechoic_lab.grids import Grid, Row, Variant
from anechoic_lab.paper import pocket
from anechoic_lab.paper.pocket import (
    ALPHAS,
    FIG5,
    FIG7,
    RESNET_BLOCKS,
    TABLE1,
    TABLE2,
    TABLE3A,
    TABLE3B,
    TABLE4,
    UVIT_ALPHAS,
    probe,
)

IN100_SIZE, IN1K_SIZE = 126_689, 1_281_167
IN1K = EvalPlan("imagenet/train", "imagenet/val", max_train=IN1K_SIZE, max_test=50_000, protocol="mae")
IN100 = EvalPlan("imagenet100/train", "imagenet100/val", max_train=IN100_SIZE, max_test=5000, protocol="in100")


def of(name: str, source: str, *, size: int = 0, alpha_min: float | None = None, **changes: Any) -> Config:
    """A recipe on its data, its budget in samples, with other shortcuts or options of the model."""
    config = recipe(name)
    form, model = changes.pop("form", "identity"), changes.pop("model", config.model.name)
    optim = config.optim
    if optim.samples is None:
        assert optim.epochs is not None
        optim = replace(optim, epochs=None, samples=round(optim.epochs * size))
    shortcut = config.shortcut if alpha_min is None else replace(config.shortcut, alpha_min=alpha_min, form=form)
    return replace(
        config,
        recipe="",
        data=replace(config.data, source=source),
        model=replace(config.model, name=model, options={**config.model.options, **changes}),
        shortcut=shortcut,
        optim=optim,
    )


def in100(alpha_min: float, **changes: Any) -> Variant:
    config = of("mae_in100", "imagenet100/train", size=IN100_SIZE, alpha_min=alpha_min, **changes)
    kept = replace(config.save, keep_every=(config.optim.samples or 0) // 16)
    return Variant(replace(config, save=kept), replace(IN100, checkpoints=True))


def mae_variants() -> dict[str, Variant]:
    return {
        **{f"alpha{alpha:g}": in100(alpha) for alpha in ALPHAS},
        **{f"small-alpha{alpha:g}": in100(alpha, model="mae_small_patch16") for alpha in ALPHAS},
        "noskips-alpha0.6": in100(0.6, skips=False),
        "noskips-alpha1": in100(1.0, skips=False),
        "branch": in100(1.0, form="branch"),
        "both": in100(1.0, form="both"),
        "attention": in100(0.6, form="attention"),
        "mlp": in100(0.6, form="mlp"),
    }


def in1k_variants() -> dict[str, Variant]:
    source: dict[str, Any] = {"source": "imagenet/train", "size": IN1K_SIZE}
    return {
        "noskips-alpha1": Variant(of("mae_in1k_plain", **source), IN1K),
        "alpha1": Variant(of("mae_in1k_residual", **source), IN1K),
        "alpha0.6": Variant(of("mae_in1k", **source), IN1K),
    }


def uvit_variants() -> dict[str, Variant]:
    cifar = EvalPlan(
        "cifar100/train.parquet",
        "cifar100/test.parquet",
        max_train=50_000,
        samples=50_000,
        extractor="inception",
        noise=(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3),
        protocol="in100",
    )
    latent = replace(
        cifar, train="imagenet100/train", test="imagenet100/val", real="imagenet100/train", max_train=IN100_SIZE
    )
    found = {}
    for alpha in UVIT_ALPHAS:
        found[f"cifar100-alpha{alpha:g}"] = Variant(
            of("uvit_cifar100", "cifar100/train.parquet", alpha_min=alpha), cifar
        )
        found[f"latent-alpha{alpha:g}"] = Variant(of("uvit_in100_latent", "in100-latents", alpha_min=alpha), latent)
        found[f"conditional-alpha{alpha:g}"] = Variant(
            of("uvit_in100_latent_cond", "in100-latents", alpha_min=alpha), replace(latent, train="", test="")
        )
    return found


def resnet_variants() -> dict[str, Variant]:
    evaluation = EvalPlan("cifar10/train", "cifar10/test", max_train=50_000)
    return {
        f"blocks{blocks}-alpha{alpha:g}": Variant(
            of("resnet18_cifar", "cifar10/train", size=50_000, alpha_min=alpha, num_blocks=blocks), evaluation
        )
        for blocks in RESNET_BLOCKS
        for alpha in (1.0, 0.6)
    }


def picture_variants() -> dict[str, Variant]:
    """Figure 6 was trained on plain pixels, Figures 3 and 4 on normalized ones."""
    shown = replace(IN100, pictures=True)
    return {
        "normalized-alpha1": Variant(in100(1.0).config, shown),
        "normalized-alpha0.6": Variant(in100(0.6).config, shown),
        "normalized-alpha0.7": Variant(in100(0.7).config, shown),
        "pixels-alpha1": Variant(in100(1.0, norm_pix=False).config, shown),
        "pixels-alpha0.6": Variant(in100(0.6, norm_pix=False).config, shown),
    }


def uvit_rows() -> list[Row]:
    paper = {
        "cifar100": ("CIFAR-100", (62.47, 63.58, 66.86, 64.63), (14.34, 11.65, 8.99, 11.71)),
        "latent": ("ImageNet-100", (72.8, 74.5, 76.1, 75.8), (44.40, 40.96, 41.17, 43.51)),
        "conditional": ("ImageNet-100 with classes", None, (6.93, 5.75, 5.11, 4.98)),
    }
    rows = []
    for name, (words, probes, distances) in paper.items():
        for i, alpha in enumerate(UVIT_ALPHAS):
            numbers = {"frechet": distances[i], **({"probe": probes[i]} if probes else {})}
            rows.append(Row(f"{words}, alpha_min {alpha:g}", f"{name}-alpha{alpha:g}", numbers))
    return rows


SMALL = (69.2, 73.5, 75.2, 78.1, 78.5, 78.6)
TABLE2_ROWS = [
    *(replace(row, label=f"ViT-B/16, {row.label}") for row in TABLE2.rows),
    *(
        Row(f"ViT-S/16, alpha_min {alpha:g}", f"small-alpha{alpha:g}", probe(value))
        for alpha, value in zip(ALPHAS, SMALL, strict=True)
    ),
]


def pictured(name: str, variants: tuple[str, str]) -> Grid:
    return replace(
        pocket.GRIDS[name],
        rows=[Row(f"alpha_min {variant.rpartition('alpha')[2]}", variant) for variant in variants],
        baseline=variants[0],
    )


GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {
    "mae": mae_variants,
    "in1k": in1k_variants,
    "uvit": uvit_variants,
    "resnet": resnet_variants,
    "pictures": picture_variants,
}
GRIDS = {
    grid.name: grid
    for grid in (
        replace(TABLE1, group="in1k"),
        replace(TABLE2, rows=TABLE2_ROWS),
        TABLE3A,
        TABLE3B,
        replace(
            TABLE4, title="Table 4: U-ViT, probe and Frechet distance", rows=uvit_rows(), baseline="cifar100-alpha1"
        ),
        pictured("fig3", ("normalized-alpha1", "normalized-alpha0.6")),
        pictured("fig4", ("normalized-alpha1", "normalized-alpha0.7")),
        FIG5,
        pictured("fig6", ("pixels-alpha1", "pixels-alpha0.6")),
        FIG7,
    )
}
