"""Channels that are selected by their index, and values that are computed from a size."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import Pictured, network, vectors


def hidden(name, verdict):
    """Register a network that applies a function to its sixteen hidden channels."""

    def register(change):
        class Hidden(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.head = nn.Linear(7, 16), nn.Linear(16, 3)

            def forward(self, x):
                return self.head(change(self.first(x)))

        network(name, verdict, "first.weight", 0, example=vectors, only=True)(Hidden)
        return change

    return register


def written(x, place, value):
    x = x.clone()
    x[place] = value
    return x


# An indexed channel is kept. Others can be removed if it still has that index afterwards.
hidden("the_first_channel", "exact")(lambda x: x * x[:, 0, None].sigmoid())
hidden("a_slice_of_the_first", "exact")(lambda x: x * x[:, :1].sigmoid())
hidden("a_slice_of_the_last", "exact")(lambda x: x * x[:, -1:].sigmoid())
hidden("the_first_narrowed", "exact")(lambda x: x + x.narrow(1, 0, 1))
hidden("the_first_split_off", "exact")(lambda x: x + x.tensor_split([1], -1)[0])
hidden("the_first_of_all", "exact")(lambda x: x + x.flatten()[0])
hidden("the_first_written", "exact")(lambda x: written(x, (slice(None), 0), 1.0))
hidden("the_last_written", "exact")(lambda x: written(x, (slice(None), -1), 1.0))
hidden("the_first_four", "exact")(lambda x: x * x[:, :4].sum(-1, keepdim=True))
hidden("one_in_the_middle", "fixed")(lambda x: x * x[:, 3:4].sigmoid())
hidden("one_before_the_last", "fixed")(lambda x: x * x[:, -2, None].sigmoid())
hidden("two_in_the_middle", "fixed")(lambda x: x * x[:, 3:5].sum(-1, keepdim=True))
hidden("all_but_the_ends", "fixed")(lambda x: x * x[:, 1:15].sum(-1, keepdim=True))
hidden("two_near_the_end", "fixed")(lambda x: x * x[:, -4:-2].sum(-1, keepdim=True))

# A value that is computed from the width changes with it, however it gets into a tensor.
hidden("divided_by_the_size", "inexact")(lambda x: x / x.shape[-1])
hidden("size_in_full", "inexact")(lambda x: x / torch.full((1,), x.shape[-1]))
hidden("size_in_full_like", "inexact")(lambda x: x / torch.full_like(x[:, :1], x.shape[-1]))
hidden("size_in_new_full", "inexact")(lambda x: x / x.new_full((1,), x.shape[-1]))
hidden("size_filled_in", "inexact")(lambda x: x / torch.empty(1).fill_(x.shape[-1]))
hidden("size_written_in", "inexact")(lambda x: x / written(torch.zeros(1), 0, x.shape[-1]))
hidden("size_at_the_end_of_a_line", "inexact")(lambda x: x / torch.linspace(0, x.shape[-1], 3)[-1])
hidden("size_as_a_factor", "inexact")(lambda x: torch.addmm(x, x, torch.zeros(16, 16).to(x), beta=x.shape[-1]))
hidden("size_by_keyword", "inexact")(lambda x: x / torch.tensor(dtype=torch.float64, data=[x.shape[-1]]))
hidden("size_in_a_tensor_of_old", "inexact")(lambda x: x / torch.Tensor([x.shape[-1]]))
hidden("size_in_a_float_tensor", "inexact")(lambda x: x / torch.FloatTensor([x.shape[-1]]))
hidden("size_in_new", "inexact")(lambda x: x / x.new([x.shape[-1]]))
hidden("size_in_an_array", "inexact")(lambda x: x / torch.from_numpy(np.array([float(x.shape[-1])])))
hidden("size_counted_by_ones", "inexact")(lambda x: x / torch.ones(1, 1).expand(1, x.shape[-1]).sum())
hidden("size_counted_by_repeated_ones", "inexact")(lambda x: x / torch.ones(1, 1).repeat(1, x.shape[-1]).sum())

hidden("size_where_a_range_begins", "inexact")(lambda x: x / torch.arange(x.shape[-1], x.shape[-1] + 3)[0])
hidden("size_as_a_step", "inexact")(lambda x: x / torch.arange(0, 3 * x.shape[-1], x.shape[-1])[1])
hidden("size_in_a_complex_number", "inexact")(lambda x: (x * complex(x.shape[-1], 1)).real)
hidden("size_as_a_diagonal", "inexact")(lambda x: x + torch.ones(3, 3).triu(x.shape[-1] - 15).sum())
hidden("size_as_a_shift", "inexact")(lambda x: x.roll(x.shape[-1], 0))
hidden("size_as_a_place_in_order", "inexact")(lambda x: x + torch.eye(3, 17)[:1].kthvalue(x.shape[-1]).values)
hidden("size_as_a_derivative", "inexact")(lambda x: x + torch.special.polygamma(x.shape[-1] // 4, x.abs().sum() + 1))
hidden("size_in_bytes", "inexact")(lambda x: x / torch.tensor(bytearray([x.shape[-1]])))
hidden("size_as_a_number_of_copies", "inexact")(
    lambda x: x * x.sum(-1, keepdim=True)[None].expand(x.shape[-1], -1, -1).sum(0)
)

# The minimum over channels is 0 if one of them is masked.
hidden("norm_of_negative_order", "inexact")(
    lambda x: x * torch.linalg.vector_norm(x, ord=-torch.inf, dim=-1, keepdim=True)
)

# With fewer channels, the same number of groups would group them differently.
hidden("groups_in_a_literal", "fixed")(lambda x: F.group_norm(x, 4))


class OwnGroupNorm(nn.Module):
    """A hand-written group norm with affine weights."""

    def __init__(self, groups, channels):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return F.group_norm(x, self.groups, self.weight, self.bias)


@network("groups_in_an_attribute", "exact", "first.weight", 0, example=vectors)
class GroupsInAnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(7, 16), OwnGroupNorm(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.first(x)))


@network("a_group_for_each_channel", "exact", "first.weight", 0, example=lambda: torch.randn(3, 3, 4, 5))
class AGroupForEachChannel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 1), OwnGroupNorm(8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.head(self.norm(self.first(x)))


@network("norm_of_two_halves", "exact", "layer.weight", 0)
class NormOfTwoHalves(nn.Module):
    """One layer computes both halves. A group of the norm is removed with its half or with its channels."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 8, 1), nn.Linear(4, 6)
        self.norm, self.head = nn.GroupNorm(4, 12), nn.Conv2d(12, 3, 1)

    def forward(self, x):
        halves = self.layer(self.first(x).unflatten(1, (2, 4)).movedim(2, -1)).movedim(-1, 2)
        return self.head(self.norm(halves.flatten(1, 2)))


