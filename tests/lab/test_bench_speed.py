"""The benchmarks of embedding, sampling, memory and growth: what they measure, not how fast it is."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from anechoic.data import Augment, Loader, open_source
from anechoic.models import build_model
from anechoic.pages.figures import draw_growth
from anechoic_lab.bench import commands, embed, growth, sample
from anechoic_lab.bench.memory import peak_memory_mb
from anechoic_lab.bench.timing import Timing, interleave, row_without_peer, table
from anechoic_lab.cli import bench as measuring
from anechoic_lab.cli.bench import bench

KEYS = {"work", "ours", "peer", "ratio", "low", "high", "fraction_of_gemm", "memory_mb"}
TINY = {"dim": 24, "depth": 2, "num_heads": 2}


@pytest.fixture
def listing(tmp_path):
    """A list of JPEGs, one of them of the network's own size."""
    rng = np.random.default_rng(0)
    for k, (width, height) in enumerate([(224, 224), (300, 260), (400, 500)]):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / f"{k}.jpg", quality=95)
    (tmp_path / "images.txt").write_text("0.jpg\n1.jpg\n2.jpg")
    return tmp_path / "images.txt"


def test_embed_peer_gets_the_same_pixels(listing):
    peer = embed.PillowImages(tuple(str(listing.parent / f"{k}.jpg") for k in range(3)))
    (batch,) = Loader(open_source(listing), image_size=224, batch_size=3, augment=Augment("center"), cache=False)
    ours = embed.PREPROCESS.apply(batch.images)
    assert len(peer) == 3
    torch.testing.assert_close(peer[0], ours[0], rtol=1e-5, atol=1e-5)
    for k in (1, 2):  # resized by two libraries: the same but for rounding
        assert (peer[k] - ours[k]).abs().mean() < 0.02


@pytest.mark.slow
def test_both_embed_contestants_write_features(listing, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(embed, "MODEL", TINY)
    paths = tuple(str(listing.parent / f"{k}.jpg") for k in range(3))
    written = []
    monkeypatch.setattr(embed.np, "savez", lambda file, **arrays: written.append(arrays["features"].shape))
    embed.peer_embedder(None, paths, 0, 2)()
    embed.embedder(None, str(listing), 0, "class")()
    assert written == [(3, 24), (3, 24)]


@pytest.mark.slow
def test_image_flops_equal_those_of_the_network():
    model = build_model("vit_small_patch16", image_size=embed.SIZE, **embed.MODEL).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(1, 3, embed.SIZE, embed.SIZE))
    assert embed.image_flops() == counter.get_total_flops()


@pytest.mark.slow
def test_overhead_row_has_both_estimates(monkeypatch):
    monkeypatch.setattr(sample, "POCKET_STEPS", 3)
    monkeypatch.setattr(sample, "POCKET_BATCH", 2)
    found = sample.overhead_row(rounds=2)
    assert set(found) >= KEYS | {"overhead", "own_share"}
    assert found["overhead_low"] <= found["overhead"] <= found["overhead_high"]
    assert found["own_share"] > 0


def touch(megabytes: int) -> None:
    np.ones(megabytes * 2**20, dtype=np.uint8)


@pytest.mark.slow
def test_peak_memory_is_that_of_the_work():
    assert peak_memory_mb(touch, 300) - peak_memory_mb(touch, 0) == pytest.approx(300, abs=40)


@pytest.mark.slow
def test_command_memory_is_measured_in_a_subprocess(tmp_path):
    assert peak_memory_mb(commands.call, "list", ("models",), {}, str(tmp_path)) > 50


def test_bench_all_keeps_rows_when_one_benchmark_fails(monkeypatch):
    def failing(options):
        raise RuntimeError("no room")

    names = {"embed": "anechoic_lab.bench.embed", "memory": "anechoic_lab.bench.commands"}
    monkeypatch.setattr(measuring, "BENCHMARKS", names)
    monkeypatch.setattr(embed, "run", lambda options: [row_without_peer("embed", 1.5, memory_mb=300)])
    monkeypatch.setattr(commands, "run", failing)
    found = bench("all")
    assert [row["benchmark"] for row in found.metrics["rows"]] == ["embed"]
    assert found.text.endswith("memory failed: RuntimeError: no room")
    with pytest.raises(RuntimeError):
        bench("memory")


def test_interleave_does_not_warm_up_warm_contestants():
    calls: list[str] = []
    interleave({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=1, warm=("b",))
    assert calls == ["a", "a", "b"]


def test_row_without_peer_is_one_line():
    found = row_without_peer("embed", 1.5, memory_mb=300)
    assert set(found) >= KEYS
    assert table([found]) == "embed: 1.5 s, 300 MB"


# ---- growth


def test_growth_exponents_are_those_of_a_power_law(monkeypatch):
    points = growth.axes()["width"]
    seconds = {point.label: [0.1 * point.value**1.7] * 3 for point in points}
    monkeypatch.setattr(growth, "contest", lambda entries, **_: (Timing(seconds), dict.fromkeys(entries, 1.0)))
    rows = growth.axis_rows("width", points, 1e11, rounds=3)
    assert [row["exponent"] for row in rows] == [None, *[pytest.approx(1.7)] * (len(points) - 1)]
    assert rows[-1]["ratio"] == pytest.approx((points[0].value / points[-1].value) ** 1.7)
    assert all(set(row) >= KEYS for row in rows)


def test_growth_flops_follow_the_algorithm():
    def exponent(name: str) -> float:
        first, last = growth.axes()[name][-2:]
        return math.log(growth.flops_of(last) / growth.flops_of(first)) / math.log(last.value / first.value)

    assert exponent("batch") == pytest.approx(1)
    assert 1.8 < exponent("width") < 2
    assert 0.7 < exponent("depth") <= 1  # the decoder does not get deeper
    assert 1 < exponent("tokens") < 1.6


def test_growth_figure_is_drawn(tmp_path):
    rows = [
        {
            "axis": axis,
            "value": value,
            "label": f"{value} of {axis}",
            "items": 8,
            "ours": 0.01 * value,
            "expected": 1.0 if k else None,
        }
        for axis in ("batch", "cores")
        for k, value in enumerate((1, 2, 4))
    ]
    png, svg = draw_growth(rows, tmp_path / "growth")
    assert Image.open(io.BytesIO(png.read_bytes())).size[0] > 100
    assert all(text in svg.read_text() for text in ("batch", "of cores"))
