"""`shrink`: take channels out for real, and everybody along who follows the model's weights.

All new tensors are made before the first old one is touched; putting them in place is then all or nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from keepk.cut.holders import refuse_follower, refuse_holders, refuse_optimizers
from keepk.cut.optimizer_state import restart_flat_history, state_per_weight
from keepk.cut.record import noted
from keepk.cut.tensors import index_tensor, left_of, replace_contents
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits, Setting, write_attribute
from keepk.graph.graph import Graph
from keepk.graph.layers import SELECTED, HeadwiseAttention, selecting
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap

Undo = Callable[[], None]


def shrink(
    model: nn.Module,
    graph: Graph,
    units: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    followers: Sequence[nn.Module | dict[str, Tensor]] = (),
) -> Edits:
    """Remove units from a model, in place.

    Parameter objects, module classes, names, ties, hooks, dtypes, devices, memory formats and `requires_grad` stay. The
    graph stays valid: any number of shrinks needs one trace.

    Args:
        model: The model that was traced.
        graph: What `keepk.trace` found.
        units: Numbers of units; see `Graph.spaces` and `Graph.choose`.
        optimizer: Its state of the cut parameters is cut along. Several may be given.
        followers: Copies of the model, averages of it (`AveragedModel`) or dicts of tensors with its names, which are cut
            along the same lines.

    Examples:
        >>> import keepk
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> graph = keepk.trace(net, torch.zeros(2, 8))
        >>> print(keepk.shrink(net, graph, [0, 5]))
        2 units removed: 3 tensors cut, 24 of their 72 numbers gone
        >>> net
        Sequential(
          (0): Linear(in_features=8, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=3, bias=True)
        )
    """
    inner = unwrap(model)
    named = {name: tensor for name, tensor, _ in named_tensors(inner)}
    _refuse_other_model(inner, graph, named)
    edits = graph.edits(units)
    if not len(edits.units):
        return edits
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    refuse_holders(model, edits)
    refuse_optimizers(optimizers, named, edits)
    following = [_tensors_of(follower) for follower in followers]
    for place, (follower, tensors) in enumerate(zip(followers, following, strict=True)):
        refuse_follower(follower, tensors, edits.cuts, place)
    changes = [_cut_module(inner, named, edits), *(_cut_states(o, named, edits.cuts) for o in optimizers)]
    for follower, tensors in zip(followers, following, strict=True):
        changes.append(_cut_follower(follower, tensors, edits))
    _all_or_nothing([change for each in changes for change in each])
    graph.removed(edits)
    for each in optimizers:
        restart_flat_history(each)
    _forget_compiled(model)
    return edits


def _refuse_other_model(model: nn.Module, graph: Graph, named: Mapping[str, Tensor]) -> None:
    for name in graph.wiring.shapes:
        expected = graph.shape(name)
        if name not in named or tuple(named[name].shape) != expected:
            got = f"has shape {tuple(named[name].shape)}" if name in named else "is not there"
            raise ShrinkError(
                f"shrink: the graph does not fit the model {type(model).__name__}: {name!r} should have shape {expected} and "
                f"{got}. Trace this very model; one that was cut elsewhere needs a trace of its own."
            )


Change = Callable[[], Undo]


def _all_or_nothing(changes: Sequence[Change]) -> None:
    """Make all changes; at the first that fails, take back those before it."""
    undos = list[Undo]()
    try:
        for change in changes:
            undos.append(change())
    except BaseException:
        for undo in reversed(undos):
            undo()
        raise


def _cut_module(module: nn.Module, tensors: Mapping[str, Tensor], edits: Edits) -> list[Change]:
    """The tensors with their gradients, the attributes, the two special layers, the record, in this order."""
    modules = dict(module.named_modules())
    changes: list[Change] = [_new_contents(tensors[cut.tensor], cut) for cut in edits.cuts]
    changes += [_new_setting(modules[setting.module], setting) for setting in edits.settings]
    for selection in edits.selections:
        changes.append(_new_selection(modules[selection.module], selection.channels))
    for path in edits.headwise:
        changes.append(_new_class(modules[path], HeadwiseAttention))
    changes += [_flatten_again(found) for found in modules.values() if isinstance(found, nn.RNNBase)]
    changes.append(noted(module, edits))
    return changes


def _new_contents(tensor: Tensor, cut: Cut) -> Change:
    contents, grad = left_of(tensor, cut), None if tensor.grad is None else left_of(tensor.grad, cut)

    def change() -> Undo:
        old, old_grad = tensor.data, tensor.grad

        def undo() -> None:
            replace_contents(tensor, old)
            tensor.grad = old_grad

        replace_contents(tensor, contents)
        if grad is not None:
            tensor.grad = grad
        return undo

    return change


def _new_setting(module: nn.Module, setting: Setting) -> Change:
    def change() -> Undo:
        old = getattr(module, setting.attribute)
        write_attribute(module, setting, setting.new)
        return lambda: setattr(module, setting.attribute, old)

    return change


def _new_selection(module: nn.Module, channels: np.ndarray) -> Change:
    index = index_tensor(channels, next(chain(module.parameters(), module.buffers())))

    def change() -> Undo:
        kind, old = type(module), module._buffers.get(SELECTED)

        def undo() -> None:
            module.__class__ = kind
            module._buffers.pop(SELECTED)
            if old is not None:
                module._buffers[SELECTED] = old

        module.register_buffer(SELECTED, index)
        module.__class__ = selecting(kind)
        return undo

    return change


def _new_class(module: nn.Module, kind: type[nn.Module]) -> Change:
    def change() -> Undo:
        old = type(module)
        if old is nn.MultiheadAttention:
            module.__class__ = kind
        return lambda: setattr(module, "__class__", old)

    return change


def _flatten_again(module: nn.RNNBase) -> Change:
    """On CUDA a recurrent layer keeps its weights in one piece of memory."""

    def change() -> Undo:
        module.flatten_parameters()
        return module.flatten_parameters

    return change


def _cut_states(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], cuts: Iterable[Cut]) -> list[Change]:
    changes = list[Change]()
    for cut in cuts:
        parameter = named[cut.tensor]
        if isinstance(parameter, nn.Parameter):
            mine = {id(tensor) for tensor in state_per_weight(optimizer, parameter)}
            state = optimizer.state.get(parameter, {})
            changes += [_new_entry(state, key, left_of(v, cut)) for key, v in state.items() if id(v) in mine]
    return changes


def _new_entry(entries: dict[Any, Any], key: Any, value: Tensor) -> Change:
    def change() -> Undo:
        old = entries[key]
        entries[key] = value
        return lambda: entries.__setitem__(key, old)

    return change


def _tensors_of(follower: object) -> Mapping[str, Tensor]:
    if isinstance(follower, dict):
        return follower
    if isinstance(follower, nn.Module):
        return {name: tensor for name, tensor, _ in named_tensors(_followed(follower))}
    raise ShrinkError(
        f"followers: got {type(follower).__name__}. Give modules (a copy, an AveragedModel) or dicts of tensors by name."
    )


def _followed(follower: nn.Module) -> nn.Module:
    return unwrap(follower.module if isinstance(follower, AveragedModel) else follower)


def _cut_follower(follower: object, tensors: Mapping[str, Tensor], edits: Edits) -> Iterator[Change]:
    if isinstance(follower, nn.Module):
        yield from _cut_module(_followed(follower), tensors, edits)
    elif isinstance(follower, dict):
        for cut in edits.cuts:
            yield _new_entry(follower, cut.tensor, left_of(tensors[cut.tensor], cut))


def _forget_compiled(model: nn.Module) -> None:
    """torch.compile gives up after a few changes of shape, unless it starts anew."""
    if unwrap(model) is not model or getattr(unwrap(model), "_compiled_call_impl", None) is not None:
        torch.compiler.reset()
