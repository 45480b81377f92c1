"""Fine-tuning as an objective: augmented, mixed images against smoothed, mixed labels (MAE's recipe; Table 1, "FT").

RandAugment, random erasing, mixup and cutmix on batches of tensors, drawn from each sample's own numbers. Layer decay,
drop path and the schedule belong to the optimizer, the model and the recipe (recipes/transfer.py).
Legend: B batch, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.rng import SampleGenerator
from anechoic.training.objectives import Objective, Samples

# ---- RandAugment: every operation takes images (B, C, H, W) in 0 .. 1 and strengths (B,) in -1 .. 1 (sign: direction)


def affine(x: Tensor, matrices: Tensor) -> Tensor:
    """Resample by matrices (B, 2, 3) from output to input positions, in half image sizes; outside is the mean color."""
    fill = x.mean(dim=(2, 3), keepdim=True)
    grid = F.affine_grid(matrices, list(x.shape), align_corners=False)
    return F.grid_sample(x - fill, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + fill


def matrices(strength: Tensor, rows: Callable[[Tensor, Tensor, Tensor], Sequence[Sequence[Tensor]]]) -> Tensor:
    zero, one = torch.zeros_like(strength), torch.ones_like(strength)
    return torch.stack([torch.stack(list(row), dim=-1) for row in rows(strength, zero, one)], dim=1)


def rotate(x: Tensor, m: Tensor) -> Tensor:
    angle = m * math.radians(30)
    return affine(x, matrices(angle, lambda a, z, o: [[a.cos(), -a.sin(), z], [a.sin(), a.cos(), z]]))


def shear_x(x: Tensor, m: Tensor) -> Tensor:
    return affine(x, matrices(0.3 * m, lambda s, z, o: [[o, s, z], [z, o, z]]))


def shear_y(x: Tensor, m: Tensor) -> Tensor:
    return affine(x, matrices(0.3 * m, lambda s, z, o: [[o, z, z], [s, o, z]]))


def translate_x(x: Tensor, m: Tensor) -> Tensor:
    # 0.45 of the side; a side is 2 units long.
    return affine(x, matrices(0.9 * m, lambda s, z, o: [[o, z, s], [z, o, z]]))


def translate_y(x: Tensor, m: Tensor) -> Tensor:
    return affine(x, matrices(0.9 * m, lambda s, z, o: [[o, z, z], [z, o, s]]))


def blend(x: Tensor, base: Tensor, m: Tensor) -> Tensor:
    """base + factor (x - base), factor = max(0.1, 1 + 0.9 m): away from the base or towards it."""
    factor = (1 + 0.9 * m).clamp(min=0.1).view(-1, 1, 1, 1)
    return (base + factor * (x - base)).clamp(0, 1)


def gray(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)


def color(x: Tensor, m: Tensor) -> Tensor:
    return blend(x, gray(x), m)


def contrast(x: Tensor, m: Tensor) -> Tensor:
    return blend(x, gray(x).mean(dim=(2, 3), keepdim=True), m)


def brightness(x: Tensor, m: Tensor) -> Tensor:
    return blend(x, torch.zeros_like(x), m)


def sharpness(x: Tensor, m: Tensor) -> Tensor:
    """The base is smoothed by a 3 x 3 kernel; the border stays."""
    C = x.shape[1]
    kernel = x.new_ones(3, 3)
    kernel[1, 1] = 5
    smooth = F.conv2d(x, (kernel / 13).expand(C, 1, 3, 3), groups=C)
    base = x.clone()
    base[:, :, 1:-1, 1:-1] = smooth
    return blend(x, base, m)


def auto_contrast(x: Tensor, m: Tensor) -> Tensor:
    """Stretch each channel to 0 .. 1; a constant one is unchanged."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-6), x)


