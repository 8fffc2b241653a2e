"""Values in a traced forward pass: numbers that become tensors, and values that Python reads from tensors.

A trace runs on the meta device, where tensors have shapes and no values. Values still matter in three ways:

* Tensors that depend on the example alone (token ids, positions, masks) carry their values beside the meta tensor
  (`keepk.model.values`), so that ``if mask.all()`` can be answered without the model's weights.
* Each value that Python reads from a tensor is recorded as a `ValueRead`. A cut copy gets the same answers, so that it
  takes the same path.
* For each truth value that Python reads, forward runs again with the opposite answer (`Outcomes`), so that both
  branches are traced.

Suppose that forward contains ``if mask.any():`` on line 3 and ``if mask.all():`` on line 7, and that the example
answers yes to the first and no to the second. Then three more passes are planned: each answer flipped alone, and both.

>>> reads = [ValueRead(True, "net.py:3", True, False), ValueRead(False, "net.py:7", True, False)]
>>> for answers in Outcomes(reads, passes=24, pairs=16):
...     print(dict(answers.numbered), dict(answers.placed))
{0: False} {}
{1: True} {}
{} {'net.py:3': (False, False, False, False), 'net.py:7': (True, True, True, True)}

`Answers.numbered` flips one read by its number in the pass; `Answers.placed` flips all reads at a line, and a few more
than the first pass had, since a flipped answer may lead to more of them.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dis import opname
from functools import partial
from numbers import Complex, Real
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from keepk.graph.ids.atoms import Label, copy_label, is_from_trace, label_of, set_origin
from keepk.graph.ids.facts import Bound, Facts, Reason
from keepk.graph.ids.maps import fibres
from keepk.model.torch_internals import (
    DisableTorchFunction,
    disable_current_modes,
    make_subclass,
    tree_map,
    will_engine_execute,
)
from keepk.model.values import keep_value_beside, tensors_in

CREATED = "torch.tensor"  # the name of the step that makes a tensor from Python numbers
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# Functions that make a tensor from Python numbers, by the position of the argument that has them.
_DATA_AT = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1, torch.Tensor.new: 1}
_INDEXES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
# Functions that let Python read a value, and whether they return a truth value.
_READS = {
    torch.Tensor.__bool__: True, torch.Tensor.is_nonzero: True, torch.is_nonzero: True,
    torch.equal: True, torch.Tensor.equal: True, torch.allclose: True, torch.Tensor.allclose: True,
    torch.Tensor.item: False, torch.Tensor.__int__: False, torch.Tensor.__float__: False,
    torch.Tensor.__index__: False, torch.Tensor.__complex__: False,
    torch.Tensor.tolist: False, torch.Tensor.numpy: False, torch.Tensor.__array__: False,
    torch.Tensor.__repr__: False, torch.Tensor.__format__: False, torch.Tensor.__dlpack__: False,
    torch.Tensor.storage: False, torch.Tensor.untyped_storage: False,
}  # fmt: skip
# Functions that read a truth value if the tensor is a boolean scalar, with the type that they return.
_PLAIN = {torch.Tensor.item: bool, torch.Tensor.tolist: bool, torch.Tensor.__int__: int, torch.Tensor.__index__: int,
          torch.Tensor.__float__: float, torch.Tensor.__complex__: complex}  # fmt: skip
# Whether a tensor requires a gradient changes when the user freezes layers, so code that asks for it has two branches.
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # a property
# These give a new tensor over the same memory, and run no operation that a dispatch mode could see.
_RENAMES = (
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]  # a property
    torch.Tensor.as_subclass,
    make_subclass,
)
_DETACHES = (torch.Tensor.detach, torch.detach, torch.Tensor.detach_, torch.detach_)
_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a property
# If a weight requires a gradient, torch folds the batch of a matrix product into its rows, which hides axes of the
# batch from the trace (two halves of the channels, for example). The result is the same without folding.
_FOLDED_FOR_GRADIENTS = (
    torch.nn.functional.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
)
FEW = 64  # longer lists of numbers are tables, not numbers computed from a size; only their hash is kept
# How often an opposite answer is repeated beyond the reads of the first pass. Without a limit, ``while x.any()`` would
# never end.
REPEATED = 3
# Files of torch whose reads are known to be harmless, such as a BatchNorm's read of its counter.
LAYERS_OF_TORCH = f"{Path(nn.modules.__file__).parent}{os.sep}"
KEEPK = f"{Path(__file__).parents[1]}{os.sep}"


class NeedsValues(Exception):  # noqa: N818 - a signal: trace again on copies with weights
    """Raised when Python reads a value that depends on the model's weights."""


