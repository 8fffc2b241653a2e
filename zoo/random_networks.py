"""Random small networks for tests of channel removal, drawn by hypothesis or, in slow tests, from a seed.

A network is a convolution, a list of random operations, each on one of the latest values, and a linear head over the
pixel means of all values that no operation reads. Every operation takes images [batch, channels, height, width] and an
earlier value of the same height and width, and returns images of that height and width.
"""

import random

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from networks import spread

NARROWEST, WIDEST = 6, 16
SIZES = ((5, 5), (6, 6), (6, 5))


class Operation(nn.Module):
    """An operation with random settings: `Class(width, other_width, pick)`, if `Class.fits(width, other_width)`.

    `pick(options)` chooses a setting. `self.width` is the number of channels that it returns.
    """

    def __init__(self, width, _other, pick):
        super().__init__()
        self.width = width
        self.build(width, pick)

    def build(self, width, pick):
        """Create the layers, and set `self.width` if it differs from `width`."""

    @staticmethod
    def fits(_width, _other):
        return True


class Even(Operation):
    """An operation that halves the channels, and leaves at least `NARROWEST`."""

    @staticmethod
    def fits(width, _other):
        return width % 2 == 0 and width // 2 >= NARROWEST


class Paired(Operation):
    """An operation on two values of the same width."""

    @staticmethod
    def fits(width, other):
        return width == other


def some_width(pick):
    return pick((6, 8, 9, 12, 16))


def some_groups(width, pick):
    return pick([groups for groups in (2, 3, 4) if width % groups == 0])


def divides(width):
    return width % 2 == 0 or width % 3 == 0


def over_pixels(layer, x):
    """Apply a layer over the last axis to the channels."""
    return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def as_sequence(x):
    return x.flatten(2).transpose(1, 2)


def as_pictures(sequence, like):
    return sequence.transpose(1, 2).unflatten(2, like.shape[2:])


# Layers


class Convolution(Operation):
    def build(self, width, pick):
        self.width = some_width(pick)
        kernel = pick((1, 3))
        self.conv = nn.Conv2d(width, self.width, kernel, padding=kernel // 2, bias=pick((True, False)))

    def forward(self, x, _other):
        return self.conv(x)


class GroupedConvolution(Operation):
    def build(self, width, pick):
        groups = some_groups(width, pick)
        self.width = groups * pick((3, 4))
        self.conv = nn.Conv2d(width, self.width, 3, padding=1, groups=groups)

    def forward(self, x, _other):
        return self.conv(x)

    @staticmethod
    def fits(width, _other):
        return divides(width)


class DepthwiseConvolution(Operation):
    def build(self, width, pick):
        self.width = width * pick((1, 2) if 2 * width <= WIDEST else (1,))
        self.conv = nn.Conv2d(width, self.width, 3, padding=1, groups=width)

    def forward(self, x, _other):
        return self.conv(x)


class TransposedConvolution(Operation):
    def build(self, width, pick):
        groups = pick((1, 2)) if width % 2 == 0 else 1
        self.width = pick((6, 8, 12))
        self.conv = nn.ConvTranspose2d(width, self.width, 3, padding=1, groups=groups)

    def forward(self, x, _other):
        return self.conv(x)


class PixelwiseLinear(Operation):
    def build(self, width, pick):
        self.width = some_width(pick)
        self.linear = nn.Linear(width, self.width)

    def forward(self, x, _other):
        return over_pixels(self.linear, x)


class Batchnorm(Operation):
    def build(self, width, pick):
        self.norm = nn.BatchNorm2d(width, affine=pick((True, True, False)))

    def forward(self, x, _other):
        return self.norm(x)


class Groupnorm(Operation):
    def build(self, width, pick):
        self.norm = nn.GroupNorm(some_groups(width, pick), width)

    def forward(self, x, _other):
        return self.norm(x)

    @staticmethod
    def fits(width, _other):
        return divides(width)


class Layernorm(Operation):
    def build(self, width, _pick):
        self.norm = nn.LayerNorm(width)

    def forward(self, x, _other):
        return over_pixels(self.norm, x)


class Prelu(Operation):
    def build(self, width, pick):
        self.activation = nn.PReLU(pick((1, width)))

    def forward(self, x, _other):
        return self.activation(x)


class Activation(Operation):
    def build(self, _width, pick):
        self.function = pick((torch.relu, torch.tanh, torch.sigmoid, F.silu, torch.cos))

    def forward(self, x, _other):
        return self.function(x)


class Attention(Operation):
    """Self-attention over the pixels, added to its input."""

    def build(self, width, pick):
        self.num_heads, self.scale = pick((2, 3)), 0.4
        self.query, self.key = (nn.Linear(width, self.num_heads * 3) for _ in range(2))
        self.value = nn.Linear(width, self.num_heads * 4)
        self.out = nn.Linear(self.num_heads * 4, width)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x, _other):
        pixels = as_sequence(x)
        query, key, value = (self.split(layer(pixels)) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(-1, -2) * self.scale).softmax(-1)
        return x + as_pictures(self.out((weights @ value).transpose(1, 2).flatten(2)), x)


