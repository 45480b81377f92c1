"""The feature cache: keys are values, so that what was computed once is found again."""

import numpy as np
import pytest
import torch
from zoo import make

from anechoic.data import Array
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.process import process_named
from anechoic.eval import feature_cache
from anechoic.eval.denoisers import denoiser_of
from anechoic.eval.encoders import Encoder
from anechoic.eval.feature_cache import features_of


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path))
    return Array(np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8))


def noisy(name, level=0.3):
    """With a process of its own, as in another run of the program."""
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3, 16, 3)
    return denoiser_of(make("sit", in_channels=3), type(process_named(name))(), preprocess).at(level, seed=1)


@pytest.mark.parametrize("name", ["vp", "flow", "discrete"])
def test_processes_of_equal_settings_have_equal_fingerprints(name):
    assert noisy(name).fingerprint == noisy(name).fingerprint
    assert noisy(name).fingerprint != noisy(name, level=0.4).fingerprint
    others = {noisy(other).fingerprint for other in ("vp", "flow", "discrete")}
    assert len(others) == 3


def test_second_embedding_by_a_denoiser_hits_the_cache(source, monkeypatch):
    first = features_of(noisy("flow"), source, device="cpu")

    def refuse(*args, **options):
        raise AssertionError("the network ran again")

    monkeypatch.setattr(feature_cache, "extract_batches", refuse)
    again = features_of(noisy("flow"), source, device="cpu")
    assert all(np.array_equal(again.sets[key], first.sets[key]) for key in first.sets)


def test_addresses_of_functions_do_not_change_a_fingerprint():
    class Activation(torch.nn.Module):
        def extra_repr(self):
            return repr(type("Function", (), {})())

    models = [make("vit"), make("vit")]
    for model in models:
        model.register_module("activation", Activation())
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3, 16, 3)
    first, second = (Encoder("vit", model, preprocess) for model in models)
    assert first.fingerprint == second.fingerprint
