"""Layer, token, scaling and learning rate are chosen on held-out training images; test numbers are only reported."""

import pytest
from constructed_records import page, tables_of, write_record

from anechoic_lab.grids import HELD_OUT_LOSS
from anechoic_lab.records.choices import choose
from anechoic_lab.studies.cifar_length import SHORT_LR


def metrics_of(loss, *, held_out, test):
    """Return metrics of two layers: held_out and test are k-NN by (token, layer); the probe is their last layer."""
    tokens = ("class", "mean")
    return {
        "diverged": False,
        "layers": {token: {"knn": test[token]} for token in tokens},
        "selection": {token: {"knn": held_out[token], "probe": held_out[token][-1]} for token in tokens},
        **{f"probe_{token}": test[token][-1] for token in tokens},
        "training": [{"held_out_loss": 9.0}, {"held_out_loss": loss}],
    }


def test_choose_takes_the_best_held_out_row_and_reports_its_test_accuracy():
    metrics = metrics_of(0.5, held_out={"class": [9, 1], "mean": [2, 3]}, test={"class": [4, 5], "mean": [6, 70]})
    assert choose(metrics, "knn") == {"held_out": 9, "test": 4, "token": "class", "kind": "knn", "layer": 0}
    assert choose(metrics, "probe") == {"held_out": 3, "test": 70, "token": "mean", "kind": "probe", "layer": -1}


@pytest.mark.usefixtures("unrendered")
def test_own_lr_page_compares_arms_at_the_learning_rates_that_each_rule_chooses(tmp_path):
    # (arm, learning rate) -> held-out loss, k-NN of held-out training images, k-NN of test images
    runs = {
        ("alpha1", "0.001"): (0.50, 10, 11),
        ("alpha1", "0.004"): (0.40, 8, 99),
        ("alpha0.6", "0.001"): (0.45, 12, 14),
        ("alpha0.6", "0.002"): (0.60, 13, 12.5),
    }
    for (arm, lr), (loss, held_out, test) in runs.items():
        metrics = metrics_of(
            loss, **{name: {"class": [0, 0], "mean": [0, x]} for name, x in (("held_out", held_out), ("test", test))}
        )
        for seed in (10, 11):
            write_record(tmp_path / SHORT_LR.group, f"muon-512k-lr{lr}-{arm}", seed, metrics)
    measured, rules = tables_of(page(SHORT_LR, tmp_path, tmp_path / "out"))
    assert measured[3][1] == "0.5000 ± 0.0000"
    columns = dict(zip(rules[0], range(99), strict=False))
    by_loss, by_votes = rules[2:]
    assert by_loss[1:3] == ["0.004", "0.001"]
    assert by_votes[1:3] == ["0.001", "0.002"]
    loss, votes = (columns[SHORT_LR.metrics[key]] for key in (HELD_OUT_LOSS, "chosen.knn.test"))
    assert by_loss[loss] == "+0.0500 ± 0.0000"
    assert [row[votes] for row in (by_loss, by_votes)] == ["-85.00 ± 0.00", "+1.50 ± 0.00"]
    assert by_votes[-1] == "2"


@pytest.mark.usefixtures("unrendered")
def test_own_lr_page_without_records_of_an_arm_chooses_nothing(tmp_path):
    metrics = metrics_of(0.5, held_out={"class": [1, 1], "mean": [1, 1]}, test={"class": [1, 1], "mean": [1, 1]})
    write_record(tmp_path / SHORT_LR.group, "muon-512k-lr0.001-alpha1", 10, metrics)
    _, rules = tables_of(page(SHORT_LR, tmp_path, tmp_path / "out"))
    assert all(row[1] == "not run" for row in rules[2:])
