"""From a model to the operations of a program: `torch.export`, then one short rule for each ATen operation.

A rule turns a node of the exported graph into an operation on values ``(channels, rows, columns)`` per sample, or says
why it cannot. Nodes without a rule, and layers that are cheaper in torch, stay with torch. `read` splits the graph
into segments of operations and nodes that torch runs, in the order of the graph.
"""

import logging
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from keepk.deploy.runtime import bound, is_batched, rows_of
from keepk.model.example import Example
from keepk.model.torch_internals import guards_against_one, sizes_as_unknown, tree_map

aten = torch.ops.aten
Shape = tuple[int, ...]
Clamp = tuple[float, float]
RELU: Clamp = (0.0, float("inf"))


@dataclass(frozen=True, eq=False)
class Weights:
    """A convolution or a linear layer, with a following BatchNorm and clamp.

    Attributes:
        output: The name of the result.
        inputs: The name of the input.
        layer: The layer's path in the model.
        weight: ``[outputs, inputs of a group, rows, columns]``.
        bias: One number for each output.
        stride: Of rows and columns; so are the next two.
        padding: Zeros around the input.
        dilation: Steps between the weights of a kernel.
        groups: The number of groups.
        clamp: Bounds of the results.
        dense: How many weights the layer has in the model, zeros included.
        kept: How many of them are not zero; a BatchNorm that is part of the layer may have made others zero.
    """

    output: str
    inputs: tuple[str, ...]
    layer: str
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    clamp: Clamp | None = None
    dense: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Pointwise:
    """A function of `keepk.engine.kernels.FUNCTIONS`, or "clamp" with its bounds."""

    output: str
    inputs: tuple[str, ...]
    layer: str
    kind: str
    clamp: Clamp = (0.0, 0.0)


@dataclass(frozen=True)
class Binary:
    """The sum ("add") or the product ("mul") of two values of equal shapes, perhaps clamped."""

    output: str
    inputs: tuple[str, ...]
    layer: str
    kind: str
    clamp: Clamp | None = None


@dataclass(frozen=True)
class Scale:
    """A value times a number for each channel."""

    output: str
    inputs: tuple[str, ...]
    layer: str


@dataclass(frozen=True, eq=False)
class Pool:
    """The maximum ("max") or "average" of a window for each output.

    Attributes:
        output: The name of the result.
        inputs: The name of the input.
        layer: The layer's path in the model.
        kind: "max" or "average".
        rows: For each row of the output: the first row of its window, the one after the last, how many count.
        columns: The same for columns.
        uniform: Size of all windows and their common step, if they lie inside the input.
    """

    output: str
    inputs: tuple[str, ...]
    layer: str
    kind: str
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    uniform: tuple[tuple[int, int], int] | None


@dataclass(frozen=True)
class Cat:
    """Values side by side, along the channels."""

    output: str
    inputs: tuple[str, ...]
    layer: str


@dataclass(frozen=True)
class View:
    """The same numbers in another shape."""

    output: str
    inputs: tuple[str, ...]
    layer: str


@dataclass(frozen=True, eq=False)
class Affine:
    """A BatchNorm: each channel times a number, plus a number. It becomes part of a layer, or a layer of its own."""

    output: str
    inputs: tuple[str, ...]
    layer: str
    factors: NDArray[np.float64]
    shifts: NDArray[np.float64]


Op = Weights | Pointwise | Binary | Scale | Pool | Cat | View | Affine


