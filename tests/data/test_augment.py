"""Crops: their law, their bits, their resampling against Pillow; evaluation transforms; normalization."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anechoic.data import Augment
from anechoic.data.augment import crop_boxes, resize
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator

RATIO = (3 / 4, 4 / 3)


def generator(count: int, *, seed: int = 0, visit: int = 0) -> SampleGenerator:
    return SampleGenerator(seed, torch.arange(count), torch.full((count,), visit))


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8, generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    low=st.floats(0.01, 1),
    tries=st.sampled_from([1, 2, 10]),
    seed=st.integers(0, 2**40),
)
def test_boxes_lie_inside_the_image(height: int, width: int, low: float, tries: int, seed: int) -> None:
    sizes = np.tile([height, width], (32, 1))
    top, left, h, w = crop_boxes(sizes, generator(32, seed=seed), scale=(low, 1.0), ratio=RATIO, tries=tries).T
    assert (h >= 1).all()
    assert (w >= 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()


def test_boxes_follow_the_law_of_the_random_resized_crop() -> None:
    """On a large square image no try is refused when the area is at most 3/4, so area and log aspect are uniform."""
    boxes = crop_boxes(np.full((20_000, 2), 2000), generator(20_000), scale=(0.2, 0.75), ratio=RATIO, tries=10)
    top, left, h, w = boxes.T.astype(float)
    area, aspect = h * w / 2000**2, np.log(w / h)
    for values, low, high in ((area, 0.2, 0.75), (aspect, math.log(3 / 4), math.log(4 / 3))):
        assert values.min() > low - 1e-3
        assert values.max() < high + 1e-3
        assert abs(values.mean() - (low + high) / 2) < 4 * (high - low) / math.sqrt(12 * 20_000)
        assert abs(values.std() - (high - low) / math.sqrt(12)) < 0.01 * (high - low)
    for share in (top / (2000 - h), left / (2000 - w)):
        assert abs(share.mean() - 0.5) < 0.01
        assert abs(share.std() - 1 / math.sqrt(12)) < 0.01


def reference_box(
    height: int, width: int, numbers: SampleGenerator, row: int, scale: tuple[float, float]
) -> tuple[int, ...]:
    """The usual loop, one sample at a time."""
    tries = numbers.uniform("crop", 10, 2)[row].tolist()
    place = numbers.uniform("place", 2)[row].tolist()
    for area_share, aspect_share in tries:
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_share)
        aspect = math.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * aspect_share)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(place[0] * (height - h + 1)), int(place[1] * (width - w + 1)), h, w
    if width / height < RATIO[0]:
        w, h = width, round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w, h = round(height * RATIO[1]), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("size", [(60, 40), (32, 32), (40, 400), (400, 40)])
def test_boxes_equal_an_explicit_loop(size: tuple[int, int]) -> None:
    numbers = generator(200, seed=3)
    boxes = crop_boxes(np.tile(size, (200, 1)), numbers, scale=(0.2, 1.0), ratio=RATIO, tries=10)
    assert boxes.tolist() == [list(reference_box(*size, numbers, row, (0.2, 1.0))) for row in range(200)]


def test_crop_that_never_fits_is_the_center() -> None:
    boxes = crop_boxes(np.array([[10, 1000], [1000, 10]]), generator(2), scale=(0.9, 1.0), ratio=RATIO, tries=10)
    assert boxes.tolist() == [[0, 493, 10, 13], [493, 0, 13, 10]]


def test_single_try_clips_the_box() -> None:
    boxes = crop_boxes(np.tile([32, 32], (500, 1)), generator(500), scale=(0.9, 1.0), ratio=RATIO, tries=1)
    assert (boxes[:, 2:] == 32).any()
    numbers = generator(500).uniform("crop", 1, 2).double()
    area = 32 * 32 * (0.9 + 0.1 * numbers[:, 0, 0])
    aspect = torch.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * numbers[:, 0, 1])
    assert boxes[:, 3].tolist() == torch.sqrt(area * aspect).round().clamp(max=32).tolist()
    assert boxes[:, 2].tolist() == torch.sqrt(area / aspect).round().clamp(max=32).tolist()


@pytest.mark.parametrize("sizes", [(224, 224, 64, 64), (40, 30, 64, 48), (333, 100, 32, 32), (7, 9, 16, 16)])
def test_resampling_is_pillows_antialiased_bicubic(sizes: tuple[int, int, int, int]) -> None:
    height, width, new_height, new_width = sizes
    image = picture(height, width)
    theirs = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((new_width, new_height), Image.Resampling.BICUBIC)
    ours = resize(image, new_height, new_width)
    assert (ours.permute(1, 2, 0).int() - torch.from_numpy(np.array(theirs)).int()).abs().max() <= 1


def test_crop_of_a_sample_is_independent_of_batch_and_layout() -> None:
    images = [picture(20 + k, 45 - k, seed=k) for k in range(12)]
    numbers = generator(12)
    together = Augment()(images, image_size=16, generator=numbers)
    for k in range(12):
        alone = SampleGenerator(0, torch.tensor([k]), torch.zeros(1, dtype=torch.int64))
        flipped_layout = images[k].permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert torch.equal(Augment()([images[k]], image_size=16, generator=alone)[0], together[k])
        assert torch.equal(Augment()([flipped_layout], image_size=16, generator=alone)[0], together[k])
    again = Augment()(images, image_size=16, generator=generator(12, visit=1))
    assert not torch.equal(again, together)


def test_full_crop_is_the_image_and_half_are_mirrored() -> None:
    image = picture(16, 16)
    batch = Augment(scale=(1.0, 1.0), ratio=(1.0, 1.0))([image] * 2000, image_size=16, generator=generator(2000))
    same = (batch == image).flatten(1).all(1)
    mirrored = (batch == image.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 0.46 < mirrored.float().mean() < 0.54
    unflipped = Augment(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)(
        [image] * 50, image_size=16, generator=generator(50)
    )
    assert (unflipped == image).all()


def test_padded_crop_is_a_window_of_the_padded_image() -> None:
    image = picture(8, 8)
    batch = Augment("pad", padding=2, flip=False)([image] * 400, image_size=8, generator=generator(400))
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = {padded[:, top : top + 8, left : left + 8].numpy().tobytes() for top in range(5) for left in range(5)}
    assert {item.numpy().tobytes() for item in batch} == windows


@pytest.mark.parametrize("kind", ["center", "none"])
def test_images_of_the_right_size_are_unchanged(kind: str) -> None:
    image = picture(32, 32)
    assert torch.equal(Augment(kind)([image], image_size=32, generator=generator(1))[0], image)  # type: ignore[arg-type]


def test_center_is_resize_256_and_crop_224() -> None:
    image = picture(300, 500)
    whole = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((426, 256), Image.Resampling.BICUBIC)
    left, top = (426 - 224) // 2, (256 - 224) // 2
    theirs = torch.from_numpy(np.array(whole.crop((left, top, left + 224, top + 224)))).permute(2, 0, 1)
    ours = Augment("center")([image], image_size=224, generator=generator(1))[0]
    assert (ours.int() - theirs.int()).abs().max() <= 1


def test_margin_never_enlarges_unless_asked() -> None:
    image = picture(70, 70)
    middle = Augment("center")([image], image_size=64, generator=generator(1))[0]
    assert torch.equal(middle, image[:, 3:67, 3:67])
    margin = Augment("center", resize="margin")([image], image_size=64, generator=generator(1))[0]
    assert torch.equal(margin, resize(image, 73, 73)[:, 4:68, 4:68])
    small = Augment("center")([picture(8, 8)], image_size=32, generator=generator(1))[0]
    assert torch.equal(small, resize(picture(8, 8), 32, 32))


def test_any_number_of_channels() -> None:
    for kind in ("crop", "pad", "center", "none"):
        batch = Augment(kind)([picture(40, 30, channels=5)] * 2, image_size=16, generator=generator(2))  # type: ignore[arg-type]
        assert batch.shape == (2, 5, 16, 16)
        assert batch.dtype == torch.uint8


@pytest.mark.parametrize(
    "options", [{"kind": "crp"}, {"scale": (0.0, 1.0)}, {"scale": (0.5, 0.2)}, {"ratio": (2.0, 1.0)}, {"tries": 0}]
)
def test_impossible_augmentations_are_refused(options: dict) -> None:
    with pytest.raises(UserError):
        Augment(**options)