class Recurrent(Operation):
    """An LSTM over the rows. Over all pixels it would have 25 or more steps, and a trace follows each of them."""

    def build(self, width, pick):
        both = pick((True, False))
        hidden = pick((3, 4)) if both else pick((6, 8))
        self.width = 2 * hidden if both else hidden
        self.rnn = nn.LSTM(width, hidden, batch_first=True, bidirectional=both)

    def forward(self, x, _other):
        rows = self.rnn(x.mean(3).transpose(1, 2))[0].transpose(1, 2)
        return rows[..., None].repeat(1, 1, 1, x.shape[3])


class Tied(Operation):
    """A matrix, and then its transpose."""

    def build(self, width, pick):
        self.inner = nn.Linear(width, some_width(pick))

    def forward(self, x, _other):
        return over_pixels(lambda y: F.linear(torch.tanh(self.inner(y)), self.inner.weight.t()), x)


class Shared(Operation):
    """One convolution, applied twice."""

    def build(self, width, _pick):
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x, _other):
        return self.conv(torch.relu(self.conv(x)))


# Joins


class Residual(Operation):
    def build(self, width, pick):
        inner = some_width(pick)
        self.conv1, self.conv2 = nn.Conv2d(width, inner, 3, padding=1), nn.Conv2d(inner, width, 1)

    def forward(self, x, _other):
        return x + self.conv2(torch.relu(self.conv1(x)))


class Sum(Paired):
    def forward(self, x, other):
        return x + other


class Product(Paired):
    def forward(self, x, other):
        return x * other.mean((2, 3), keepdim=True)


class Stack(Paired):
    def build(self, width, _pick):
        self.width = 2 * width

    def forward(self, x, other):
        return torch.stack([x, other], 2).flatten(1, 2)

    @staticmethod
    def fits(width, other):
        return width == other and 2 * width <= WIDEST


class Concatenation(Operation):
    def __init__(self, width, other, pick):
        super().__init__(width, other, pick)
        self.width = width + other

    def forward(self, x, other):
        return torch.cat([x, other], 1)

    @staticmethod
    def fits(width, other):
        return width + other <= WIDEST


class SqueezeGate(Operation):
    def build(self, width, _pick):
        self.squeeze, self.excite = nn.Conv2d(width, 3, 1), nn.Conv2d(3, width, 1)

    def forward(self, x, _other):
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class SoftmaxGate(Operation):
    def build(self, _width, pick):
        self.axis = pick((1, 3))

    def forward(self, x, _other):
        return x * x.softmax(self.axis)


# Moves


class Chunk(Even):
    def build(self, width, pick):
        self.width, self.part = width // 2, pick((0, 1))

    def forward(self, x, _other):
        return x.chunk(2, 1)[self.part]


class Half(Even):
    """A slice whose border is computed from the shape."""

    def build(self, width, pick):
        self.width, self.upper = width // 2, pick((True, False))

    def forward(self, x, _other):
        half = x.shape[1] // 2
        return x[:, half:] if self.upper else x[:, :half]


class Glu(Even):
    def build(self, width, _pick):
        self.width = width // 2

    def forward(self, x, _other):
        return F.glu(x, 1)


class Strided(Even):
    def build(self, width, _pick):
        self.width = width // 2

    def forward(self, x, _other):
        return x[:, ::2]


