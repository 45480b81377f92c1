"""The feature cache: keys are values, so that what was computed once is found again."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo import make

from anechoic.data import Array
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.process import process_named
from anechoic.eval import feature_cache
from anechoic.eval.denoisers import denoiser_of
from anechoic.eval.encoders import Encoder, open_encoder
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


def resident_kilobytes(name):
    """Of the mappings of files of this name in this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.rstrip().endswith("/" + name)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory of a mapped file is known on Linux")
def test_rows_of_a_long_pass_do_not_stay_in_memory(tmp_path):
    count, encoder = 20_000, noisy("flow")
    source = Array(np.zeros((count, 1, 1, 3), dtype=np.uint8))
    key = (1, encoder.poolings[0])
    unfinished = feature_cache.Unfinished(tmp_path / "pass", encoder, source, [key], device="cpu")
    with unfinished.resumed() as tables:
        tables[key][:] = 1
        assert resident_kilobytes(feature_cache.file_name(key)) > 1000
        unfinished.rows = count
        unfinished.mark()
        assert resident_kilobytes(feature_cache.file_name(key)) < 100
        assert (tables[key][:] == 1).all()


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


PREPROCESS = Preprocess((0.5,) * 3, (0.25,) * 3, 16, 3)


@pytest.mark.parametrize("kind", ["vit", "transformers"])
def test_networks_of_equal_weights_and_other_heads_share_no_features(kind, source, tmp_path):
    """Neither tensors nor the text of a module tell the number of heads."""

    def encoder(heads):
        torch.manual_seed(0)
        if kind == "vit":
            return Encoder("vit", make("vit", num_heads=heads).eval(), PREPROCESS)
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))
        model.save_pretrained(tmp_path / "vit")
        card = json.loads((tmp_path / "vit" / "config.json").read_text())
        (tmp_path / "vit" / "config.json").write_text(json.dumps({**card, "num_attention_heads": heads}))
        return open_encoder(f"transformers:{tmp_path / 'vit'}")

    features_of(encoder(2), source)
    found, direct = (features_of(encoder(4), source, cached=cached) for cached in (True, False))
    assert all(np.array_equal(found.sets[key], direct.sets[key]) for key in direct.sets)


@pytest.mark.parametrize("change", ["weights", "alpha", "hook", "forward"])
def test_features_of_a_network_changed_in_memory_are_new(change, source):
    encoder = Encoder("vit", make("vit").eval(), PREPROCESS)
    features_of(encoder, source)
    block = encoder.model.blocks[0]
    if change == "weights":
        block.mlp.fc1.weight.data.mul_(1.5)
    elif change == "alpha":
        block.shortcut1.alpha = 0.3
    elif change == "hook":
        block.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    else:
        plain = block.forward
        block.forward = lambda x: 0.5 * plain(x)
    found, direct = (features_of(encoder, source, cached=cached) for cached in (True, False))
    assert all(np.array_equal(found.sets[key], direct.sets[key]) for key in direct.sets)


def test_features_of_other_libraries_are_computed_again(source, monkeypatch):
    """The last bits, at least, may differ."""
    encoder, passes = Encoder("vit", make("vit").eval(), PREPROCESS), []
    compute = feature_cache.compute
    monkeypatch.setattr(feature_cache, "compute", lambda *args, **how: passes.append(1) or compute(*args, **how))
    for version in ("1", "2", "2"):
        monkeypatch.setattr(feature_cache, "package_version", lambda name, version=version: version)
        features_of(encoder, source)
    assert len(passes) == 2
