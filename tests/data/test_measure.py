"""What pretrain measures before it starts: type, channels and statistics, and what the network gets from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from anechoic.config import EIGHT_BIT, DataConfig, PixelConfig
from anechoic.data import Augment, Loader
from anechoic.data.measure import measure, parse_channels, reopened
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images with 3 channels of very different scales; the third spans decades."""
    root = tmp_path_factory.mktemp("bands")
    generator = np.random.default_rng(0)
    for number in range(24):
        noise = generator.standard_normal((2, 24, 24))
        decades = np.exp(generator.normal(6, 1.5, (1, 24, 24)))
        image = np.concatenate([noise * [[[5]], [[300]]] + [[[1000]], [[9000]]], decades]).clip(0, 65535)
        metadata = {"axes": "CYX", "Channel": {"Name": ["low", "mid", "high"]}}
        tifffile.imwrite(root / f"{number:02d}.ome.tif", image.astype(np.uint16), metadata=metadata)
    return root


@pytest.mark.parametrize("stretch", ["linear", "log", "asinh"])
@pytest.mark.parametrize("clip", [None, (0.5, 99.5)])
def test_measured_statistics_give_the_network_mean_0_and_deviation_1(folder: Path, stretch, clip) -> None:
    found = measure(folder, labels=False, channels=None, stretch=stretch, clip_percentiles=clip)
    assert (found.pixels.type, found.pixels.select, found.channels) == ("uint16", ("low", "mid", "high"), 3)
    assert found.mean is not None
    assert found.std is not None
    prepare = Preprocess(found.mean, found.std, 24, 3, found.pixels)
    batch = next(iter(Loader(found.source, image_size=24, batch_size=24, augment=Augment("none"))))
    x = prepare.apply(batch.images)
    assert torch.allclose(x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=0.05)
    assert torch.allclose(x.std(dim=(0, 2, 3)), torch.ones(3), atol=0.05)
    assert Preprocess.from_json(prepare.to_json()) == prepare
    assert torch.allclose(prepare.renormalize(prepare.invert(x)), x, atol=1e-5)
    assert "low, mid, high" in found.text
    assert ("percentiles" in found.text) == (clip is not None)
    if clip:
        assert float(x.amax()) < 20


def test_the_same_data_is_measured_the_same(folder: Path) -> None:
    first, second = (measure(folder, labels=False, channels="high,0", stretch="log") for _ in range(2))
    assert (first.mean, first.std, first.pixels) == (second.mean, second.std, second.pixels)
    assert first.pixels.select == ("high", "0")


@pytest.mark.parametrize(
    ("words", "expected"),
    [(None, (None, ())), (3, (3, ())), ("5", (5, ())), ("0,1,3", (3, ("0", "1", "3"))), ("2,", (1, ("2",)))],
)
def test_channels_are_a_number_or_a_list(words, expected) -> None:
    assert parse_channels(words) == expected


def test_wrong_channels_and_percentiles_are_one_sentence(folder: Path) -> None:
    with pytest.raises(UserError, match="have 3 channels, not 5: choose some by number or name"):
        measure(folder, labels=False, channels=5)
    with pytest.raises(UserError, match="names no channel, or one twice"):
        measure(folder, labels=False, channels="1,1")
    with pytest.raises(UserError, match="it has no channel 'GFP'; its channels are low, mid, high"):
        measure(folder, labels=False, channels="GFP")
    with pytest.raises(UserError, match="low < high"):
        measure(folder, labels=False, channels=None, clip_percentiles=(99, 1))


def test_pictures_stay_8_bit_and_gray_ones_are_measured(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 200, (12, 16, 16), dtype=np.uint8)
    for number, image in enumerate(values):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    color = measure(tmp_path, labels=False, channels=None)
    assert (color.pixels, color.channels, color.mean, color.std) == (EIGHT_BIT, 3, None, None)
    gray = measure(tmp_path, labels=False, channels=1)
    assert gray.pixels == EIGHT_BIT
    assert gray.mean == pytest.approx([values.mean() / 255], abs=0.01)
    assert gray.std == pytest.approx([values.std() / 255], abs=0.01)


def test_constant_channel_is_named_with_the_others_as_remedy(tmp_path: Path, caplog) -> None:
    image = np.random.default_rng(0).integers(0, 999, (3, 16, 16), dtype=np.uint16)
    image[1] = 0
    for number in range(12):
        tifffile.imwrite(tmp_path / f"{number}.tif", image, photometric="minisblack")
    found = measure(tmp_path, labels=False, channels=None)
    assert "Channel 1 is constant" in caplog.text
    assert "--channels 0,2" in caplog.text
    assert found.std is not None
    assert found.std[1] == 1.0


def test_a_run_is_reopened_as_it_was_frozen(folder: Path) -> None:
    asked = {"tile": 0, "overlap": 0, "stretch": "linear", "clip_percentiles": None}
    old = DataConfig(source=str(folder), channels=3, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    found = reopened(folder, old, labels=False, channels=None, **asked)
    assert (found.pixels, found.mean) == (EIGHT_BIT, old.mean)
    assert found.source.read(0).dtype == torch.uint8
    with pytest.raises(UserError, match="another --stretch"):
        reopened(folder, old, labels=False, channels=None, **{**asked, "stretch": "log"})


def test_preprocess_of_earlier_versions_loads_and_has_the_same_text() -> None:
    saved = {"mean": [0.5], "std": [0.25], "image_size": 8, "channels": 1}
    prepare = Preprocess.from_json(saved)
    assert prepare.to_json() == saved
    assert repr(prepare) == "Preprocess(mean=(0.5,), std=(0.25,), image_size=8, channels=1)"


def test_preprocess_takes_arrays_of_stored_values() -> None:
    prepare = Preprocess((100.0, 0.0), (10.0, 1.0), 4, 2, PixelConfig(type="uint16"))
    image = np.full((4, 4, 2), 120, np.uint16)
    assert prepare(image).amax(dim=(0, 2, 3)).tolist() == [2.0, 120.0]
    with pytest.raises(UserError, match="its pixels are uint8 and those of the data set uint16"):
        prepare(image.astype(np.uint8))