class WidthInArguments(Pictured):
    """An argument that does not affect shapes is computed from the number of channels."""

    def __init__(self):
        super().__init__(16, 16)


@network("kernel_from_width", "lossy", "first.weight", 0, only=True)
class KernelFromWidth(WidthInArguments):
    def pattern(self, h):
        kernel = h.shape[1] // 8 * 2 + 1
        return F.avg_pool2d(h, kernel, 1, kernel // 2)


@network("max_pool_from_width", "lossy", "first.weight", 0, only=True)
class MaxPoolFromWidth(WidthInArguments):
    def pattern(self, h):
        kernel = h.shape[1] // 8 * 2 + 1
        return F.max_pool2d(h, kernel, 1, kernel // 2)


@network("dilation_from_width", "lossy", "first.weight", 0, only=True)
class DilationFromWidth(WidthInArguments):
    def __init__(self):
        super().__init__()
        self.second = nn.Conv2d(16, 16, 3)

    def pattern(self, h):
        reach = max(h.shape[1] // 8, 1)
        return F.conv2d(h, self.second.weight, self.second.bias, padding=reach, dilation=reach)


@network("padding_from_width", "lossy", "first.weight", 0, only=True)
class PaddingFromWidth(WidthInArguments):
    def pattern(self, h):
        left = h.shape[1] // 4
        return F.pad(h, (left, 6 - left))[..., :10]


@network("kernel_from_another_width", "lossy", "first.weight", 0, only=True)
class KernelFromAnotherWidth(WidthInArguments):
    """The kernel size is computed from channels that are not pooled themselves."""

    def __init__(self):
        super().__init__()
        self.second = nn.Conv2d(16, 12, 1)
        self.head = nn.Linear(12, 5)

    def pattern(self, h):
        kernel = h.shape[1] // 8 * 2 + 1
        return F.avg_pool2d(self.second(h), kernel, 1, kernel // 2)


@network("mode_from_width", "lossy", "first.weight", 0, only=True)
class ModeFromWidth(WidthInArguments):
    def pattern(self, h):
        return F.gelu(h, approximate="tanh" if h.shape[1] > 10 else "none")


@network("dim_from_width", "inexact", "first.weight", 0, only=True)
class DimFromWidth(WidthInArguments):
    def pattern(self, h):
        return h.softmax(2 if h.shape[1] > 10 else 3)


@network("depthwise_groups_from_width", "exact", "first.weight", 0)
class GroupsFromWidth(WidthInArguments):
    """The number of groups of a depthwise convolution is a size."""

    def __init__(self):
        super().__init__()
        self.second = nn.Conv2d(16, 16, 3, groups=16, padding=1)

    def pattern(self, h):
        return F.conv2d(h, self.second.weight, self.second.bias, padding=1, groups=h.shape[1])


@network("constant_kernel", "exact", "first.weight", 0)
class ConstantKernel(WidthInArguments):
    def pattern(self, h):
        return F.avg_pool2d(F.pad(h, (1, 2, 2, 1)), 3, 1, 1)[..., 1:9, 1:11]


def beside_input(name, verdict, **options):
    """Register a network whose output is a function of its sixteen hidden channels and of the input."""

    def register(change):
        class BesideInput(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.head = nn.Linear(7, 16), nn.Linear(16, 3)

            def forward(self, x):
                h = torch.relu(self.first(x))
                return change(self, h, x)

        network(name, verdict, "first.weight", 0, example=vectors, only=True, **options)(BesideInput)
        return change

    return register


def by_width(h, narrow, wide):
    return narrow if h.shape[1] < 12 else wide


def two_results(net, h):
    doubled, tripled = 2 * h, 3 * h
    return net.head(by_width(h, doubled, tripled))


def two_outputs(net, h):
    one, other = net.head(h), net.head(2 * h)
    return by_width(h, one, other)


def through_data(h, change):
    written = h.clone()
    change(written.data)
    return written.sum(1)[:, None]


# The width is an argument of an operation on a tensor without channels.
beside_input("a_slice_of_the_input", "inexact")(lambda net, h, x: net.head(h) * x[:, : h.shape[1] // 4].sum(1)[:, None])
beside_input("a_list_as_an_index", "inexact")(lambda net, h, x: net.head(h) * x[:, [h.shape[1] // 4]])
beside_input("an_array_as_an_index", "inexact")(lambda net, h, x: net.head(h) * x[:, np.array([h.shape[1] // 4])])
beside_input("strides_by_the_size", "inexact")(
    lambda net, h, x: net.head(h) * x.as_strided((len(x), 1), (h.shape[1] // 4, 1))
)
beside_input("a_long_table_by_the_size", "inexact")(
    lambda net, h, _: net.head(h) * torch.tensor([np.sin(i / h.shape[1]) for i in range(100)])[50]
)
beside_input("a_dtype_by_the_size", "inexact")(
    lambda net, h, x: net.head(h) * x.to(by_width(h, torch.int64, torch.float64)).double()[:, :1]
)
beside_input("groups_of_the_input", "inexact")(
    lambda net, h, x: net.head(h) * F.group_norm(x[:, :4].repeat(1, 2), h.shape[1] // 4)[:, :1]
)
beside_input("dims_of_the_input", "inexact")(
    lambda net, h, x: net.head(h) * F.layer_norm(x.view(-1, 1, 7), (1, 7)[-max(h.shape[1] // 8, 1) :])[:, 0, :1]
)
beside_input("fixed_parts_of_the_input", "exact")(
    lambda net, h, x: net.head(h) * x[:, :4].sum(1)[:, None] * x[:, [2]] * x.as_strided((len(x), 1), (7, 1))
)

# The width decides which of two results is used.
beside_input("the_size_picks_a_result", "inexact")(lambda net, h, _: net.head(by_width(h, 2 * h, 3 * h)))
beside_input("the_size_picks_one_of_two_results", "inexact")(lambda net, h, _: two_results(net, h))
beside_input("the_size_picks_an_output", "inexact")(lambda net, h, _: two_outputs(net, h))
beside_input("the_size_ends_the_gradient", "inexact")(lambda net, h, _: net.head(by_width(h, h.detach(), h)))
beside_input("a_part_without_gradient", "exact")(lambda net, h, _: net.head(h + h.detach()))

# The width decides what happens in train mode.
beside_input("training_scales_small_ones", "inexact")(
    lambda net, h, _: net.head(2 * h if net.training and h.shape[1] < 16 else h)
)
beside_input("dropout_by_the_size", "inexact")(
    lambda net, h, _: net.head(F.dropout(h, 1 - h.shape[1] / 16, net.training))
)
beside_input("training_takes_another_channel", "exact")(
    lambda net, h, _: net.head(h) * (h[:, -1:] if net.training else h[:, :1]).exp()
)

# A removed channel is the number zero, which does not make a comparison or a position zero.
beside_input("a_match_with_zeros", "inexact")(
    lambda net, h, x: net.head(h) + (h == torch.relu(x[:, :1])).double().sum(1)[:, None]
)
beside_input("the_least_integer", "inexact")(
    lambda net, h, x: net.head(h) + torch.minimum((3 * h).long(), (3 * x[:, :1]).long()).double().sum(1)[:, None]
)
beside_input("a_sum_of_integers", "exact")(lambda net, h, _: net.head(h) + (3 * h).long().double().sum(1)[:, None])
beside_input("divided_by_the_input", "exact")(lambda net, h, x: net.head(h) + (h / x[:, :1]).sum(1)[:, None])
beside_input("written_through_data", "inexact")(lambda net, h, _: net.head(h) + through_data(h, torch.sigmoid_))
beside_input("zeros_written_through_data", "exact")(lambda net, h, _: net.head(h) + through_data(h, torch.relu_))
beside_input("the_median_of_all", "inexact")(lambda net, h, _: net.head(h) * (1 + h.median()))


@network("positions_of_a_pool", "inexact", "first.weight", 0, only=True)
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        h, where = F.max_pool2d(torch.relu(self.first(x)), 2, return_indices=True)
        return self.head(h).mean((2, 3)) + where.double().sum((1, 2, 3))[:, None]


@network("a_momentum_by_the_size", "inexact", "first.weight", 0, example=vectors, only=True)
class Momentum(nn.Module):
    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(7, 16), nn.Linear(16, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("spread", torch.ones(16))

    def forward(self, x):
        h = self.first(x)
        momentum = 1 / h.shape[1] if self.training else 0.0
        h = F.batch_norm(h, self.mean, self.spread, self.scale, self.shift, self.training, momentum)
        return self.head(torch.relu(h))
