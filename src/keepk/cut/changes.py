"""The changes that a shrink makes to a model, each of which can be undone.

Every function here computes what its change needs and returns the change; making it only assigns. So the expensive
steps, which may run out of memory, are done before anything has changed.
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
                f"Build the model and its followers like the model that was traced."
            )


def cut_module(module: nn.Module, tensors: Mapping[str, Tensor], edits: Edits) -> list[Change]:
    """The changes that cut a module: tensors with their gradients, attributes, special layers, and the record.

    Args:
        module: The model, or a follower built like it.
        tensors: Its tensors by name.
        edits: The cuts.
    """
    modules = dict(module.named_modules())
    _refuse_missing(module, modules, edits)
    changes: list[Change] = [new_contents(tensors[cut.tensor], cut) for cut in edits.cuts]
    changes += [new_setting(modules[setting.module], setting) for setting in edits.settings]
    for selection in edits.selections:
        changes.append(new_selection(modules[selection.module], selection.channels))
    for path in edits.headwise:
        changes.append(new_class(modules[path], HeadwiseAttention))
    # After the tensors have their new contents, which lie in separate pieces of memory.
    changes += [flatten_again(found) for found in modules.values() if isinstance(found, nn.RNNBase)]
    changes.append(noted(module, edits))
    return changes


def new_contents(tensor: Tensor, cut: Cut) -> Change:
    """A change that cuts a tensor and its gradient, in the same tensor object."""
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
    """A change that sets an attribute of a module, or an entry of it."""
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
    """A change that lets a BatchNorm read only these channels of its input."""
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
    """A change that gives a plain `nn.MultiheadAttention` another class, such as one whose sizes follow its weights."""
    # A user's subclass has its own forward, which the trace has followed; it keeps its class.
    new = kind if type(module) is nn.MultiheadAttention else type(module)
    return replaced(lambda: type(module), lambda it: setattr(module, "__class__", it), new)


def flatten_again(module: nn.RNNBase) -> Change:
    """A change that puts a recurrent layer's weights into one block of memory, which cuDNN needs to run at full speed.

    Without it, torch copies the weights in every forward pass and warns.
    """

    def change() -> Undo:
        module.flatten_parameters()
        return lambda: None  # undoing the cuts, which happens later, brings the old weights back

    return change


def new_entry(entries: dict[Any, Any], key: Any, value: Tensor) -> Change:
    """A change that replaces the tensor under a key."""
    return replaced(lambda: entries[key], lambda it: entries.__setitem__(key, it), value)


def forget_compiled(model: nn.Module) -> None:
    """Discard compiled code of a model whose shapes have changed."""
    # torch.compile recompiles a function only a few times (8) and then stays in eager mode; a reset starts over.
    if any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in model.modules()):
        torch.compiler.reset()
