"""The slow oracle of channel removal: a copy of the model in which every slice of every removed unit is zero."""

import copy
import math

import torch
from torch import nn


def call(model, example):
    """The output for an example: one tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(example, dict):
        return model(**example)
    if isinstance(example, tuple):
        return model(*example)
    return model(example)


def masked(model, graph, units):
    """A copy in which every slice of every unit is zero in the parameters, and in the running means."""
    copied = copy.deepcopy(model)
    zero_slices(dict(copied.named_parameters(remove_duplicate=False)), copied, graph, units)
    means = {name: buffer for name, buffer in copied.named_buffers() if name.endswith("running_mean")}
    zero_slices(means, copied, graph, units)
    return copied


@torch.no_grad()
def zero_slices(tensors, model, graph, units):
    """Zero the units' slices in tensors with the names and shapes of the model's."""
    for unit in units:
        for name, axis, index in graph.slices(int(unit)):
            if name in tensors and not is_direction(model, name, axis):
                slice_of(tensors[name], axis, int(index), groups_of(model, name)).zero_()


def slice_of(tensor, axis, index, groups=1):
    """A view of one index of an axis. On axis 1 of a grouped weight the index means (group, local index)."""
    if groups == 1 or axis != 1 or tensor.dim() < 3:
        return tensor.select(axis, index)
    group, local = divmod(index, tensor.shape[1])
    rows = tensor.shape[0] // groups
    return tensor[group * rows : (group + 1) * rows].select(1, local)


def owner_of(model, name):
    """The layer that a weight belongs to, which for a parametrized weight is not its direct parent."""
    path = name.split(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]
    return model.get_submodule(path)


def groups_of(model, name):
    owner = owner_of(model, name)
    return owner.groups if isinstance(owner, nn.modules.conv._ConvNd) else 1


def is_direction(model, name, axis):
    """Weight norm is g v / |v|: a zero g alone makes the weight zero, and a zero v would be 0 / 0."""
    if not name.endswith(".original1"):
        return False
    length = model.get_parameter(name.removesuffix("1") + "0")
    return length.shape[axis] > 1


def without_dropout(model):
    """The same model in train mode without dropout, so that it is deterministic."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model.train()


def leaves(output):
    """The tensors of a nested output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [leaf for value in values for leaf in leaves(value)]


def relative_error(wanted, got):
    """The largest max|a - b| / max|a| of the tensors of two nested outputs; infinite where shapes or NaN differ."""
    pairs = list(zip(leaves(wanted), leaves(got), strict=True))
    return max(tensor_error(a.detach(), b.detach()) for a, b in pairs)


def tensor_error(wanted, got):
    if wanted.shape != got.shape or not (wanted.isfinite().all() and got.isfinite().all()):
        return math.inf
    if wanted.numel() == 0:
        return 0.0
    return float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1e-9))
