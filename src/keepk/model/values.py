"""Values of meta tensors: those of small ones, attached to them, and those of parameters that are in a file.

A trace runs on the meta device, where tensors have shapes and no values. Those that depend on the example or on integer
buffers alone are computed beside it (`keep_values`), so that ``if mask.all()`` can be answered:

>>> mask = torch.ones(2, device="meta")
>>> keep_value_beside(mask, torch.ones(2))
>>> with WithValues():
...     bool((mask > 0).all())
True

The parameters of a model that is too large for the memory are read from a file when they are asked for (`store`):

>>> parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
>>> store(parameter, lambda: torch.tensor([1.0, 2.0]))
>>> is_stored(parameter), values_of(parameter)
(True, tensor([1., 2.]))
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepk.model.torch_internals import TorchDispatchMode, tree_map

LARGEST = 1 << 20  # elements up to which a meta tensor carries its values; bounds memory and time of a trace
LARGEST_BUFFER = 1 << 16  # the same for buffers, which are copied for every pass
_VALUE = "_keepk_value"  # an attribute of tensors of traced copies; the user's tensors never get it
_NESTED = (list, tuple, set)
_READ = "_keepk_read"  # an attribute of tensors of meta models that keepk itself has built


def keep_value_beside(tensor: Tensor, value: Tensor) -> None:
    """Attach values to a meta tensor, unless there are more than `LARGEST`."""
    if tensor.is_meta and not value.is_meta and value.numel() <= LARGEST:
        setattr(tensor, _VALUE, value)


def keep_buffers_beside(copied: nn.Module, model: nn.Module) -> None:
    """Attach the model's values to the integer and boolean buffers of a copy: counters, masks, position tables."""
    own = dict(model.named_buffers())
    for name, buffer in copied.named_buffers():
        value = value_of(own[name]) if name in own else None
        if value is not None and not value.is_floating_point() and value.numel() <= LARGEST_BUFFER:
            keep_value_beside(buffer, value.detach().clone())


def value_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, or those attached to a meta tensor; None if they are unknown."""
    return getattr(tensor, _VALUE, None) if tensor.is_meta else tensor


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors in the arguments or results of an operation, at any depth of lists, tuples and dicts."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: object, found: list[Tensor]) -> None:
    # A list that is passed on, because this is called several times in every operation of a trace, where nested
    # generators take twice as long.
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, _NESTED):
        for value in tree:
            _collect(value, found)


def keep_values(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Repeat an operation on the values attached to its inputs, and attach the results to its outputs.

    Does nothing unless all inputs have values. The outputs of an operation without inputs (``torch.arange``) have
    values; those of `empty` do not.
    """
    made = tensors_in(result)
    if not made or not all(tensor.is_meta and tensor.numel() <= LARGEST for tensor in made):
        return
    given = tensors_in((args, kwargs))
    known = all(not tensor.is_meta or hasattr(tensor, _VALUE) for tensor in given)
    if not known or (not given and "device" not in kwargs) or "empty" in operation._schema.name:
        for tensor in made:  # an in-place operation on unknown values leaves the attached ones out of date
            if hasattr(tensor, _VALUE):
                delattr(tensor, _VALUE)
        return

    def real(entry: Any) -> Any:
        if isinstance(entry, Tensor):
            return value_of(entry)
        return torch.device("cpu") if isinstance(entry, torch.device) else entry

    try:
        values = operation(*tree_map(real, list(args)), **tree_map(real, dict(kwargs)))
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return  # such as two devices in one operation: the values stay unknown
    for tensor, value in zip(made, tensors_in(values), strict=True):
        keep_value_beside(tensor, value)


class WithValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Carries values along operations on meta tensors, and answers Python's reads of those that are known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, on the values as well."""
        by_name = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and (value := value_of(args[0])) is not None:
            return value.item()
        result = func(*args, **by_name)
        keep_values(func, args, by_name, result)
        return result


def store(parameter: Tensor, read: Callable[[], Tensor]) -> None:
    """Let a meta tensor have the values that `read` returns. They must have its shape; their dtype may differ."""
    setattr(parameter, _READ, read)


def forget(parameters: Iterable[Tensor]) -> None:
    """Undo `store`, as when the tensors are cut and the stored values no longer fit."""
    for parameter in parameters:
        if is_stored(parameter):
            delattr(parameter, _READ)


def is_stored(parameter: Tensor) -> bool:
    """Whether the values of a tensor are stored."""
    return hasattr(parameter, _READ)


def values_of(parameter: Tensor) -> Tensor:
    """The values of a parameter without its gradient graph; stored ones are read from the file at every call."""
    read: Callable[[], Tensor] | None = getattr(parameter, _READ, None)
    return parameter.detach() if read is None else read()
