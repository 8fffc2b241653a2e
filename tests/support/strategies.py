"""Hypothesis strategies for the property tests: small real networks, awkward weights, optimizers."""

import itertools

import torch
from hypothesis import strategies as st
from torch import nn

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

seeds = st.integers(0, 2**31 - 1)

# An eps that float16 can represent: the default 1e-8 becomes 0 there, and torch divides 0 by 0.
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4, foreach=False),
    "adam_foreach": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4, amsgrad=True, foreach=True),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-4, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-4, initial_accumulator_value=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


def ordinary(shape, generator):
    return torch.randn(shape, generator=generator)


def sixteen_levels(shape, generator):
    return torch.randint(-8, 8, shape, generator=generator) / 8


def mostly_zero(shape, generator):
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.05)


def all_equal(shape, _generator):
    return torch.full(shape, 0.5)


FILLS = (ordinary, sixteen_levels, mostly_zero, all_equal)


@st.composite
def small_nets(draw, dtypes=DTYPES):
    """A network of a few layers (dense, convolutional, with BatchNorm) with awkward weights."""
    widths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += draw(st.sampled_from([dense_block, conv_block]))(before, after)
    net = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(draw(seeds))
    fill = draw(st.sampled_from(FILLS))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(fill(parameter.shape, generator))
    return net.to(dtype)


def dense_block(before, after):
    return [nn.Linear(before, after), nn.ReLU()]


def conv_block(before, after):
    return [nn.Conv2d(before, after, 3), nn.BatchNorm2d(after)]


def mlp(widths=(6, 5, 4, 2), dtype=torch.float32, seed=0):
    """A small network that can be trained."""
    torch.manual_seed(seed)
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def train_step(model, optimizer, seed=0):
    """Make one update, with a closure if the optimizer needs one."""
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    inputs = torch.randn(16, first.shape[1], generator=generator).to(first.dtype)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