class Shuffle(Operation):
    def build(self, width, pick):
        self.groups = some_groups(width, pick)

    def forward(self, x, _other):
        return x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)

    @staticmethod
    def fits(width, _other):
        return divides(width)


class PixelShuffle(Operation):
    """A convolution to four times the channels, and a pixel shuffle that reduces them again."""

    def build(self, width, pick):
        self.width = pick((6, 7))
        self.conv = nn.Conv2d(width, 4 * self.width, 1)

    def forward(self, x, _other):
        return F.avg_pool2d(F.pixel_shuffle(self.conv(x), 2), 2)


class PixelUnshuffle(Operation):
    def build(self, width, _pick):
        self.conv = nn.Conv2d(4 * width, width, 1)

    def forward(self, x, _other):
        return self.conv(F.pixel_unshuffle(F.interpolate(x, scale_factor=2.0), 2))


class Roll(Operation):
    def forward(self, x, _other):
        return x.roll(1, 1)


class Flip(Operation):
    def forward(self, x, _other):
        return x.flip(1)


class Repeat(Operation):
    def build(self, width, _pick):
        self.width = 2 * width

    def forward(self, x, _other):
        return x.repeat(1, 2, 1, 1)

    @staticmethod
    def fits(width, _other):
        return 2 * width <= WIDEST


class Centered(Operation):
    """Subtracts a reduction over the channels from each of them."""

    def build(self, _width, pick):
        self.reduce = pick((torch.mean, torch.sum, torch.amax))

    def forward(self, x, _other):
        return x - self.reduce(x, 1, keepdim=True)


# Two axes


class Pairs(Operation):
    """All pairs of the channels of two values, reduced over one of the two axes."""

    def __init__(self, width, other, pick):
        super().__init__(width, other, pick)
        self.over = pick((1, 2))
        self.width = width if self.over == 1 else other

    def build(self, _width, pick):
        functions = (torch.relu, torch.tanh, torch.sigmoid, torch.cos)
        self.functions = pick(functions), pick(functions)
        self.pair = pick((torch.mul, torch.mul, torch.sub, torch.add))
        self.reduce = pick((torch.sum, torch.linalg.vector_norm, torch.mean, torch.amax))

    def forward(self, x, other):
        one, two = (function(value) for function, value in zip(self.functions, (x, other), strict=True))
        return self.reduce(self.pair(one[:, None], two[:, :, None]).abs(), dim=self.over)


class PairsWithParameter(Operation):
    """All pairs of channels and entries of a parameter."""

    def build(self, width, pick):
        self.table = nn.Parameter(torch.randn(4, pick((1, width)), 1, 1))
        self.pair, self.function = pick((torch.mul, torch.add)), pick((torch.relu, torch.cos, torch.tanh))

    def forward(self, x, _other):
        return self.function(self.pair(x[:, None], self.table)).sum(1)


# Other paths


class InTraining(Operation):
    """An operation that runs only in train mode."""

    def build(self, width, pick):
        self.drop, self.kind = nn.Dropout2d(0.2), pick(range(9 if width % 3 == 0 else 8))
        self.inner = nn.Conv2d(width, width, 1)

    def forward(self, x, _other):
        return (self.trained(x) if self.training else x) if self.kind else self.drop(x)

    def trained(self, x):
        changes = (
            lambda: x,
            lambda: x / x.shape[1],
            lambda: x.softmax(1),
            lambda: x.roll(1, 1),
            lambda: x - x.mean(1, keepdim=True),
            lambda: torch.relu(self.inner(x)),
            lambda: x * x.square().sum(1, keepdim=True).sqrt(),
            lambda: F.layer_norm(x, x.shape[1:]),
            lambda: x.view(len(x), 3, self.width // 3, *x.shape[2:]).flip(1).flatten(1, 2),
        )
        return changes[self.kind]()


class OnValues(Operation):
    """A branch on the sign of the mean of a channel."""

    def build(self, width, pick):
        self.left, self.right = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding=1)
        self.kind, self.channels = pick(range(4)), width

    def forward(self, x, _other):
        return self.left(x) if x[:, :1].mean() > 0 else self.other_way(x)

    def other_way(self, x):
        changes = (
            lambda: self.right(x),
            lambda: x.softmax(1),
            lambda: x.reshape(len(x), self.channels, *x.shape[2:]) * 2,
            lambda: x.flip(1),
        )
        return changes[self.kind]()


