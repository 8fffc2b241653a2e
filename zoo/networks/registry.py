"""The table of small networks, each registered with the verdict that channel removal must reach on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

NETWORKS: dict[str, Callable[..., tuple[Any, Any]]] = {}
EXPECTED: "dict[str, Expected]" = {}


class Expected(NamedTuple):
    """The verdict on one axis of one tensor.

    exact    it has a unit that can be removed exactly
    lossy    it has units, each with a reason why removing it is not exact
    inexact  it has no unit that can be removed exactly; it may be lossy or fixed
    fixed    it has no units, and the reason is recorded
    """

    verdict: str
    tensor: str
    axis: int
    only: bool  # whether this axis has all of the network's channels


def pictures():
    return torch.randn(3, 3, 6, 10)


def vectors():
    return torch.randn(3, 7)


def sequences():
    return torch.randn(3, 5, 7)


def words():
    return torch.randint(0, 11, (3, 5))


def network(name, verdict, tensor, axis, *, example=pictures, only=False):
    """Register a class and the verdict on one axis of it: `NETWORKS[name]()` is a float64 model with its example."""

    def register(cls):
        assert name not in NETWORKS, f"two networks are called {name!r}"
        NETWORKS[name] = lambda seed=0: made(cls, example, seed)
        EXPECTED[name] = Expected(verdict, tensor, axis, only)
        return cls

    return register


def made(build, example, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().double()
        spread(model)
        return model, in_float64(example())


def in_float64(example):
    if isinstance(example, dict):
        return {key: in_float64(value) for key, value in example.items()}
    if isinstance(example, tuple):
        return tuple(in_float64(value) for value in example)
    return example.double() if example.is_floating_point() else example


@torch.no_grad()
def spread(model):
    """Make biases, scales and statistics distinct: zeros and ones would hide a slice that was not cut."""
    for parameter in model.parameters():
        if parameter.dim() < 2 or parameter.unique().numel() == 1:
            parameter.uniform_(0.4, 1.2).mul_(torch.randint(0, 2, parameter.shape) * 2 - 1)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)


class Pictured(nn.Module):
    """A convolution `first`, ReLU, the subclass's `pattern`, the mean over all pixels, and a linear `head`."""

    pattern: Callable[..., torch.Tensor]  # defined by subclasses

    def __init__(self, width, out):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.head = nn.Linear(out, 5)

    def forward(self, x):
        return self.head(self.pattern(F.relu(self.first(x))).mean((2, 3)))
