"""Channels that cannot be removed exactly: they must be reported as fixed or as lossy."""

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import Pictured, network, sequences


@network("layer_norm", "lossy", "first.weight", 0, example=sequences, only=True)
class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.first(x))))


@network("max_over_channels", "lossy", "first.weight", 0, only=True)
class MaxOverChannels(Pictured):
    def __init__(self):
        super().__init__(8, 8)

    def pattern(self, x):
        return x - x.amax(1, keepdim=True)


@network("mean_over_channels", "lossy", "first.weight", 0, only=True)
class MeanOverChannels(Pictured):
    def __init__(self):
        super().__init__(8, 8)

    def pattern(self, x):
        return x * x.mean(1, keepdim=True)


@network("softmax_gate", "lossy", "gate.weight", 0, only=True)
class SoftmaxGate(Pictured):
    """A channel that is only set to zero still contributes exp(0) to the softmax."""

    def __init__(self):
        super().__init__(8, 8)
        self.gate = nn.Conv2d(8, 8, 1)

    def pattern(self, x):
        return x * self.gate(x).softmax(1)


@network("sigmoid_then_sum", "inexact", "first.weight", 0, only=True)
class SigmoidThenSum(Pictured):
    """A zeroed channel adds sigmoid(0) = 0.5 to the sum; a removed one adds nothing."""

    def __init__(self):
        super().__init__(8, 1)

    def forward(self, x):
        return self.head(torch.sigmoid(self.first(x)).sum(1, keepdim=True).mean((2, 3)))


@network("roll", "fixed", "first.weight", 0)
class Roll(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.last = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        return self.last(x + x.roll(1, 1))


@network("strided_slice", "fixed", "first.weight", 0)
class StridedSlice(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.last = nn.Conv2d(4, 7, 1)

    def pattern(self, x):
        return self.last(x[:, ::2])


@network("topk_over_channels", "fixed", "first.weight", 0, only=True)
class TopkOverChannels(Pictured):
    def __init__(self):
        super().__init__(8, 4)

    def pattern(self, x):
        return x.topk(4, 1).values


@network("sort_over_channels", "fixed", "first.weight", 0, only=True)
class SortOverChannels(Pictured):
    def __init__(self):
        super().__init__(8, 8)

    def pattern(self, x):
        return x.sort(1).values


@network("literal_sizes", "fixed", "first.weight", 0, example=sequences, only=True)
class LiteralSizes(nn.Module):
    """Sizes are literals in forward, so there is no attribute that could change with the width."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 32)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        batch, time, _ = x.shape
        return self.head(F.relu(self.first(x)).view(batch, time, 8, 4).amax(2))


@network("index_by_tensor", "fixed", "first.weight", 0)
class IndexByTensor(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.register_buffer("order", torch.tensor([3, 1, 7, 0, 2, 6]))
        self.last = nn.Conv2d(6, 7, 1)

    def pattern(self, x):
        return self.last(x[:, self.order])


@network("output", "fixed", "head.weight", 0)
class Output(Pictured):
    """The outputs of a model keep their size."""

    def __init__(self):
        super().__init__(8, 8)

    def pattern(self, x):
        return x
