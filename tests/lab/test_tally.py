"""The tally of all pairs, from constructed records."""

from constructed_records import tables_of, write_record

from anechoic_lab.paper import pocket
from anechoic_lab.records.tally import write_tally


def pair_metrics(accuracy):
    keys = [f"{kind}_{token}" for kind in ("knn", "probe") for token in ("mean", "class")]
    return {"diverged": False, **dict.fromkeys(keys, accuracy), "layers": {"mean": {"knn": [1.0, 2.0, accuracy]}}}


def test_tally_lists_every_pair_once_and_only_significant_leads(tmp_path):
    for variant, start, seeds in (
        ("alpha1", 20.0, 3),
        ("alpha0.8", 22.0, 3),
        ("alpha0.7", 18.0, 3),
        ("alpha0.6", 90.0, 1),
    ):
        for seed in range(seeds):
            write_record(tmp_path / "results" / "mae", variant, seed, pair_metrics(start + seed + 0.1 * seed**2))
    for variant in ("branch", "both"):
        write_record(tmp_path / "results" / "mae", variant, 0, pair_metrics(99.0))
    text = write_tally(
        [pocket.TABLE2, pocket.TABLE3B, pocket.TABLE4], tmp_path / "results", tmp_path / "out"
    ).read_text()
    rows = [row for row in tables_of(text)[0] if row[0].startswith("alpha")]
    assert [row[:3] for row in rows] == [
        ["alpha_min 0.8", "[table2](table2.md)", "3"],
        ["alpha_min 0.7", "[table2](table2.md)", "3"],
        ["alpha_min 0.6", "[table2](table2.md)", "1"],
    ]
    assert rows[0][3] == "+2.00 ± 0.00"
    assert rows[0][-2:] == ["block 2 of 2: +2.00 ± 0.00", "6"]
    leads = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(leads) == 4
    assert all("alpha_min 0.8" in lead for lead in leads)
    assert "of 10 comparisons" in text
    assert "10 networks" in text


def test_tally_without_records_is_empty(tmp_path):
    text = write_tally([pocket.TABLE2], tmp_path / "results", tmp_path / "out").read_text()
    assert "- none" in text
    assert "0 networks" in text
