"""Values in a traced forward pass: numbers that become tensors, and tensors that Python looks at.

A trace runs on the meta device, where tensors have shapes and no values. Two things bring values back:

* Tensors that depend on the example alone (token ids, positions, masks) carry their values beside the meta tensor, so
  that ``if mask.all()`` can be answered without the model's weights.
* Whatever Python reads from a tensor is written down as a `ValueRead`. A cut copy gets the same answers, and another
  run of the trace gets the opposite ones, so that both branches are known.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dis import opname
from numbers import Complex, Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from keepk.graph.label import tensors_in

CREATED = "torch.tensor"
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_DATA_AT = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1, torch.Tensor.new: 1}
# What Python may call to learn a value; true of those that answer with a truth value.
_INDEXES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_READS = {
    torch.Tensor.__bool__: True, torch.Tensor.is_nonzero: True, torch.is_nonzero: True,
    torch.equal: True, torch.Tensor.equal: True, torch.allclose: True, torch.Tensor.allclose: True,
    torch.Tensor.item: False, torch.Tensor.__int__: False, torch.Tensor.__float__: False,
    torch.Tensor.__index__: False, torch.Tensor.__complex__: False,
    torch.Tensor.tolist: False, torch.Tensor.numpy: False, torch.Tensor.__array__: False,
}  # fmt: skip
FEW = 64  # longer ones are tables, and not computed from a size
LARGEST = 1 << 20  # numbers of a tensor that keeps its values beside it
LARGEST_BUFFER = 1 << 16
REPEATED = 3  # how often the opposite answer is given where the first run did not ask; bounds loops
_VALUE = "_keepk_value"  # lives on tensors of traced copies only


class NeedsValues(Exception):  # noqa: N818 - it says only that the copy needs weights
    """Python reads a value that is not known without the model's weights."""


@dataclass(frozen=True)
class ValueRead:
    """A value that the model's Python read from a tensor.

    Attributes:
        value: What was answered.
        place: File and line in the user's program.
        boolean: It was asked for as a truth value, so that there is exactly one other answer.
        own: It was read from the model's own buffers or parameters, which no input changes.
    """

    value: Any
    place: str
    boolean: bool
    own: bool


def opposite(reads: Sequence[ValueRead], place: str) -> tuple[bool, ...]:
    """The other answers to the truth values asked for at a place; a few more of the last one.

    ``if a or b`` asks for b only once a is false, which the first run may not have done.

    >>> opposite([ValueRead(False, "net.py:3", True, False)], "net.py:3")
    (True, True, True, True)
    """
    asked = [not read.value for read in reads if read.place == place and read.boolean]
    return (*asked, *asked[-1:] * REPEATED)


class Watcher(Protocol):
    """The trace that is told what happens."""

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """A tensor was made of these numbers."""

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:
        """Python wants to know something about the values of these tensors; `read` finds it out."""


class WatchedValues(TorchFunctionMode):
    """Tells a trace the numbers that tensors are made of, and asks it for the values that Python reads."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and tell what it made a tensor of; or let the trace answer what it reads."""
        by_name = kwargs or {}
        if func in _READS:
            tensors = [argument for argument in (*args, *by_name.values()) if isinstance(argument, Tensor)]
            boolean = _READS[func] or (tensors[0].dtype is torch.bool and tensors[0].ndim == 0)

            def read(values: Sequence[Tensor]) -> Any:
                replaced = dict(zip(map(id, tensors), values, strict=True))
                positional = (replaced.get(id(it), it) for it in args)
                return func(*positional, **{key: replaced.get(id(it), it) for key, it in by_name.items()})

            return self._watcher.answer(tensors, boolean=boolean, read=read)
        if func in _INDEXES and (listed := tuple(_listed_in(args[1]))):
            self._watcher.record_numbers(listed if len(listed) <= FEW else (hash(listed),))
        result = func(*args, **by_name)
        if (place := _DATA_AT.get(func)) is not None:
            self._made(func, place, args, by_name, result)
        return result

    def _made(self, func: Any, place: int, args: Any, by_name: Mapping[str, Any], result: Tensor) -> None:
        data = args[place] if len(args) > place else by_name.get("data", by_name.get("obj"))
        found = tuple(numbers_in(data)) if func is not torch.Tensor.new or type(data) is list else ()
        if found:
            self._watcher.record_numbers(found if len(found) <= FEW else (hash(found),))
        if result.is_meta and not any(True for _ in tensors_in(data)) and func is not torch.Tensor.new:
            with _disable_current_modes():
                keep_value_beside(result, torch.tensor(data, dtype=result.dtype, device="cpu"))


