"""Time to quality: which training counts, and that both sides are trained on and measured by the same things."""

from __future__ import annotations

import pytest

from anechoic.benchmarks import quality
from anechoic.benchmarks.quality import Trained, goal_row
from anechoic.benchmarks.timing import Options
from anechoic.benchmarks.train import DRAWINGS

PEER = Trained(32_000, 90.0, 0.65, 30.0)


def test_the_shortest_training_that_is_good_enough_counts():
    ours = [Trained(4_000, 9.0, 0.7, 20.0), Trained(8_000, 15.0, 0.6, 29.0), Trained(9_000, 18.0, 0.5, 31.0)]
    rounds = [(PEER, ours)]
    loss, probe = (goal_row(goal, DRAWINGS, rounds) for goal in ("loss", "probe"))
    assert (loss["ours"], loss["ratio"], loss["reached"]) == (15.0, 6.0, True)
    assert (probe["ours"], probe["ratio"], probe["reached"]) == (18.0, 5.0, True)


def test_what_is_not_reached_is_said():
    found = goal_row("loss", DRAWINGS, [(PEER, [Trained(32_000, 60.0, 0.66, 50.0)])])
    assert (found["reached"], found["ratio"]) == (False, 1.5)


def test_both_sides_are_trained_and_measured(monkeypatch):
    pytest.importorskip("transformers", reason="the peer")
    monkeypatch.setattr(quality, "SAMPLES", 512)
    monkeypatch.setattr(quality, "PEER_RATES", (1e-4, 2e-3))
    monkeypatch.setattr(quality, "SHARES", (0.5,))
    monkeypatch.setattr(quality, "in_a_process", lambda train, *arguments: train(*arguments))
    rows = quality.run(Options(rounds=1, small="digits"))
    searched = rows[0]["peer_rates"]
    assert rows[0]["peer_rate"] == 2e-3
    assert searched["0.002"]["loss"] < searched["0.0001"]["loss"] < 1.2  # patches are normalised: about 1 untrained
    (found,) = rows[0]["rounds"]
    assert found["peer"]["samples"] == 512
    assert found["ours"][0]["samples"] == 256
    assert all(0 <= own["probe"] <= 100 for own in [found["peer"], *found["ours"]])
