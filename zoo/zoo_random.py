"""Random small networks, one per seed: all kinds of convolutions, residuals, splits, shuffles, attention.

A network is a list of values, each computed from one or two earlier ones by an operation of the table ``OPERATIONS``.
Sizes that an operation needs are bound as constants, as in much code, so no attribute reveals them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_networks.network import Network, images

OPERATION_COUNT = 9
CLASSES = 5

Choice = TypeVar("Choice")


class Apply(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Tensor:
        """Call the function."""
        return self.function(*values)


class ChannelsLast(nn.Module):
    """A layer over the last axis, applied to the channels of images."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, maps: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C', H, W]."""
        return self.layer(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """A gate per channel, computed from the means of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1), nn.Sigmoid())

    def forward(self, maps: Tensor) -> Tensor:
        """Multiply each channel by its gate."""
        return maps * self.gate(maps.mean((2, 3), keepdim=True))


class Attention(nn.Module):
    """Two heads over the pixels, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, 16)
        self.key = nn.Linear(width, 16)
        self.value = nn.Linear(width, 8)
        self.output = nn.Linear(8, width)

    def forward(self, maps: Tensor) -> Tensor:
        """The input plus the attention over its pixels."""
        batch, width, rows, columns = maps.shape
        pixels = maps.flatten(2).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (2, part.shape[-1] // 2)).transpose(1, 2)
            for part in (self.query(pixels), self.key(pixels), self.value(pixels))
        )
        shares = (query @ key.transpose(-1, -2) * 0.3).softmax(-1)
        mixed = self.output((shares @ value).transpose(1, 2).flatten(2))
        return maps + mixed.transpose(1, 2).reshape(batch, width, rows, columns)