@dataclass(frozen=True)
class ValueRead:
    """A value that the model's Python read from a tensor.

    Attributes:
        value: The value that Python got.
        place: File and line in the user's program.
        boolean: Whether it was read as a truth value, which has exactly one other outcome.
        own: Whether it was read from the model's own buffers or parameters, which no input changes.
        constant: The name of the integer buffer that it was read from; "torch" if one of torch's own layers read it, as
            a BatchNorm reads its counter; empty otherwise.
        may_fail: Whether forward may fail on the other outcome, since no input needs to have it: a mask selects nothing
            (``x[mask]``), a factorisation fails, a tensor requires a gradient.
    """

    value: Any
    place: str
    boolean: bool
    own: bool
    constant: str = ""
    may_fail: bool = False


@dataclass(frozen=True)
class Asked:
    """A truth value that a pass reads, identified independently of the pass.

    Attributes:
        place: File and line.
        earlier: How many truth values were read at the same place before, in the same pass.
        may_fail: Whether forward may fail on the other outcome; see `ValueRead`.
    """

    place: str
    earlier: int
    may_fail: bool = False


def asked_in(reads: Sequence[ValueRead]) -> dict[int, Asked]:
    """The truth values among the reads of a pass, by the number of the read.

    >>> asked_in([ValueRead(True, "net.py:3", True, False)] * 2)[1]
    Asked(place='net.py:3', earlier=1, may_fail=False)
    """
    found, seen = dict[int, Asked](), dict[str, int]()
    for number, read in enumerate(reads):
        if read.boolean:
            found[number] = Asked(read.place, seen.get(read.place, 0), read.may_fail)
            seen[read.place] = found[number].earlier + 1
    return found


@dataclass(frozen=True)
class Answers:
    """Truth values that Python gets in one forward pass instead of the real ones.

    Attributes:
        numbered: Answers by the number of a read among all reads of the pass.
        placed: By place, the answers to its reads in order, for reads that are not in `numbered`.
        goals: The outcomes that this pass is meant to show; the one that was added last comes last.
    """

    numbered: Mapping[int, bool] = field(default_factory=dict)
    placed: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    goals: tuple[tuple[Asked, bool], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbered or self.placed)

    @property
    def places(self) -> list[str]:
        """The places of the outcomes."""
        return list(dict.fromkeys(asked.place for asked, _ in self.goals))

    def answer_to(self, reads: Sequence[ValueRead], place: str) -> bool | None:
        """The answer to the next read, which is at `place`; None if Python should get the real value.

        >>> earlier = [ValueRead(True, "net.py:3", True, False)]
        >>> Answers({1: False}).answer_to(earlier, "net.py:3"), Answers({1: False}).answer_to([], "net.py:3")
        (False, None)
        """
        if len(reads) in self.numbered:
            return self.numbered[len(reads)]
        outcomes = self.placed.get(place, ())
        earlier = sum(read.boolean and read.place == place for read in reads) if outcomes else 0
        return outcomes[earlier] if earlier < len(outcomes) else None

    def and_not(self, reads: Sequence[ValueRead], number: int) -> "Answers":
        """These answers and one more: the opposite of a value read in the pass that these answers produced."""
        flipped = {**self.numbered, number: not reads[number].value}
        return Answers(flipped, self.placed, (*self.goals, (asked_in(reads)[number], flipped[number])))


def all_opposite(reads: Sequence[ValueRead], places: Sequence[str]) -> Answers:
    """The opposite answers to all truth values read at some places; the last one at each place is repeated.

    ``if a or b`` reads b only if a is false, so a flipped pass may read more values than the first pass did.

    >>> all_opposite([ValueRead(False, "net.py:3", True, False)], ["net.py:3"]).placed
    {'net.py:3': (True, True, True, True)}
    """
    goals = [(asked, not reads[number].value) for number, asked in asked_in(reads).items() if asked.place in places]
    found = {place: [outcome for asked, outcome in goals if asked.place == place] for place in places}
    placed = {place: (*outcomes, *outcomes[-1:] * REPEATED) for place, outcomes in found.items()}
    return Answers(placed=placed, goals=tuple(goals))


