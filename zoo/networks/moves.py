"""Channels that move between axes and can still be removed: splits, shuffles, stacks, copies."""

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import Pictured, network


@network("channel_shuffle", "exact", "expand.weight", 0)
class ChannelShuffle(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.groups = 2
        self.expand = nn.Conv2d(8, 12, 1, groups=2)
        self.reduce = nn.Conv2d(12, 8, 1, groups=2)
        self.last = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        x = F.relu(self.expand(x))
        batch, channels, height, width = x.shape
        x = x.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2)
        return self.last(F.relu(self.reduce(x.reshape(batch, channels, height, width))))


@network("glu", "exact", "second.weight", 0)
class Glu(Pictured):
    def __init__(self):
        super().__init__(8, 6)
        self.second = nn.Conv2d(8, 12, 1)

    def pattern(self, x):
        return F.glu(self.second(x), 1)


@network("chunk", "exact", "first.weight", 0)
class Chunk(Pictured):
    def __init__(self):
        super().__init__(12, 7)
        self.left = nn.Conv2d(6, 7, 1)
        self.right = nn.Conv2d(6, 7, 1)

    def pattern(self, x):
        left, right = x.chunk(2, 1)
        return F.relu(self.left(left)) + self.right(right)


@network("split_sizes", "exact", "first.weight", 0)
class SplitSizes(Pictured):
    """The sizes are attributes, so they can change with the widths."""

    def __init__(self):
        super().__init__(12, 7)
        self.small, self.large = 4, 8
        self.left = nn.Conv2d(4, 7, 1)
        self.right = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        left, right = x.split([self.small, self.large], 1)
        return F.relu(self.left(left)) + self.right(right)


