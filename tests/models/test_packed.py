"""The packed forward of a frozen transformer: equal to the plain one, for any number of threads, without leaks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from zoo import make

from anechoic.errors import UserError
from anechoic.eval import features
from anechoic.models import packed as inference

VARIANTS = [
    {},
    {"alpha_min": 0.6},
    {"alpha_min": 0.6, "norm": False},
    {"form": "both"},
    {"form": "branch"},
    {"form": "learnable", "alpha_min": 0.7},
    {"qkv_bias": False},
    {"positions": "learned"},
    {"num_classes": 5},
    {"num_classes": 5, "pool": "mean"},
]


def images(count=7, size=16):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def by_hooks(model, batches, monkeypatch, **options):
    """Features by the model's own forward."""
    with monkeypatch.context() as patch:
        patch.setattr(features, "is_served", lambda model: False)
        return features.extract(model, batches, **options)


def assert_same(found, expected):
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[key]), torch.from_numpy(value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("poolings", [("class", "mean", "all"), ("class",)], ids=str)
def test_every_layer_equals_the_plain_forward(options, poolings, monkeypatch):
    model, batches = make("vit", **options), images().split(4)
    assert inference.is_served(model)
    for layers in ("all", (-1,), (1, 2), (0,)):
        wanted = {"layers": layers, "poolings": poolings}
        assert_same(features.extract(model, batches, **wanted), by_hooks(model, batches, monkeypatch, **wanted))


def test_images_of_another_size(monkeypatch):
    model, larger = make("vit", alpha_min=0.6), images(size=24)
    assert_same(features.extract(model, [larger]), by_hooks(model, [larger], monkeypatch))


def test_features_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(inference, "TOKENS", 40)
    model, before = make("vit", alpha_min=0.6), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(features.extract(model, images(11).split(5), layers="all"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all((other[key] == found[0][key]).all() for key in found[0])


def test_weights_and_images_stay_as_they_were():
    model, pixels = make("vit", alpha_min=0.6), images()
    weights, copy = {k: v.clone() for k, v in model.state_dict().items()}, pixels.clone()
    features.extract(model, [pixels], layers="all")
    assert torch.equal(pixels, copy)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_other_models_keep_their_own_forward():
    hooked, doubled = make("vit"), make("vit").double()
    hooked.blocks[0].register_forward_hook(lambda *_: None)
    assert not inference.is_served(hooked)
    assert not inference.is_served(doubled)
    assert not inference.is_served(make("uvit"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not inference.is_served(make("vit"))


def test_failed_extraction_restores_the_number_of_threads():
    before = torch.get_num_threads()
    with pytest.raises(UserError, match="Expected images of shape"):
        features.extract(make("vit"), [images(), images()[:, :1]])
    assert torch.get_num_threads() == before


def test_long_extraction_does_not_leak_tensors():
    """The number of live tensors is the same after 10 batches and after 200."""
    model = make("vit")

    def stream():
        for _ in range(200):
            yield images(3)

    counts = {}
    for number, _ in enumerate(features.extract_batches(model, stream(), layers="all"), 1):
        if number in (10, 200):
            gc.collect()
            counts[number] = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    # At the end no batch is waiting any more, so there may be fewer, but never more.
    assert counts[200] <= counts[10]