@dataclass(frozen=True)
class Segment:
    """Operations that run as one compiled program.

    Attributes:
        ops: The operations, in order.
        inputs: Names of values that torch hands over.
        outputs: Names of values that torch or the caller needs.
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TorchNode:
    """An operation that torch runs, with the reason.

    Attributes:
        node: The node of the exported graph.
        layer: The path of its layer in the model.
        reason: Why it is not part of a segment; empty for bookkeeping, such as a size.
    """

    node: fx.Node
    layer: str
    reason: str


@dataclass(frozen=True, eq=False)
class Exported:
    """A model as steps.

    Attributes:
        steps: Segments and nodes of torch, in order.
        shapes: The shape of each value without its batch.
        constants: Parameters, buffers and what follows from them alone, by the name of the node.
        inputs: Names of the graph's inputs, in the order of the flattened arguments.
        outputs: The nodes or plain values that the graph returns.
        batch: The symbol of the batch, as text.
    """

    steps: tuple[Segment | TorchNode, ...]
    shapes: Mapping[str, Shape]
    constants: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    batch: str


class Unsupported(Exception):  # noqa: N818 - not an error: the reason why torch runs an operation
    """Why a node is not an operation of a program."""


@dataclass
class Reading:
    """The state while a graph is read.

    Attributes:
        batch: The symbol of the batch, as text.
        banned: Nodes that no program can run, with the reason.
        shapes: As in `Exported`.
        constants: As in `Exported`.
        names: Paths of parameters and buffers, by the names of their nodes.
        nodes: The nodes of the graph by name.
    """

    batch: str
    banned: Mapping[str, str]
    shapes: dict[str, Shape] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(default_factory=dict)

    def shape(self, node: Any) -> Shape:
        """The shape of a node's value without the batch.

        Raises:
            Unsupported: It is not a batch of float32 samples of known sizes.
        """
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.layout != torch.strided:
            raise Unsupported("its input or result is not a float32 tensor")
        sizes: list[Any] = [*value.shape]
        first, *rest = sizes or [0]
        if isinstance(first, int) or str(first) != self.batch or not all(isinstance(size, int) for size in rest):
            raise Unsupported("its sizes other than the batch are not fixed, or the batch is not first")
        if len(rest) not in (1, 3):
            raise Unsupported(f"its tensors have {len(rest) + 1} dimensions instead of 2 or 4")
        if 0 in rest:
            raise Unsupported("a tensor is empty")
        return self.shapes.setdefault(node.name, tuple(int(size) for size in rest))

    def constant(self, node: Any) -> Tensor:
        """A constant float32 tensor among the arguments.

        Raises:
            Unsupported: The argument depends on the input.
        """
        found = self.constants.get(node.name) if isinstance(node, fx.Node) else None
        if not isinstance(found, Tensor) or found.dtype != torch.float32 or found.layout != torch.strided:
            raise Unsupported("its weights are computed from the input or are not strided float32 tensors")
        return found


def is_batch_size(node: fx.Node, batch: str) -> bool:
    """Whether a node takes the size of the batch from a tensor."""
    return node.target == aten.sym_size.int and str(node.meta.get("val")) == batch


def layer_of(node: fx.Node) -> str:
    """The path of the module that a node is from; its own name where the module is the whole model."""
    stack = [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if isinstance(entry, tuple)]
    path = str(stack[-1][0]) if stack else ""
    return path if path and not path.startswith("_") else node.name


# Export --------------------------------------------------------------------------------------------------------------


QUIET = threading.RLock()  # logging, filters of warnings and the exporter's settings belong to the whole process


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's warnings and logs, which are about its internals."""
    with QUIET:
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(before)


def export(model: nn.Module, example: Example) -> Any:
    """The exported program of a model in eval mode, functional, for a batch of any size.

    Args:
        model: The model.
        example: Its inputs, with at least two samples.

    Raises:
        Unsupported: torch.export cannot trace the model, or only for some batches.
    """
    rows, batch = rows_of(example), torch.export.Dim("batch", min=1)
    try:
        shapes = tree_map(lambda value: {0: batch} if is_batched(value, rows) else None, bound(model, example))
        with quiet(), torch.no_grad(), sizes_as_unknown():
            program = torch.export.export(model, example.arguments, example.by_name, dynamic_shapes=shapes)
            _refuse_guards(program)
            return program.run_decompositions({})
    except Unsupported:
        raise
    except Exception as error:  # the exporter runs the user's code and raises errors of many kinds
        reason = str(error).strip().partition("\n")[0][:200]
        raise Unsupported(f"torch.export cannot trace it for a batch of any size ({reason})") from error


def _refuse_guards(program: Any) -> None:
    """Refuse a graph that is not valid for a single sample.

    torch.export itself refuses a graph that is valid only for some batches of two samples and more.
    """
    inputs = set(program.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in program.graph.nodes if node.name in inputs]
    sizes: list[Any] = [it.shape[0] for it in values if isinstance(it, Tensor) and it.dim()]
    for guard in guards_against_one([size for size in sizes if isinstance(size, torch.SymInt)]):
        raise Unsupported(f"forward does something else for a batch of 1 (it asks whether {guard})")


