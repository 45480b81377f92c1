"""From records to statements: intervals, paired differences, agreement with the paper, and where a sign changes."""

import math
import random

import numpy as np
import pytest
from constructed_records import write_record
from scipy import stats

from anechoic.pages.estimates import estimates_with_shared_spread
from anechoic_lab.records.statistics import (
    Estimate,
    Records,
    crossover,
    dig,
    estimate,
    extrapolate,
    order_agreement,
    verdict,
)


def records_of(folder, table):
    """table: variant -> seed -> k-NN accuracy"""
    for variant, values in table.items():
        for seed, value in values.items():
            write_record(folder, variant, seed, {"diverged": False, "knn": value})
    return Records(folder)


# ---- intervals


@pytest.mark.parametrize("n", [2, 3, 7])
def test_estimate_interval_is_students_t(n):
    values = np.random.default_rng(n).normal(50, 3, n)
    found = estimate(values)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert found.n == n
    assert found.mean == pytest.approx(values.mean())
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


def test_shared_spread_is_that_of_a_fit_of_group_means():
    """The interval of a mean in ordinary least squares with one mean for each group, which scipy does not have."""
    groups = [[1.0, 2.0, 4.0, 4.5], [7.0, 9.0], [20.0]]
    own, *lent = estimates_with_shared_spread(groups)
    assert own == estimate(groups[0])
    design = np.zeros((7, 3))
    for i, group in enumerate((0, 0, 0, 0, 1, 1, 2)):
        design[i, group] = 1
    values = np.concatenate(groups)
    means, (residual,), *_ = np.linalg.lstsq(design, values, rcond=None)
    errors = np.sqrt(residual / 4 * np.linalg.inv(design.T @ design).diagonal())
    for found, mean, error in zip(lent, means[1:], errors[1:], strict=True):
        assert found.mean == pytest.approx(mean)
        assert found.half == pytest.approx(stats.t.ppf(0.975, 4) * error)


def test_shared_spread_needs_a_group_with_two_values():
    assert estimates_with_shared_spread([[1.0], [2.0]]) == [Estimate(1.0, None, 1), Estimate(2.0, None, 1)]
    nothing, one = estimates_with_shared_spread([[], [2.0]])
    assert (nothing.n, one.half) == (0, None)


def test_records_count_a_trial_in_two_groups_once(tmp_path):
    records_of(tmp_path / "a", {"alpha1": {0: 10.0, 1: 11.0}})
    records_of(tmp_path / "b", {"alpha1": {1: 99.0, 2: 12.0}})
    assert Records(tmp_path / "a", tmp_path / "b").values("alpha1", "knn") == {0: 10.0, 1: 11.0, 2: 12.0}


def test_estimate_interval_of_two_has_a_closed_form():
    # one degree of freedom is Cauchy's distribution: its 97.5 % quantile is tan(0.475 pi), and sd/sqrt(2) is 1 here
    assert estimate([10.0, 12.0]).half == pytest.approx(math.tan(0.475 * math.pi))


def test_estimate_of_one_seed_has_no_interval_and_of_none_no_mean():
    assert estimate([3.0]) == Estimate(3.0, None, 1)
    assert str(estimate([3.0])) == "3.00"
    assert math.isnan(estimate([]).mean)
    assert estimate([]).n == 0


@pytest.mark.parametrize(
    ("values", "sign"), [([1, 1.1, 0.9], 1), ([-1, -1.1, -0.9], -1), ([1, -1, 0.5], 0), ([5.0], 0)]
)
def test_estimate_has_a_sign_only_if_the_interval_excludes_zero(values, sign):
    assert estimate(values).sign == sign


# ---- pairs


def test_difference_cancels_a_common_offset_per_seed(tmp_path):
    """Seeds that differ wildly, by the same amount on both sides, leave a difference without spread."""
    base = {0: 10.0, 1: 50.0, 2: 90.0}
    plain = records_of(tmp_path / "a", {"residual": base, "decayed": {s: v + 2.0 for s, v in base.items()}})
    found = plain.difference("decayed", "residual", "knn")
    assert (found.mean, found.half, found.n) == (2.0, 0.0, 3)
    assert plain.mean("decayed", "knn").half > 50

    moved = {0: 7.0, 1: -4.0, 2: 1.0}
    noise = {0: 0.3, 1: -0.2, 2: 0.7}
    before = records_of(tmp_path / "b", {"residual": base, "decayed": {s: base[s] + noise[s] for s in base}})
    after = records_of(
        tmp_path / "c",
        {
            "residual": {s: base[s] + moved[s] for s in base},
            "decayed": {s: base[s] + noise[s] + moved[s] for s in base},
        },
    )
    one, two = (records.difference("decayed", "residual", "knn") for records in (before, after))
    assert (two.mean, two.half) == pytest.approx((one.mean, one.half))


def test_difference_depends_on_pairs_not_on_seed_numbers(tmp_path):
    residual, decayed = [10.0, 50.0, 90.0], [11.0, 52.0, 90.5]
    order = [2, 0, 1]

    def found(name, base, ours):
        table = {"residual": dict(enumerate(base)), "decayed": dict(enumerate(ours))}
        return records_of(tmp_path / name, table).difference("decayed", "residual", "knn")

    straight = found("straight", residual, decayed)
    renumbered = found("renumbered", [residual[i] for i in order], [decayed[i] for i in order])
    broken = found("broken", residual, [decayed[i] for i in order])
    assert (renumbered.mean, renumbered.half) == pytest.approx((straight.mean, straight.half))
    assert broken.mean == pytest.approx(straight.mean)
    assert broken.half > 10 * straight.half