@network("split_by_width", "exact", "first.weight", 0)
class SplitByWidth(Pictured):
    """The size of a part is computed from the width, which is an attribute."""

    def __init__(self):
        super().__init__(12, 7)
        self.width, self.parts = 12, 2
        self.left = nn.Conv2d(6, 7, 1)
        self.right = nn.Conv2d(6, 7, 1)

    def pattern(self, x):
        left, right = x.split(self.width // self.parts, 1)
        return F.relu(self.left(left)) + self.right(right)


@network("one_number_for_two", "exact", "left.weight", 0)
class OneNumberForTwo(Pictured):
    """Two widths share one attribute, so they must stay equal."""

    def __init__(self):
        super().__init__(8, 12)
        self.width = 6
        self.left = nn.Conv2d(8, 6, 1)
        self.right = nn.Conv2d(8, 6, 1)

    def pattern(self, x):
        sizes = len(x), self.width, *x.shape[2:]
        left, right = (F.relu(branch(x)).reshape(sizes) for branch in (self.left, self.right))
        return torch.cat([left, right], 1)


@network("another_width", "fixed", "second.weight", 0, only=True)
class AnotherWidth(Pictured):
    """A width that is read from another tensor and is equal by coincidence."""

    def __init__(self):
        super().__init__(8, 8)
        self.second = nn.Conv2d(8, 8, 1)

    def pattern(self, x):
        return F.relu(self.second(x)).reshape(x.shape)


@network("halves_of_two_moments", "exact", "first.weight", 0)
class HalvesOfTwoMoments(Pictured):
    """Two halves of the channels at different positions, as in the read-out of a bidirectional LSTM."""

    half: int  # type: ignore[assignment]  # hides the method that casts to float16

    def __init__(self):
        super().__init__(12, 12)
        self.half = 6

    def pattern(self, x):
        return torch.cat([x[:, : self.half, 1:], x[:, self.half :, :-1]], 1)


@network("rows_of_a_table", "exact", "first.weight", 0)
class RowsOfATable(Pictured):
    """Python indexes the rows of a table; the entries of a row are channels."""

    def __init__(self):
        super().__init__(12, 12)
        self.shifts = nn.Parameter(torch.randn(3, 12))
        self.scales = nn.Parameter(torch.randn(2, 12))

    def pattern(self, x):
        for number in range(3):
            x = F.relu(x + self.shifts[number, :, None, None])
        left, right = self.scales.unbind(0)
        return x * (left * right)[:, None, None]


@network("row_by_width", "inexact", "first.weight", 0, only=True)
class RowByWidth(Pictured):
    """The number of channels decides which row of pixels is read."""

    def __init__(self):
        super().__init__(12, 12)

    def pattern(self, x):
        return x + x[:, :, x.shape[1] // 4, None]


@network("kernels_of_each_picture", "fixed", "kernel", 1)
class KernelsOfEachPicture(Pictured):
    """A grouped convolution with one group per image, whose weights are computed from that image."""

    def __init__(self):
        super().__init__(6, 8)
        self.kernel = nn.Parameter(torch.randn(8, 6, 1, 1))
        self.style = nn.Linear(6, 6)

    def pattern(self, x):
        weight = self.kernel * self.style(x.mean((2, 3)))[:, None, :, None, None]
        folded = x.reshape(1, -1, *x.shape[2:])
        return F.conv2d(folded, weight.flatten(0, 1), groups=len(x)).view(len(x), -1, *x.shape[2:])


@network("halves", "exact", "first.weight", 0)
class Halves(Pictured):
    """Two slices whose borders are computed from the shape."""

    def __init__(self):
        super().__init__(12, 7)
        self.left = nn.Conv2d(6, 7, 1)
        self.right = nn.Conv2d(6, 7, 1)

    def pattern(self, x):
        half = x.shape[1] // 2
        return F.relu(self.left(x[:, :half])) + self.right(x[:, half:])


@network("pixel_shuffle", "exact", "second.weight", 0)
class PixelShuffle(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.second = nn.Conv2d(8, 24, 1)
        self.last = nn.Conv2d(6, 7, 1)

    def pattern(self, x):
        return self.last(F.relu(F.pixel_shuffle(self.second(x), 2)))


@network("pixel_unshuffle", "exact", "first.weight", 0)
class PixelUnshuffle(Pictured):
    def __init__(self):
        super().__init__(6, 7)
        self.last = nn.Conv2d(24, 7, 1)

    def pattern(self, x):
        return self.last(F.relu(F.pixel_unshuffle(x, 2)))


@network("filled_by_slices", "exact", "left.weight", 0)
class FilledBySlices(Pictured):
    def __init__(self):
        super().__init__(8, 10)
        self.left = nn.Conv2d(8, 4, 1)
        self.right = nn.Conv2d(8, 6, 1)

    def pattern(self, x):
        left, right = self.left(x), self.right(x)
        border = left.shape[1]
        both = x.new_zeros(x.shape[0], border + right.shape[1], *x.shape[2:])
        both[:, :border] = left
        both[:, border:] = right
        return F.relu(both)


@network("stack_flatten", "exact", "left.weight", 0)
class StackFlatten(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.left = nn.Conv2d(8, 6, 1)
        self.right = nn.Conv2d(8, 6, 1)

    def pattern(self, x):
        return F.relu(torch.stack([self.left(x), self.right(x)], 2).flatten(1, 2))


@network("expand", "exact", "second.weight", 0)
class Expand(Pictured):
    """Every channel is copied next to itself, by broadcasting."""

    def __init__(self):
        super().__init__(8, 12)
        self.second = nn.Conv2d(8, 6, 1)

    def pattern(self, x):
        x = self.second(x)
        return F.relu(x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2))


@network("repeat", "exact", "second.weight", 0)
class Repeat(Pictured):
    """All channels, followed by a copy of all of them."""

    def __init__(self):
        super().__init__(8, 12)
        self.second = nn.Conv2d(8, 6, 1)

    def pattern(self, x):
        return F.relu(self.second(x).repeat(1, 2, 1, 1))


@network("flip", "exact", "first.weight", 0)
class Flip(Pictured):
    def __init__(self):
        super().__init__(8, 7)
        self.last = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        return self.last(x.flip(1))


@network("zero_preserving_sum", "exact", "first.weight", 0)
class ZeroPreservingSum(Pictured):
    """A sum over channels is unchanged if the removed ones are zero."""

    def __init__(self):
        super().__init__(8, 1)

    def pattern(self, x):
        return torch.tanh(x).sum(1, keepdim=True)
