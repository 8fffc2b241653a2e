"""Linear layers, all kinds of convolutions, and the norms between them."""

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import Pictured, network, vectors


@network("linears", "exact", "first.weight", 0, example=vectors)
class Linears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.second = nn.Linear(12, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.second(F.relu(self.first(x)))))


@network("conv_bn_flatten", "exact", "second.weight", 0)
class ConvBnFlatten(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(12)
        self.head = nn.Linear(12 * 3 * 5, 5)

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)))
        x = F.relu(self.norm2(self.second(x)))
        return self.head(x.flatten(1))


@network("depthwise", "exact", "first.weight", 0)
class Depthwise(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 12, 1)

    def pattern(self, x):
        return self.pointwise(F.relu6(self.norm(self.depthwise(x))))


@network("depthwise_multiplier", "exact", "first.weight", 0)
class DepthwiseMultiplier(Pictured):
    def __init__(self):
        super().__init__(8, 24)
        self.depthwise = nn.Conv2d(8, 24, 3, padding=1, groups=8)

    def pattern(self, x):
        return F.relu(self.depthwise(x))


@network("grouped", "exact", "grouped.weight", 0)
class Grouped(Pictured):
    def __init__(self):
        super().__init__(12, 7)
        self.grouped = nn.Conv2d(12, 8, 3, padding=1, groups=2)
        self.last = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        return self.last(F.relu(self.grouped(x)))


@network("transposed", "exact", "up.weight", 1)
class Transposed(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.up = nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(12)

    def pattern(self, x):
        return F.relu(self.norm(self.up(x)))


@network("grouped_transposed", "exact", "first.weight", 0)
class GroupedTransposed(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=2)
        self.last = nn.Conv2d(12, 7, 1)

    def pattern(self, x):
        return self.last(F.relu(self.up(x)))


@network("conv1d", "exact", "first.weight", 0, example=lambda: torch.randn(3, 3, 9))
class Conv1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 12, 3)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = F.leaky_relu(self.norm(self.first(x)))
        return self.head(F.max_pool1d(self.second(x), 2).mean(2))


@network("conv3d", "exact", "first.weight", 0, example=lambda: torch.randn(3, 2, 4, 6, 5))
class Conv3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm3d(8)
        self.second = nn.Conv3d(8, 7, 2)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x = F.max_pool3d(F.silu(self.norm(self.first(x))), 2)
        return self.head(F.adaptive_avg_pool3d(self.second(x), 1).flatten(1))


@network("group_norm", "exact", "first.weight", 0)
class GroupNorm(Pictured):
    """Whole groups can be removed exactly."""

    def __init__(self):
        super().__init__(12, 12)
        self.norm = nn.GroupNorm(4, 12)

    def pattern(self, x):
        return F.relu(self.norm(x))


@network("instance_norm", "exact", "first.weight", 0)
class InstanceNorm(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.last = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        return self.last(F.relu(self.norm(x)))


@network("prelu", "exact", "prelu.weight", 0)
class Prelu(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.second = nn.Conv2d(8, 12, 1)
        self.prelu = nn.PReLU(12)

    def pattern(self, x):
        return self.prelu(self.second(x))


@network("dropout", "exact", "second.weight", 0)
class Dropout(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.second = nn.Conv2d(8, 12, 1)
        self.whole_channels = nn.Dropout2d(0.2)
        self.single_values = nn.Dropout(0.5)

    def pattern(self, x):
        return self.single_values(F.relu(self.second(self.whole_channels(x))))