class OnWidth(Operation):
    """A branch on a number of channels that the cut copies of a trace may not have."""

    def build(self, width, pick):
        self.border, self.kind = pick(range(1, width)), pick((0, 1, 2))

    def forward(self, x, _other):
        if x.shape[1] > self.border:
            return x
        return (lambda: x * 2, lambda: x.flip(1), lambda: torch.relu(x))[self.kind]()


class ArgumentFromWidth(Operation):
    """A kernel size, dilation or padding that is computed from the width and does not affect the shape."""

    def build(self, width, pick):
        self.part, self.kind = pick((2, 4, width)), pick((0, 1, 2))
        self.conv = nn.Conv2d(width, width, 3)

    def forward(self, x, _other):
        reach = max(x.shape[1] // self.part, 1)
        if self.kind == 0:
            return F.avg_pool2d(F.pad(x, (reach,) * 4), 2 * reach + 1, 1)
        if self.kind == 1:
            return F.conv2d(x, self.conv.weight, self.conv.bias, padding=reach, dilation=reach)
        return F.pad(x, (reach, 0))[..., : x.shape[3]]


OPERATIONS = (
    Convolution,
    GroupedConvolution,
    DepthwiseConvolution,
    TransposedConvolution,
    PixelwiseLinear,
    Batchnorm,
    Groupnorm,
    Layernorm,
    Prelu,
    Activation,
    Attention,
    Recurrent,
    Tied,
    Shared,
    Residual,
    Sum,
    Product,
    Stack,
    Concatenation,
    SqueezeGate,
    SoftmaxGate,
    Chunk,
    Half,
    Glu,
    Strided,
    Shuffle,
    PixelShuffle,
    PixelUnshuffle,
    Roll,
    Flip,
    Repeat,
    Centered,
)
TRAPS = (Pairs, PairsWithParameter, InTraining, OnValues, OnWidth, ArgumentFromWidth)


class RandomNetwork(nn.Module):
    """A network whose operations, their inputs and their settings are chosen by `pick(options)`."""

    def __init__(self, count, pick, traps=()):
        super().__init__()
        width = some_width(pick)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.operations = nn.ModuleList()
        self.sources = []
        widths = [width]
        for _ in range(count):
            latest = range(len(widths))[-3:]
            source, other = pick(latest), pick(latest)
            sizes = widths[source], widths[other]
            # Traps and ordinary operations alternate, so that each trap has ordinary operations around it.
            kinds = traps if traps and len(widths) % 2 else OPERATIONS
            kind = pick([operation for operation in kinds if operation.fits(*sizes)])
            self.operations.append(kind(*sizes, pick))
            self.sources.append((source, other))
            widths.append(self.operations[-1].width)
        consumed = {source for source, _ in self.sources}
        self.left_over = [value for value in range(len(widths)) if value not in consumed]
        self.head = nn.Linear(sum(widths[value] for value in self.left_over), 5)

    def forward(self, x):
        values = [self.first(x)]
        for operation, (source, other) in zip(self.operations, self.sources, strict=True):
            values.append(operation(values[source], values[other]))
        return self.head(torch.cat([values[value] for value in self.left_over], 1).mean((2, 3)))


def built(pick, count, size, seed, traps=()):
    """A network in float64, and its example."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RandomNetwork(count, pick, traps).double()
        spread(model)
        return model, torch.randn(3, 3, *size, dtype=torch.float64)


def random_network(seed):
    """The network of a seed, and its example."""
    source = random.Random(seed)
    return built(source.choice, source.randint(4, 10), source.choice(SIZES), seed)


def random_trap(seed):
    """The network of a seed with operations that are easily cut wrong, and its example."""
    source = random.Random(seed)
    return built(source.choice, source.randint(3, 7), source.choice(SIZES), seed, TRAPS)


@st.composite
def random_networks(draw):
    """Networks and their examples; hypothesis shrinks a failing one."""
    return built(
        lambda options: draw(st.sampled_from(options)),
        draw(st.integers(4, 10)),
        draw(st.sampled_from(SIZES)),
        draw(st.integers(0, 2**16)),
    )
