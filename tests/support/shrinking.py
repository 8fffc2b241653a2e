"""Helpers for the tests of `keepk.shrink`."""

import copy
from collections import OrderedDict
from typing import Any

import torch

from masked import call, leaves, without_dropout
from traced_once import traced_network

TOLERANCE = 1e-10
KINDS = ("linears", "conv_bn_flatten", "dense_block", "multihead_attention", "lstm", "gru", "tied_embedding", "caches")


def traced(name="linears", share=0.5):
    """A network with its example, its graph and units that can be removed."""
    model, example, graph = traced_network(name)
    return model, example, graph, graph.choose(share, seed=0)


def backward(model, example):
    loss = sum(leaf.square().mean() for leaf in leaves(call(without_dropout(model), example)))
    loss.backward()
    return loss


def step(model, example, optimizer):
    def closure():
        optimizer.zero_grad()
        return backward(model, example)

    optimizer.step(closure)


def output(model, example):
    with torch.no_grad():
        return call(model.eval(), example)


def left(tensor, name, graph, units):
    """A slow oracle for what is left of a dense tensor; not for grouped weights."""
    removed = {slice_ for unit in units for slice_ in graph.slices(int(unit))}
    for axis in range(tensor.dim()):
        kept = [index for index in range(tensor.shape[axis]) if (name, axis, index) not in removed]
        tensor = tensor.index_select(axis, torch.tensor(kept))
    return tensor


def check_gradients(model, example):
    """Check that gradients equal those of a copy, which has no autograd history."""
    model.zero_grad()
    backward(model, example)
    fresh = copy.deepcopy(model)
    fresh.zero_grad()
    backward(fresh, example)
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert ours.grad is theirs.grad is None or torch.equal(ours.grad, theirs.grad)


class Stubborn(OrderedDict[Any, Any]):
    """A dict that accepts a number of writes and then refuses one."""

    patience = 10**9

    def __setitem__(self, key, value):
        self.patience -= 1
        if self.patience == -1:
            raise RuntimeError("no more entries")
        super().__setitem__(key, value)
