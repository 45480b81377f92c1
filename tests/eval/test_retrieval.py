"""Retrieval across styles against a loop over drawings, and the laws it keeps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from anechoic.data import Subset, open_source
from anechoic.data.preprocess import Preprocess
from anechoic.errors import NotFiniteError, UserError
from anechoic.eval.encoders import Encoder, flat
from anechoic.eval.eval_data import EvalData
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.feature_scaling import SCALINGS, rescaled
from anechoic.eval.metrics.retrieval import group_accuracy, retrieval_accuracy, retrieval_matrix
from anechoic.models import build_model


def drawings(things=12, styles=3, dim=6, seed=0):
    """Features (n, dim) that hold thing and style, shuffled, with the numbers of both and of the group."""
    rng = np.random.default_rng(seed)
    thing, style = np.tile(np.arange(things), styles), np.repeat(np.arange(styles), things)
    features = rng.normal(size=(things, dim))[thing] + rng.normal(size=(styles, dim))[style]
    features += rng.normal(size=features.shape)
    order = rng.permutation(len(thing))
    return features[order].astype(np.float32), thing[order], style[order], thing[order] % 4


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def by_brute_force(features, things, styles):
    pairs = []
    for a in np.unique(styles):
        for b in np.unique(styles):
            if a == b:
                continue
            hits = []
            for i in np.flatnonzero(styles == a):
                bank = np.flatnonzero(styles == b)
                if things[i] in things[bank]:
                    best = max(bank, key=lambda j: (cosine(features[i], features[j]), -j))
                    hits.append(things[best] == things[i])
            pairs.append(np.mean(hits))
    return float(np.mean(pairs))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_loop_over_drawings(seed):
    features, things, styles, _ = drawings(seed=seed)
    expected = by_brute_force(features, things, styles)
    assert 0 < expected < 1
    assert retrieval_accuracy(features, things, styles) == pytest.approx(expected)
    # Some hand may lack some thing.
    keep = ~((styles == 1) & (things < 3))
    expected = by_brute_force(features[keep], things[keep], styles[keep])
    assert retrieval_accuracy(features[keep], things[keep], styles[keep]) == pytest.approx(expected)


def test_thing_alone_is_found_always_and_style_alone_never_better_than_by_chance():
    things, styles = np.tile(np.arange(40), 5), np.repeat(np.arange(5), 40)
    assert retrieval_accuracy(np.eye(40)[things], things, styles) == 1.0
    # Equal similarities: the first drawing answers, which is right for one thing.
    assert retrieval_accuracy(np.eye(5)[styles] + 1, things, styles) == pytest.approx(1 / 40)


def test_the_matrix_is_by_query_style_and_has_no_diagonal():
    features, things, styles, _ = drawings()
    found = retrieval_matrix(features, things, styles)
    assert found.shape == (3, 3)
    assert np.isnan(found.diagonal()).all()
    assert np.nanmean(found) == pytest.approx(retrieval_accuracy(features, things, styles))
    # Names of styles may be any distinct values.
    named = np.array(["noto", "blob", "flat"])[styles]
    assert np.nanmean(retrieval_matrix(features, things, named)) == pytest.approx(np.nanmean(found))


def group_by_brute_force(features, groups, things, styles, k):
    shares = []
    for a in np.unique(styles):
        right = []
        for i in np.flatnonzero(styles == a):
            bank = [j for j in range(len(things)) if styles[j] != a and things[j] != things[i]]
            bank.sort(key=lambda j: -cosine(features[i], features[j]))
            votes = np.zeros(groups.max() + 1)
            for j in bank[:k]:
                votes[groups[j]] += np.exp(cosine(features[i], features[j]) / 0.07)
            right.append(votes.argmax() == groups[i])
        shares.append(np.mean(right))
    return float(np.mean(shares))


@pytest.mark.parametrize("k", [1, 5])
def test_groups_are_voted_by_other_objects_in_other_styles(k):
    features, things, styles, groups = drawings(seed=1)
    expected = group_by_brute_force(features, groups, things, styles, k)
    assert group_accuracy(features, groups, things, styles, k=k) == pytest.approx(expected)


def test_scalings_forget_what_they_should():
    features, things, styles, _ = drawings(things=60, dim=5)
    rng = np.random.default_rng(2)
    stretched = features * np.array([1, 10, 0.1, 3, 1e3]) + np.array([5, 0, -3, 0, 1e4])
    assert torch.allclose(rescaled(stretched, "standardized"), rescaled(features, "standardized"), atol=1e-4)
    mixed = features.astype(np.float64) @ rng.normal(size=(5, 5)) + 7
    expected = retrieval_accuracy(rescaled(features, "whitened"), things, styles)
    assert retrieval_accuracy(rescaled(mixed, "whitened"), things, styles) == pytest.approx(expected)
    white = rescaled(mixed, "whitened").double()
    assert torch.allclose(white.T @ white / len(white), torch.eye(5, dtype=torch.double), atol=1e-2)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_collapsed_features_are_worth_nothing_and_raise_nothing(scaling):
    _, things, styles, _ = drawings()
    constant = np.ones((len(things), 4), dtype=np.float32)
    assert retrieval_accuracy(rescaled(constant, scaling), things, styles) <= 1 / 12 + 1e-9


def test_refusals():
    features, things, styles, groups = drawings()
    with pytest.raises(UserError, match="two styles"):
        retrieval_accuracy(features, things, np.zeros_like(styles))
    with pytest.raises(UserError, match="one to each"):
        retrieval_accuracy(features, things[:-1], styles)
    with pytest.raises(UserError, match="lower k"):
        group_accuracy(features, groups, things, styles, k=40)
    features[0, 0] = np.nan
    with pytest.raises(NotFiniteError, match="NaN"):
        retrieval_accuracy(features, things, styles)


# ---- as metrics of the evaluator


def encoder_of(model):
    return Encoder("tiny", model, preprocess=Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3))


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    model = build_model("mae_tiny_patch4", image_size=16, dim=24, depth=2, num_heads=2, decoder_dim=16, decoder_depth=1)
    return encoder_of(model.eval())


def test_the_evaluator_measures_what_the_functions_do(tiny):
    source = open_source("emoji:test:style=noto+twemoji")
    names = ("retrieval", "retrieval_standardized", "retrieval_whitened", "group_vote")
    evaluator = Evaluator(EvalSpec(names, layers="all", poolings=("mean",), neighbors=(5,)), device="cpu", cached=False)
    eval_data = EvalData(None, source, None, None)
    found = evaluator.run(tiny, eval_data)
    sets = evaluator.extract(tiny, eval_data).sets
    groups, things, styles = (source.facets[name] for name in ("group", "object", "style"))
    for layer in range(3):
        features = sets[layer, "mean"]
        row = found.rows[layer]
        for scaling, name in zip(("raw", "standardized", "whitened"), names[:3], strict=True):
            assert row[name] == retrieval_accuracy(rescaled(features, scaling), things, styles)
        assert row["group_vote"] == group_accuracy(features, groups, things, styles, k=5)
    assert found.value("retrieval", pooling="mean") > 2 / 203, "pixels of the same thing are more alike than chance"


def test_a_part_of_the_drawings_keeps_its_facets(tiny):
    whole = open_source("emoji")
    part = Subset(whole, np.arange(0, 5150, 7))
    assert np.array_equal(part.facets["object"], whole.facets["object"][::7])
    two = EvalData(None, Subset(open_source("emoji:style=noto+twemoji"), np.arange(0, 2060, 2)), None, None)
    (row, *_) = Evaluator(EvalSpec(("retrieval",), max_test=900), device="cpu", cached=False).run(tiny, two).rows
    assert 0 < row["retrieval"] < 1


def test_data_without_styles_is_refused():
    torch.manual_seed(0)
    model = build_model("vit_tiny_patch4", image_size=8, in_channels=1, dim=24, depth=1, num_heads=2).eval()
    encoder = Encoder("tiny", model, preprocess=Preprocess((0.5,), (0.5,), 8, 1))
    digits = EvalData(None, open_source("digits:test", channels=1), None, None)
    with pytest.raises(UserError, match="as emoji does"):
        Evaluator(EvalSpec(("retrieval",)), device="cpu", cached=False).run(encoder, digits)


def test_flat_tokens_keep_the_layout(tiny):
    images = torch.rand(2, 3, 16, 16)
    tokens = tiny.model.encoder(images)
    assert torch.equal(flat(tiny).model(images), tokens[:, 1:].reshape(2, 1, -1))
    assert flat(tiny).poolings == ("mean",)


def test_a_record_keeps_retrieval_of_every_layer_and_what_stands_beside_it(tmp_path):
    from anechoic.sweeps.trial import Trial, run_trial, trial_from_json
    from anechoic_lab.studies.emoji_styles import EVALUATION, emoji

    config = emoji(0.6, lr=8e-3, samples=256)
    small = {"dim": 24, "depth": 2, "num_heads": 2, "decoder_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
    config = replace(config, model=replace(config.model, options={**config.model.options, **small}))
    plan = replace(EVALUATION, max_train=100, max_test=60, retrieval="emoji:test:style=noto+twemoji", baselines=True)
    record = run_trial(Trial("tiny-seed0", "tiny", config, plan), tmp_path / "run", root=tmp_path)
    metrics = record["metrics"]
    for token in ("mean", "class"):
        for name in ("retrieval", "retrieval_standardized", "retrieval_whitened"):
            assert len(metrics["layers"][token][name]) == 3
            assert metrics[f"{name}_{token}"] == metrics["layers"][token][name][-1]
        assert 0 <= metrics[f"group_vote_{token}"] <= 100
    assert set(metrics["beside"]) == {"flat tokens", "untrained", "raw pixels"}
    # Raw pixels know nothing of the training, and find drawings of the same layout.
    assert metrics["beside"]["raw pixels"]["retrieval_mean"] > 100 * 5 / 203
    assert trial_from_json(record).evaluation == plan