def test_difference_uses_seeds_of_both_sides_only(tmp_path):
    records = records_of(tmp_path, {"residual": {0: 1.0, 1: 2.0, 5: 900.0}, "decayed": {0: 4.0, 1: 5.0, 7: -900.0}})
    assert records.difference("decayed", "residual", "knn") == Estimate(3.0, 0.0, 2)
    assert records.difference("decayed", "fnord", "knn").n == 0


def test_diverged_run_counts_but_has_no_values(tmp_path):
    write_record(tmp_path, "decayed", 0, {"diverged": False, "knn": 10.0})
    write_record(tmp_path, "decayed", 1, {"diverged": True, "knn": 0.0})
    records = Records(tmp_path)
    assert (records.count("decayed"), records.diverged("decayed")) == (2, 1)
    assert records.mean("decayed", "knn") == Estimate(10.0, None, 1)
    assert (records.count("fnord"), records.diverged("fnord")) == (0, 0)


def test_curve_has_an_estimate_per_entry(tmp_path):
    for seed, values in enumerate(([1.0, 2.0, 3.0], [3.0, 2.0, 5.0])):
        write_record(tmp_path, "v", seed, {"diverged": False, "layers": {"mean": {"entropy": values}}})
    assert [e.mean for e in Records(tmp_path).curve("v", "layers.mean.entropy")] == [2.0, 2.0, 4.0]


# ---- paths into records


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a", {"b": [1, [2, 3]], "1": "one"}),
        ("a.b.0", 1),
        ("a.b.-1.-2", 2),
        ("a.b.1.1", 3),
        ("a.1", "one"),
        ("a.b.2", None),
        ("a.b.-3", None),
        ("a.c", None),
        ("c.d.e", None),
        ("a.b.0.x", None),
    ],
)
def test_dig_follows_dotted_paths(key, value):
    assert dig({"a": {"b": [1, [2, 3]], "1": "one"}}, key) == value


# ---- agreement with the paper


@pytest.mark.parametrize(
    ("ours", "paper", "word"),
    [
        ([1.0, 1.1, 0.9], 5.0, "agrees"),
        ([1.0, 1.1, 0.9], -5.0, "opposite"),
        ([-1.0, -1.1, -0.9], -5.0, "agrees"),
        ([-1.0, -1.1, -0.9], 5.0, "opposite"),
        ([1.0, -1.0, 0.5], 5.0, "undecided"),
        ([1.0, -1.0, 0.5], None, "undecided"),
        ([1.0, 1.1, 0.9], None, "higher"),
        ([-1.0, -1.1, -0.9], 0.0, "lower"),
        ([1.0], 5.0, "one seed"),
        ([], 5.0, "not run"),
    ],
)
def test_verdict_compares_signs_with_the_paper(ours, paper, word):
    assert verdict(estimate(ours), paper) == word


def test_order_agreement_is_kendalls_tau():
    rng = random.Random(0)
    ours, paper = ([rng.random() for _ in range(6)] for _ in range(2))
    pairs = [(i, j) for i in range(6) for j in range(i)]
    agree = sum(1 if (ours[i] - ours[j]) * (paper[i] - paper[j]) > 0 else -1 for i, j in pairs)
    assert order_agreement(ours, paper) == pytest.approx(agree / len(pairs))
    assert order_agreement(paper, [100 * x for x in paper]) == pytest.approx(1)
    assert order_agreement(paper, [-x for x in paper]) == pytest.approx(-1)
    assert order_agreement([1, 2], [1, 2]) is None
    assert order_agreement([1, 1, 1], [1, 2, 3]) is None


# ---- where the sign changes


def test_crossover_interpolates_over_log_length():
    lengths = [1000.0, 2000.0, 4000.0, 8000.0]
    # exactly half-way between 2000 and 4000 in log length
    assert crossover(lengths, [-3.0, -1.0, 1.0, 3.0]) == pytest.approx(2000 * math.sqrt(2))
    assert crossover(lengths, [-3.0, -1.0, 0.0, 1.0]) == pytest.approx(4000)
    assert crossover(lengths, [-1.0, 1.0, -1.0, 3.0]) == pytest.approx(1000 * math.sqrt(2))
    for never in ([-4.0, -3.0, -2.0, -1.0], [1.0, 2.0, 3.0, 4.0], [3.0, 1.0, -1.0, -3.0]):
        assert crossover(lengths, never) is None


def test_extrapolate_finds_a_known_onset():
    lengths = [1000 * 2**i for i in range(5)]
    onset, slope = 1_000_000.0, 1.5
    line = [slope * math.log2(x / onset) for x in lengths]
    seeds = [[value + offset for value in line] for offset in (-0.3, 0.0, 0.3)]
    found = extrapolate(lengths, seeds, resamples=400)
    assert found.slope == pytest.approx(slope)
    assert found.at == pytest.approx(onset)
    assert found.low < onset < found.high
    # no resample can be further than a seed on its own: an offset of 0.3 moves the root by 0.3 / slope doublings
    assert found.low >= onset * 2 ** (-0.3 / slope) - 1
    assert found.high <= onset * 2 ** (0.3 / slope) + 1
    assert extrapolate(lengths, seeds, resamples=400) == found


def test_extrapolate_returns_no_onset_for_a_falling_difference():
    found = extrapolate([1000, 2000, 4000], [[-1.0, -2.0, -3.0], [-1.5, -2.0, -3.5]], resamples=50)
    assert found.slope < 0
    assert (found.at, found.low, found.high) == (None, None, None)
