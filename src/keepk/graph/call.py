"""One operation of the forward pass: what it was given, what it returned, and the verbs that a rule is made of."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from keepk.graph.algebra import Algebra, Operand
from keepk.graph.atoms import Atoms
from keepk.graph.facts import Facts, Read, Reason, Role
from keepk.graph.label import Label, is_labelled, label_of, set_label, tensors_in
from keepk.graph.maps import Map, aligned, support
from keepk.graph.zeros import stays_zero


class Recorder(Protocol):
    """The trace that a call is a part of."""

    atoms: Atoms
    facts: Facts
    groups: dict[str, int]
    tensors: dict[str, tuple[Map, ...]]

    @property
    def module(self) -> str:
        """The path of the module whose forward is under way."""

    def place(self) -> str:
        """File and line in the user's program."""

    def is_batch_norm(self, module: str) -> bool:
        """Whether a path names a BatchNorm of the model."""


class Call(Algebra):
    """What a rule sees.

    Attributes:
        name: The operation without overload and in-place mark, such as ``aten::add``.
        inputs: The tensors among its arguments, in order.
        outputs: The tensors that it returned.
        taken: The atoms of single channels that it takes by their numbers.
        counts: Numbers among its arguments that are sizes, each with the maps of what it counts.
    """

    def __init__(
        self, trace: "Recorder", operation: Any, arguments: tuple[Sequence[Any], dict[str, Any]], result: Any
    ) -> None:
        super().__init__(trace.atoms, trace.facts, self.reason)
        self._trace, self.operation, self._arguments = trace, operation, arguments
        self.name = base_name(operation)
        self.inputs = list(tensors_in(list(arguments)))
        self.outputs = list(tensors_in(result))
        self.taken: list[int] = []
        self.counts: list[tuple[int, tuple[Map, ...]]] = []

    def __getitem__(self, argument: str) -> Any:
        """An argument by the name that the operation's schema gives it."""
        return self.arguments[argument]

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument, or `default` if the operation has none of that name or it is None."""
        found = self.arguments.get(argument)
        return default if found is None else found

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults filled in."""
        positional, by_name = self._arguments
        schema = self.operation._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, positional, strict=False)}
        rest = {a.name: a.default_value for a in schema if a.has_default_value()}
        return {**rest, **given, **by_name}

    def dims(self, argument: str, rank: int) -> list[int]:
        """A dim or list of dims, as non-negative numbers; none given means all."""
        given = self.arguments.get(argument)
        if given is None or given == []:
            return list(range(rank))
        return [dim % rank for dim in (given if isinstance(given, Sequence) else [given])] if rank else []

    @cached_property
    def place(self) -> str:
        """File and line in the user's program."""
        return self._trace.place()

    @property
    def module(self) -> str:
        """The path of the module whose forward is under way."""
        return self._trace.module

    def reason(self, why: str) -> Reason:
        """Why, with this operation and its place in the user's program."""
        return Reason(why, self.name, self.module, self.place)

    def maps(self, tensor: Tensor) -> tuple[Map, ...]:
        """The tensor's maps."""
        return label_of(tensor).maps

    def operand(self, tensor: Tensor, rank: int) -> Operand:
        """The tensor as broadcasting sees it among others of the given rank; what was expanded is as it was before."""
        shape = (1,) * (rank - tensor.ndim) + shape_before_expansion(tensor)
        return self.shaped_operand(tensor, lambda m: aligned(m, rank), shape)

    def shaped_operand(self, tensor: Tensor, transform: Callable[[Map], Map], shape: tuple[int, ...]) -> Operand:
        """The tensor with every map transformed, as an operand of that shape."""
        label = label_of(tensor)
        neutral = label.neutral or tensor.numel() == 1
        return Operand([transform(m) for m in label.maps], shape, label.zeros, neutral, label.null)

    def input_shapes(self) -> list[tuple[int, ...]]:
        """What it was given; element by element, what was expanded is as it was before."""
        if is_pointwise(self.operation):
            return [shape_before_expansion(tensor) for tensor in self.inputs]
        return [tuple(tensor.shape) for tensor in self.inputs]

    def zero_in(self, tensors: Sequence[Tensor], maps: Iterable[Map]) -> list[bool]:
        """For each merged map, whether the elements of a removed channel are 0 in all of these tensors."""
        rank = self.outputs[0].ndim
        operands = [self.operand(tensor, rank) for tensor in tensors]
        return [all(operand.zero_along(m) for operand in operands) for m in maps]

    def leave(
        self, maps: Iterable[Map], *, to: Tensor | None = None, zero: bool | Tensor | Sequence[bool] | None = None
    ) -> None:
        """Label an output.

        Args:
            maps: The maps of the output. The output is neutral if all inputs are.
            to: The output; the first one if none is given.
            zero: Whether the elements of a removed channel are 0 in the output, once they are 0 in the weights: for
                all maps, for each one, or as in an input whose atoms the maps have. By default an element is 0 where
                it is 0 in every input, which is right for sums, products and data movement.
        """
        labels = [label_of(tensor) for tensor in self.inputs]
        given = list(maps)
        if zero is None:
            flags = [bool(labels) and all(label.zero_along(m) for label in labels) for m in given]
        elif isinstance(zero, Tensor):
            flags = [label_of(zero).zero_along(m) for m in given]
        else:
            flags = [zero] * len(given) if isinstance(zero, bool) else list(zero)
        kept = _distinct(given)
        label = Label(
            maps=tuple(given[place] for place in kept),
            neutral=bool(labels) and all(label.neutral for label in labels),
            own=bool(labels) and all(label.own for label in labels),
            zeros=tuple(flags[place] for place in kept),
        )
        set_label(self.outputs[0] if to is None else to, label)

    def pin_inputs(self, why: str) -> None:
        """Every channel of every input stays."""
        for tensor in self.inputs:
            for index_map in self.maps(tensor):
                self.pin(index_map, why)

    def take(self, channel: Map) -> None:
        """A channel is taken by its number: it stays, and cut copies must take the very same."""
        self.taken += channel.ravel().tolist()
        self.pin(channel, "one channel is taken by its number")

    def count(self, number: int, rows: Sequence[Map]) -> None:
        """An argument says how many of these there are, each with an atom in every map: it must follow them."""
        self.counts.append((number, tuple(row.ravel() for row in rows)))

    def pointwise(self) -> None:
        """Element by element, with broadcasting."""
        if not self.outputs:
            return
        rank = self.outputs[0].ndim
        everything = [self.operand(tensor, rank) for tensor in self.inputs]
        inputs = [place for place, tensor in enumerate(self.inputs) if tensor.ndim <= rank]
        if all(label_of(self.inputs[place]).own for place in inputs):
            # Of a weight and its mask or scale, the weight's atoms go on.
            inputs.sort(key=lambda place: _is_weight(self.inputs[place]), reverse=True)
        operands = [everything[place] for place in inputs]
        maps = list(operands[0].maps) if len(operands) == 1 else self.merge(operands, "meets")
        zeros = [self.maps_to_zero([operand.zero_along(m) for operand in everything]) for m in maps]
        for output in self.outputs:
            self.leave(maps, to=output, zero=zeros)

    def maps_to_zero(self, zero: Sequence[bool]) -> bool:
        """Whether the operation gives 0 where the inputs flagged in `zero` are 0, found by running it on numbers."""
        return stays_zero(self.operation, self._arguments, zero)

    def read_by(self, reader: str, maps: Iterable[Map], dims: Iterable[int]) -> None:
        """Write down that somebody reads the channels along `dims`."""
        wanted = set(dims)
        for index_map in maps:
            if wanted & set(support(index_map)):
                self.facts.uses.append((index_map.ravel(), reader))

    def weight_of(self, weight: Tensor, *, read: int, produced: int) -> None:
        """Write down which dim of a weight reads channels and which produces them."""
        self._role(weight, read, Role.READER)
        self._role(weight, produced, Role.PRODUCER)

    def produced_by(self, weight: Tensor, dim: int) -> None:
        """Write down which dim of a weight produces channels."""
        self._role(weight, dim, Role.PRODUCER)

    def carried_by(self, tensor: Tensor) -> None:
        """Write down that a tensor scales or shifts channels on their way."""
        self._role(tensor, tensor.ndim - 1, Role.CARRIER)

    def needs_groups(self, index_map: Map, groups: int, rows: int) -> None:
        """The second axis of a weight with so many rows is one axis for each group: the trace is begun again with that.

        A weight that is made anew for each picture has other rows than the parameter that it is made of.
        """
        axis = self.atoms.axis(int(index_map.max()))
        if axis.tensor and rows == max(m.shape[0] for m in self._trace.tensors[axis.tensor]):
            self._trace.groups[axis.tensor] = groups

    def reads(self, maps: Sequence[Map], carriers: Sequence[Tensor]) -> bool:
        """Whether this is a BatchNorm of the model that can be taught to read a selection of these channels."""
        channels = [m for m in maps if 1 in support(m)]
        own = [m for tensor in carriers for m in self.maps(tensor)]
        return (
            self._trace.is_batch_norm(self.module)
            and len(channels) == 1
            and bool((channels[0] > 0).all())
            and len(own) == len(carriers) >= 2
            and self.atoms.axis(int(own[0].max())).tensor.rpartition(".")[0] == self.module
        )

    def read(self, sources: Map, readers: Map) -> None:
        """Write down that the module under way reads channels with atoms of its own."""
        mine = [read for read in self.facts.reads if read.module == self.module]
        if not any(np.array_equal(read.sources, sources) for read in mine):
            self.facts.reads.append(Read(sources, readers, self.module))
        self.facts.uses.append((sources, f"read {self.module}"))

    def _role(self, tensor: Tensor, dim: int, role: Role) -> None:
        if not is_labelled(tensor):
            return
        for index_map in self.maps(tensor):
            if dim in support(index_map):
                axis = self.atoms.axis(int(index_map.max()))
                self.facts.roles.setdefault((axis.tensor, axis.dim), role)


def _distinct(maps: Sequence[Map]) -> list[int]:
    """The places of the maps that say something, each once."""
    found = dict[int, int]()
    for place, index_map in enumerate(maps):
        if support(index_map):
            found.setdefault(id(index_map), place)
    return list(found.values())


def _is_weight(tensor: Tensor) -> tuple[bool, int]:
    """How much a tensor is the weight among those that a weight is made of: a parameter, the largest."""
    return any(label_of(tensor).zeros), tensor.numel()


def shape_before_expansion(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape with 1 where no map goes along a dim and all along it there is one and the same memory."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tuple(tensor.shape)
    tracked = {dim for index_map in label_of(tensor).maps for dim in support(index_map)}
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(1 if stride == 0 and dim not in tracked else size for dim, (size, stride) in sizes)


def base_name(operation: Any) -> str:
    """The name under which an operation has its rule: ``aten::add`` for ``aten::add_.Tensor``."""
    name: str = operation._schema.name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_pointwise(operation: Any) -> bool:
    """Whether torch itself says that the operation works element by element."""
    return torch.Tag.pointwise in getattr(operation, "tags", ())