class PerHalf(nn.Module):
    """One linear layer, applied to both halves of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width // 2, 6)

    def forward(self, maps: Tensor) -> Tensor:
        """Apply the layer to both halves and concatenate the results."""
        batch, width, rows, columns = maps.shape
        halves = maps.flatten(2).transpose(1, 2).reshape(batch, rows * columns, 2, width // 2)
        return self.layer(halves).flatten(2).transpose(1, 2).reshape(batch, -1, rows, columns)


def half(maps: Tensor, which: int) -> Tensor:
    return maps.chunk(2, 1)[which]


def last_half(maps: Tensor) -> Tensor:
    return maps[:, -(maps.shape[1] // 2) :]


def every_second(maps: Tensor) -> Tensor:
    return maps[:, ::2]


def reversed_channels(maps: Tensor) -> Tensor:
    return maps.flip(1)


def rolled_channels(maps: Tensor) -> Tensor:
    return torch.roll(maps, 1, 1)


def gated_linear_unit(maps: Tensor) -> Tensor:
    return F.glu(maps, 1)


def shuffled_channels(maps: Tensor, groups: int) -> Tensor:
    batch, width, rows, columns = maps.shape
    grouped = maps.view(batch, groups, width // groups, rows, columns)
    return grouped.transpose(1, 2).reshape(batch, width, rows, columns)


def shuffled_pixels(maps: Tensor) -> Tensor:
    return F.avg_pool2d(F.pixel_shuffle(maps, 2), 2)


def unshuffled_pixels(maps: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.interpolate(maps, scale_factor=2), 2)


def below_maximum(maps: Tensor) -> Tensor:
    return maps - maps.amax(1, keepdim=True)


def weighed_by_means(maps: Tensor, weights: Tensor) -> Tensor:
    return maps * weights.mean((2, 3), keepdim=True)


def concatenated(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right], 1)


def interleaved(left: Tensor, right: Tensor) -> Tensor:
    return torch.stack([left, right], 2).flatten(1, 2)


@dataclass(frozen=True)
class Draft:
    """A partly drawn network: the random generator, the width of every value, and the value to continue from."""

    dice: random.Random
    widths: list[int]
    source: int

    @property
    def width(self) -> int:
        """The channels of the value to continue from."""
        return self.widths[self.source]

    def choose(self, *options: Choice) -> Choice:
        """A random one of the options."""
        return self.dice.choice(options)

    def groups(self) -> int:
        """A random number of groups that divides the width."""
        return self.choose(*([groups for groups in (2, 3, 4) if self.width % groups == 0] or [1]))

    def alike(self) -> list[int]:
        """The values of the same width, without the input."""
        return [value for value in range(1, len(self.widths)) if self.widths[value] == self.width]


@dataclass(frozen=True)
class Step:
    """One drawn operation: its module, the values that it reads, and the width of its result."""

    module: nn.Module
    reads: tuple[int, ...]
    width: int


Operation = Callable[[Draft], Step | None]


def convolution(draft: Draft) -> Step:
    width = draft.choose(8, 12, 16, 24)
    module = nn.Conv2d(draft.width, width, draft.choose(1, 3), padding="same")
    return Step(module, (draft.source,), width)


def grouped_convolution(draft: Draft) -> Step:
    groups = draft.groups()
    width = groups * draft.choose(2, 4, 6)
    return Step(nn.Conv2d(draft.width, width, 3, padding=1, groups=groups), (draft.source,), width)


def depthwise(draft: Draft, times: int = 1) -> Step:
    width = times * draft.width
    return Step(nn.Conv2d(draft.width, width, 3, padding=1, groups=draft.width), (draft.source,), width)


def transposed_convolution(draft: Draft, groups: int = 1) -> Step:
    return Step(nn.ConvTranspose2d(draft.width, 8, 3, padding=1, groups=groups), (draft.source,), 8)


def linear(draft: Draft) -> Step:
    width = draft.choose(8, 16)
    return Step(ChannelsLast(nn.Linear(draft.width, width)), (draft.source,), width)


def per_half(draft: Draft) -> Step:
    return Step(PerHalf(draft.width), (draft.source,), 12)


def layer(make: Callable[[int], nn.Module]) -> Operation:
    """An operation with parameters that keeps the width."""
    return lambda draft: Step(make(draft.width), (draft.source,), draft.width)


def function(apply: Callable[[Tensor], Tensor], *, times: int = 1, over: int = 1) -> Operation:
    """An operation without parameters, which multiplies the width by ``times / over``."""
    return lambda draft: Step(Apply(apply), (draft.source,), times * draft.width // over)


def one_half(draft: Draft) -> Step:
    return Step(Apply(partial(half, which=draft.choose(0, 1))), (draft.source,), draft.width // 2)


def gate(draft: Draft) -> Step:
    draft.choose(0, 1)  # unused, but the later draws of a seed depend on it
    return Step(Apply(gated_linear_unit), (draft.source,), draft.width // 2)


def channel_shuffle(draft: Draft) -> Step:
    return Step(Apply(partial(shuffled_channels, groups=draft.groups())), (draft.source,), draft.width)


def with_another(apply: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """An operation on two different values of the same width."""

    def draw(draft: Draft) -> Step | None:
        others = [value for value in draft.alike() if value != draft.source]
        return Step(Apply(apply), (draft.source, draft.choose(*others)), draft.width) if others else None

    return draw


def concatenation(draft: Draft) -> Step:
    other = draft.choose(*range(1, len(draft.widths)))
    return Step(Apply(concatenated), (draft.source, other), draft.width + draft.widths[other])


def interleaving(draft: Draft) -> Step:
    return Step(Apply(interleaved), (draft.source, draft.choose(*draft.alike())), 2 * draft.width)


def when(fits: Callable[[int], bool], operation: Operation) -> Operation:
    """The operation if the width fits, else None."""
    return lambda draft: operation(draft) if fits(draft.width) else None


def even(width: int) -> bool:
    return width % 2 == 0


def halves(width: int) -> bool:
    return even(width) and width >= 8


# Do not reorder: the network of a seed depends on the order.
OPERATIONS: dict[str, Operation] = {
    "convolution": convolution,
    "grouped convolution": grouped_convolution,
    "depthwise convolution": depthwise,
    "depthwise multiplier": when(lambda width: width <= 16, partial(depthwise, times=2)),
    "batch norm": layer(nn.BatchNorm2d),
    "relu": function(F.relu),
    "sigmoid": function(torch.sigmoid),
    "add": with_another(torch.add),
    "concatenate": concatenation,
    "chunk": when(halves, one_half),
    "channel shuffle": channel_shuffle,
    "pixel shuffle": when(lambda width: width % 4 == 0 and width >= 16, function(shuffled_pixels, over=4)),
    "squeeze and excite": layer(SqueezeExcite),
    "linear": linear,
    "roll": function(rolled_channels),
    "flip": function(reversed_channels),
    "interleave": interleaving,
    "every second channel": when(halves, function(every_second, over=2)),
    "attention": layer(Attention),
    "transposed convolution": transposed_convolution,
    "grouped transposed convolution": when(even, partial(transposed_convolution, groups=2)),
    "group norm": when(lambda width: width % 4 == 0, layer(partial(nn.GroupNorm, 4))),
    "prelu": layer(nn.PReLU),
    "multiply by means": with_another(weighed_by_means),
    "slice": when(lambda width: width >= 8, function(last_half, over=2)),
    "gated linear unit": when(halves, gate),
    "subtract maximum": function(below_maximum),
    "pixel unshuffle": when(lambda width: width <= 12, function(unshuffled_pixels, times=4)),
    "layer norm": layer(lambda width: ChannelsLast(nn.LayerNorm(width))),
    "one layer for both halves": when(even, per_half),
}


class RandomNetwork(nn.Module):
    """A convolution, some random operations, and a classifier that reads the last two values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        width = dice.choice((8, 12, 16))
        steps = [Step(nn.Conv2d(3, width, 3, padding=1), (0,), width)]
        widths = [3, width]
        for _ in range(OPERATION_COUNT):
            draft = Draft(dice, widths, dice.choice(range(max(1, len(widths) - 4), len(widths))))
            step = OPERATIONS[dice.choice(tuple(OPERATIONS))](draft)
            if step is not None:
                steps.append(step)
                widths.append(step.width)
        self.modules_in_order = nn.ModuleList(step.module for step in steps)
        self.reads = tuple(step.reads for step in steps)
        self.classifier = nn.Linear(widths[-1] + widths[-2], CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """The logits."""
        values = [pictures]
        for module, reads in zip(self.modules_in_order, self.reads, strict=True):
            values.append(module(*(values[index] for index in reads)))
        return self.classifier(torch.cat([values[-1], values[-2]], 1).mean((2, 3)))


def make(seed: int) -> nn.Module:
    """The network of a seed in eval mode, with random BatchNorm statistics as after training."""
    torch.manual_seed(seed)
    network = RandomNetwork(seed).eval()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return network


def listing(seeds: range) -> list[Network]:
    """The networks of these seeds."""
    return [Network(f"random.{seed}", partial(make, seed), images(8), heads=("classifier",)) for seed in seeds]
