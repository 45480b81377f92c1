"""The page of the lead against CPU minutes, from constructed records."""

from constructed_records import write_record

from anechoic_lab.records.cost import DRAWINGS, PHOTOGRAPHS, costs, write_costs


def fill_pairs(results, leads, *, measure="retrieval_whitened_mean", samples=""):
    for seed, lead in enumerate(leads):
        for alpha, value in ((1, 20.0), (0.6, 20.0 + lead)):
            write_record(
                results / DRAWINGS.group, f"muon-{samples}alpha{alpha}", seed, {measure: value, "diverged": False}
            )


def test_cheapest_lead_is_that_beyond_its_interval(tmp_path):
    fill_pairs(tmp_path, [-1.0, 1.0, 0.5])
    fill_pairs(tmp_path, [2.0, 2.5, 3.0], samples="384k-")
    text = write_costs(tmp_path, tmp_path).read_text()
    assert "the cheapest lead beyond its interval" in text
    assert "(384,000 samples, +2.50 ± 1.24 points, 3 pairs). The goal of 10 minutes is met." in text
    assert text.count(f"[{DRAWINGS.name}]") == 2
    assert PHOTOGRAPHS.name not in text
    assert (tmp_path / "cost.png").exists()


def test_no_lead_and_no_records_are_said(tmp_path):
    assert costs(tmp_path) == []
    fill_pairs(tmp_path, [-1.0, 1.0, 0.5])
    assert "no setting leads by more than its interval" in write_costs(tmp_path, tmp_path).read_text()