class Outcomes:
    """Chooses the forward passes that show both outcomes of every truth value that Python reads.

    Each truth value of the first pass is flipped alone, then all of them together. A truth value that one of these
    passes reads for the first time is flipped next, then pairs, as long as the number of passes allows. If the first
    pass reads too many truth values for that (a loop), all reads at a place are flipped together, then the first and
    the last one at each place.

    Iterating gives the `Answers` of each pass. Report the result of each pass with `learn` before asking for the next.

    Args:
        reads: The values that the first pass read.
        passes: The maximum number of passes.
        pairs: The number of passes after which no more pairs are tried.
    """

    def __init__(self, reads: Sequence[ValueRead], passes: int, pairs: int) -> None:
        self._left, self._for_pairs = passes, pairs
        self.too_many = False  # places: there are not enough passes to flip each of them
        asked = asked_in(reads)
        self._seen, self._often = set(asked.values()), Counter(it.place for it in asked.values())
        places = list(self._often)
        self._every = len(asked) < passes
        self._first = [all_opposite(reads, places)] if len(asked) > 1 else []
        if self._every:
            self._first = [*map(partial(Answers().and_not, reads), asked), *self._first]
        else:
            self._first += [all_opposite(reads, [place]) for place in places]
            self.too_many = len(self._first) > passes
            self._first += map(partial(Answers().and_not, reads), _first_and_last(asked))
        self._new, self._pairs = list[Answers](), list[Answers]()

    def __iter__(self) -> Iterator[Answers]:
        while self._left > 0 and (answers := self._next()) is not None:
            self._left -= 1
            self._for_pairs -= 1
            yield answers

    def _next(self) -> Answers | None:
        for waiting in (self._first, self._new, self._pairs if self._for_pairs > 0 else []):
            if waiting:
                return waiting.pop(0)
        return None

    def learn(self, answers: Answers, reads: Sequence[ValueRead]) -> None:
        """Plan further passes from the values that a pass with these answers read."""
        last = max(answers.numbered, default=-1)
        for number, asked in asked_in(reads).items():
            if number <= last:  # read before the latest flip, so another pass covers it
                continue
            if asked not in self._seen and asked.earlier < self._often[asked.place] + REPEATED:
                self._new.append(answers.and_not(reads, number))
            elif len(answers.numbered) == 1 and not answers.placed and self._every:
                self._pairs.append(answers.and_not(reads, number))
            self._seen.add(asked)


def _first_and_last(asked: Mapping[int, Asked]) -> list[int]:
    """The numbers of the first and the last read at each place that has several."""
    first = {it.place: number for number, it in asked.items() if it.earlier == 0}
    last = {it.place: number for number, it in asked.items()}
    return [number for place in first if first[place] < last[place] for number in (first[place], last[place])]


# Operations whose results have a size that depends on values, by the position of the argument with these values.
_SELECTING = {
    torch.ops.aten.nonzero.default: 0, torch.ops.aten.masked_select.default: 1, torch.ops.aten.index.Tensor: 1,
    torch.ops.aten.repeat_interleave.Tensor: 0, torch.ops.aten.bincount.default: 0,
    torch.ops.aten._unique.default: 0, torch.ops.aten._unique2.default: 0, torch.ops.aten.unique_dim.default: 0,
    torch.ops.aten.unique_consecutive.default: 0,
}  # fmt: skip


