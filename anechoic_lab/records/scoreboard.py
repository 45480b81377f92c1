"""The paper's claims, each with its number, what was measured here, and a verdict computed from the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from anechoic.pages.estimates import ENOUGH
from anechoic_lab.grids import Grid
from anechoic_lab.paper.muon_tables import GRIDS as MUON
from anechoic_lab.records.choices import add_choices
from anechoic_lab.records.markdown_tables import line, signed
from anechoic_lab.records.statistics import Estimate, Records
from anechoic_lab.studies.cifar_length import WHITENED
from anechoic_lab.studies.emoji_styles import LENGTH as EMOJI
from anechoic_lab.studies.emoji_styles import LONG, long_name


@dataclass(frozen=True)
class Claim:
    """A difference that the paper found: variant minus baseline, in the measures of a grid."""

    source: str
    text: str
    grid: Grid
    variant: str
    baseline: str
    measures: Mapping[str, str]
    sign: int = 1
    """of the paper's difference"""


BOTH = {"probe_mean": "probe", "knn_whitened_mean": "whitened k-NN"}
# Of the tables with Muon; "chosen": token, layer and scaling, on held-out training images.
TABLES = {"chosen.probe.test": "chosen probe", "chosen.knn.test": "chosen k-NN"} | BOTH
CIFAR = (WHITENED, "muon-2048k-alpha0.6", "muon-2048k-alpha1")
CLAIMS = (
    Claim(
        "Table 1",
        "decay and skips against the original MAE (probe 72.7 against 67.8 %, k-NN 63.9 against 27.4 %)",
        MUON["table1-muon"],
        "alpha0.6",
        "noskips-alpha1",
        TABLES,
    ),
    Claim(
        "Table 2",
        "alpha_min 0.6 against 1, both with skips (83.6 against 76.5 %)",
        MUON["cifar-fresh"],
        "alpha0.6",
        "alpha1",
        TABLES,
    ),
    Claim("Table 2", "the same after 2,048,000 samples, mean tokens", *CIFAR, BOTH),
    Claim("Table 2", "the same, class tokens", *CIFAR, {"probe_class": "probe", "knn_whitened_class": "whitened k-NN"}),
    Claim("Table 2", "the same, k-NN of raw features", *CIFAR, {"knn_mean": "mean token", "knn_class": "class token"}),
    *(
        Claim(
            "Table 2",
            f"alpha_min {alpha:g} against 1",
            MUON["table2-muon"],
            f"alpha{alpha:g}",
            "alpha1",
            TABLES,
        )
        for alpha in (0.9, 0.8, 0.7, 0.5, 0.4)
    ),
    Claim(
        "Table 3a",
        "decay without skips destroys the features (61.5 against 83.6 %)",
        MUON["table3a-muon"],
        "noskips-alpha0.6",
        "alpha0.6",
        TABLES,
        -1,
    ),
    *(
        Claim(
            "Table 3b", f"{words} against x + f ({number} against 76.5 %)", MUON["table3b-muon"], name, "alpha1", TABLES
        )
        for name, words, number in (
            ("branch", "x + sqrt(0.5) f", 76.9),
            ("both", "sqrt(0.5) (x + f)", 82.6),
            ("attention", "decay in attention only", 79.3),
            ("mlp", "decay in MLPs only", 80.6),
        )
    ),
    Claim(
        "Figure 5",
        "a lower effective rank with decay",
        *CIFAR,
        {"entropy": "entropy, last block"},
        -1,
    ),
    Claim(
        "Figure 3",
        "more abstract features: the same object in another style is found more often (our measure, on emoji)",
        EMOJI,
        "muon-alpha0.6",
        "muon-alpha1",
        {"retrieval_whitened_mean": "96,000 samples, whitened mean token"},
    ),
    *(
        Claim(
            "Figure 3",
            f"the same after {samples:,} samples",
            EMOJI,
            long_name(0.6, samples),
            long_name(1.0, samples),
            {"retrieval_whitened_mean": "whitened mean token"},
        )
        for samples in LONG
    ),
)
# Claims of which there are short runs with AdamW only: (source, text, page).
SHORT_ONLY = (
    ("Table 4", "U-ViT: probe 66.86 against 62.47 %, FID 8.99 against 14.34", "table4"),
    ("Figure 4", "patches of one object share a color; COCO segmentation 10.41 against 4.10", "fig4"),
    ("Figure 6", "reconstructions are not worse", "fig6"),
    ("Figure 7", "supervised ResNets hardly change (93.6 against 94.4 %)", "fig7"),
    ("Appendix", "below 0.7 norms explode unless branches start at zero", "stability"),
)


def scoreboard(results: Path) -> list[str]:
    """Return the table as lines of Markdown."""
    titles = ["paper", "claim", "measured here, percentage points", "pairs", "verdict", "CPU hours", "command"]
    lines = [line(titles), line(["---"] * len(titles))]
    for claim in CLAIMS:
        records = records_of(claim.grid, results)
        found = {words: records.difference(claim.variant, claim.baseline, key) for key, words in claim.measures.items()}
        pairs = max(estimate.n for estimate in found.values())
        hours = cpu_minutes(records, (claim.variant, claim.baseline)) / 60
        source = f"[{claim.source}]({claim.grid.name}.md)" if pairs else claim.source
        measured = "; ".join(f"{words} {signed(value)}" for words, value in found.items() if value.n)
        command = f"`anechoic reproduce {claim.grid.name}`"
        shown = [measured or "not run", str(pairs), verdict(found.values(), claim.sign), f"{hours:.1f}", command]
        lines.append(line([source, claim.text, *shown]))
    for source, text, page in SHORT_ONLY:
        link = f"[{source}]({page}.md)"
        lines.append(
            line([link, text, "short runs with AdamW only", "–", "not tested", "–", f"`anechoic reproduce {page}`"])
        )
    return [*lines, "", RULE]


RULE = (
    f"Verdicts follow from the records. Reproduced: with {ENOUGH} pairs or more, every measure of the row differs in "
    "the paper's direction by more than its 95 % interval. Partly: some do, none differs in the other direction. "
    "Opposite here: one differs in the other direction. Undecided: no interval excludes 0. All of it is far below the "
    "paper's scale."
)


def verdict(found: Iterable[Estimate], sign: int) -> str:
    """Compare the measures of a claim with the sign of the paper's difference."""
    estimates = [estimate for estimate in found if estimate.n]
    if not estimates:
        return "not run"
    if max(estimate.n for estimate in estimates) < ENOUGH:
        return "too few pairs"
    signs = {estimate.sign * sign for estimate in estimates}
    if -1 in signs:
        return "opposite here"
    return {frozenset({1}): "reproduced", frozenset({0}): "undecided"}.get(frozenset(signs), "partly")


def records_of(grid: Grid, results: Path) -> Records:
    return add_choices(Records(*(results / group for group in (grid.group, *grid.others))))


def cpu_minutes(records: Records, variants: Iterable[str]) -> float:
    """Return the CPU time of all records of these variants."""
    found = (record for name in variants for record in records.by_variant.get(name, {}).values())
    return sum(record["cpu_seconds"] for record in found) / 60