def read(program: Any, banned: Mapping[str, str]) -> Exported:
    """The steps of an exported program.

    Args:
        program: A result of `exported`.
        banned: Nodes that stay with torch, with the reason.

    Raises:
        Unsupported: The graph has something that no step stands for; torch has to run the whole model.
    """
    graph, signature = program.graph, program.graph_signature
    state = {**program.state_dict, **program.constants}
    bound = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    bound |= signature.inputs_to_lifted_tensor_constants
    inputs = tuple(signature.user_inputs)
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise Unsupported("forward changes a buffer or its input")
    reading = Reading(_batch_of(graph, inputs), banned, names=bound, nodes={node.name: node for node in graph.nodes})
    for name, path in bound.items():
        # Tensors that forward takes from elsewhere are not part of the copied model.
        lifted = name in signature.inputs_to_lifted_tensor_constants
        reading.constants[name] = state[path].detach().clone() if lifted else state[path].detach()
    [output] = [node for node in graph.nodes if node.op == "output"]
    kept = {it.name for it in output.args[0] if isinstance(it, fx.Node)}
    steps = list(_steps(graph, reading))
    readers = _readers(steps, kept, reading.batch)
    steps = list(_cheaper_in_torch(_folded(steps, readers), reading))
    readers = _readers(steps, kept, reading.batch)  # a layer with its BatchNorm has the name of the latter
    return Exported(
        steps=tuple(_without_unused_sizes([*_segments(steps, reading, readers)], kept, reading.batch)),
        shapes=reading.shapes,
        constants=reading.constants,
        inputs=inputs,
        outputs=tuple(output.args[0]),
        batch=reading.batch,
    )


def _batch_of(graph: fx.Graph, inputs: Sequence[str]) -> str:
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder" and node.name in inputs]
    symbols = {
        str(it.shape[0]) for it in values if isinstance(it, Tensor) and it.dim() and not isinstance(it.shape[0], int)
    }
    if len(symbols) != 1:
        raise Unsupported("no input has a batch of any size")
    return symbols.pop()


def _steps(graph: fx.Graph, reading: Reading) -> Iterator[Op | TorchNode]:
    """The graph as operations and nodes of torch, in order."""
    # Nodes that an earlier operation includes: a BatchNorm includes the node that takes its first result.
    made = set[str]()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.name in made:
            continue
        if node.op != "call_function":
            raise Unsupported(f"its graph has a {node.op}")
        if _is_constant(node, reading):
            with torch.no_grad():
                arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda it: reading.constants[it.name])
                reading.constants[node.name] = node.target(*arguments, **named)
            continue
        rule = RULES.get(node.target)
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            if node.users:
                yield TorchNode(node, "", "")
            continue  # an assertion about sizes
        try:
            if node.name in reading.banned:
                raise Unsupported(reading.banned[node.name])
            if rule is None:
                raise Unsupported(f"there is no kernel for {node.target}")
            op = rule(reading, node)
            made.add(op.output)
            yield op
        except Unsupported as reason:
            yield TorchNode(node, layer_of(node), str(reason))


def _is_constant(node: fx.Node, reading: Reading) -> bool:
    """Whether a node's value follows from parameters alone, and is the same at every call."""
    if not node.all_input_nodes or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(it.name in reading.constants for it in node.all_input_nodes)


# Segments ------------------------------------------------------------------------------------------------------------


def inputs_of(node: fx.Node, batch: str) -> list[str]:
    """The values that torch reads to run a node. The size of the batch is known without any."""
    return [] if is_batch_size(node, batch) else [it.name for it in node.all_input_nodes]


def _readers(steps: Sequence[Op | TorchNode], kept: set[str], batch: str) -> dict[str, list[str]]:
    """The names of the results that are computed from each value; "" stands for the caller."""
    readers: dict[str, list[str]] = {name: [""] for name in kept}
    for step in steps:
        if isinstance(step, TorchNode):
            inputs, output = tuple(inputs_of(step.node, batch)), step.node.name
        else:
            inputs, output = step.inputs, step.output
        for name in inputs:
            readers.setdefault(name, []).append(output)
    return readers


