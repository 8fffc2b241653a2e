"""`sparse`: a model as compiled programs that skip pruned weights, for inference on the CPU.

`SparseModel._build` makes the result in this order:

1. A copy of the model is taken, so that later changes of the model have no effect.
2. The copy is exported and read as a list of steps (`engine.graph`): segments, each wrapped in a runner that compiles a
   program for each group size, and single nodes that torch runs. If this fails, or no layer is faster without its
   zeros, torch runs the whole copy.
3. The results on the example are compared with the copy's, and then those for batches of 0, 1, and 2 or 3 samples.

A call checks its arguments and runs the steps. Models that are one segment with one input and one output have a shorter
way (`_quick`), because the checks would take longer than the program of a small network.
"""

import copy
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from inspect import Parameter, signature
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from keepk.deploy.runtime import difference, is_batched, rows_of, with_rows
from keepk.engine.graph import (
    Exported,
    Segment,
    TorchNode,
    Unsupported,
    Weights,
    export,
    inputs_of,
    is_batch_size,
    quiet,
    read,
)
from keepk.engine.machine import Machine, host
from keepk.engine.program import LARGEST, Banned, Program, Shapes
from keepk.errors import SparseError, TraceError
from keepk.model.example import Example, not_a_model, refuse_scripted
from keepk.model.torch_internals import TorchDispatchMode, tree_flatten, tree_leaves, tree_map, tree_unflatten
from keepk.plan.numbers import count
from keepk.reports.tables import Table

