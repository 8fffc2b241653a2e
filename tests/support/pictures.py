"""Snapshots of models, optimizers and dicts as plain values, which are equal if nothing changed in between."""

from types import MappingProxyType

import torch
from torch import nn

from keepk.graph.graph import Graph

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.Size)


def picture(thing):
    """A snapshot of every tensor (object, bits, strides, gradient) and of every module (class, attributes)."""
    if isinstance(thing, torch.Tensor):
        return picture_of_tensor(thing)
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, dict | MappingProxyType):
        return [(key if isinstance(key, PLAIN) else id(key), picture(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [picture(value) for value in thing]
    if isinstance(thing, nn.Module | torch.optim.Optimizer):
        return id(thing), type(thing), picture(vars(thing))
    if isinstance(thing, Graph):
        return thing.alive.tolist(), {name: thing.shape(name) for name in thing.wiring.shapes}
    return id(thing)


def picture_of_tensor(tensor):
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    grad = None if tensor.grad is None else picture_of_tensor(tensor.grad)
    return id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, bits, grad