def _folded(steps: Sequence[Op | TorchNode], readers: Mapping[str, Sequence[str]]) -> list[Op | TorchNode]:
    """The steps with BatchNorms as part of the layer before them, or as layers with one weight for each channel."""
    made: dict[str, Op | TorchNode] = {}
    for step in steps:
        if not isinstance(step, Affine):
            made[step.node.name if isinstance(step, TorchNode) else step.output] = step
            continue
        before = made.get(step.inputs[0])
        if isinstance(before, Weights) and len(readers[before.output]) == 1:
            del made[before.output]
            weight = before.weight.astype(np.float64) * step.factors[:, None, None, None]
            bias = before.bias * step.factors + step.shifts
            made[step.output] = replace(
                before, output=step.output, weight=weight.astype(np.float32), bias=bias.astype(np.float32)
            )
        else:
            made[step.output] = Weights(
                output=step.output,
                inputs=step.inputs,
                layer=step.layer,
                weight=step.factors.astype(np.float32)[:, None, None, None],
                bias=step.shifts.astype(np.float32),
                groups=len(step.factors),
                dense=len(step.factors),
                kept=int(np.count_nonzero(step.factors)),
            )
    return list(made.values())


SPARSE_RATE, DENSE_RATE = 18.0, 35.0  # multiply-adds per nanosecond on one thread, of both kinds of kernels
LAYOUT_COST = 0.75  # nanoseconds to move one activation between torch's layout and the program's
CALL_COST, READ_COST = 1000.0, 0.25  # nanoseconds of one operation in torch, and of each activation that it writes


def _cheaper_in_torch(steps: Sequence[Op | TorchNode], reading: Reading) -> Iterator[Op | TorchNode]:
    for step in steps:
        reason = _slow(step, reading.shapes) if isinstance(step, Weights) else ""
        if isinstance(step, Weights) and reason:
            # A BatchNorm or clamp that became part of the layer goes with it.
            yield from _nodes_of(step, reading, reason)
        else:
            yield step


def _nodes_of(op: Op, reading: Reading, reason: str) -> list[TorchNode]:
    """The nodes that an operation stands for, from its inputs to its result."""
    found, todo = dict[str, fx.Node](), [reading.nodes[op.output]]
    while todo:
        node = todo.pop()
        is_result = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | list | tuple)
        if is_result and not (node.name in op.inputs or node.name in reading.constants or node.name in found):
            found[node.name] = node
            todo += node.all_input_nodes
    order = [name for name in reading.nodes if name in found]
    return [TorchNode(found[name], op.layer, reason if name == op.output else "") for name in order]


def _slow(op: Weights, shapes: Mapping[str, Shape]) -> str:
    """Why a layer is cheaper in torch, including two changes of layout; empty if it is not.

    The rates are fixed numbers rather than measurements, so that a model always becomes the same program.
    """
    here, there = _costs(op, shapes)
    moved = prod(shapes[op.output]) + prod(shapes[op.inputs[0]])
    if here <= there + LAYOUT_COST * moved:
        return ""
    return f"dense: {100 * np.count_nonzero(op.weight) / op.dense:.0f} % of its weights are left"


def _costs(op: Weights, shapes: Mapping[str, Shape]) -> tuple[float, float]:
    """Nanoseconds for one sample in a program and in torch."""
    pixels = prod(shapes[op.output][1:])
    return int(np.count_nonzero(op.weight)) * pixels / SPARSE_RATE, op.dense * pixels / DENSE_RATE + CALL_COST


def _worthwhile(segment: Segment, shapes: Mapping[str, Shape]) -> bool:
    """Whether a segment is cheaper than the same layers in torch, including the changes of layout around it."""
    here, there = np.sum([_costs(op, shapes) for op in segment.ops if isinstance(op, Weights)], 0)
    others = [prod(shapes[op.output]) for op in segment.ops if not isinstance(op, Weights | View)]
    moved = sum(prod(shapes[name]) for name in (*segment.inputs, *segment.outputs))
    return bool(here + LAYOUT_COST * moved < there + sum(CALL_COST + READ_COST * size for size in others))


