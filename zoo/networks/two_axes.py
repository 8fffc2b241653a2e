"""Products over two axes: a removed channel may be zero along one axis and not along the other.

Most networks have a counterpart in which both factors are zero for a removed channel, which must stay exact.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import network, vectors


class TwoAxes(nn.Module):
    """`pattern` combines all pairs of channels of `a` and `b`, and reduces one of the two axes."""

    pattern: Callable[..., torch.Tensor]  # defined by subclasses

    def __init__(self, out=8):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Conv2d(out, 2, 1)

    def forward(self, x):
        return self.head(self.pattern(self.a(x), self.b(x))).mean((2, 3))


@network("attention_maps_pool_features", "lossy", "b.weight", 0)
class AttentionMaps(TwoAxes):
    def pattern(self, a, b):
        return (torch.relu(a)[:, None] * torch.sigmoid(b)[:, :, None]).sum(1)


@network("attention_maps_of_relu", "exact", "b.weight", 0)
class ReluMaps(TwoAxes):
    def pattern(self, a, b):
        return (torch.relu(a)[:, None] * torch.relu(b)[:, :, None]).sum(1)


@network("features_of_attention_maps", "exact", "a.weight", 0)
class FeaturesOfMaps(TwoAxes):
    """The same product, reduced over the axis along which it is zero."""

    def __init__(self):
        super().__init__(6)

    def pattern(self, a, b):
        return (torch.relu(a)[:, None] * torch.sigmoid(b)[:, :, None]).sum(2)


@network("norm_of_pairs", "lossy", "b.weight", 0)
class NormOfPairs(TwoAxes):
    def pattern(self, a, b):
        return torch.linalg.vector_norm(torch.tanh(a)[:, None] * torch.exp(b)[:, :, None], dim=1)


@network("norm_of_pairs_of_zero", "exact", "b.weight", 0)
class NormOfZeroPairs(TwoAxes):
    def pattern(self, a, b):
        return torch.linalg.vector_norm(torch.tanh(a)[:, None] * torch.tanh(b)[:, :, None], dim=1)


@network("count_of_pairs", "lossy", "b.weight", 0)
class CountOfPairs(TwoAxes):
    def pattern(self, a, b):
        return (torch.relu(a)[:, None] * torch.cos(b)[:, :, None] > 0.1).sum(1).to(a.dtype)


@network("pairwise_distance", "lossy", "b.weight", 0)
class PairwiseDistance(TwoAxes):
    def pattern(self, a, b):
        return (torch.relu(a)[:, None] - torch.relu(b)[:, :, None]).abs().sum(1)


@network("product_cut_off_above", "exact", "b.weight", 0)
class CutOffProduct(TwoAxes):
    """Clamping a product from above preserves its zeros."""

    def pattern(self, a, b):
        return (torch.relu(a)[:, None] * torch.relu(b)[:, :, None]).clamp(max=1.0).sum(1)


@network("pairwise_sum", "lossy", "b.weight", 0)
class PairwiseSum(TwoAxes):
    def pattern(self, a, b):
        return (torch.relu(a)[:, None] + torch.relu(b)[:, :, None]).sum(1)


@network("outer_product_of_one_layer", "lossy", "a.weight", 0, only=True)
class OuterOfOne(TwoAxes):
    """The same channels on both axes, zero along one of them only."""

    def pattern(self, a, b):
        return (torch.relu(a)[:, None] * torch.sigmoid(a)[:, :, None]).sum(1) + b.mean(1, keepdim=True)


@network("outer_product_by_einsum", "lossy", "b.weight", 0)
class OuterByEinsum(TwoAxes):
    def pattern(self, a, b):
        return torch.einsum("bihw,bjhw->bjihw", torch.relu(a), torch.sigmoid(b)).sum(1)


@network("expanded_pairs", "lossy", "b.weight", 0)
class ExpandedPairs(TwoAxes):
    def pattern(self, a, b):
        rows = torch.relu(a)[:, None].expand(-1, b.shape[1], -1, -1, -1)
        return (rows * torch.sigmoid(b)[:, :, None].expand_as(rows)).sum(1)


@network("copies_that_are_summed", "inexact", "b.weight", 0, only=True)
class SummedCopies(TwoAxes):
    """A tensor is repeated for each channel of another and summed, so the sum depends on their number."""

    def pattern(self, a, b):
        return torch.relu(a)[:, None].expand(-1, b.shape[1], -1, -1, -1).sum(1) + b.sum(1, keepdim=True)


class MixedGates(nn.Module):
    """Experts that share one input and are mixed by gates: a sum over the experts of [expert, channel]."""

    mixed: Callable[..., torch.Tensor]  # defined by subclasses

    def __init__(self):
        super().__init__()
        self.experts, self.gates, self.head = nn.Linear(7, 8), nn.Linear(7, 6), nn.Linear(8, 3)
        self.table = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        return self.head(self.mixed(self.gates(x), self.experts(x)))


@network("mixture_of_sigmoid_gates", "lossy", "gates.weight", 0, example=vectors)
class SigmoidGates(MixedGates):
    def mixed(self, gates, values):
        return (torch.sigmoid(gates)[:, :, None] * F.relu(values)[:, None]).sum(1)


@network("mixture_of_relu_gates", "exact", "gates.weight", 0, example=vectors)
class ReluGates(MixedGates):
    def mixed(self, gates, values):
        return (F.relu(gates)[:, :, None] * F.relu(values)[:, None]).sum(1)


@network("activation_times_parameter", "exact", "gates.weight", 0, example=vectors)
class TimesParameter(MixedGates):
    """Removing a gate removes its row of the table, so the product is zero even where the gate is not."""

    def mixed(self, gates, values):
        return (torch.sigmoid(gates)[:, :, None] * self.table).sum(1) * F.relu(values)


@network("activation_plus_parameter", "exact", "gates.weight", 0, example=vectors)
class PlusParameter(MixedGates):
    """For a removed gate both terms are zero; for a removed column of the table only one of them is."""

    def mixed(self, gates, values):
        return F.relu(F.relu(gates)[:, :, None] + self.table).sum(1) * F.relu(values)


@network("activation_times_shared_parameter", "lossy", "gates.weight", 0, example=vectors)
class TimesSharedParameter(nn.Module):
    """A parameter without an axis for the gates, so that no slice of it is removed with a gate."""

    def __init__(self):
        super().__init__()
        self.gates, self.row, self.head = nn.Linear(7, 6), nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.cos(F.relu(self.gates(x))[:, :, None] * self.row).sum(1))


@network("in_place_on_a_slice", "lossy", "first.weight", 0, example=vectors, only=True)
class InPlaceOnSlice(nn.Module):
    """A write into a slice changes the whole tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(7, 8), nn.Linear(1, 3)

    def forward(self, x):
        h = F.gelu(self.first(x))
        h[:, : h.shape[1] // 2].add_(1.0)
        return self.head(h.sum(1, keepdim=True))


@network("view_taken_before_a_write", "lossy", "first.weight", 0, example=vectors, only=True)
class ViewBeforeWrite(InPlaceOnSlice):
    def forward(self, x):
        h = F.gelu(self.first(x))
        early = h.view(-1, h.shape[1])
        h.add_(1.0)
        return self.head(early.sum(1, keepdim=True))


@network("in_place_that_keeps_zero", "exact", "first.weight", 0, example=vectors)
class InPlaceThatKeepsZero(InPlaceOnSlice):
    def forward(self, x):
        h = F.gelu(self.first(x))
        early = h.view(-1, h.shape[1])
        h.mul_(2.0)
        h[:, : h.shape[1] // 2].sin_()
        return self.head(early.sum(1, keepdim=True))


@network("dynamic_kernel", "lossy", "first.weight", 0)
class DynamicKernel(nn.Module):
    """A kernel that is computed from the image is not zero for removed channels of its input."""

    def __init__(self):
        super().__init__()
        self.first, self.kernel, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.sigmoid(self.first(x))
        rows = self.kernel(x.mean((0, 2, 3)))[:, None, None, None].expand(-1, h.shape[1], 1, 1)
        return self.head(F.conv2d(h, rows).mean((2, 3)))


@network("written_into_zeros", "lossy", "first.weight", 0, example=vectors, only=True)
class WrittenIntoZeros(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(7, 8), nn.Linear(2, 3)

    def forward(self, x):
        h = torch.sigmoid(self.first(x))
        out = h.new_zeros(len(h), 2, h.shape[1])
        out[:, 0], out[:, 1] = h, 2 * h
        return self.head(out.sum(2))
