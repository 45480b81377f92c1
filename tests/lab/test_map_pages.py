"""Pages of the map from constructed records: pairs against their own baselines, and the sentence on the onset."""

import numpy as np
import pytest
from constructed_records import page, tables_of, with_probes, write_record

from anechoic.pages import figures
from anechoic_lab.records.map_pages import onset_words
from anechoic_lab.records.statistics import Records, estimate, paired_over_time
from anechoic_lab.studies import cifar_length, crossover


@pytest.mark.usefixtures("unrendered")
def test_axes_page_compares_with_its_own_baseline(tmp_path):
    grid = crossover.AXES_GRID
    base = {"base": 30.0, "depth12": 10.0}
    for name, value in base.items():
        with_probes(tmp_path, grid, {f"{name}-alpha1": [value, value + 1], f"{name}-alpha0.6": [value + 3, value + 4]})
    with_probes(tmp_path, grid, {"depth12-equal": [15.0, 16.0]})
    rows = {row[0]: row[1:] for row in tables_of(page(grid, tmp_path, tmp_path / "out"))[0]}
    assert rows["the pocket setting, alpha_min 0.6"][0] == "+3.00 ± 0.00, higher"
    assert rows["depth 12, alpha_min 0.6"][0] == "+3.00 ± 0.00, higher"
    assert rows["depth 12, alpha_min for the same effective decay as depth 6"][0] == "+5.00 ± 0.00, higher"
    assert rows["depth 3, alpha_min 0.6"][0] == "not run"


def test_lengths_page_compares_with_its_own_baseline_and_draws_over_samples(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "draw_estimates", lambda curves, path, **options: drawn.update(curves))
    leads = {"96k": (1.0, 30.0), "512k": (3.0, 50.0)}
    for length, (lead, value) in leads.items():
        pairs = {
            f"muon-{length}-alpha1": [value, value + 1],
            f"muon-{length}-alpha0.6": [value + lead, value + 1 + lead],
        }
        with_probes(tmp_path, cifar_length.LENGTH, pairs)
    differences, measured = tables_of(page(cifar_length.LENGTH, tmp_path, tmp_path / "out"))
    assert [row[:2] for row in measured[2:4]] == [
        ["Muon, alpha_min 0.6, 96,000 samples", "31.50 ± 6.35"],
        ["its residual baseline", "30.50 ± 6.35"],
    ]
    rows = {row[0]: row[1:] for row in differences}
    assert rows["Muon, alpha_min 0.6, 96,000 samples"][0] == "+1.00 ± 0.00, higher"
    assert rows["Muon, alpha_min 0.6, 512,000 samples"][0] == "+3.00 ± 0.00, higher"
    assert rows["Muon, alpha_min 0.6, 2,048,000 samples"][0] == "not run"
    line = drawn["linear probe, mean token: lead"]["Muon, alpha_min 0.6"]
    assert [(samples, lead) for samples, lead, _ in line] == [(96_000, 1.0), (512_000, 3.0)]


def test_lengths_page_pools_groups_and_shares_their_spread_with_single_seeds(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "draw_estimates", lambda curves, path, **options: drawn.update(curves))
    grid = cifar_length.LENGTH
    leads = {
        ("natural", "96k"): {10: 1.0, 11: 3.0},
        ("natural-probe", "96k"): {20: 5.0},
        ("natural", "512k"): {10: 2.0},
    }
    for (group, length), by_seed in leads.items():
        for seed, lead in by_seed.items():
            for alpha, value in (("1", 30.0), ("0.6", 30.0 + lead)):
                metrics = {"diverged": False, **dict.fromkeys(grid.metrics, value)}
                write_record(tmp_path / group, f"muon-{length}-alpha{alpha}", seed, metrics)
    text = page(grid, tmp_path, tmp_path / "out")
    rows = {row[0]: row[1:] for row in tables_of(text)[0]}
    assert rows["Muon, alpha_min 0.6, 96,000 samples"][0] == "+3.00 ± 4.97, undecided"
    assert rows["Muon, alpha_min 0.6, 96,000 samples"][-1] == "3"
    # The spread of the three others is 2, and t with 2 degrees of freedom is 4.303.
    assert rows["Muon, alpha_min 0.6, 512,000 samples"][0] == "+2.00 ± 8.61, undecided"
    assert drawn["linear probe, mean token: lead"]["Muon, alpha_min 0.6"][1] == (
        512_000,
        2.0,
        pytest.approx(8.605, abs=1e-3),
    )
    assert "spread of the differences at all lengths" in text
    assert "8 records in `results/evidence/natural`, `results/evidence/natural-probe`" in text


# ---- the onset in words


def words(differences, *, spread=0.0, lengths=(1000, 2000, 4000)):
    per_seed = [[d - spread for d in differences], [d + spread for d in differences]]
    found = [estimate(values) for values in zip(*per_seed, strict=True)]
    return onset_words(lengths, per_seed, found)


def test_onset_words_name_where_the_sign_changes():
    assert words([1.0, 2.0, 3.0]) == "decay is ahead at every length measured."
    assert words([-2.0, -1.0, 1.0]).startswith("the mean difference turns positive at about 2,828 samples")
    assert words([-3.0, -2.0, -1.0]).startswith(
        "still behind; +1.00 points per doubling of the length put the onset at"
    )
    assert "at about 8,000 samples" in words([-3.0, -2.0, -1.0])
    assert words([-1.0, -2.0, -3.0]).startswith("no onset: the difference changes by -1.00 points")


def test_onset_words_do_not_call_an_undecided_lead_behind():
    said = words([0.1, 0.2, 0.3], spread=5.0)
    assert "behind" not in said
    assert "ahead on average" in said


def test_paired_over_time_matches_seed_and_samples_seen(tmp_path):
    def over_time(offset, seen):
        return [{"seen": x, "knn_mean": offset + x / 1000} for x in seen]

    for seed, offset in ((0, 10.0), (1, 60.0)):
        write_record(tmp_path, "alpha1", seed, {"diverged": False, "over_time": over_time(offset, (1000, 2000, 3000))})
        write_record(tmp_path, "alpha0.6", seed, {"diverged": False, "over_time": over_time(offset + 2, (1000, 3000))})
    write_record(tmp_path, "alpha1", 2, {"diverged": False, "over_time": over_time(0, (1000, 3000))})
    seeds, per_seed, seen = paired_over_time(Records(tmp_path), "alpha0.6", "alpha1", "knn_mean")
    assert (seeds, seen) == ([0, 1], [1000, 3000])
    assert np.allclose(per_seed, 2.0)