def _segments(
    steps: Sequence[Op | TorchNode], reading: Reading, readers: Mapping[str, Sequence[str]]
) -> Iterator[Segment | TorchNode]:
    """Runs of operations as segments."""
    # Sizes that follow from the batch alone are computed first, and do not divide a run.
    sizes, known = list[TorchNode](), set[str]()
    for step in steps:
        if not isinstance(step, TorchNode) or not isinstance(step.node.meta.get("val"), int | torch.SymInt):
            continue
        if is_batch_size(step.node, reading.batch) or known.issuperset(it.name for it in step.node.all_input_nodes):
            sizes.append(step)
            known.add(step.node.name)
    yield from sizes
    runs = list[list[Op | TorchNode]]()
    for step in (it for it in steps if not any(it is size for size in sizes)):
        if runs and isinstance(step, TorchNode) == isinstance(runs[-1][0], TorchNode):
            runs[-1].append(step)
        else:
            runs.append([step])
    for run in runs:
        ops = [it for it in run if not isinstance(it, TorchNode)]
        if not ops:
            yield from (it for it in run if isinstance(it, TorchNode))
            continue
        segment = _segment(ops, readers)
        layers = any(isinstance(it, Weights) for it in ops)
        if layers and _worthwhile(segment, reading.shapes):
            yield segment
        else:
            reason = "a program would be slower than torch" if layers else "it is between layers that torch runs"
            yield from (node for op in ops for node in _nodes_of(op, reading, reason))


def _without_unused_sizes(
    steps: Sequence[Segment | TorchNode], kept: set[str], batch: str
) -> list[Segment | TorchNode]:
    """The steps without sizes that were the arguments of operations in segments, which know their shapes."""
    found, needed = list[Segment | TorchNode](), set(kept)
    for step in reversed(steps):
        if isinstance(step, Segment):
            needed.update(step.inputs)
        elif step.node.name not in needed and isinstance(step.node.meta.get("val"), int | torch.SymInt):
            continue
        else:
            needed.update(inputs_of(step.node, batch))
        found.append(step)
    return found[::-1]


def _segment(ops: Sequence[Op], readers: Mapping[str, Sequence[str]]) -> Segment:
    own = {op.output for op in ops}
    outputs = tuple(op.output for op in ops if not own.issuperset(readers.get(op.output, ())))
    fused = list[Op]()
    for op in ops:
        last = fused[-1] if fused else None
        if (
            isinstance(op, Pointwise)
            and op.kind == "clamp"
            and isinstance(last, Weights | Binary)
            and last.clamp is None
            and op.inputs == (last.output,)
            and len(readers[last.output]) == 1
            and (isinstance(last, Weights) or last.kind == "add")
        ):
            fused[-1] = replace(last, output=op.output, clamp=op.clamp)
        else:
            fused.append(op)
    inputs = dict.fromkeys(name for op in ops for name in op.inputs if name not in own)
    return Segment(tuple(fused), tuple(inputs), outputs)


# Rules ---------------------------------------------------------------------------------------------------------------

Rule = Callable[[Reading, fx.Node], Op]
RULES: dict[Any, Rule] = {}
"""The rule of each ATen operation."""


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an ATen operation by name, with its defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # operations of ATen have one
    found = {it.name: it.default_value for it in schema}
    found |= {it.name: value for it, value in zip(schema, node.args, strict=False)}
    return found | dict(node.kwargs)


