"""One thing, five hands: autoencoders on emoji, where the echo of the pixels is the hand and the abstraction the thing.

The protocol: all 5,150 drawings at 48 pixels in patches of 8, without labels, crops from half the area, the rest as in
pocket.py. How often is the nearest of 1,030 drawings by another hand one of the same thing, on average over the 20
ordered pairs of hands? Each optimiser has its own best of the peak rates below, chosen for each arm by the loss on 256
held-out drawings, never by a label; the claim is made with seeds that no choice had seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anechoic.config import Config
from anechoic.paper.grids import Grid, Row, Variant
from anechoic.paper.pocket import mae
from anechoic.paper.trial import EvalPlan

SAMPLES = 96_000
SEARCH_SAMPLES = 32_000
# Of the search: (alpha_min, algorithm) -> peak rates.
RATES: dict[tuple[float, str], tuple[float, ...]] = {
    (1.0, "adamw"): (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    (1.0, "muon"): (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
    (0.6, "muon"): (2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
}
FIRST_FRESH_SEED = 10
EVALUATION = EvalPlan("emoji:train", "emoji:test", probe=False, retrieval="emoji")
WORDS = {"muon": "Muon", "adamw": "AdamW"}


def emoji(alpha_min: float, *, algorithm: str = "muon", lr: float = 1e-3, samples: int = SAMPLES) -> Config:
    """An autoencoder of drawings; no label is read."""
    config = mae(alpha_min, samples=samples, lr=lr, source="emoji", image_size=48)
    return replace(
        config,
        data=replace(config.data, scale=(0.5, 1.0)),
        optim=replace(config.optim, algorithm=algorithm),  # type: ignore[arg-type]
    )


# ---- the search for the rates

# Arms that were trained at full length too, around the best of the short search.
CONFIRMED = ((1.0, "muon", (2e-3, 4e-3, 8e-3)), (0.6, "muon", (8e-3, 16e-3)))


def rate_variants() -> dict[str, Variant]:
    """Every arm at every rate; nothing but the held-out loss is measured, so no label can have a say."""
    short = [(alpha, algorithm, lr, SEARCH_SAMPLES) for (alpha, algorithm), rates in RATES.items() for lr in rates]
    full = [(alpha, algorithm, lr, SAMPLES) for alpha, algorithm, rates in CONFIRMED for lr in rates]
    return {
        f"{algorithm}-alpha{alpha:g}-lr{lr:g}-{samples // 1000}k": Variant(
            emoji(alpha, algorithm=algorithm, lr=lr, samples=samples), EvalPlan()
        )
        for alpha, algorithm, lr, samples in [*short, *full]
    }


def rate_words(variant: str) -> str:
    algorithm, alpha, lr, samples = variant.replace("e-", "e~").split("-")
    rate = float(lr.removeprefix("lr").replace("e~", "e-"))
    return (
        f"{WORDS[algorithm]}, alpha_min {alpha.removeprefix('alpha')}, peak rate {rate:g}, {samples[:-1]},000 samples"
    )


RATES_GRID = Grid(
    name="hands-rates",
    title="One thing, five hands: learning rates by held-out loss",
    claim="",
    group="hands-rates",
    rows=[Row(rate_words(name), name) for name in rate_variants()],
    metrics={"training.-1.held_out_loss": "held-out loss"},
    baseline="muon-alpha1-lr0.008-32k",
    kind="losses",
)


# ---- the claim

BEST = {(1.0, "adamw"): 2e-3, (1.0, "muon"): 8e-3, (0.6, "muon"): 8e-3}
MEASURES = {
    "retrieval_mean": "retrieval, mean token",
    "retrieval_class": "retrieval, class token",
    "retrieval_standardised_mean": "standardised, mean token",
    "retrieval_standardised_class": "standardised, class token",
    "retrieval_whitened_mean": "whitened, mean token",
    "retrieval_whitened_class": "whitened, class token",
    "beside.flat tokens.retrieval_mean": "all tokens, flat",
    "group_vote_mean": "group, mean token",
    "group_vote_class": "group, class token",
    "training.-1.held_out_loss": "held-out loss",
}


def hands_variants() -> dict[str, Variant]:
    return {
        f"{algorithm}-alpha{alpha:g}": Variant(
            emoji(alpha, algorithm=algorithm, lr=lr), replace(EVALUATION, baselines=(alpha, algorithm) == (1.0, "muon"))
        )
        for (alpha, algorithm), lr in BEST.items()
    }


HANDS = Grid(
    name="hands",
    title="One thing, five hands: retrieval across drawing styles",
    claim="Fading shortcuts make the deep features of a generative learner more abstract.",
    group="hands",
    rows=[
        Row(f"{WORDS[algorithm]}, alpha_min {alpha:g}, peak rate {lr:g}", f"{algorithm}-alpha{alpha:g}")
        for (alpha, algorithm), lr in BEST.items()
    ],
    metrics=MEASURES,
    baseline="muon-alpha1",
    kind="early",
    first_seed=FIRST_FRESH_SEED,
    panels={
        "layers.mean.retrieval": "retrieval, mean token (%)",
        "layers.class.retrieval": "retrieval, class token (%)",
    },
)

GROUPS: dict[str, Callable[[], dict[str, Variant]]] = {"hands": hands_variants, "hands-rates": rate_variants}
GRIDS = {grid.name: grid for grid in (HANDS, RATES_GRID)}
