"""Inception-v3 as the Frechet inception distance uses it, up to its 2,048 pooled features.

It differs from the classifier of torchvision in its pooling, as the original TensorFlow graph did: padding does not
count in average pools, and the last block takes a maximum. Szegedy et al. 2016; Heusel et al. 2017.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv(nn.Module):
    """Convolution without bias, batch norm, ReLU; the names are those of the published weights."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        # A step of 1 keeps the size, a step of 2 does not pad.
        padding = (height // 2, width // 2) if stride == 1 else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class MixedA(nn.Module):
    """1x1, 5x5, two 3x3 and a pool, side by side, at 35 x 35."""

    def __init__(self, inputs: int, *, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 64)
        self.branch5x5_1, self.branch5x5_2 = Conv(inputs, 48), Conv(48, 64, 5)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(inputs, 64), Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3)
        self.branch_pool = Conv(inputs, pooled)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(average(x))], dim=1)


class MixedB(nn.Module):
    """From 35 x 35 to 17 x 17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(inputs, 64), Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], dim=1)


class MixedC(nn.Module):
    """7x7 convolutions as pairs of 1x7 and 7x1, at 17 x 17."""

    def __init__(self, inputs: int, *, width: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 192)
        self.branch7x7_1, self.branch7x7_2 = Conv(inputs, width), Conv(width, width, (1, 7))
        self.branch7x7_3 = Conv(width, 192, (7, 1))
        self.branch7x7dbl_1, self.branch7x7dbl_2 = Conv(inputs, width), Conv(width, width, (7, 1))
        self.branch7x7dbl_3, self.branch7x7dbl_4 = Conv(width, width, (1, 7)), Conv(width, width, (7, 1))
        self.branch7x7dbl_5 = Conv(width, 192, (1, 7))
        self.branch_pool = Conv(inputs, 192)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(average(x))], dim=1)


class MixedD(nn.Module):
    """From 17 x 17 to 8 x 8."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1, self.branch3x3_2 = Conv(inputs, 192), Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1, self.branch7x7x3_2 = Conv(inputs, 192), Conv(192, 192, (1, 7))
        self.branch7x7x3_3, self.branch7x7x3_4 = Conv(192, 192, (7, 1)), Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([three, seven, F.max_pool2d(x, 3, stride=2)], dim=1)


class MixedE(nn.Module):
    """Branches that end in a 1x3 and a 3x1 side by side, at 8 x 8; `maximum` chooses the pool."""

    def __init__(self, inputs: int, *, maximum: bool) -> None:
        super().__init__()
        self.maximum = maximum
        self.branch1x1 = Conv(inputs, 320)
        self.branch3x3_1 = Conv(inputs, 384)
        self.branch3x3_2a, self.branch3x3_2b = Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1))
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(inputs, 448), Conv(448, 384, 3)
        self.branch3x3dbl_3a, self.branch3x3dbl_3b = Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1))
        self.branch_pool = Conv(inputs, 192)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.maximum else average(x)
        return torch.cat(
            [
                self.branch1x1(x),
                self.branch3x3_2a(three),
                self.branch3x3_2b(three),
                self.branch3x3dbl_3a(double),
                self.branch3x3dbl_3b(double),
                self.branch_pool(pooled),
            ],
            dim=1,
        )


class Unpadded(Conv):
    """A 3x3 convolution that takes a pixel off every side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3)
        self.conv.padding = (0, 0)


class Inception(nn.Module):
    """Images (B, 3, 299, 299) in -1..1 -> features (B, 2048)."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Unpadded(32, 32)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80)
        self.Conv2d_4a_3x3 = Unpadded(80, 192)
        self.Mixed_5b, self.Mixed_5c = MixedA(192, pooled=32), MixedA(256, pooled=64)
        self.Mixed_5d, self.Mixed_6a = MixedA(288, pooled=64), MixedB(288)
        self.Mixed_6b, self.Mixed_6c = MixedC(768, width=128), MixedC(768, width=160)
        self.Mixed_6d, self.Mixed_6e = MixedC(768, width=160), MixedC(768, width=192)
        self.Mixed_7a = MixedD(768)
        self.Mixed_7b, self.Mixed_7c = MixedE(1280, maximum=False), MixedE(2048, maximum=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean(dim=(2, 3))
