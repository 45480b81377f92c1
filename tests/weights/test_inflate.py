"""A network for RGB inflated to n channels computes the same of images whose channels are alike."""

from __future__ import annotations

import pytest
import torch

from anechoic import build_model
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.weights.inflate import inflate

TINY = {"dim": 24, "depth": 2, "num_heads": 2, "image_size": 16, "patch_size": 4}
DECODER = {"decoder_dim": 24, "decoder_depth": 1, "decoder_num_heads": 2}
RGB = Preprocess((0.4, 0.5, 0.6), (0.2, 0.2, 0.2), 16, 3)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_inflated_network_agrees_on_images_with_equal_channels(channels):
    model = build_model("mae_tiny_patch4", **TINY, **DECODER).eval()
    wide, preprocess = inflate(model, RGB, channels)
    gray = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        wide.encoder(gray.expand(-1, channels, -1, -1)), model.encoder(gray.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5
    )
    noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(1))
    many = wide(gray.expand(-1, channels, -1, -1), noise).prediction.unflatten(-1, (-1, channels))
    colors = model(gray.expand(-1, 3, -1, -1), noise).prediction.unflatten(-1, (-1, 3))
    torch.testing.assert_close(many, colors.mean(-1, keepdim=True).expand_as(many), rtol=1e-4, atol=1e-5)
    assert preprocess.mean == pytest.approx((0.5,) * channels)


def test_only_networks_for_three_channels_are_inflated():
    gray = build_model("vit_tiny_patch4", **TINY, in_channels=1)
    with pytest.raises(UserError, match="not one for 1"):
        inflate(gray, RGB, 5)
    with pytest.raises(UserError, match="--channels 0"):
        inflate(build_model("vit_tiny_patch4", **TINY), RGB, 0)
