"""Changes to a model, each with the way back: made all, or none.

A change is ready before it is made: what it needs is computed, and making it only puts things in place.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.record import noted
from keepk.cut.tensors import index_tensor, left_of, refuse_old_losses, replace_contents
from keepk.cut.undo import Change, Undo, replaced, undone_by
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits, Setting, write_attribute
from keepk.graph.layers import SELECTED, HeadwiseAttention, selecting


def _refuse_missing(module: nn.Module, modules: Mapping[str, nn.Module], edits: Edits) -> None:
    paths = [*(it.module for it in edits.settings), *(it.module for it in edits.selections), *edits.headwise]
    for path in paths:
        if path not in modules:
            raise ShrinkError(
                f"shrink: {type(module).__name__} has no module {path!r}, which has to change with its tensors. "
                f"Model and followers must be built like the model that was traced."
            )


def cut_module(module: nn.Module, tensors: Mapping[str, Tensor], edits: Edits) -> list[Change]:
    """The tensors with their gradients, the attributes, the two special layers, the record, in this order."""
    modules = dict(module.named_modules())
    _refuse_missing(module, modules, edits)
    changes: list[Change] = [new_contents(tensors[cut.tensor], cut) for cut in edits.cuts]
    changes += [new_setting(modules[setting.module], setting) for setting in edits.settings]
    for selection in edits.selections:
        changes.append(new_selection(modules[selection.module], selection.channels))
    for path in edits.headwise:
        changes.append(new_class(modules[path], HeadwiseAttention))
    changes += [flatten_again(found) for found in modules.values() if isinstance(found, nn.RNNBase)]
    changes.append(noted(module, edits))
    return changes


def new_contents(tensor: Tensor, cut: Cut) -> Change:
    """What is left of a tensor and of its gradient, in the same tensor object."""
    contents, grad = left_of(tensor, cut), None if tensor.grad is None else left_of(tensor.grad, cut)

    def change() -> Undo:
        old, old_grad = tensor.data, tensor.grad
        allow_old_losses = refuse_old_losses(tensor, cut.tensor)

        def undo() -> None:
            replace_contents(tensor, old)
            tensor.grad = old_grad
            allow_old_losses()

        with undone_by(undo):
            replace_contents(tensor, contents)
            tensor.grad = grad
            return undo

    return change


def new_setting(module: nn.Module, setting: Setting) -> Change:
    """Another value of an attribute."""
    outer = setting.attribute.partition(".")[0]

    def change() -> Undo:
        old = getattr(module, outer)

        def undo() -> None:
            setattr(module, outer, old)

        with undone_by(undo):
            write_attribute(module, setting, setting.new)
            return undo

    return change


def new_selection(module: nn.Module, channels: np.ndarray) -> Change:
    """A BatchNorm that reads these channels of its input."""
    index = index_tensor(channels, next(chain(module.parameters(), module.buffers())))

    def change() -> Undo:
        kind, old = type(module), getattr(module, SELECTED, None)

        def undo() -> None:
            module.__class__ = kind
            module.__dict__.pop(SELECTED, None)
            if old is not None:
                setattr(module, SELECTED, old)

        with undone_by(undo):
            setattr(module, SELECTED, index)
            module.__class__ = selecting(kind)
            return undo

    return change


def new_class(module: nn.Module, kind: type[nn.Module]) -> Change:
    """An attention that takes its sizes from its weights; a subclass of torch's has a forward of its own and stays."""
    new = kind if type(module) is nn.MultiheadAttention else type(module)
    return replaced(lambda: type(module), lambda it: setattr(module, "__class__", it), new)


def flatten_again(module: nn.RNNBase) -> Change:
    """On CUDA a recurrent layer keeps its weights in one piece of memory; if not, it is slower and warns."""

    def change() -> Undo:
        module.flatten_parameters()
        return lambda: None  # the old weights come back after this

    return change


def new_entry(entries: dict[Any, Any], key: Any, value: Tensor) -> Change:
    """Another tensor under a key."""
    return replaced(lambda: entries[key], lambda it: entries.__setitem__(key, it), value)


def forget_compiled(model: nn.Module) -> None:
    """torch.compile gives up after a few changes of shape, unless it starts anew."""
    if any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in model.modules()):
        torch.compiler.reset()