def _first(node: fx.Node) -> fx.Node:
    """The node that computes the first argument."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        raise Unsupported("its input is not a tensor")
    return source


def _pair(value: Any) -> tuple[int, int]:
    sizes = [value, value] if isinstance(value, int) else list(value)
    if len(sizes) not in (1, 2) or not all(isinstance(it, int) for it in sizes):
        raise Unsupported("a size is not a fixed number")
    return sizes[0], sizes[-1]


def _weights(reading: Reading, node: fx.Node, weight: Tensor, given: Mapping[str, Any], **options: Any) -> Weights:
    bias = np.zeros(len(weight), np.float32)
    if given["bias"] is not None:
        bias = reading.constant(given["bias"]).expand(len(weight)).cpu().numpy().copy()
    return Weights(
        output=node.name,
        inputs=(given["input"].name,),
        layer=reading.names.get(given["weight"].name, "").rpartition(".")[0] or layer_of(node),
        weight=weight.cpu().numpy().copy(),
        bias=bias,
        dense=weight.numel(),
        kept=int(weight.count_nonzero()),
        **options,
    )


@_rule(aten.linear.default)
def _linear(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    if len(reading.shape(given["input"])) != 1 or len(reading.shape(node)) != 1:
        raise Unsupported("its input has rows and columns")
    return _weights(reading, node, reading.constant(given["weight"])[:, :, None, None], given)


@_rule(aten.conv2d.default, aten.conv2d.padding)
def _convolution(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    if len(reading.shape(given["input"])) != 3 or len(reading.shape(node)) != 3:
        raise Unsupported("its input has no batch")
    weight = reading.constant(given["weight"])
    stride, dilation = _pair(given["stride"]), _pair(given["dilation"])
    if given["padding"] == "valid":
        padding = (0, 0)
    elif given["padding"] == "same":
        total = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
        if total[0] % 2 or total[1] % 2:
            raise Unsupported("padding='same' of an even kernel is not symmetric")
        padding = (total[0] // 2, total[1] // 2)
    else:
        padding = _pair(given["padding"])
    return _weights(
        reading, node, weight, given, stride=stride, padding=padding, dilation=dilation, groups=given["groups"]
    )


@_rule(aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default)
def _batch_norm(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    shape = reading.shape(given["input"])
    output = node
    if not isinstance(node.meta.get("val"), Tensor):  # several results, of which only the first is used
        [output, *more] = node.users
        if more or output.target != operator.getitem or output.args[1] != 0:
            raise Unsupported("its statistics are used")
    if given.get("training") or shape != reading.shape(output):
        raise Unsupported("it computes statistics")
    mean, variance = (reading.constant(given[name]).double().cpu().numpy() for name in ("running_mean", "running_var"))
    factors = 1 / np.sqrt(variance + given["eps"])
    if given["weight"] is not None:
        factors = factors * reading.constant(given["weight"]).double().cpu().numpy()
    shifts = -mean * factors
    if given["bias"] is not None:
        shifts = shifts + reading.constant(given["bias"]).double().cpu().numpy()
    return Affine(output.name, (given["input"].name,), layer_of(node), factors, shifts)


def _clamp(low: float, high: float) -> Rule:
    def rule(reading: Reading, node: fx.Node) -> Op:
        return _pointwise_op(reading, node, "clamp", (low, high))

    return rule


def _pointwise_op(reading: Reading, node: fx.Node, kind: str, clamp: Clamp = (0.0, 0.0)) -> Op:
    source = _first(node)
    if reading.shape(source) != reading.shape(node):
        raise Unsupported("its shape changes")
    return Pointwise(node.name, (source.name,), layer_of(node), kind, clamp)


_rule(aten.relu.default)(_clamp(*RELU))
_rule(aten.relu6.default)(_clamp(0.0, 6.0))


@_rule(aten.hardtanh.default)
def _hardtanh(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    return _pointwise_op(reading, node, "clamp", (float(given["min_val"]), float(given["max_val"])))


@_rule(aten.clamp.default)
def _clamp_default(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    low, high = given["min"], given["max"]
    if not all(it is None or isinstance(it, int | float) for it in (low, high)):
        raise Unsupported("a bound is not a fixed number")
    bounds = (float("-inf") if low is None else float(low), float("inf") if high is None else float(high))
    return _pointwise_op(reading, node, "clamp", bounds)


for _target, _kind in (
    (aten.sigmoid.default, "sigmoid"),
    (aten.tanh.default, "tanh"),
    (aten.silu.default, "silu"),
    (aten.hardsigmoid.default, "hardsigmoid"),
    (aten.hardswish.default, "hardswish"),
):
    RULES[_target] = partial(_pointwise_op, kind=_kind)


@_rule(aten.gelu.default)
def _gelu(reading: Reading, node: fx.Node) -> Op:
    return _pointwise_op(reading, node, "gelu_tanh" if _arguments(node)["approximate"] == "tanh" else "gelu")


@_rule(aten.add.Tensor, aten.mul.Tensor)
def _binary(reading: Reading, node: fx.Node) -> Op:
    given, kind = _arguments(node), "add" if node.target == aten.add.Tensor else "mul"
    one, other = given["self"], given["other"]
    shapes, result = (reading.shape(one), reading.shape(other)), reading.shape(node)
    if given.get("alpha", 1) != 1:
        raise Unsupported("alpha is not 1")
    if shapes == (result, result):
        return Binary(node.name, (one.name, other.name), layer_of(node), kind)
    if shapes[0] != result:
        one, other, shapes = other, one, shapes[::-1]
    if kind == "mul" and shapes[0] == result and shapes[1] == (result[0], 1, 1):
        return Scale(node.name, (one.name, other.name), layer_of(node))
    raise Unsupported("its operands have different shapes")


@_rule(aten.cat.default)
def _cat(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    shapes, result = [reading.shape(it) for it in given["tensors"]], reading.shape(node)
    if given["dim"] not in (1, -len(result)) or any(shape[1:] != result[1:] for shape in shapes):
        raise Unsupported("it does not join channels")
    return Cat(node.name, tuple(it.name for it in given["tensors"]), layer_of(node))


@_rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
)
def _view(reading: Reading, node: fx.Node) -> Op:
    source = _first(node)
    before, after = reading.shape(source), reading.shape(node)
    if node.target == aten.dropout.default and _arguments(node)["train"]:
        raise Unsupported("it drops out in eval mode")
    if node.target in (aten.squeeze.dim, aten.squeeze.dims):
        dims, count = _arguments(node)["dim"], len(before) + 1
        if 0 in {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}:
            raise Unsupported("it removes the batch of a single sample")
    # In the program's layout the columns of a row and the rows of a channel are not adjacent, so only a reshape that
    # does not separate channels again is free.
    if before != after and (prod(before[1:]) > 1 or prod(after[1:]) > 1) and len(after) != 1:
        raise Unsupported(f"it reshapes {before} to {after}")
    return View(node.name, (source.name,), layer_of(node))


# Pooling


def _spans(size: int, kernel: int, step: int, padding: int, outputs: int, *, count_padding: bool) -> NDArray[np.int32]:
    begin = np.arange(outputs) * step - padding
    end = np.minimum(begin + kernel, size + padding)
    inside = np.maximum(begin, 0), np.minimum(end, size)
    if (inside[0] >= inside[1]).any():
        raise Unsupported("a window is empty")
    counted = end - begin if count_padding else inside[1] - inside[0]
    return np.stack([*inside, counted], 1).astype(np.int32)


def _pool(reading: Reading, node: fx.Node, kind: str, **options: Any) -> Op:
    given = _arguments(node)
    before, after = reading.shape(given["self"]), reading.shape(node)
    if len(before) != 3 or len(after) != 3:
        raise Unsupported("its input has no batch")
    kernel, padding = _pair(given["kernel_size"]), _pair(given["padding"])
    stride = _pair(given["stride"] or kernel)
    if given.get("divisor_override") is not None or _pair(given.get("dilation", 1)) != (1, 1):
        raise Unsupported("it has a dilation or its own divisor")
    rows, columns = (_spans(before[1 + d], kernel[d], stride[d], padding[d], after[1 + d], **options) for d in range(2))
    inside = all((spans[:, 1] - spans[:, 0] == kernel[d]).all() for d, spans in enumerate((rows, columns)))
    uniform = (kernel, stride[0]) if inside and padding == (0, 0) and stride[0] == stride[1] else None
    return Pool(node.name, (given["self"].name,), layer_of(node), kind, rows, columns, uniform)


@_rule(aten.max_pool2d.default)
def _max_pool(reading: Reading, node: fx.Node) -> Op:
    return _pool(reading, node, "max", count_padding=False)


@_rule(aten.avg_pool2d.default)
def _average_pool(reading: Reading, node: fx.Node) -> Op:
    return _pool(reading, node, "average", count_padding=bool(_arguments(node)["count_include_pad"]))


@_rule(aten.adaptive_avg_pool2d.default)
def _adaptive_average_pool(reading: Reading, node: fx.Node) -> Op:
    before, after = reading.shape(node.args[0]), reading.shape(node)
    return _adaptive(node, before, after[-2:] if len(after) == 3 else ())


@_rule(aten.mean.dim)
def _mean(reading: Reading, node: fx.Node) -> Op:
    given = _arguments(node)
    before, after = reading.shape(node.args[0]), reading.shape(node)
    dims = {dim % (len(before) + 1) for dim in given["dim"] or ()}
    if len(before) != 3 or dims != {2, 3} or given["dtype"] not in (None, torch.float32) or after[0] != before[0]:
        raise Unsupported("it is not a mean over rows and columns")
    return _adaptive(node, before, (1, 1))


def _adaptive(node: fx.Node, before: Shape, sizes: Shape) -> Op:
    if len(before) != 3 or len(sizes) != 2:
        raise Unsupported("its input has no batch")
    spans = []
    for size, outputs in zip(before[1:], sizes, strict=True):
        index = np.arange(outputs)
        begin, end = index * size // outputs, -(-(index + 1) * size // outputs)
        spans.append(np.stack([begin, end, end - begin], 1).astype(np.int32))
    return Pool(node.name, (_first(node).name,), layer_of(node), "average", spans[0], spans[1], None)
