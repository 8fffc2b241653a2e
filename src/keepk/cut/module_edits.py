"""The changes that a shrink makes to a model, each of which can be undone.

Every function here does its computations immediately and returns a change that only assigns the results. So the
expensive steps, which may run out of memory, are over before anything has changed.

`replace_contents` puts new contents of a different shape into a tensor object, so that everything that refers to the
object sees them. ``parameter.data = small`` keeps the object, its hooks and its name. But the autograd node that
accumulates its gradient remembers the old shape, and lives as long as any loss that was computed with it. Torch makes a
new node only if the dtype or device changes, so the tensor briefly gets contents of another dtype.

A loss from before the cut can no longer be back-propagated, because its graph has the old sizes. Usually torch raises
an error about shapes. Where it does not, the gradient would have the old shape, so a hook on the old node raises.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.record import noted
from keepk.errors import ShrinkError
from keepk.model.edits import Change, Cut, Edits, Setting, Undo, cut_tensor, replaced, undone_by, write_attribute
from keepk.model.layers import SELECTED, HeadwiseAttention, selecting

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def left_of(tensor: Tensor, cut: Cut) -> Tensor:
    """The part of a tensor that a cut leaves, in new memory and in the tensor's memory format."""
    left, layout = cut_tensor(tensor.detach(), cut), _layout(tensor)
    if layout is torch.contiguous_format:
        return left.contiguous()
    return torch.empty(left.shape, dtype=left.dtype, device=left.device, memory_format=layout).copy_(left)


def _layout(tensor: Tensor) -> torch.memory_format:
    """The memory format of a tensor."""
    layout = LAYOUTS.get(tensor.dim())
    if layout is None or not tensor.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    # A tensor of one channel or one pixel is contiguous in both formats; only its strides show which one was chosen.
    usual = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
    return layout if not tensor.is_contiguous() or tensor.stride() == usual else torch.contiguous_format


def replace_contents(tensor: Tensor, contents: Tensor) -> None:
    """Put new contents into a tensor object and drop its gradient, which callers set again."""
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32  # every device has both
    tensor.grad = None
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = contents


def refuse_old_losses(tensor: Tensor, name: str) -> Callable[[], None]:
    """Make the backward pass of every loss computed so far raise when it reaches this tensor.

    Returns:
        A function that undoes this.
    """
    if not tensor.requires_grad:
        return lambda: None

    def refuse(_gradients: Any) -> None:
        raise ShrinkError(
            f"backward: this loss was computed before {name!r} was cut to shape {tuple(tensor.shape)}, so its gradient "
            f"does not fit. Run the forward pass again."
        )

    node = torch.autograd.graph.get_gradient_edge(tensor).node
    handle = node.register_prehook(refuse)
    return handle.remove


def index_tensor(indices: np.ndarray, like: Tensor) -> Tensor:
    """Indices as a new tensor on the device of another one."""
    return torch.tensor(indices, device=like.device)


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
    # Only now, because the new contents of the tensors lie in separate pieces of memory.
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
    """A change that makes a BatchNorm read only these channels of its input."""
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
    # A user's subclass keeps its class, because the trace has followed its forward.
    new = kind if type(module) is nn.MultiheadAttention else type(module)
    return replaced(lambda: type(module), lambda it: setattr(module, "__class__", it), new)


def flatten_again(module: nn.RNNBase) -> Change:
    """A change that puts a recurrent layer's weights into one block of memory, which cuDNN needs to run at full speed.

    Without it, torch copies the weights in every forward pass and warns.
    """

    def change() -> Undo:
        module.flatten_parameters()
        return lambda: None  # undoing the cuts restores the old weights

    return change


def new_entry(entries: dict[Any, Any], key: Any, value: Tensor) -> Change:
    """A change that replaces the tensor under a key."""
    return replaced(lambda: entries[key], lambda it: entries.__setitem__(key, it), value)


def forget_compiled(model: nn.Module) -> None:
    """Discard compiled code of a model whose shapes have changed."""
    # torch.compile recompiles a function only a few times (8) and then stays in eager mode; a reset starts over.
    if any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in model.modules()):
        torch.compiler.reset()
