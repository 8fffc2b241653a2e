"""`Tracer`: one forward pass under a dispatch mode, which sees every ATen operation.

Before the pass, each index of each axis of each parameter and buffer gets an id, its *atom*. A tensor carries index
maps (`maps`), which say to which atom each of its elements belongs. For each operation a rule (`rules.registry`)
computes the maps of the outputs from those of the inputs, and adds facts about atoms that have met (`facts`). The
operation itself is kept as a `Step`, so that a later pass over a cut copy can be compared with this one (`replay`).

With two linear layers, atoms 1 to 3 are the rows of the first weight:

>>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
>>> tracer = Tracer(net, groups={})
>>> tracer.label_tensors()
>>> {name: [index_map.ravel().tolist() for index_map in maps] for name, maps in tracer.tensors.items()}
{'0.weight': [[1, 2, 3], [4, 5, 6, 7]], '0.bias': [[8, 9, 10]],
 '2.weight': [[11, 12], [13, 14, 15]], '2.bias': [[16, 17]]}

The output of the first layer has one map, over its second dim, with the atoms of those rows. ReLU passes it on:

>>> output = tracer.follow((torch.zeros(5, 4),), {})
>>> [(step.name, step.outputs[0][1][0].tolist()) for step in tracer.steps if "relu" in step.name]
[('aten::relu', [[1, 2, 3]])]

Where maps meet, atoms are equated: rows with entries of the bias, and rows with columns of the second weight.

>>> [(lines.parents.tolist(), lines.cells.tolist()) for lines in tracer.facts.equal]
[([1, 2, 3], [8, 9, 10]), ([1, 2, 3], [13, 14, 15]), ([11, 12], [16, 17])]
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

import keepk.graph.rules  # noqa: F401 - fills the table
from keepk.graph.ids.atoms import (
    Atoms,
    Label,
    Origin,
    begin_forward_pass,
    copy_label,
    is_from_trace,
    is_labelled,
    label_of,
    origin_of,
    set_label,
    set_origin,
    tensors_kept_by,
)
from keepk.graph.ids.facts import Bound, Facts, Reason
from keepk.graph.ids.maps import Map, along
from keepk.graph.meta_results import meta_result
from keepk.graph.rules.call import Call, base_name
from keepk.graph.rules.registry import rule_for
from keepk.graph.values import (
    CREATED,
    FEW,
    Answers,
    NeedsValues,
    SizedByValues,
    ValueRead,
    WatchedValues,
    add_read,
    is_read_by_torch,
    may_fail,
)
from keepk.model.copies import plain_tensors
from keepk.model.names import named_tensors
from keepk.model.torch_internals import (
    BatchNormBase,
    DisableTorchFunction,
    LinAlgError,
    StorageWeakRef,
    TorchDispatchMode,
    disable_current_modes,
)
from keepk.model.values import keep_values, value_of

# Frames of these files are skipped when looking for the line of the user's program.
FOREIGN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", functools.__file__)
# These make tensors that need atoms even if no input has any: a zero tensor of the width of a layer follows that width,
# and the copies that `expand` makes may meet channels later.
MAKES_ATOMS = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided",
               "new_empty_strided", "scalar_tensor", "expand", "repeat")  # fmt: skip

# These get tensors that torch has just made from Python numbers: the data of ``torch.tensor``, lists in an index.
MAKES_TENSORS = ("aten::lift_fresh", "aten::index", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")

# Arguments that are sizes, by operation. They may change when a width does, because a replay compares the shapes and
# channels of the outputs anyway. Every other argument must be the same on a cut copy.
SIZES = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "zeros", "ones", "full", "empty",
                     "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided", "new_empty_strided", "rand",
                     "randn", "randint", "normal", "as_strided"),
                    ("size", "stride", "storage_offset")),
    **dict.fromkeys(("slice", "narrow"), ("start", "end", "length")),
    "select": ("index",),
    "split": ("split_size",),
    **dict.fromkeys(("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy"), ("split_sizes",)),
    **dict.fromkeys(("unsafe_split", "split_copy"), ("split_size",)),
    "repeat": ("repeats",),
    "repeat_interleave": ("output_size",),
    **dict.fromkeys(("arange", "range"), ("end",)),
    "randperm": ("n",),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), ("normalized_shape",)),
    "native_group_norm": ("N", "C", "HxW", "group"),  # the rule checks the number of groups
    # A replay sees the number of groups in the shapes of weight and input.
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"), ("groups",)),
}  # fmt: skip
# Operations that only move data. Whether a reshape copies depends on sizes and strides, so that a cut copy may run more
# or fewer of these than the first trace; `replay` matches them loosely.
MOVES = "clone _unsafe_view view alias expand slice contiguous _to_copy detach squeeze unsqueeze lift_fresh"
MAY_DIFFER = {f"aten::{name}" for name in MOVES.split()}
# Arguments that do not affect values or shapes, and may depend on the device of the copy.
NOT_VALUES = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "implicit")
# Operations that take a part of a dim, with the argument that says where it begins.
TAKES_AT = {"aten::select": "index", "aten::slice": "start"}
TENSORS = object()  # in place of an argument that contains tensors, which are compared by their origins
NO_ATOMS = np.zeros(0, np.int32)
Numbers: TypeAlias = tuple[tuple[str, Any], ...]
Shaped: TypeAlias = tuple[tuple[int, ...], tuple[Map, ...]]


@dataclass(frozen=True)
class Step:
    """One operation of a traced forward pass.

    Attributes:
        name: The operation.
        outputs: Shape and maps of each output.
        inputs: Shape and maps of each input, and of each count among its arguments.
        taken: The atoms of single channels that it took by index, as ``x[:, 3]`` does.
        numbers: By name, its arguments that are neither tensors nor sizes.
        sizes: By name, its arguments that are sizes.
        origins: For each input, the parameter, model input or earlier step that it comes from.
        constants: For each input that no operation made, such as a global tensor, its values; None if unknown.
        module: The path of the module in whose forward it ran.
        place: File and line in the user's program.
    """

    name: str
    outputs: tuple[Shaped, ...]
    inputs: tuple[Shaped, ...]
    taken: tuple[int, ...]
    numbers: Numbers
    sizes: Numbers
    origins: tuple[Origin, ...]
    constants: tuple[tuple[float, ...] | None, ...]
    module: str
    place: str

    @property
    def has_channels(self) -> bool:
        """Whether any of its tensors has an index map."""
        return any(maps for _, maps in self.tensors)

    @property
    def tensors(self) -> tuple[Shaped, ...]:
        """Shape and maps of each output, then of each input."""
        return (*self.outputs, *self.inputs)


@dataclass(frozen=True)
class Written:
    """A tensor that was written in place, directly or through a view.

    Attributes:
        tensor: The tensor; the reference keeps its memory, which identifies it, from being reused.
        nonzero: The atoms along which it is not zero.
        constant: Whether all of its elements are one constant.
    """

    tensor: Tensor
    nonzero: Map
    constant: bool


@dataclass(frozen=True, eq=False)
class Recorded:
    """The record of a traced forward pass.

    Attributes:
        steps: Its operations in order.
        reads: The values that Python read from tensors.
        tensors: By name, the maps of each parameter and buffer.
        touched: The names of the parameters and buffers that it used.
        atoms: The atoms in use at its end.
        groups: By name of a weight, the number of groups of the convolution that uses it.
        returned: For each tensor that the model returned, where it comes from.
        forgotten: By step, the lossy facts that were dropped because nothing used the result; see
            `Tracer.forget_unused`.
    """

    steps: Sequence[Step]
    reads: Sequence[ValueRead]
    tensors: Mapping[str, tuple[Map, ...]]
    touched: frozenset[str]
    atoms: Atoms
    groups: dict[str, int]
    returned: tuple[Origin, ...] = ()
    forgotten: Mapping[int, tuple[Bound, ...]] = field(default_factory=dict)


class UnseenOperation(Exception):  # noqa: N818 - the trace turns it into a TraceError
    """Raised when an operation gets a tensor that another thread computed, where a dispatch mode sees nothing."""


@dataclass(frozen=True)
class _LossyResult:
    """An operation that marked channels as lossy: its number, the facts, and its results while they exist.

    The results are known by their memory, since autograd may keep a tensor for backward without its Python object. No
    memory means that it cannot be seen whether they are used.
    """

    step: int
    bounds: tuple[Bound, ...]
    memory: tuple[StorageWeakRef, ...]

    @property
    def exists(self) -> bool:
        """Whether anything still holds one of the results, or may hold it."""
        return not self.memory or not all(map(StorageWeakRef.expired, self.memory))


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Follows index maps through a forward pass, collecting facts and steps.

    Args:
        model: A copy of the user's model that may be labelled.
        groups: By name of a weight, the number of groups of the convolution that uses it; filled by the rules.
        answers: Truth values that Python gets instead of the real ones.
    """

    def __init__(self, model: nn.Module, groups: dict[str, int], answers: Answers | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.model, self.groups = model, groups
        self.atoms, self.facts = Atoms(), Facts()
        self.steps: list[Step] = []
        self.reads: list[ValueRead] = []
        self._answers = answers or Answers()
        begin_forward_pass()
        self.tensors: dict[str, tuple[Map, ...]] = {}
        self.touched: set[str] = set()
        self._names: dict[int, str] = {}
        self._named: list[Tensor] = []  # a buffer that forward replaces stays alive, so that its id is not used again
        self._written: dict[int, Written] = {}
        self._lossy: list[_LossyResult] = []
        self.forgotten: dict[int, tuple[Bound, ...]] = {}
        self._read: set[int] = set()  # the numbers of steps whose results Python has read
        self.is_detaching = False  # whether the model itself is detaching a tensor
        self._stack = [""]
        self._modules = dict(model.named_modules())

    def recorded(self, output: Any) -> Recorded:
        """The record of the pass, which does not keep the traced copy alive."""
        atoms, touched = self.atoms.branch(), frozenset(self.touched)
        returned = tuple(map(origin_of, tensors_kept_by(output)))
        return Recorded(
            self.steps, self.reads, self.tensors, touched, atoms, self.groups, returned, dict(self.forgotten)
        )

    @property
    def module(self) -> str:
        """The path of the module whose forward is running."""
        return self._stack[-1]

    def is_batch_norm(self, module: str) -> bool:
        """Whether a path names a BatchNorm of the model."""
        return isinstance(self._modules.get(module), BatchNormBase)

    def place(self) -> str:
        """File and line of the innermost frame outside torch and keepk; empty if there is none."""
        frame = sys._getframe(1)
        while frame is not None:
            if not frame.f_code.co_filename.startswith(FOREIGN):
                return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if frame.f_code.co_name == "follow":
                break
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def label_tensors(self, maps: Mapping[str, tuple[Map, ...]] | None = None) -> None:
        """Label every parameter and buffer with new atoms, or with the maps of an earlier trace."""
        for name, tensor, parameter in named_tensors(self.model):
            found = self._fresh(name, tensor) if maps is None else maps[name]
            self.tensors[name] = found
            self._names[id(tensor)] = name
            self._named.append(tensor)
            set_label(tensor, Label(found, from_parameters=True, zeros=(parameter,) * len(found)))
            set_origin(tensor, name)
        for tensor in plain_tensors(self.model):
            if not is_from_trace(tensor):
                set_origin(tensor, None)

    def _fresh(self, name: str, tensor: Tensor) -> tuple[Map, ...]:
        """One map for each axis larger than 1.

        In the weight of a convolution with 2 groups, column 0 is a different input channel in the two halves of the
        rows: the second axis gets ``groups * size`` atoms and a map over rows and columns.
        """
        groups = self.groups.get(name, 1)
        maps = []
        for dim, size in enumerate(tensor.shape):
            if dim == 1 and groups > 1 and size > 1:
                ids = self.atoms.new(groups * size, name, dim, groups).reshape(groups, 1, size)
                rows = np.broadcast_to(ids, (groups, tensor.shape[0] // groups, size)).reshape(tensor.shape[0], size)
                maps.append(rows.reshape(*rows.shape, *(1,) * (tensor.ndim - 2)))
            elif size > 1:
                maps.append(along(self.atoms.new(size, name, dim), dim, tensor.ndim))
        return tuple(maps)

    def follow(self, arguments: Sequence[Any], by_name: dict[str, Any]) -> Any:
        """Run the model's forward and return its output."""
        for number, tensor in enumerate(tensors_kept_by((arguments, by_name))):
            set_origin(tensor, ("input", number))
        with self._watching_modules(), WatchedValues(self), self:
            return self.model(*arguments, **by_name)

    def forget_unused(self) -> None:
        """Drop the lossy facts of results that nothing uses: no operation, no value that Python reads, no object.

        `nn.MultiheadAttention` averages its weights over the heads, and most models discard the average. Such a result
        does not exist any more at the end of the pass, and no removal can change anything through it. Call this while
        the output of the model is still referenced.
        """
        used = {number for step in self.steps for origin in step.origins for number in _steps_in(origin)} | self._read
        for found in self._lossy:
            if found.step not in used and not found.exists:
                self.facts.lossy = [bound for bound in self.facts.lossy if not any(bound is it for it in found.bounds)]
                self.forgotten[found.step] = found.bounds

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:
        """The value that Python reads from tensors, which is recorded: the real one, or the answer from `answers`."""
        place = self.place()
        self._read |= {number for tensor in tensors for number in _steps_in(origin_of(tensor))}
        value: Any = self._answers.answer_to(self.reads, place) if boolean else None
        if value is None:
            values = [known for tensor in tensors if (known := value_of(tensor)) is not None]
            if len(values) < len(tensors):
                raise NeedsValues(f"a value is read at {place}")
            with disable_current_modes():
                value = read(values)
        own = bool(tensors) and all(is_labelled(tensor) and label_of(tensor).from_parameters for tensor in tensors)
        constant = ("torch" if is_read_by_torch() else self._constant_of(tensors)) if own else ""
        self.reads.append(ValueRead(value, place, boolean, own, constant, may_fail=not tensors))
        add_read(self.facts, tensors, lambda why: Reason(why, module=self.module, place=place), boolean=boolean)
        return value

    def _constant_of(self, tensors: Sequence[Tensor]) -> str:
        """The name of the integer buffer that was read, in whole or in part; empty for any other tensor.

        Training never changes such a buffer unless forward writes it, so a number read from it may be relied on.
        """
        found = tensors[0] if tensors[0]._base is None else tensors[0]._base
        name = self._names.get(id(found), "")
        trained = found.is_floating_point() or found.is_complex() or isinstance(found, nn.Parameter)
        return "" if trained or len(tensors) > 1 else name

    @contextmanager
    def _watching_modules(self) -> Iterator[None]:
        handles = []
        for path, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str, _module: nn.Module, _arguments: Any) -> None:
        self._stack.append(path)

    def _leave(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        if func is torch.ops.aten.detach.default and not self.is_detaching:
            # autograd keeps a detached tensor for backward, which is no operation of the model.
            with DisableTorchFunction():
                result = func(*args)
                copy_label(args[0], result)
            return result
        if func is torch.ops.aten._local_scalar_dense.default:  # a read in C++, which WatchedValues does not see
            return self.answer(args, boolean=False, read=lambda values: func(*values))
        if may_fail(func, arguments) and self.answer((), boolean=True, read=lambda _: False):
            raise LinAlgError(f"{func}: on the other side of the branch, it fails")
        result = meta_result(func, *arguments)
        if result is None:
            result = func(*args, **(kwargs or {}))
        if (selection := SizedByValues.of(func, args, arguments[1])) is not None:
            result = self._sized(selection, result)
        with DisableTorchFunction():  # values that rules read are not reads of the model
            self._follow_operation(func, arguments, result)
        return result

    def _sized(self, selection: SizedByValues, result: Any) -> Any:
        """The result of an operation whose size depends on values, which Python can branch on like a truth value."""
        found = selection.finds_some(result)
        some = self.answer((), boolean=True, read=lambda _: found)
        return result if some == found else selection.with_other_outcome(some=some)

    def _follow_operation(self, func: Any, arguments: tuple[Sequence[Any], dict[str, Any]], result: Any) -> None:
        keep_values(func, *arguments, result)
        call = Call(self, func, arguments, result)
        for tensor in call.inputs if call.name not in MAKES_TENSORS else ():
            if tensor.is_meta and not is_from_trace(tensor):
                raise UnseenOperation(f"{call.name} at {call.place} gets a tensor that no operation of the trace made")
        self._refresh_views(call.inputs)
        self.touched.update(self._names[id(tensor)] for tensor in call.inputs if id(tensor) in self._names)
        if call.name.removeprefix("aten::") in MAKES_ATOMS or any(map(is_labelled, call.inputs)):
            known = len(self.facts.lossy)
            self._apply_rule(call)
            if func._schema.is_mutable:
                self._note_written(call.outputs)
            elif len(self.facts.lossy) > known:
                self._note_lossy(call, len(self.steps), tuple(self.facts.lossy[known:]))
        self.record(call)

    def _note_lossy(self, call: Call, step: int, bounds: tuple[Bound, ...]) -> None:
        """Note the results of an operation that marked channels as lossy, to see later whether anything uses them."""
        # Without storage, nothing can be seen. torch's schema of a BatchNorm does not say that it writes statistics.
        seen = all(tensor.layout is torch.strided for tensor in call.outputs) and not _updates_statistics(call)
        storages = [tensor.untyped_storage() for tensor in call.outputs] if seen else []
        memory = tuple(map(StorageWeakRef, storages))
        self._lossy.append(_LossyResult(step, bounds, memory))

    def _note_written(self, outputs: Sequence[Tensor]) -> None:
        """Note that memory was written through a tensor: all views of it are nonzero where this one is."""
        for tensor in outputs:
            memory, label = _memory(tensor), label_of(tensor)
            atoms = [m.ravel() for m, zero in zip(label.maps, label.zeros, strict=True) if not zero]
            if tensor._base is None:  # no view, so all of the memory was overwritten
                constant = label.neutral
            else:
                constant = False
                atoms += [self._written[memory].nonzero] if memory in self._written else []
            self._written[memory] = Written(tensor, np.unique(np.concatenate([*atoms, NO_ATOMS])), constant)
            self._refresh_views([tensor if tensor._base is None else tensor._base])

    def _refresh_views(self, tensors: Sequence[Tensor]) -> None:
        """Correct the zero flags of tensors whose memory was written through another view after they were labelled."""
        for tensor in tensors if self._written else ():
            found, label = self._written.get(_memory(tensor)), label_of(tensor)
            if found is None or found.constant or not (any(label.zeros) or label.neutral):
                continue
            kept = (
                zero and not np.isin(m, found.nonzero).any() for m, zero in zip(label.maps, label.zeros, strict=True)
            )
            set_label(tensor, replace(label, zeros=tuple(kept), neutral=False, all_zero=False))

    def _apply_rule(self, call: Call) -> None:
        rule = rule_for(call)
        why = f"{call.name} has no rule; keepk.rule registers one"
        if rule is not None:
            try:
                rule(call)
            except Exception as error:  # a user's rule may raise anything; that pins its inputs and nothing else
                why = f"the rule of {call.name} failed: {type(error).__name__}: {error}"
            else:
                return
        call.pin_inputs(why)
        for output in call.outputs:
            set_label(output, Label())

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Record that a tensor was made from Python numbers."""
        self.steps.append(Step(CREATED, (), (), (), (("data", numbers),), (), (), (), self.module, self.place()))

    def record(self, call: Call) -> None:
        """Append the operation to the steps."""
        step = self.step_of(call)
        self.note_origins(call, (len(self.steps),))
        self.steps.append(step)

    def step_of(self, call: Call) -> Step:
        """The `Step` that describes an operation."""
        outputs = tuple((tuple(tensor.shape), label_of(tensor).maps) for tensor in call.outputs)
        inputs = list(zip(call.input_shapes(), (label_of(tensor).maps for tensor in call.inputs), strict=True))
        inputs += [((number,), rows) for number, rows in call.counts]
        return Step(
            kind_of(call),
            outputs,
            tuple(inputs),
            tuple(call.taken),
            numbers_of(call),
            sizes_of(call),
            tuple(map(origin_of, call.inputs)),
            constants_of(call),
            self.module,
            call.place,
        )

    def note_origins(self, call: Call, origin: Origin) -> None:
        """Set the origin of the outputs; an operation that only moves data passes on the origin of its input.

        A cut copy may run more or fewer such operations, so they must not appear in origins.
        """
        moved = kind_of(call) in MAY_DIFFER and len(call.inputs) == 1
        for place, tensor in enumerate(call.outputs):
            known = origin_of(call.inputs[0]) if moved else origin
            if call.name == "aten::detach" and known is not None:
                known = ("detached", known)  # a detached tensor has the same values and different gradients
            set_origin(tensor, (*known, place) if not moved and isinstance(known, tuple) else known)


def _steps_in(origin: Any) -> Iterator[int]:
    """The numbers in an origin, which include that of the step it names.

    >>> list(_steps_in(("detached", (12, 0)))), list(_steps_in("conv.weight"))
    ([12, 0], [])
    """
    if isinstance(origin, tuple):
        for entry in origin:
            yield from _steps_in(entry)
    elif isinstance(origin, int):
        yield origin


def _memory(tensor: Tensor) -> int:
    """An id of the tensor's storage; views, ``.data`` and ``detach()`` share it, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def _updates_statistics(call: Call) -> bool:
    """Whether an operation is a BatchNorm that writes running statistics."""
    return call.name.endswith("batch_norm") and bool(call.get("training")) and call.get("running_mean") is not None


def kind_of(call: Call) -> str:
    """The operation's name; a copy to another dtype gets a separate name, since it does more than move data."""
    if call.name == "aten::_to_copy" and call.outputs[0].dtype != call.inputs[0].dtype:
        return f"{call.name} to {call.outputs[0].dtype}"
    return call.name


def sizes_of(call: Call) -> Numbers:
    """The arguments of an operation that are sizes; see `SIZES`."""
    names = SIZES.get(call.name.removeprefix("aten::"), ())
    found = [(name, _plain(call.arguments[name])) for name in names if name in call.arguments]
    return tuple((name, value) for name, value in found if value is not TENSORS)


def numbers_of(call: Call) -> Numbers:
    """The arguments of an operation that are neither tensors nor sizes: a kernel, a padding, a dim, a factor."""
    found = [(name, _plain(call.arguments[name])) for name in _value_arguments(call.operation)]
    if call.name in TAKES_AT:
        found.append(("position", _taken_at(call)))
    elif call.name == "aten::lift_fresh":
        found.append(("data", _made_of(call.inputs[0])))
    elif torch.Tag.nondeterministic_seeded in call.operation.tags:
        generator = call.arguments.get("generator") or torch.default_generator
        found.append(("seed", generator.initial_seed()))
    return tuple((name, value) for name, value in found if value is not TENSORS)


def constants_of(call: Call) -> tuple[tuple[float, ...] | None, ...]:
    """For each input that no operation made, its values; None for other inputs and for unknown values."""
    values = (value_of(tensor) if origin_of(tensor) is None else None for tensor in call.inputs)
    return tuple(None if value is None else _made_of(value) for value in values)


@functools.cache
def _value_arguments(operation: Any) -> tuple[str, ...]:
    sizes = SIZES.get(base_name(operation).removeprefix("aten::"), ())
    if base_name(operation).startswith("aten::_assert"):
        return ()  # the message of an assertion may contain sizes, which change with a cut
    return tuple(a.name for a in operation._schema.arguments if a.name not in (*sizes, *NOT_VALUES))


def _plain(value: Any) -> Any:
    """An argument as a comparable value; `TENSORS` if it contains tensors."""
    if isinstance(value, Tensor):
        return TENSORS
    if isinstance(value, list | tuple):
        entries = tuple(map(_plain, value))
        return TENSORS if TENSORS in entries else entries
    return "nan" if value != value else value  # noqa: PLR0124 - NaN is not equal to itself


def _made_of(tensor: Tensor) -> tuple[float, ...]:
    """The values of a small tensor, or a hash of those of a large one; parameters and buffers never get here."""
    if tensor.is_meta or tensor.is_complex():
        return ()
    numbers = tensor.double().ravel()
    return tuple(numbers.tolist()) if len(numbers) <= FEW else (hash(numbers.numpy().tobytes()),)


def _taken_at(call: Call) -> tuple[float, ...]:
    """Where a part of a dim without channels begins; empty where maps show which part was taken."""
    source, place = call.inputs[0], call.get(TAKES_AT[call.name], 0)
    dim = call.get("dim", 0) % source.ndim
    if source.shape[dim] == 1 or any(index_map.shape[dim] > 1 for index_map in call.maps(source)):
        return ()
    return (float(place + source.shape[dim] if place < 0 else place),)


def output_maps(output: Any) -> Iterator[Map]:
    """The maps of all tensors in a model's output."""
    for tensor in tensors_kept_by(output):
        yield from label_of(tensor).maps
