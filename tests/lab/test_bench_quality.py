"""Time to quality: which training counts, and that both sides use the same data and measures."""

from __future__ import annotations

import pytest

from anechoic_lab.bench import quality
from anechoic_lab.bench.quality import Trained, goal_row, is_as_good
from anechoic_lab.bench.timing import Options
from anechoic_lab.bench.train import DRAWINGS

PEERS = [Trained(96_000, 90.0, 0.65, 30.0), Trained(96_000, 60.0, 0.61, 32.0)]


def length(samples, seconds, loss, probe):
    return [Trained(samples, second, loss, probe) for second in seconds]


def test_goal_row_takes_the_shortest_length_that_is_confirmed():
    ours = [
        length(8_000, (9.0, 9.0), 0.7, 31.5),  # a lucky probe
        length(12_000, (15.0, 12.0), 0.63, 29.0),
        length(16_000, (18.0, 20.0), 0.5, 31.0),
        length(19_200, (20.0, 20.0), 0.5, 31.0),
    ]
    loss, probe = (goal_row(goal, DRAWINGS, PEERS, ours) for goal in ("loss", "probe"))
    assert (loss["ours"], loss["low"], loss["high"], loss["samples_ratio"]) == (13.5, 5.0, 6.0, 8.0)
    assert (probe["ours"], probe["low"], probe["high"], probe["samples_ratio"]) == (19.0, 3.0, 5.0, 6.0)
    assert loss["reached"]
    assert probe["reached"]


def test_goal_averages_seeds():
    uneven = [Trained(8_000, 9.0, 0.69, 0.0), Trained(8_000, 9.0, 0.57, 0.0)]
    assert is_as_good("loss", uneven, PEERS)
    assert not is_as_good("loss", [*uneven[:1], Trained(8_000, 9.0, 0.58, 0.0)], PEERS)


def test_goal_row_reports_a_goal_that_is_not_reached():
    worse = [length(8_000, (60.0, 40.0), 0.66, 50.0)]
    found = goal_row("loss", DRAWINGS, PEERS, worse)
    assert (found["reached"], found["ratio"]) == (False, 1.5)
    once = goal_row("probe", DRAWINGS, PEERS, worse)
    assert not once["reached"]  # nothing longer confirms it


@pytest.mark.slow
def test_quality_trains_and_measures_both_sides(monkeypatch):
    pytest.importorskip("transformers", reason="the peer")
    monkeypatch.setattr(quality, "SAMPLES", 512)
    monkeypatch.setattr(quality, "PEER_LRS", (1e-4, 2e-3))
    monkeypatch.setattr(quality, "SHARES", (0.5,))
    monkeypatch.setattr(quality, "MAX_TRAIN", 400)
    monkeypatch.setattr(quality, "MAX_TEST", 200)
    monkeypatch.setattr(quality, "in_a_process", lambda train, *arguments: train(*arguments))
    rows = quality.run(Options(rounds=1, small="digits"))
    searched = rows[0]["peer_rates"]
    assert rows[0]["peer_rate"] == 2e-3
    assert searched["0.002"]["loss"] < searched["0.0001"]["loss"] < 1.2  # patches are normalized: about 1 untrained
    ((ours,),), (peer,) = rows[0]["lengths"], rows[0]["peers"]
    assert (peer["samples"], ours["samples"]) == (512, 256)
    assert all(0 <= side["probe"] <= 100 for side in (peer, ours))
