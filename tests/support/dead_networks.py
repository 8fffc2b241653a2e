"""Small networks with many zeros for tests of `compact`, and a slow oracle for chains of linear layers."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from networks import spread

ACTIVATIONS = {
    "relu": (nn.ReLU, lambda value: max(value, 0.0)),
    "tanh": (nn.Tanh, lambda value: torch.tanh(torch.tensor(value, dtype=torch.float64)).item()),
    "sigmoid": (nn.Sigmoid, lambda value: torch.sigmoid(torch.tensor(value, dtype=torch.float64)).item()),
}


@torch.no_grad()
def prune(model, share, seed):
    """Zero about this share of all weights at random, and some whole rows and columns; biases half as often."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        often = share if parameter.dim() > 1 else share / 2
        parameter.mul_(torch.rand(parameter.shape, generator=generator) > often)
        for dim in range(min(parameter.dim(), 2) if parameter.dim() > 1 else 0):
            gone = torch.rand(parameter.shape[dim], generator=generator) < share / 3
            parameter.index_fill_(dim, gone.nonzero().ravel(), 0)
    return model


def mlp(sizes, activation, *, bias=True):
    layers = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, bias=bias), ACTIVATIONS[activation][0]()]
    return nn.Sequential(*layers[:-1])


class Pictures(nn.Module):
    """Convolutions with a norm, a residual or a depthwise branch, then a head over pixels."""

    def __init__(self, padding, norm, branch, activation):
        super().__init__()
        self.padding, self.branch = padding, branch
        self.first = nn.Conv2d(3, 7, 3, padding=padding)
        self.norm = nn.BatchNorm2d(7) if norm else nn.Identity()
        self.act = ACTIVATIONS[activation][0]()
        groups = 7 if branch == "depthwise" else 1
        self.second = nn.Conv2d(7, 7, 3, padding=1 if branch == "residual" else padding, groups=groups)
        self.third = nn.Conv2d(7, 6, 1, bias=norm)
        self.head = nn.Linear(6 * 4, 5)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        y = self.act(self.second(x))
        y = self.act(self.third(x + y if self.branch == "residual" else y))
        return self.head(F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 2).flatten(1))


class Block(nn.Module):
    """Attention and an MLP between residual connections."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def finished(model, example, share, seed):
    """The model in float64 and eval mode, with nontrivial norms, and pruned."""
    spread(model.double())
    return prune(model.eval(), share, seed), example.double()


@st.composite
def pruned_networks(draw):
    """A pruned network and its example."""
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    kind = draw(st.sampled_from(("mlp", "pictures", "pictures", "pictures", "block")))
    share = draw(st.sampled_from((0.5, 0.8, 0.93, 0.98)))
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    if kind == "mlp":
        sizes = draw(st.lists(st.integers(2, 9), min_size=3, max_size=5))
        return finished(mlp(sizes, activation, bias=draw(st.booleans())), torch.randn(3, sizes[0]), share, seed)
    if kind == "pictures":
        options = st.tuples(st.sampled_from((0, 1)), st.booleans(), st.sampled_from(("none", "residual", "depthwise")))
        padding, norm, branch = draw(options)
        return finished(Pictures(padding, norm, branch, activation), torch.randn(3, 3, 9, 9), share, seed)
    return finished(Block(), torch.randn(3, 4, 8), share, seed)


def oracle(model, activation):
    """The live neurons of each hidden layer of a chain of linear layers, by counting degrees until none dies.

    A neuron without a live, varying input is a constant, and is folded into the biases of its readers.
    """
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [layer.weight.tolist() for layer in layers]
    biases = [layer.bias.tolist() for layer in layers]
    alive = [set(range(layer.in_features)) for layer in layers]
    changed = True
    while changed:
        changed = False
        for level in range(1, len(layers)):
            for neuron in sorted(alive[level]):
                fed = any(weights[level - 1][neuron][source] != 0 for source in alive[level - 1])
                read = any(
                    weights[level][reader][neuron] != 0
                    for reader in range(len(weights[level]))
                    if level + 1 == len(layers) or reader in alive[level + 1]
                )
                if not fed:
                    value = ACTIVATIONS[activation][1](biases[level - 1][neuron])
                    for reader in range(len(weights[level])):
                        biases[level][reader] += weights[level][reader][neuron] * value
                if not fed or not read:
                    alive[level].remove(neuron)
                    changed = True
    return alive[1:]
