"""Per-sample randomness: known answers of the generator, independence of batching, the right laws."""

import pytest
import torch

from anechoic.rng import SampleGenerator, philox


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        # The known answers of Philox4x32-10 published with the generator (counter and key all zeros, all ones).
        (0x00000000, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_known_answers(word, answer):
    counter = [torch.tensor([word])] * 4
    assert [int(out) for out in philox(counter, (word, word))] == answer


def generator(ids, seed=7, visit=3):
    ids = torch.as_tensor(ids)
    return SampleGenerator(seed, ids, torch.full_like(ids, visit))


def test_a_sample_draws_the_same_whatever_its_batch():
    whole = generator(range(10))
    for kind in ("uniform", "normal"):
        together = getattr(whole, kind)("noise", 5, 3)
        alone = torch.cat([getattr(generator([i]), kind)("noise", 5, 3) for i in range(10)])
        assert torch.equal(together, alone)
    assert torch.equal(whole.integers("labels", 1000, 4)[3:5], generator([3, 4]).integers("labels", 1000, 4))


def test_a_longer_draw_begins_with_the_shorter():
    assert torch.equal(generator(range(4)).uniform("mask", 9)[:, :5], generator(range(4)).uniform("mask", 5))


def test_seed_visit_sample_and_purpose_all_matter():
    base = generator([1]).uniform("mask", 8)
    for other in (
        generator([1], seed=8),
        generator([1], visit=4),
        generator([2]),
        generator([1 + 2**40]),
        generator([1], seed=7 + 2**40),
    ):
        assert not torch.equal(base, other.uniform("mask", 8))
    assert not torch.equal(base, generator([1]).uniform("crop", 8))


def test_laws():
    many = generator(range(500))
    uniform = many.uniform("u", 400).double()
    assert 0 <= uniform.min() < uniform.max() < 1
    assert uniform.mean() == pytest.approx(0.5, abs=3e-3)
    assert uniform.var() == pytest.approx(1 / 12, rel=1e-2)
    normal = many.normal("n", 20, 21).double()
    assert normal.mean() == pytest.approx(0, abs=1e-2)
    assert normal.var() == pytest.approx(1, rel=1e-2)
    assert (normal**4).mean() == pytest.approx(3, rel=3e-2)
    counts = many.integers("i", 10, 400).flatten().bincount(minlength=10)
    assert counts.min() > 0.97 * 20_000
    assert counts.max() < 1.03 * 20_000
