"""The benchmark of the training step: its count of work, its arithmetic, and that memory does not grow with steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from zoo import inputs, make

from anechoic.models import build_model, model_config
from anechoic.training.cost import skip_flops, step_flops
from anechoic_lab.bench import train
from anechoic_lab.bench.contest import Entry, contest
from anechoic_lab.bench.timing import Options, Timing


def test_step_flops_equal_those_counted_in_the_peer():
    transformers = pytest.importorskip("transformers", reason="the peer is the plain algorithm")
    work = train.Work("tiny", dim=24, heads=3, decoder_dim=16, decoder_heads=2, batch=3, depth=3, decoder_depth=2)
    config = transformers.ViTMAEConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=32,
        patch_size=4,
        decoder_num_attention_heads=2,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=64,
    )
    model = transformers.ViTMAEForPreTraining(config).train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(pixel_values=torch.randn(3, 3, 32, 32)).loss.backward()
    ours = step_flops(model_config("mae_tiny_patch4", **work.model_options(skips=False)), 3)
    assert ours == counter.get_total_flops()


def test_skip_flops_equal_those_of_the_concatenation():
    with FlopCounterMode(display=False) as counter:
        hidden = F.linear(torch.randn(17, 24 + 16), torch.randn(16, 24 + 16))
        F.linear(hidden, torch.randn(16, 16))
    assert skip_flops(17, 24, 16) == counter.get_total_flops()


def test_step_does_fewer_flops_than_the_plain_algorithm():
    model = make("mae", skips=False).train()
    images, noise = inputs(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images, noise).loss.backward()
    assert 0 < counter.get_total_flops() < step_flops(model.config, len(images))


def test_median_ratio_has_an_order_statistic_interval():
    ours, peer = [1.0] * 25, [float(i) for i in range(1, 26)]
    median, low, high = train.median_ratio(Timing({"ours": ours, "peer": peer}), "peer", ours="ours")
    # The 8th and the 18th of 25: fewer than 8 heads, or more than 17, in 25 tosses have a chance of 4.3 %.
    assert (median, low, high) == (13, 8, 18)
    assert train.median_ratio(Timing({"ours": [1.0], "peer": [2.0]}), "peer", ours="ours") == (2, 2, 2)


TINY = train.Work("tiny", dim=24, heads=3, decoder_dim=16, decoder_heads=2, batch=4, depth=2, decoder_depth=1)


@pytest.mark.slow
def test_bench_train_compares_one_and_two_processes(monkeypatch):
    pytest.importorskip("transformers", reason="the peer")
    monkeypatch.setattr(train, "WORKS", (TINY,))
    monkeypatch.setattr(train, "POCKET", TINY)
    monkeypatch.setattr(train, "DRAWINGS", TINY)
    monkeypatch.setattr(train, "PAIRS", 3)
    monkeypatch.setattr(train, "MUON_PAIRS", 3)
    monkeypatch.setattr(train, "arrangements", lambda batch: [(1, 1), (2, 1)])
    rows = train.run(Options(rounds=1))
    assert [row["peer_name"].split(",")[0] for row in rows] == ["transformers", "residual", "AdamW"]
    assert {name.split(",")[0] for name in rows[0]["contestants"]} == {"ours", "transformers", "limit"}
    assert 0 < rows[0]["fraction_of_gemm"] < 1
    assert all(row["low"] < row["ratio"] < row["high"] for row in rows[1:])
    assert all(row["memory_mb"] > 50 for row in rows)


@pytest.mark.slow
def test_contest_raises_what_a_contestant_raises():
    with pytest.raises(ZeroDivisionError):
        contest({"one": Entry(divide, (0,))}, rounds=1)


def divide(place, by):
    return 1 / by


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("recompute", [False, True])
def test_training_memory_does_not_grow_with_steps(recompute):
    torch.manual_seed(0)
    model = build_model("mae_tiny_patch4", **TINY.model_options(alpha_min=0.6)).train()
    train_step = stepper(model, recompute)

    def used() -> tuple[int, int]:
        gc.collect()
        tensors = sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())
        return tensors, int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(20):
        train_step()
    tensors, resident = used()
    for _ in range(100):
        train_step()
    more_tensors, more_resident = used()
    assert more_tensors <= tensors
    # What one step keeps is about a megabyte: a hundred leaked ones would show.
    assert more_resident - resident < 20 * 2**20


def stepper(model, recompute):
    from anechoic.models.layers import set_block_options

    set_block_options(model, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(4, 3, 32, 32)

    def step() -> None:
        model(images).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
