"""Signals without labels, and the words that follow from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from anechoic.data import Subset, open_source
from anechoic.data.preprocess import Preprocess
from anechoic.eval.encoders import ConstantEncoder, Encoder, RawPixels
from anechoic.eval.eval_data import EvalData
from anechoic.eval.evaluator import EvalSpec, Evaluator
from anechoic.eval.metrics.crop_retrieval import found_again
from anechoic.eval.verdict import Signals, fall, late_fall, late_gain, measure, verdict_of
from anechoic.models import build_model
from anechoic.models.layers import patchify
from anechoic.models.mae import normalize_patches
from anechoic.rng import SampleGenerator

GRAY = Preprocess((0.5,), (0.5,), 8, 1)
SMALL = {"image_size": 8, "patch_size": 2, "in_channels": 1, "dim": 24, "depth": 2, "num_heads": 2}
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


def autoencoder(**options):
    torch.manual_seed(0)
    return build_model("mae_tiny_patch4", **SMALL, **DECODER, **options).eval()


@pytest.fixture(scope="module")
def digits():
    return Subset(open_source("digits", channels=1), np.arange(0, 640, 5))


# ---- an image found again by another crop of it


def test_a_crop_finds_itself_where_features_tell_images_apart():
    one = np.random.default_rng(0).standard_normal((40, 8))
    assert found_again(one, one).tolist() == [1.0] * 40
    assert found_again(one, np.roll(one, 1, axis=0)).tolist() == [0.0] * 40


def test_equal_features_find_nothing():
    assert found_again(np.ones((5, 3)), np.ones((5, 3))).tolist() == [0.0] * 5


def test_no_loud_channel_decides_alone():
    rng = np.random.default_rng(0)
    one, noise = rng.standard_normal((40, 8)), 1e4 * rng.standard_normal((2, 40, 1))
    found = found_again(np.hstack([one, noise[0]]), np.hstack([one, noise[1]]))
    assert found.mean() > 0.8


def test_crops_of_raw_pixels_and_of_a_constant(digits):
    spec = EvalSpec(("crops",), poolings=("mean",))
    evaluator = Evaluator(spec, cached=False)
    found = evaluator.run(Encoder("pixels", RawPixels(), GRAY), EvalData(None, digits, None, None)).rows[0]
    assert 2 / len(digits) < found["crop_retrieval"] < 1
    assert 0 < found["crop_error"] < 0.1
    again = evaluator.run(Encoder("pixels", RawPixels(), GRAY), EvalData(None, digits, None, None)).rows[0]
    assert again == found
    constant = evaluator.run(Encoder("constant", ConstantEncoder(4), GRAY), EvalData(None, digits, None, None))
    assert constant.rows[0]["crop_retrieval"] == 0


# ---- hidden patches against the mean patch


@pytest.mark.parametrize("norm_pix", [True, False])
def test_losses_are_those_of_one_pass_over_all_images(digits, norm_pix):
    model = autoencoder(norm_pix=norm_pix)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    found = Evaluator(EvalSpec(("reconstruction",), seed=3)).run(
        Encoder("tiny", model, GRAY), EvalData(None, digits, None, None)
    )
    images = GRAY.apply(torch.stack([digits.read(i) for i in range(len(digits))]))
    ids = torch.arange(len(images))
    with torch.inference_mode():
        loss, _, mask = model(images, SampleGenerator(3, ids, torch.zeros_like(ids)).uniform("mask", 16))
    assert found.network["masked_loss"] == pytest.approx(loss.item(), rel=1e-5)
    hidden = patchify(images, 2)[mask.bool()].double()
    hidden = normalize_patches(hidden) if norm_pix else hidden
    assert found.network["mean_patch_loss"] == pytest.approx((hidden - hidden.mean(0)).square().mean().item(), rel=1e-5)


def test_other_networks_have_no_such_loss(digits):
    encoder = Encoder("pixels", RawPixels(), GRAY)
    found = Evaluator(EvalSpec(("reconstruction",))).run(encoder, EvalData(None, digits, None, None))
    assert found.network == {}


# ---- the curve


def test_late_gain_is_a_share_of_all_that_fell():
    def records(losses, name="held_out_loss"):
        return [{"kind": "validation", "seen": 100 * i, name: loss} for i, loss in enumerate(losses)]

    straight = records([1.0, 0.9, 0.8, 0.7])
    assert late_gain(straight) == pytest.approx(1 / 3)
    assert late_gain(records([1.0, 0.5, 0.5, 0.5])) == 0
    assert late_gain(records([1.0, 0.5, 0.4, 0.5])) == pytest.approx(-0.2)
    assert late_gain(records([1.0, 1.1, 1.2, 1.3])) is None
    assert late_gain(straight[:3]) is None
    assert late_gain(records([1.0, 0.9, 0.8, 0.7], "loss")) == pytest.approx(1 / 3)
    assert late_fall(records([1.0, 0.9, 0.8, 0.7])) == pytest.approx(1 / 8)
    assert late_fall(records([1.0, 1.1, 1.2, 1.3])) == pytest.approx(-1 / 12)
    assert late_fall(straight[:3]) is None
    assert fall(straight[:2]) == pytest.approx(0.1)
    assert fall(straight[:1]) is None


# ---- words

GOOD = Signals(
    200,
    masked_loss=0.4,
    mean_patch_loss=1.0,
    rank=10.0,
    untrained_rank=5.0,
    crop_retrieval=0.6,
    crop_error=0.02,
    pixel_crop_retrieval=0.3,
    pixel_crop_error=0.02,
    untrained_crop_retrieval=0.3,
    late_gain=0.1,
    late_fall=0.06,
)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "learning"),
        ({"late_gain": 0.001}, "plateaued"),
        ({"late_gain": None}, "learning"),
        ({"masked_loss": 0.99, "late_gain": 0.03}, "plateaued"),  # hardly better than the mean patch
        ({"masked_loss": 0.99}, "too short"),
        ({"masked_loss": 0.99, "crop_retrieval": 0.2}, "too short"),
        ({"rank": 1.3, "crop_retrieval": 0.3}, "too short"),
        ({"rank": 1.3, "crop_retrieval": 0.3, "late_gain": 0.03}, "collapsed"),
        ({"rank": 1.0, "untrained_rank": 1.0, "crop_retrieval": 0.3}, "too short"),
        ({"rank": 1.0, "untrained_rank": 1.0, "crop_retrieval": 0.3, "late_gain": None, "fall": 0.05}, "too short"),
        ({"rank": 1.0, "untrained_rank": 1.0, "crop_retrieval": 0.3, "late_gain": None, "fall": -0.05}, "collapsed"),
        ({"rank": 1.3, "crop_retrieval": 0.3, "late_gain": None}, "collapsed"),  # nothing is known of its training
        ({"crop_retrieval": 0.2}, "worse than raw pixels"),
        ({"crop_retrieval": 0.28}, "learning"),  # less than chance allows
        ({"crop_retrieval": None}, "learning"),
        ({"rank": 1.1, "crop_retrieval": 0.3}, "collapsed"),
        ({"rank": 1.1}, "learning"),  # what finds images has not collapsed
        ({"rank": 0.0, "untrained_rank": None, "crop_retrieval": None}, "collapsed"),
        ({"crop_retrieval": 0.2, "late_gain": 0.0, "rank": 1.0}, "collapsed"),
    ],
)
def test_the_verdict_follows_from_the_signals(changes, word):
    verdict = verdict_of(replace(GOOD, **changes))
    assert verdict.word == word
    assert verdict.text.startswith(f"Verdict: {word}.")
    assert verdict.to_json()["signals"]["skill"] == pytest.approx(1 - verdict.signals.masked_loss)


def test_reasons_name_what_was_measured():
    text = verdict_of(GOOD).text
    for number in ("60 %", "30 % by raw pixels", "0.400", "The loss still fell by 6 % in the last third"):
        assert number in text
    assert text.endswith("Train longer (--epochs).")
    # Rank decides nothing unless it is close to 1.
    assert "effective rank" not in text
    assert "1.0 directions (effective rank)" in verdict_of(replace(GOOD, rank=1.0)).text
    flat = verdict_of(replace(GOOD, late_gain=-0.1, late_fall=-0.002)).text
    assert "The loss rose by 0.2 % in the last third" in flat
    assert "Train longer" not in flat
    worse = verdict_of(replace(GOOD, masked_loss=1.1))
    assert "no better" in worse.text


def test_measured_from_end_to_end(digits):
    model = autoencoder()
    encoder = Encoder("tiny", model, GRAY, untrained=lambda: autoencoder())
    signals = measure(encoder, digits)
    assert signals.images == len(digits)
    assert signals.rank_share == pytest.approx(1.0)  # it is untrained itself
    assert signals.crop_retrieval == signals.untrained_crop_retrieval
    assert signals.skill == pytest.approx(0.0, abs=0.05)  # it predicts 0, about the mean of normalized patches
    constant = measure(Encoder("constant", ConstantEncoder(4), GRAY), digits)
    assert verdict_of(constant).word == "collapsed"


def test_weights_that_are_no_numbers_have_collapsed(digits):
    model = autoencoder()
    with torch.no_grad():
        model.encoder.blocks[0].norm1.weight.fill_(torch.nan)
    assert verdict_of(measure(Encoder("broken", model, GRAY), digits)).word == "collapsed"
