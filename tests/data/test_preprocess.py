"""Preprocess: the one place that normalizes, there and back."""

import math

import numpy as np
import pytest
import torch

from anechoic.data.pixels import stretched
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError

COLOR = Preprocess((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 32, 3)


def test_apply_is_the_formula():
    images = torch.randint(0, 256, (2, 3, 5, 6), dtype=torch.uint8)
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (COLOR.mean, COLOR.std))
    out = COLOR.apply(images)
    assert out.dtype == torch.float32
    assert (out - (images.double() / 255 - mean) / std).abs().max() < 1e-6


def test_invert_undoes_apply_and_renormalize_undoes_invert():
    images = torch.randint(0, 256, (2, 3, 5, 6), dtype=torch.uint8)
    x = COLOR.apply(images)
    assert torch.equal((255 * COLOR.invert(x)).round().to(torch.uint8), images)
    torch.testing.assert_close(COLOR.renormalize(COLOR.invert(x)), x)


def test_what_is_no_pixels_stays_as_it_is():
    latents = torch.randn(2, 4, 8, 8)
    assert torch.equal(COLOR.apply(latents), latents)


def test_preprocess_json_round_trip():
    assert Preprocess.from_json(COLOR.to_json()) == COLOR


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [0.5]},
        {"std": [0.0] * 3},
        {"mean": [math.nan] * 3},
        {"image_size": 0},
        {"mean": "x"},
        {"channels": None},
    ],
)
def test_nonsense_is_refused_in_a_sentence(change):
    with pytest.raises(UserError):
        Preprocess.from_json({**COLOR.to_json(), **change})


def test_other_channels_are_refused():
    with pytest.raises(UserError, match="takes images of 3 channels and these have 1"):
        COLOR.apply(torch.zeros(1, 1, 4, 4, dtype=torch.uint8))


def test_stretched_maps_percentiles_of_each_channel_of_each_image_to_0_and_1():
    ramp = np.linspace(0, 1, 10_000).reshape(100, 100)
    images = np.stack([np.stack([1000 * ramp, 5 + 3 * ramp], -1), np.stack([ramp, np.full_like(ramp, 7.0)], -1)])
    found = stretched(images)
    assert found.min() == 0
    assert found.max() == 1
    np.testing.assert_allclose(found[0, :, :, 0], found[0, :, :, 1], atol=1e-9)
    assert (found[1, :, :, 1] == 0).all()
    np.testing.assert_allclose(stretched(images[:1] * [1.0, 0.0] + [0.0, 6.5], like=images[:1])[..., 1], 0.5, atol=1e-9)