@dataclass(frozen=True)
class SizedByValues:
    """An operation whose result has a size that depends on values, so that Python can branch on it.

    The two outcomes are the smallest possible size and a larger one. A mask selects nothing or something; `unique`
    finds one value or several; `bincount` returns `minlength` counts or more.
    """

    operation: Any
    arguments: Sequence[Any]
    by_name: Mapping[str, Any]

    @staticmethod
    def of(operation: Any, arguments: Sequence[Any], by_name: Mapping[str, Any]) -> "SizedByValues | None":
        """The operation as a selection; None if the size of its result does not depend on values."""
        if operation not in _SELECTING or by_name.get("output_size") is not None:
            return None
        found = SizedByValues(operation, arguments, by_name)
        return found if found._deciding and all(tensor.numel() for tensor in found._deciding) else None

    @property
    def _deciding(self) -> list[Tensor]:
        tensors = tensors_in(self.arguments[_SELECTING[self.operation]])
        masks = (torch.bool, torch.uint8)
        return [it for it in tensors if self.operation is not torch.ops.aten.index.Tensor or it.dtype in masks]

    def _argument(self, name: str) -> Any:
        schema = self.operation._schema.arguments
        given = {it.name: value for it, value in zip(schema, self.arguments, strict=False)}
        return {**given, **self.by_name}.get(name) or 0

    @property
    def _least(self) -> int:
        if self.operation is torch.ops.aten.bincount.default:
            return max(1, int(self._argument("minlength")))
        return int("unique" in self.operation._schema.name)

    def finds_some(self, result: Any) -> bool:
        """Whether the result is larger than the smallest possible one."""
        first = tensors_in(result)[0]
        along = self._argument("dim") if "unique" in self.operation._schema.name else 0
        return first.numel() > 0 and first.shape[along] > self._least

    def with_other_outcome(self, *, some: bool) -> Any:
        """The result for made-up values with which the operation has the given outcome."""
        forced = {id(tensor): self._forced(tensor, some=some) for tensor in self._deciding}

        def put(entry: Any) -> Any:
            return forced.get(id(entry), entry)

        return self.operation(*tree_map(put, list(self.arguments)), **tree_map(put, dict(self.by_name)))

    def _forced(self, tensor: Tensor, *, some: bool) -> Tensor:
        made = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if some:
            made.view(-1)[0] = max(1, self._least)
        return made


# Operations that raise `LinAlgError` for some values; the model may handle it.
_FAILING = ("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig")