def numbers_in(data: Any) -> Iterator[float]:
    """The plain numbers of nested lists or an array.

    >>> list(numbers_in([[1, 2.5], (True, np.float32(3)), 4 + 1j]))
    [1.0, 2.5, 1.0, 3.0, 4.0, 1.0]
    """
    if isinstance(data, Real):
        yield float(data)
    elif isinstance(data, Complex):
        yield from (float(data.real), float(data.imag))
    elif isinstance(data, np.ndarray) and data.dtype.kind in "biuf":
        yield from data.ravel().tolist()
    elif isinstance(data, list | tuple | bytes | bytearray):
        for entry in data:
            yield from numbers_in(entry)


def _listed_in(index: Any) -> Iterator[float]:
    """The numbers of lists and arrays in an index, which torch makes a tensor of: 2 and 3 of ``x[:, [2, 3]]``."""
    for entry in index if isinstance(index, tuple) else (index,):
        if isinstance(entry, list | tuple | np.ndarray):
            yield from numbers_in(entry)


def keep_value_beside(tensor: Tensor, value: Tensor) -> None:
    """Let a meta tensor carry its values, unless there are too many of them."""
    if tensor.is_meta and not value.is_meta and value.numel() <= LARGEST:
        setattr(tensor, _VALUE, value)


def keep_buffers_beside(copied: nn.Module, model: nn.Module) -> None:
    """Let counters, masks and tables of positions among the buffers of a copy carry the model's values."""
    own = dict(model.named_buffers())
    for name, buffer in copied.named_buffers():
        value = own.get(name)
        if value is not None and not value.is_floating_point() and value.numel() <= LARGEST_BUFFER:
            keep_value_beside(buffer, value.detach().clone())


def value_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor: its own, or those that a meta tensor carries; None if they are not known."""
    return getattr(tensor, _VALUE, None) if tensor.is_meta else tensor


def keep_values(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Do to the values what an operation did to meta tensors, where all of its inputs carry values."""
    made = list(tensors_in(result))
    if not made or not all(tensor.is_meta and tensor.numel() <= LARGEST for tensor in made):
        return
    given = list(tensors_in([list(args), dict(kwargs)]))
    known = all(not tensor.is_meta or hasattr(tensor, _VALUE) for tensor in given)
    if not known or (not given and "device" not in kwargs) or "empty" in operation._schema.name:
        for tensor in made:  # an in-place operation with a tensor whose values are not known
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
        return  # devices that do not meet; the values are then not known
    for tensor, value in zip(made, tensors_in(values), strict=True):
        keep_value_beside(tensor, value)


def is_raised_by_program(error: BaseException) -> bool:
    """Whether an exception comes from a ``raise`` or ``assert`` outside of torch: a check that the program makes.

    >>> try:
    ...     raise ValueError("no token is masked")
    ... except ValueError as error:
    ...     is_raised_by_program(error)
    True
    >>> try:
    ...     torch.zeros(2) + torch.zeros(3)
    ... except RuntimeError as error:
    ...     is_raised_by_program(error)
    False
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    instruction = opname[code.co_code[trace.tb_lasti]]
    return instruction in ("RAISE_VARARGS", "RERAISE") and not code.co_filename.startswith(TORCH)