TOLERANCE = 1e-5  # largest difference from the model on the example, relative to the largest output
# The exporter makes views of reshapes if the example's strides allow it; those of other inputs may not.
RESHAPES: dict[Any, Any] = dict.fromkeys(
    (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.reshape
)
PARALLEL = 1e6  # multiply-adds per thread below which another thread takes longer than it saves


@dataclass(frozen=True)
class SparseLayer:
    """A layer of a `SparseModel`.

    Attributes:
        name: The layer's path in the model.
        runs: "keepk" if it runs in a compiled program, "torch" if torch runs it.
        kept: How many of its weights are not zero; None for a layer without weights.
        total: How many weights it has.
        macs: Multiply-adds for one sample, without those of zero weights.
        dense_macs: Multiply-adds for one sample, zeros included.
        reason: Why torch runs it; empty if it does not.
    """

    name: str
    runs: str
    kept: int | None
    total: int | None
    macs: int | None
    dense_macs: int | None
    reason: str = ""


@dataclass(frozen=True)
class SparseReport:
    """How a `SparseModel` runs. It prints as a table.

    Attributes:
        model: The name of the model's class.
        cpu: LLVM's name of the CPU.
        vector: Floats in a vector.
        threads: The most threads that a call uses.
        difference: max|model - fast| / max|model| on the example.
        layers: The layers with weights, and the operations that torch runs, without bookkeeping such as sizes.
    """

    model: str
    cpu: str
    vector: int
    threads: int
    difference: float
    layers: tuple[SparseLayer, ...]

    @property
    def fallbacks(self) -> tuple[SparseLayer, ...]:
        """The layers that torch runs."""
        return tuple(layer for layer in self.layers if layer.runs == "torch")

    @property
    def macs_left(self) -> float:
        """The share of the multiply-adds that is left, over all layers whose weights the programs know."""
        known = [layer for layer in self.layers if layer.macs is not None]
        dense = sum(layer.dense_macs or 0 for layer in known)
        return sum(layer.macs or 0 for layer in known) / dense if dense else 1.0

    def json(self) -> str:
        """All attributes, as JSON."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """A table with one row for each layer."""
        title = (
            f"{self.model} on {self.cpu}, vectors of {self.vector} floats, {self.threads} "
            f"thread{'s' if self.threads > 1 else ''}; differs from the model by {self.difference:.1e}"
        )
        rows = [
            (
                layer.name,
                layer.runs,
                _of(layer.kept, layer.total),
                _of(layer.macs, layer.dense_macs),
                "" if layer.macs is None else _percent(layer.macs, layer.dense_macs),
                layer.reason,
            )
            for layer in self.layers
        ]
        known = [layer for layer in self.layers if layer.macs is not None]
        sums = [sum(getattr(it, name) for it in known) for name in ("kept", "total", "macs", "dense_macs")]
        if known:
            rows.append(("in keepk", "", _of(*sums[:2]), _of(*sums[2:]), _percent(*sums[2:]), ""))
        columns = ("layer", "runs in", "weights left", "MACs left", "share", "reason")
        return Table(columns, tuple(rows), title, total_row=bool(known))

    def __str__(self) -> str:
        return str(self.table())


def _of(left: int | None, total: int | None) -> str:
    return "" if left is None else f"{left:,} of {total:,}"


def _percent(left: int, total: int | None) -> str:
    return f"{100 * left / total:.1f} %" if total else ""


class _Pool:
    """Threads, started when they are first needed, and again in a forked process, which has none of its parent's."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._started: tuple[int, ThreadPoolExecutor] | None = None

    def run(self, work: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Do the work for each item; returns when all is done."""
        started, process = self._started, os.getpid()
        if started is None or started[0] != process:
            started = self._started = process, ThreadPoolExecutor(self.threads)
        list(started[1].map(work, items))


class _Runner:
    """A segment, with a program for each group size, compiled when it is first used."""

    def __init__(self, segment: Segment, exported: Exported, machine: Machine) -> None:
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self.shapes = {name: exported.shapes[name] for name in (*segment.inputs, *segment.outputs)}
        self._segment, self._exported, self._machine = segment, exported, machine
        shapes, lanes = Shapes(segment, exported), machine.lanes
        spatial = any(size[1:] != (1, 1) for size in shapes.sizes.values())
        groups = (lanes,) if spatial else (4 * lanes, lanes)
        self._groups = tuple(group for group in groups if shapes.largest(group, machine) <= LARGEST)
        # With up to this many samples left over, they are computed one at a time, otherwise as a partly filled group: a
        # single sample costs less than a group of lanes, but more than one lane of it.
        self._few = lanes * 5 // 8 if spatial else 3
        self._lock = threading.Lock()
        self._programs: dict[int, Program] = {}
        self.macs = sum(
            int(np.count_nonzero(op.weight)) * prod(exported.shapes[op.output][1:])
            for op in segment.ops
            if isinstance(op, Weights)
        )
        self.program(1)

    def program(self, group: int) -> Program:
        found = self._programs.get(group)
        if found is None:
            with self._lock:
                found = self._programs.get(group)
                if found is None:
                    found = self._programs[group] = Program(self._segment, self._exported, self._machine, group)
        return found

    def spans(self, batch: int) -> Iterator[tuple[int, int, int]]:
        """Group size, begin and end of the spans in which a batch is computed."""
        begin = 0
        for group in self._groups:
            end = begin + (batch - begin) // group * group
            if end > begin:
                yield group, begin, end
            begin = end
        if begin < batch:
            single = batch - begin < self._few or not self._groups
            yield (1 if single else self._groups[-1]), begin, batch

    def __call__(self, values: Sequence[Tensor], batch: int, pool: _Pool | None) -> list[Tensor]:
        refuse_without_memory(*values)
        # Held until the end: the addresses are those of these tensors.
        return self.on([plain(value) for value in values], batch, pool)

    def on(self, inputs: Sequence[Tensor], batch: int, pool: _Pool | None) -> list[Tensor]:
        """The results for inputs that are contiguous and in memory."""
        results = [new_tensor((batch, *self.shapes[name])) for name in self.outputs]
        refuse_without_memory(*results)  # a mode may make others
        addresses: tuple[Any, Any] = inputs[0].data_ptr(), results[0].data_ptr()
        if not len(inputs) == len(results) == 1:
            addresses = _array(inputs), _array(results)
        spans = list(self.spans(batch))
        if pool is not None and self.macs * batch > PARALLEL:
            spans = [part for span in spans for part in divided(span, pool.threads)]
        if pool is None or len(spans) == 1:
            for span in spans:
                self._run(span, addresses)
        else:
            pool.run(lambda span: self._run(span, addresses), spans)
        return results

    def _run(self, span: tuple[int, int, int], addresses: tuple[Any, Any]) -> None:
        group, begin, end = span
        program = self.program(group)
        space = program.workspace()
        program.run(space.address, *addresses, begin, end)
        program.release(space)


def divided(span: tuple[int, int, int], parts: int) -> Iterator[tuple[int, int, int]]:
    """A span as up to `parts` spans of whole groups.

    >>> list(divided((16, 0, 80), 2))
    [(16, 0, 48), (16, 48, 80)]
    """
    group, begin, end = span
    groups = -(-(end - begin) // group)
    parts = min(parts, groups)
    for part in range(parts):
        first, last = -(-groups * part // parts), -(-groups * (part + 1) // parts)
        yield group, begin + first * group, min(end, begin + last * group)


def _array(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(it.data_ptr() for it in tensors))


def new_tensor(shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def refuse_without_memory(*tensors: Tensor) -> None:
    """Refuse tensors of tracers and the like, whose numbers are not in memory."""
    for tensor in tensors:
        shown = "tensor without its numbers in memory"
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            shown = f"{type(tensor).__name__} instead of a tensor in memory"
        elif _in_memory(tensor):
            continue
        raise SparseError(
            f"sparse: got a {shown}, as tracers, fake modes and the transforms of torch.func make them. Call the "
            f"compiled model outside of them, with ordinary tensors."
        )


def _in_memory(tensor: Tensor) -> bool:
    """Whether the storage of a strided tensor has all of its elements."""
    try:
        address, bytes_ = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func
        return False
    if not tensor.numel():
        return True
    span = tensor.numel()  # elements from the first one to the last one, with the gaps between them
    if not tensor.is_contiguous():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return address != 0 and (tensor.storage_offset() + span) * tensor.element_size() <= bytes_


def plain(value: Tensor) -> Tensor:
    """A tensor whose numbers are adjacent in memory, in the order of its indices."""
    return value.detach().contiguous().resolve_neg()


class SparseModel:
    """A snapshot of a model that computes its outputs without the zero weights; made by `keepk.sparse`.

    Calls take the arguments of the model's forward, with a batch of any size, and return what it returns. Changing the
    model afterwards changes nothing here. Several threads may call it at the same time.

    Attributes:
        report: The layers, how many of their weights and MACs are left, and which of them torch runs, and why.
    """

    report: SparseReport
    _steps: list[_Runner | TorchNode]
    _exported: Exported | None
    _storages: AbstractSet[int] = frozenset()  # of the tensors that the snapshot consists of

    def __init__(self, model: nn.Module, example: Example, threads: int) -> None:
        self._machine = host()
        self._threads = threads
        self._pool = _Pool(threads) if threads > 1 else None
        with _in_float32(), torch.inference_mode(mode=False):
            self._build(model, example)

    def _build(self, model: nn.Module, example: Example) -> None:
        self._model, held = _snapshot(model)
        given = with_rows(example, max(2, rows_of(example)))
        self._rows = rows_of(given)
        leaves, self._structure = tree_flatten((given.arguments, given.by_name))
        self._batched = [is_batched(leaf, self._rows) for leaf in leaves]
        self._leaves = leaves
        try:
            wanted, self._result = self._model_on(given)
        except Exception as reason:  # forward may raise anything
            raise SparseError(
                f"sparse: {type(model).__name__} fails on the example, as a batch of {self._rows} ({reason}). Pass "
                f"inputs that its forward takes."
            ) from reason
        why = self._compile(given, leaves)
        error = self._error(given, wanted)
        if not error <= TOLERANCE:
            self._refuse(type(model).__name__, error, _difference(wanted, self._model_on(given)[0]))
        if self._exported is not None:
            why = self._other_batches(given, wanted)
            if why:
                self._steps, self._exported, self._quick = [], None, None
                error = self._error(given, wanted)
        # The tensors that the snapshot consists of; those of an exported graph may be computed from the model's.
        constants = self._exported.constants.values() if self._exported else [*held, *self._model.parameters()]
        self._storages = {_storage_of(it) for it in constants if isinstance(it, Tensor)} - {0}
        if self._exported is None:
            self._refuse_passed(model, given)
        layers = tuple(self._layers(why))
        self.report = SparseReport(
            type(model).__name__, self._machine.name, self._machine.width, self._threads, error, layers
        )

    def _error(self, given: Example, wanted: Sequence[Any]) -> float:
        """How far the results on the example are from the model's."""
        own = given.on(None)  # copies, since forward may write to its arguments
        return _difference(wanted, tree_flatten(self(*own.arguments, **own.by_name))[0])

    @staticmethod
    def _refuse(model: str, error: float, again: float) -> None:
        """Refuse a model from which the programs' results differ by `error`, or its own of a second run by `again`."""
        if not again <= TOLERANCE:
            raise SparseError(
                f"sparse: {model} gives different results for the same input in eval mode, so a compiled one cannot "
                f"be checked. Remove what is random or counts calls, or run it in torch."
            )
        why = "Its results may be dominated by rounding."
        if error == float("inf"):
            why = "It has NaN or infinities, which the compiled model skips where they meet a zero weight."
        raise SparseError(
            f"sparse: the compiled {model} differs from the model by {error:.1e} of the largest output on the "
            f"example, which is more than {TOLERANCE:.0e}. {why} Pass a typical example, or run the model in torch."
        )

    def _refuse_passed(self, model: nn.Module, given: Example) -> None:
        """Refuse a model that torch runs if its copy reaches the tensors of the one that was passed.

        A function that a module holds, such as a lambda, is not copied, and what it refers to is not either.
        """
        passed = [*model.parameters(), *model.buffers()]
        with _Used() as used:
            self._model_on(given)
        if used.storages & ({_storage_of(it) for it in passed} - self._storages - {0}):
            raise SparseError(
                f"sparse: the forward of {type(model).__name__} uses tensors of the model that was passed rather than "
                f"those of its copy, so the result would not be a snapshot. Let it use the layers of `self`, not those "
                f"that a function or lambda remembers."
            )

    def _other_batches(self, given: Example, typical: Sequence[Any]) -> str:
        """Why torch has to run the model although it was exported: it differs for a batch of 0, 1, or another size.

        The exporter does not see everything that forward does with the size of a batch: squeeze(), for example, also
        removes the dim of a single sample. Batches that the model itself refuses are not compared.
        """
        for rows in (0, 1, 3 if self._rows == 2 else 2):
            own, other = (with_rows(given, rows).on(None) for _ in range(2))
            try:
                with quiet():
                    wanted, structure = self._model_on(own)
            except Exception:  # forward may raise anything
                continue
            try:
                got, result = tree_flatten(self(*other.arguments, **other.by_name))
            except Exception as error:  # a step of torch may raise anything
                return f"torch.export's graph fails for a batch of {rows} ({str(error).partition(chr(10))[0]})"
            if structure != result or not all(map(_agree, wanted, got, typical)):
                return f"torch.export's graph differs from the model for a batch of {rows}"
        return ""

    def _model_on(self, given: Example) -> tuple[list[Any], Any]:
        """The leaves and the structure of what the model returns."""
        own = given.on(None)
        return tree_flatten(self._model(*own.arguments, **own.by_name))

    def _compile(self, given: Example, leaves: Sequence[Any]) -> str:
        """Make the steps; returns why torch has to run the whole model, or an empty string."""
        self._steps, self._exported = [], None
        banned: dict[str, str] = {}
        try:
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise Unsupported("forward takes arguments that are not tensors")
            program = export(self._model, given)
            while True:
                found = read(program, banned)
                try:
                    self._steps = [
                        _Runner(step, found, self._machine) if isinstance(step, Segment) else step
                        for step in found.steps
                    ]
                    break
                except Banned as reason:
                    if not reason.output or reason.output in banned:
                        raise Unsupported(reason.reason) from reason
                    banned[reason.output] = reason.reason
            if len(found.inputs) != len(leaves) or len(found.outputs) != self._result.num_leaves:
                raise Unsupported("its inputs or outputs are not those of the exported graph")
        except Unsupported as reason:
            self._steps = []
            return str(reason)
        self._exported = found
        self._last = _last_readers(self._steps, found)
        runners = [step for step in self._steps if isinstance(step, _Runner)]
        if len(self._steps) == len(runners) == 1:
            [runner] = runners
            results = tuple(getattr(it, "name", "") for it in found.outputs)
            single = len(found.inputs) == len(results) == 1 and self._takes(leaves[0])
            if single and (runner.inputs, runner.outputs) == (found.inputs, results):
                self._quick = _quick(runner, self._pool)
        if not any(isinstance(step, _Runner) for step in self._steps):
            self._steps, self._exported = [], None  # torch runs the model itself rather than its graph
            return "no layer is faster without its zeros"
        return ""

    _quick: Callable[[Tensor], Tensor | None] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The model's outputs, without gradients.

        Args:
            arguments: What forward takes; float32 tensors on the CPU, of the example's sizes except for the batch.
            named: The same, by name.

        Raises:
            SparseError: The arguments differ from the example's in more than the batch.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # missing in torch's types
            raise SparseError(
                "sparse: torch.jit.trace cannot record machine code. Trace or export the model that was compiled."
            )
        if self._quick is not None and len(arguments) == 1 and not named:
            result = self._quick(arguments[0])
            if result is not None:
                return tree_unflatten([result], self._result) if self._wrapped else result
        leaves, structure = tree_flatten((arguments, named))
        if structure != self._structure:
            arguments, named = self._as_in_example(arguments, named)
            leaves, structure = tree_flatten((arguments, named))
        batch = self._checked(leaves, structure)
        with _in_float32():
            if self._exported is None:
                return tree_map(self._own, self._model(*arguments, **named))
            return tree_unflatten([self._own(it) for it in self._walk(leaves, batch)], self._result)

    def _own(self, value: Any) -> Any:
        """A result, copied if it shares memory with the snapshot, since the caller may write to it."""
        if isinstance(value, Tensor) and _storage_of(value) in self._storages:
            return value.clone()
        return value

    def _takes(self, *arguments: Any) -> bool:
        """Whether arguments by position are those of the example."""
        if tree_flatten((arguments, {}))[1] == self._structure:
            return True
        return bool(tree_flatten(self._as_in_example(arguments, {}))[1] == self._structure)

    def _as_in_example(
        self, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments passed by position and by name as in the example, where forward's signature allows it."""
        positional, by_name = tree_unflatten(self._leaves, self._structure)
        kinds = signature(self._model.forward).parameters
        fixed = all(it.kind is not Parameter.VAR_POSITIONAL for it in kinds.values())
        try:
            given = signature(self._model.forward).bind(*arguments, **named).arguments if fixed else {}
        except TypeError:
            given = {}
        for name, it in kinds.items():
            if it.kind is Parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        first = list(kinds)[: len(positional)]
        if not given or {*given} != {*first, *by_name}:
            return arguments, named
        return tuple(given[name] for name in first), {name: given[name] for name in by_name}

    @property
    def _wrapped(self) -> bool:
        return not self._result.is_leaf()

    def _checked(self, leaves: Sequence[Any], structure: Any) -> int:
        """The batch size of a call, after checking its arguments."""
        if structure != self._structure:
            raise SparseError(f"sparse: got arguments {structure}, the example has {self._structure}. Pass the same.")
        sizes = set()
        for index, (got, like) in enumerate(zip(leaves, self._leaves, strict=True)):
            if not isinstance(like, Tensor):
                if type(got) is not type(like) or not np.array_equal(got, like):
                    raise SparseError(f"sparse: argument {index} is {got!r}, the example has {like!r}. Pass the same.")
                continue
            batched = self._batched[index]
            fits = (
                isinstance(got, Tensor)
                and got.layout == like.layout
                and got.dtype == like.dtype
                and got.device == like.device
                and got.dim() == like.dim()
                and got.shape[batched:] == like.shape[batched:]
            )
            if not fits:
                shown = (
                    f"{got.dtype} {tuple(got.shape)} on {got.device}" if isinstance(got, Tensor) else type(got).__name__
                )
                if isinstance(got, Tensor) and got.layout != like.layout:
                    shown = f"{shown} with layout {got.layout}"
                shape = ("batch", *like.shape[1:]) if batched else tuple(like.shape)
                raise SparseError(
                    f"sparse: argument {index} is {shown}, the example has {like.dtype} {shape} on {like.device}. "
                    f"Pass that, or make another keepk.sparse(model, example) for other sizes."
                )
            if batched:
                sizes.add(len(got))
        if len(sizes) != 1:
            raise SparseError(f"sparse: the arguments have batches of {sorted(sizes)}. Pass equal ones.")
        return int(sizes.pop())

    def _walk(self, leaves: Sequence[Any], batch: int) -> list[Any]:
        """Run the steps one after the other."""
        found = self._exported
        assert found is not None
        values = dict(found.constants)
        values.update(zip(found.inputs, leaves, strict=True))
        for index, step in enumerate(self._steps):
            if isinstance(step, _Runner):
                results = step([values[name] for name in step.inputs], batch, self._pool)
                values.update(zip(step.outputs, results, strict=True))
            elif is_batch_size(step.node, found.batch):
                values[step.node.name] = batch
            else:
                arguments, named = fx.node.map_arg((step.node.args, step.node.kwargs), lambda it: values[it.name])
                operation: Any = RESHAPES.get(step.node.target, step.node.target)
                values[step.node.name] = operation(*arguments, **named)
            for name in self._last.get(index, ()):
                del values[name]
        return [values[it.name] if isinstance(it, fx.Node) else it for it in found.outputs]

    def _layers(self, reason: str) -> Iterator[SparseLayer]:
        if self._exported is None:
            yield SparseLayer(type(self._model).__name__, "torch", None, None, None, None, reason)
            return
        for step in self._exported.steps:
            if isinstance(step, TorchNode):
                if step.reason:
                    yield SparseLayer(step.layer, "torch", None, None, None, None, step.reason)
                continue
            for op in step.ops:
                if isinstance(op, Weights):
                    left, pixels = int(np.count_nonzero(op.weight)), prod(self._exported.shapes[op.output][1:])
                    yield SparseLayer(op.layer, "keepk", op.kept, op.dense, left * pixels, op.dense * pixels)

    def __repr__(self) -> str:
        torch_runs = len(self.report.fallbacks)
        return (
            f"SparseModel({self.report.model}, {100 * self.report.macs_left:.1f} % of MACs left, "
            f"{torch_runs} operation{'' if torch_runs == 1 else 's'} in torch)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseModel":
        return self  # nothing changes it

    def __reduce__(self) -> Any:
        raise SparseError(
            "sparse: a compiled model cannot be pickled, because machine code does not travel. Save the model with "
            "keepk.save, and call keepk.sparse on the loaded one."
        )


def _quick(runner: _Runner, pool: _Pool | None) -> Callable[[Tensor], Tensor | None]:
    """A shorter way for the usual call: one tensor that is as the program needs it, and one result."""
    [shape], [result] = ([runner.shapes[name] for name in names] for names in (runner.inputs, runner.outputs))
    dims, single = len(shape) + 1, runner.program(1)
    empty, float32, strided, one = torch.empty, torch.float32, torch.strided, (1, *result)
    bytes_ = 4 * prod(shape)

    def call(value: Tensor) -> Tensor | None:
        if type(value) is not Tensor or value.dtype is not float32 or value.layout is not strided:
            return None
        if not value.is_contiguous() or not value.is_cpu:
            return None
        sizes = value.shape
        if len(sizes) != dims or sizes[1:] != shape or value.requires_grad or value.is_neg():
            return None
        batch = sizes[0]
        try:
            source = value.data_ptr()
            if not source or value.untyped_storage().nbytes() < bytes_ * batch + 4 * value.storage_offset():
                return None
            if batch != 1:
                return runner.on((value,), batch, pool)[0]
            out = empty(one, dtype=float32, device="cpu")
            target = out.data_ptr() if type(out) is Tensor else 0
        except (RuntimeError, NotImplementedError):  # a wrapper of torch.func, which the longer way refuses
            return None
        if not target:
            return None
        space = single.workspace()
        single.run(space.address, source, target, 0, 1)
        single.release(space)
        return out

    return call


def _in_float32() -> ExitStack:
    """A context without gradients and autocast: programs read and write float32, and so does what torch runs."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast("cpu", enabled=False))
    return stack


def _storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none, as in transforms of torch.func."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class _Used(TorchDispatchMode):
    """Collects the storages of the tensors that operations read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # missing in torch's types
        self.storages = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.storages.update(_storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def _snapshot(model: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """A copy of a model, and the tensors that were copied."""
    # Results of autograd, such as the masked weights of torch.nn.utils.prune, refuse to be copied.
    held = (it for module in model.modules() for it in vars(module).values() if isinstance(it, Tensor))
    copies: dict[int, Any] = {id(it): it.detach().clone() for it in held if not it.is_leaf}
    try:
        made = copy.deepcopy(model, copies).eval().requires_grad_(False)
    except Exception as error:  # a module may refuse to be copied with any error
        raise SparseError(
            f"sparse: model {type(model).__name__} cannot be copied ({error}), and the compiled model is a snapshot. "
            f"Make its modules work with copy.deepcopy."
        ) from error
    return made, [it for it in copies.values() if isinstance(it, Tensor)]


def _difference(wanted: Sequence[Any], got: Sequence[Any]) -> float:
    pairs = zip(wanted, got, strict=True)
    return max((difference(one, other) for one, other in pairs if isinstance(one, Tensor)), default=0.0)


def _agree(wanted: Any, got: Any, typical: Any) -> bool:
    """Whether two results are equal up to rounding, relative to the largest number of the first or of a typical one."""
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return type(wanted) is type(got) and bool(wanted == got)
    if wanted.dtype != got.dtype:
        return False
    error = difference(wanted, got)
    if error <= TOLERANCE or not isinstance(typical, Tensor):
        return error <= TOLERANCE
    own, other = (float(it.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if it.numel() else 0.0 for it in (wanted, typical))
    return error * (own or 1.0) <= TOLERANCE * other


def _last_readers(steps: Sequence[_Runner | TorchNode], found: Exported) -> dict[int, list[str]]:
    """The values that nothing needs after each step, so that their memory can be used again."""
    kept = {it.name for it in found.outputs if isinstance(it, fx.Node)} | set(found.constants)
    last = dict[str, int]()
    for index, step in enumerate(steps):
        names = step.inputs if isinstance(step, _Runner) else inputs_of(step.node, found.batch)
        made = step.outputs if isinstance(step, _Runner) else (step.node.name,)
        last.update(dict.fromkeys((*names, *made), index))
    result: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            result.setdefault(index, []).append(name)
    return result


def sparse(model: nn.Module, example: Any, threads: int = 1) -> SparseModel:
    """Compile a model with pruned weights for fast inference on the CPU; needs ``pip install "keepk[sparse]"``.

    Layers whose weights are mostly zero become machine code that multiplies only with the others. torch runs
    operations without a kernel, and layers that are faster with their zeros; the report lists them. The result is a
    snapshot: it is in eval mode, and does not follow later changes of the model, which itself is not changed.

    A sample gets the same bits whatever the size of its batch and the number of threads, as long as torch runs nothing.
    Zero weights are skipped even where the activation is NaN or infinite. Results are equal to the model's up to
    rounding, which is checked on the example.

    Args:
        model: A float32 model on the CPU.
        example: An input of forward, as for `trace`. Later inputs have the same sizes, except for the batch.
        threads: How many threads a call may use; they share the samples of a batch.

    Returns:
        A `SparseModel`: call it like the model. Its `report` has the layers.

    Raises:
        SparseError: llvmlite is missing, the CPU has no kernels, the model is not a float32 model on the CPU, or its
            results on the example differ.

    Examples:
        >>> import keepk, torch
        >>> net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> keepk.Pruner(net, [keepk.weights("*.weight", prune=0.9, schedule=keepk.OneShot())]).step()
        >>> fast = keepk.sparse(net, torch.randn(2, 64))
        >>> x = torch.randn(100, 64)
        >>> torch.allclose(fast(x), net(x), atol=1e-5)
        True
        >>> [(layer.name, layer.runs, layer.total) for layer in fast.report.layers]
        [('0', 'keepk', 2048), ('2', 'keepk', 256)]
    """
    if not isinstance(model, nn.Module):
        raise SparseError(f"sparse: {not_a_model(model)} The order is model, example.")
    threads = count(threads, "threads", lambda words: SparseError(f"sparse: {words}"), least=1)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise SparseError(f"sparse: tensor {name!r} has layout {tensor.layout}. Pass it as to_dense() makes it.")
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise SparseError(
                f"sparse: tensor {name!r} is {tensor.dtype} on {tensor.device}. Programs are for float32 on the CPU: "
                f"pass copy.deepcopy(model).float().cpu()."
            )
    try:
        refuse_scripted("sparse", model)
        given = Example.of(example)
        rows_of(given)
    except TraceError as error:
        raise SparseError(f"sparse: {str(error).removeprefix('sparse: ')}") from error
    return SparseModel(model, given, threads)