def equalize(x: Tensor, m: Tensor) -> Tensor:
    """Each channel's 256 levels mapped to their rank: level -> share of the pixels below it, the last level apart."""
    levels = (x * 255).round().long().flatten(2)  # (B, C, H W)
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    last = counts.gather(2, levels.amax(dim=2, keepdim=True))
    step = (counts.sum(dim=2, keepdim=True) - last) // 255
    below = counts.cumsum(dim=2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    mapped = table.gather(2, levels).view(x.shape) / 255
    return torch.where(step[..., None] > 0, mapped, x)


def invert(x: Tensor, m: Tensor) -> Tensor:
    return 1 - x


def posterize(x: Tensor, m: Tensor) -> Tensor:
    """Keep the 4 - floor(4 m) highest of 8 bits."""
    bits = 4 - (4 * m.abs()).floor().long()
    size = 2 ** (8 - bits.view(-1, 1, 1, 1))
    return ((x * 255).round().long() // size * size) / 255


def solarize(x: Tensor, m: Tensor) -> Tensor:
    """Invert pixels of at least 1 - m."""
    return torch.where(x >= 1 - m.abs().view(-1, 1, 1, 1), 1 - x, x)


def solarize_add(x: Tensor, m: Tensor) -> Tensor:
    """Add 110 / 255 m to pixels below a half."""
    return torch.where(x < 128 / 255, (x + 110 / 255 * m.abs().view(-1, 1, 1, 1)).clamp(max=1), x)


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    auto_contrast,
    equalize,
    invert,
    rotate,
    posterize,
    solarize,
    solarize_add,
    color,
    contrast,
    brightness,
    sharpness,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
)
# Those that take values of any range and channels of any meaning.
GEOMETRIC = (rotate, shear_x, shear_y, translate_x, translate_y)


def rand_augment(
    x: Tensor,
    generator: SampleGenerator,
    *,
    magnitude: float = 9,
    deviation: float = 0.5,
    layers: int = 2,
    operations: Sequence[Callable[[Tensor, Tensor], Tensor]] = OPERATIONS,
) -> Tensor:
    """Apply `layers` times a random operation with probability 0.5 at strength N(magnitude, deviation) / 10.

    Reads back from the device which images get which operation: computing all fifteen for all images costs more.
    """
    for layer in range(layers):
        choice = generator.integers(f"operation {layer}", len(operations), 1)[:, 0]
        u = generator.uniform(f"strength {layer}", 2)
        strength = (magnitude + deviation * generator.normal(f"magnitude {layer}", 1)[:, 0]).clamp(0, 10) / 10
        strength = torch.where(u[:, 0] < 0.5, strength, -strength)
        choice = torch.where(u[:, 1] < 0.5, choice, -1)
        x = x.clone()
        for number, operation in enumerate(operations):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                x[rows] = operation(x[rows], strength[rows])
    return x


# ---- erasing and mixing


def random_erase(x: Tensor, generator: SampleGenerator, *, probability: float) -> Tensor:
    """With this probability a box of 2 to 33 % of the area, aspect 0.3 to 3.3, becomes normal noise, pixel by pixel."""
    C, H, W = x.shape[1:]
    u = generator.uniform("erase", 5)
    area = H * W * (0.02 + (1 / 3 - 0.02) * u[:, 1])
    aspect = torch.exp(math.log(0.3) + (math.log(1 / 0.3) - math.log(0.3)) * u[:, 2])
    height, width = (area * aspect).sqrt().round().clamp(1, H), (area / aspect).sqrt().round().clamp(1, W)
    top, left = (u[:, 3] * (H - height + 1)).floor(), (u[:, 4] * (W - width + 1)).floor()
    box = boxes(top, left, height, width, H, W) & (u[:, 0] < probability).view(-1, 1, 1)
    return torch.where(box[:, None], generator.normal("erase noise", C, H, W), x)


def boxes(top: Tensor, left: Tensor, height: Tensor, width: Tensor, H: int, W: int) -> Tensor:
    """(B, H, W) bool: inside the box of each sample."""
    rows, columns = torch.arange(H, device=top.device), torch.arange(W, device=top.device)
    inside_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None])
    inside_columns = (columns >= left[:, None]) & (columns < (left + width)[:, None])
    return inside_rows[:, :, None] & inside_columns[:, None, :]


