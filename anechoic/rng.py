"""Random numbers per sample: each is a function of (seed, purpose, sample id, visit, position).

Crops, masks, noise and times do not depend on batch size, number of ranks, device or earlier numbers, so a run can be
split or resumed anywhere. The generator is Philox4x32-10 (Salmon et al. 2011), counter-based.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Sequence[Tensor], key: Sequence[int]) -> list[Tensor]:
    """Return four words for four counter words (int64 tensors holding 32-bit values) and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A 32 x 32 bit product wraps in int64, but its bits are right: mask them after the shift.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return [c0, c1, c2, c3]


@dataclass(frozen=True)
class SampleGenerator:
    """Random numbers for a batch of samples. ids and visits: int64 tensors (B,) on the device of the numbers."""

    seed: int
    ids: Tensor
    visits: Tensor

    def words(self, purpose: str, count: int) -> Tensor:
        """Return (B, count) words of 32 bits. A longer row begins with the shorter one."""
        blocks = -(-count // 4)
        position = torch.arange(blocks, device=self.ids.device).expand(len(self.ids), blocks)
        ids, visits = self.ids[:, None].expand_as(position), self.visits[:, None].expand_as(position)
        key = (self.seed & WORD, (zlib.crc32(purpose.encode()) ^ (self.seed >> 32)) & WORD)
        out = philox([position, visits & WORD, ids & WORD, ids >> 32 & WORD], key)
        return torch.stack(out, dim=-1).flatten(1)[:, :count]

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Return (B, *shape) float32 in [0, 1), 24 bits each."""
        words = self.words(purpose, math.prod(shape))
        return ((words >> 8).to(torch.float32) * 2.0**-24).view(len(self.ids), *shape)

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Return (B, *shape) standard normal float32, by the Box-Muller transform of neighboring words."""
        count = math.prod(shape)
        pairs = -(-count // 2)
        words = self.words(purpose, 2 * pairs).view(len(self.ids), pairs, 2)
        # 1 - u is never 0, so the logarithm is finite.
        radius = torch.sqrt(-2 * torch.log1p(-((words[..., 0] >> 8).to(torch.float32) * 2.0**-24)))
        angle = (words[..., 1] >> 8).to(torch.float32) * (2 * math.pi * 2.0**-24)
        both = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
        return both.flatten(1)[:, :count].reshape(len(self.ids), *shape)

    def integers(self, purpose: str, high: int, *shape: int) -> Tensor:
        """Return (B, *shape) int64 in 0 .. high - 1 (high up to 2^31; the bias of the scaling is below high / 2^32)."""
        return (self.words(purpose, math.prod(shape)) * high >> 32).view(len(self.ids), *shape)
