"""The scoreboard: a row for every claim, and verdicts that follow from the records."""

import pytest
from constructed_records import fill

from anechoic_lab import catalog
from anechoic_lab.paper import muon_tables
from anechoic_lab.records.scoreboard import CLAIMS, SHORT_ONLY, scoreboard, verdict
from anechoic_lab.records.statistics import Estimate

AHEAD, BEHIND, EVEN = Estimate(2.0, 1.0, 5), Estimate(-2.0, 1.0, 5), Estimate(0.5, 1.0, 5)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ([], "not run"),
        ([Estimate(9.0, None, 1)], "too few pairs"),
        ([AHEAD, AHEAD], "reproduced"),
        ([AHEAD, EVEN], "partly"),
        ([EVEN], "undecided"),
        ([AHEAD, BEHIND], "opposite here"),
    ],
)
def test_verdict_follows_the_signs_of_all_measures(found, word):
    assert verdict(found, 1) == word


def test_verdict_of_a_claim_that_something_is_lower():
    assert verdict([BEHIND], -1) == "reproduced"
    assert verdict([AHEAD], -1) == "opposite here"


def test_claims_name_variants_and_measures_that_exist():
    for claim in CLAIMS:
        variants = catalog.variants(claim.grid, "pocket")
        assert {claim.variant, claim.baseline} <= set(variants)
        assert claim.grid.name in {grid.name for grid in catalog.choose("all", "pocket")}
    for _, _, page in SHORT_ONLY:
        catalog.choose(page, "pocket")


def test_scoreboard_has_not_run_until_there_are_records(tmp_path):
    rows = scoreboard(tmp_path)[2:-2]
    assert len(rows) == len(CLAIMS) + len(SHORT_ONLY)
    assert all("| not run |" in row or "| not tested |" in row for row in rows)
    fill(tmp_path, muon_tables.GRIDS["table3a-muon"])
    (row,) = (row for row in scoreboard(tmp_path) if "destroys the features" in row)
    assert "not run" not in row
    assert "[Table 3a](table3a-muon.md)" in row