def smooth_labels(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """(B,) -> (B, K): 1 - smoothing more on the label, smoothing / K everywhere."""
    return F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


TABLE = 4096


@cache
def beta_table(a: float) -> Tensor:
    from scipy.stats import beta

    return torch.from_numpy(beta.ppf(np.linspace(0, 1, TABLE + 1), a, a)).float()


def beta_quantile(u: Tensor, a: float) -> Tensor:
    """Return the quantiles of Beta(a, a) at u in [0, 1), from a table, so that nothing is read back from a GPU."""
    table, place = beta_table(a).to(u.device), u * TABLE
    low = place.long()
    return torch.lerp(table[low], table[low + 1], place - low)


def mix(
    x: Tensor, targets: Tensor, generator: SampleGenerator, *, mixup: float, cutmix: float, switch: float
) -> tuple[Tensor, Tensor]:
    """Mix pairs: lam own + (1 - lam) other, or a box of area 1 - lam of the other pasted in. lam ~ Beta(a, a).

    Samples 2 i and 2 i + 1 are a pair and the first one's random numbers decide. So ranks and micro-batches of an even
    size mix as the whole batch does. Of an odd number the last sample is not mixed.
    """
    if max(mixup, cutmix) <= 0:
        return x, targets
    H, W = x.shape[2:]
    rows = torch.arange(len(x), device=x.device)
    partner = (rows ^ 1).clamp(max=len(x) - 1)
    choice, share, row, column = generator.uniform("mix", 4)[torch.minimum(rows, partner)].unbind(1)
    probability = 0.0 if cutmix <= 0 else 1.0 if mixup <= 0 else switch
    cutting = choice < probability
    lam = beta_quantile(share, mixup) if mixup > 0 else torch.ones_like(share)
    if cutmix > 0:
        side = (1 - beta_quantile(share, cutmix)).sqrt()
        top, bottom, left, right = (
            ((middle * size).floor() + sign * ((size * side).floor() / 2).floor()).clamp(0, size)
            for middle, size in ((row, H), (column, W))
            for sign in (-1, 1)
        )
        box = boxes(top, left, bottom - top, right - left, H, W) & cutting.view(-1, 1, 1)
        pasted = torch.where(box[:, None], x[partner], x)
        lam = torch.where(cutting, 1 - (bottom - top) * (right - left) / (H * W), lam)
    blended = torch.lerp(x[partner], x, lam.view(-1, 1, 1, 1))
    mixed = torch.where(cutting.view(-1, 1, 1, 1), pasted, blended) if cutmix > 0 else blended
    return mixed, torch.lerp(targets[partner], targets, lam[:, None])


# ---- the objective


def full_precision(device_type: str) -> AbstractContextManager:
    """Switch autocast off, on devices that have it."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def finetuning(
    *,
    preprocess: Preprocess | None,
    num_classes: int,
    smoothing: float = 0.1,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    switch: float = 0.5,
    magnitude: float = 9.0,
    erase: float = 0.25,
) -> Objective:
    """Soft cross-entropy on augmented and mixed images in training; plain cross-entropy and accuracy in evaluation.

    preprocess: how the images were normalized, since they are augmented as pixels; stored values are only moved, since
    they have no range. magnitude 0 turns RandAugment off.
    """
    for name, value in {"smoothing": smoothing, "switch": switch, "erase": erase}.items():
        if not 0 <= value <= 1:
            raise UserError(f"The option {name} of fine-tuning is {value}: choose a value from 0 to 1.")

    def augmented(images: Tensor, generator: SampleGenerator) -> Tensor:
        if magnitude > 0:
            assert preprocess is not None, "the training loop passes it"
            if preprocess.pixels.stored:
                images = rand_augment(images, generator, magnitude=magnitude, operations=GEOMETRIC)
            else:
                pixels = preprocess.invert(images).clamp(0, 1)
                images = preprocess.renormalize(rand_augment(pixels, generator, magnitude=magnitude))
        return random_erase(images, generator, probability=erase) if erase else images

    def loss(model: Any, batch: Samples, generator: SampleGenerator) -> dict[str, Tensor]:
        assert batch.labels is not None, "the training loop requires labels for this objective"
        if not model.training:
            logits = model(batch.images)
            accuracy = (logits.argmax(dim=1) == batch.labels).float().mean()
            return {"loss": F.cross_entropy(logits, batch.labels), "accuracy": accuracy}
        targets = smooth_labels(batch.labels, num_classes, smoothing)
        # bfloat16 would move pixel positions by up to half a pixel at 224 pixels.
        with full_precision(batch.images.device.type):
            images = augmented(batch.images, generator)
        images, targets = mix(images, targets, generator, mixup=mixup, cutmix=cutmix, switch=switch)
        return {"loss": F.cross_entropy(model(images), targets)}

    return loss
