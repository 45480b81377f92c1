"""The bench command and its arithmetic; speed itself is not tested."""

from __future__ import annotations

import json

import pytest

from anechoic.cli.main import main
from anechoic_lab.bench import data as bench_data
from anechoic_lab.bench.timing import Timing, gemm_flops, interleave, row, table

KEYS = {"work", "ours", "peer", "ratio", "low", "high", "fraction_of_gemm", "memory_mb"}


def test_interleave_takes_turns_after_a_warm_up() -> None:
    calls: list[str] = []
    timing = interleave({name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}, rounds=3)
    assert calls == ["a", "b", "c"] * 4
    assert {name: len(times) for name, times in timing.seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_timing_forms_ratios_within_a_round() -> None:
    timing = Timing({"ours": [1.0, 2.0, 4.0], "peer": [3.0, 4.0, 20.0]})
    assert timing.ratio("peer") == (3.0, 2.0, 5.0)
    line = row("work", timing, peer="peer", items=10, flops=4e9, gemm=8e9, memory_mb=5)
    assert set(line) >= KEYS
    assert (line["ours"], line["peer"], line["fraction_of_gemm"]) == (2.0, 4.0, 0.25)
    assert "5/s against 2/s" in table([line])
    assert "25% of the GEMM peak" in table([line])


def test_gemm_flops_are_plausible() -> None:
    assert 1e8 < gemm_flops() < 1e16


@pytest.mark.slow
def test_bench_data_reports_rows_and_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench_data, "BATCHES", 1)
    monkeypatch.setattr(bench_data, "BATCH", 8)
    monkeypatch.setattr(bench_data, "MADE_UP_JPEGS", 20)
    monkeypatch.setattr(bench_data, "MADE_UP_SMALL", 200)
    monkeypatch.setattr(bench_data, "IDENTIFIED_FILES", 30)
    assert main(["bench", "data", "--rounds", "1", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert all(set(item) >= KEYS and item["benchmark"] == "data" for item in metrics["rows"])
    assert all(item["ours"] > 0 and item["peer"] > 0 for item in metrics["rows"])
    decoders = [item["work"].rsplit(", ", 1)[1] for item in metrics["rows"][:-1]]
    assert decoders[0] == "decoded by Pillow"
    identified = len(bench_data.IDENTIFIED_SIZES) * ["all files hashed", "hashes known"]
    assert decoders[-1 - len(identified) :] == ["from the cache", *identified]
    assert metrics["peers"]["pillow"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dta"], "did you mean data"),
        (["data", "--rounds", "0"], "at least one round"),
        (["data", "--images", "digits"], "folder of JPEGs"),
    ],
)
def test_bench_refuses_wrong_arguments(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err