def may_fail(operation: Any, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> bool:
    """Whether an operation raises `LinAlgError` for some values of its inputs."""
    name = operation._schema.name.removeprefix("aten::")
    if name in _FAILING or not name.startswith("linalg_"):
        return name in _FAILING
    positional, by_name = arguments
    given = {it.name: value for it, value in zip(operation._schema.arguments, positional, strict=False)}
    return bool({**given, **by_name}.get("check_errors"))


class Watcher(Protocol):
    """The trace to which `WatchedValues` reports.

    Attributes:
        is_detaching: Set while the model calls `detach`.
    """

    is_detaching: bool

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Called when a tensor is made from Python numbers."""

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:
        """Called when Python reads a value from tensors; `read` computes it. Returns the value for Python."""


class WatchedValues(TorchFunctionMode):
    """Reports to a trace the Python numbers that tensors are made from, and the values that Python reads.

    A function mode, because a dispatch mode sees neither the list in ``torch.tensor([2, 3])`` nor whether a truth value
    is read.
    """

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and report its numbers, or let the trace answer a read."""
        by_name = kwargs or {}
        if func in _READS:
            tensors = [argument for argument in (*args, *by_name.values()) if isinstance(argument, Tensor)]
            plain = func in _PLAIN and tensors[0].dtype is torch.bool and tensors[0].ndim == 0

            def read(values: Sequence[Tensor]) -> Any:
                replaced = dict(zip(map(id, tensors), values, strict=True))
                positional = (replaced.get(id(it), it) for it in args)
                return func(*positional, **{key: replaced.get(id(it), it) for key, it in by_name.items()})

            value = self._watcher.answer(tensors, boolean=_READS[func] or plain, read=read)
            return _PLAIN[func](value) if plain else value
        if func == _REQUIRES_GRAD and not _called_by_torch():
            return self._watcher.answer((), boolean=True, read=lambda _: func(*args))
        if func in _INDEXES and (listed := tuple(_listed_in(args[1]))):
            self._watcher.record_numbers(listed if len(listed) <= FEW else (hash(listed),))
        if func in _FOLDED_FOR_GRADIENTS:
            return _unfolded(func, args, by_name)
        self._watcher.is_detaching = func in _DETACHES
        result = func(*args, **by_name)
        self._watcher.is_detaching = False
        if (place := _DATA_AT.get(func)) is not None:
            self._made(func, place, args, by_name, result)
        elif func in _RENAMES:
            copy_label(next(it for it in args if isinstance(it, Tensor)), result)
        elif func == _SETS_DATA:
            copy_label(args[1], args[0])
        return result

    def _made(self, func: Any, place: int, args: Any, by_name: Mapping[str, Any], result: Tensor) -> None:
        data = args[place] if len(args) > place else by_name.get("data", by_name.get("obj"))
        found = tuple(numbers_in(data)) if func is not torch.Tensor.new or type(data) is list else ()
        if not is_from_trace(result):
            set_origin(result, None)
        if found:
            self._watcher.record_numbers(found if len(found) <= FEW else (hash(found),))
        if result.is_meta and not tensors_in(data) and func is not torch.Tensor.new:
            with disable_current_modes():
                keep_value_beside(result, torch.tensor(data, dtype=result.dtype, device="cpu"))


class _Linked(torch.autograd.Function):
    """Returns a product as a tensor that was computed from parameters; `compute` computes it again, with gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], product: Tensor, *parameters: Tensor) -> Tensor:
        ctx.compute, ctx.parameters = compute, parameters
        return product.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Only a forward that computes gradients itself gets here. Forces are the gradient of an energy with respect to
        # the input, to which the product is linked already; an inner step of training needs those of the parameters.
        if not any(map(_is_asked_for, ctx.parameters)):
            return None, gradient, *(None for _ in ctx.parameters)
        with_graph = torch.is_grad_enabled()
        with torch.enable_grad(), DisableTorchFunction():
            again = ctx.compute()
        return None, gradient, *torch.autograd.grad(again, ctx.parameters, gradient, create_graph=with_graph)


def _is_asked_for(parameter: Tensor) -> bool:
    """Whether the backward pass that is running computes the gradient of a parameter."""
    try:
        return will_engine_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # raised where the parameter is an argument of `torch.autograd.grad`
        return True


def _unfolded(func: Any, args: Sequence[Any], by_name: Mapping[str, Any]) -> Any:
    """The result of a matrix product, computed as if no parameter required a gradient."""
    # The parameters are those of a copy that the trace has made.
    parameters = [it for it in (*args, *by_name.values()) if isinstance(it, nn.Parameter) and it.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        result = func(*args, **by_name)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    if not parameters or not torch.is_grad_enabled():
        return result
    # A node in autograd's graph, so that Python sees that the result has a gradient.
    return _Linked.apply(lambda: func(*args, **by_name), result, *parameters)  # type: ignore[no-untyped-call]  # likewise


def numbers_in(data: Any) -> Iterator[float]:
    """The numbers in nested lists or an array, as floats.

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
    """The numbers of lists and arrays in an index, which torch turns into tensors: 2 and 3 of ``x[:, [2, 3]]``."""
    for entry in index if isinstance(index, tuple) else (index,):
        if isinstance(entry, list | tuple | np.ndarray):
            yield from numbers_in(entry)


def _called_by_torch() -> bool:
    """Whether the innermost frame outside keepk belongs to torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(KEEPK):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(TORCH)


def is_read_by_torch() -> bool:
    """Whether the frame that reads a value belongs to one of torch's own layers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(KEEPK) and (name.startswith(LAYERS_OF_TORCH) or not name.startswith(TORCH)):
            return name.startswith(LAYERS_OF_TORCH)
        frame = frame.f_back
    return False


def add_read(facts: Facts, tensors: Sequence[Tensor], reason: Callable[[str], Reason], *, boolean: bool) -> None:
    """Add the facts that follow from a read: removing channels of these tensors may change the value.

    A comparison of two tensors does not change with channels that are zero in both. It changes with others, and a list
    or an array contains the values of all channels.
    """
    labels = [label_of(tensor) for tensor in tensors]
    maps = [index_map for label in labels for index_map in label.maps]
    if any(not _has_atoms_of(label, labels[0]) for label in labels):
        for index_map in maps:
            facts.add_pin(index_map, reason("is compared with something that has other channels"))
    elif not boolean or not all(all(label.zeros) for label in labels):
        facts.lossy += [Bound(fibres(m, ()), reason("all values of the axis are read by Python")) for m in maps]


def _has_atoms_of(label: Label, other: Label) -> bool:
    pairs = zip(label.maps, other.maps, strict=False)
    return len(label.maps) == len(other.maps) and all(np.array_equal(one, two) for one, two in pairs)


def fails_with_values_too(error: BaseException) -> bool:
    """Whether a forward pass that failed on the meta device would also fail with weights.

    >>> fails_with_values_too(IndexError("list index out of range")), fails_with_values_too(NeedsValues())
    (True, False)
    """
    return not isinstance(error, NeedsValues | NotImplementedError) and "meta" not in str(error).lower()


def is_raised_by_program(error: BaseException) -> bool:
    """Whether an exception comes from a ``raise`` or ``assert`` outside of torch: a check in the user's code.

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
