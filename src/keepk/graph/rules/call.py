"""One operation of the forward pass: its arguments and results, and the methods that a rule is written with.

A rule does two things. It labels the outputs (`Call.label_output`), so that the trace knows which channel is where in
them, and it records what the operation requires of its channels:

=============================  =================================================  =======================
method                         requirement                                        needed by
=============================  =================================================  =======================
`Call.merge`                   channels at one position are removed together      add, mul, bias
`Call.contract`                summed channels are removed from both factors      linear, convolution
`Call.require_equal_rows`      all parts keep equal numbers of channels           reshape, chunk
`Call.require_grid`            only whole rows or columns are removed             transpose of a split axis
`Call.mark_lossy`              removing some changes the others                   softmax, mean, LayerNorm
`Call.pin`                     cannot be removed                                  roll, sort, gather
=============================  =================================================  =======================

`stays_zero` finds out which operations keep a removed channel at zero by running them on a few numbers. A table of such
operations would be long and would have to know every argument (``clamp`` keeps 0 with ``min=-1`` and not with
``min=1``). Elementwise operations are cheap to run, so they are tried instead.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from keepk.graph.ids.atoms import Atoms, Label, is_labelled, label_of, set_label
from keepk.graph.ids.facts import Facts, Read, Reason, Role
from keepk.graph.ids.maps import Map, aligned, support
from keepk.graph.ids.merge import Algebra, Operand
from keepk.model.torch_internals import tree_flatten, tree_unflatten
from keepk.model.values import tensors_in

# Samples for inputs that are not zero: both signs, zero, and magnitudes on both sides of 1.
FLOATS = (-1.3, 0.7, 2.1, -0.4, 0.0)
OTHERS = (0, 1, 3, 1, -2)
BLOCKS = 4  # the samples are repeated for each combination of two signs of zero
NOT_NEEDED = ("device", "generator", "memory_format")  # of the meta tensors in the trace; samples are on the CPU


def stays_zero(
    operation: Any,
    arguments: tuple[Sequence[Any], dict[str, Any]],
    zero: Sequence[bool],
    undefined: Sequence[bool] = (),
) -> bool:
    """Whether the result is 0 wherever the tensors flagged in `zero` are 0, for any values of the other tensors.

    Args:
        operation: The overload of an ATen operation.
        arguments: Its positional and its named arguments.
        zero: For each tensor among the arguments, in order, whether it is 0.
        undefined: For each tensor, whether it may be NaN where it should be 0.

    >>> one, other = torch.zeros(3), torch.zeros(3)
    >>> stays_zero(torch.ops.aten.mul.Tensor, ((one, other), {}), (True, False))
    True
    >>> stays_zero(torch.ops.aten.add.Tensor, ((one, other), {}), (True, False))
    False
    >>> stays_zero(torch.ops.aten.cos.default, ((one,), {}), (True,))
    False
    """
    if not any(zero) or torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
        return False
    kinds = ["zero" if it else "other" for it in zero]
    if not _is_zero(_result_on_samples(operation, arguments, kinds)):
        return False
    with_nan = ["nan" if it and nan else kind for it, nan, kind in zip(zero, undefined, kinds, strict=False)]
    return "nan" not in with_nan or _is_zero(_result_on_samples(operation, arguments, with_nan))


def is_undefined(
    operation: Any, arguments: tuple[Sequence[Any], dict[str, Any]], zero: Sequence[bool], undefined: Sequence[bool]
) -> bool:
    """Whether the result may be NaN where the tensors flagged in `zero` are 0; the arguments are as in `stays_zero`.

    >>> one, other = torch.zeros(3), torch.zeros(3)
    >>> is_undefined(torch.ops.aten.div.Tensor, ((one, other), {}), (True, True), (False, False))
    True
    """
    if any(undefined) or not any(zero):
        return any(undefined)
    result = _result_on_samples(operation, arguments, ["zero" if it else "other" for it in zero])
    return result is not None and bool(result.isnan().any())


def _is_zero(result: Tensor | None) -> bool:
    # 0 / 0 is NaN in the masked network as well, where it spoils every output unless a later operation replaces it.
    return result is not None and not bool(
        torch.where(result.isnan(), torch.zeros_like(result), result).count_nonzero()
    )


def _result_on_samples(
    operation: Any, arguments: tuple[Sequence[Any], dict[str, Any]], kinds: Sequence[str]
) -> Tensor | None:
    """The result of an operation on samples of the given kinds in place of its tensors; None if it fails on them."""
    positional, by_name = arguments
    named = {key: value for key, value in by_name.items() if key not in NOT_NEEDED}
    leaves, tree = tree_flatten((list(positional), named))
    left = iter(kinds)
    values = tuple((value.dtype, next(left)) if isinstance(value, Tensor) else value for value in leaves)
    tensors = tuple(isinstance(value, Tensor) for value in leaves)
    try:
        return _run_on_samples(operation, tree, values, tensors)
    except TypeError:  # an argument that cannot be hashed
        return _run_on_samples.__wrapped__(operation, tree, values, tensors)


@lru_cache(maxsize=4096)  # a network repeats its layers, and a trace its forward passes
def _run_on_samples(operation: Any, tree: Any, values: tuple[Any, ...], tensors: tuple[bool, ...]) -> Tensor | None:
    numbers = count()  # of the tensors that are zero
    leaves = [
        (_mixture(value[0]) if value[1] == "other" else _zeros(value[0], next(numbers), nan=value[1] == "nan"))
        if is_tensor
        else value
        for value, is_tensor in zip(values, tensors, strict=True)
    ]
    positional, by_name = tree_unflatten(leaves, tree)
    try:
        result = operation(*positional, **by_name)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None
    first = result if isinstance(result, Tensor) else next(iter(result), None)
    return first if isinstance(first, Tensor) else None


def _zeros(dtype: torch.dtype, number: int, *, nan: bool = False) -> Tensor:
    """Zeros of both signs in place of the first, second, ... tensor that is zero; two tensors have all combinations.

    ``-relu(x)`` is -0.0 where a channel is masked, and ``atan2(0.0, -0.0)`` is not zero. With `nan`, NaN instead.
    """
    if nan and (dtype.is_floating_point or dtype.is_complex):
        return torch.full((BLOCKS * len(FLOATS),), float("nan"), dtype=dtype, device="cpu")
    signs = ((-1.0 if block >> number % 2 & 1 else 1.0) for block in range(BLOCKS))
    return torch.tensor([sign * 0.0 for sign in signs for _ in FLOATS], device="cpu").to(dtype)


def _mixture(dtype: torch.dtype) -> Tensor:
    """A few numbers in place of a tensor that is not zero."""
    samples = FLOATS if dtype.is_floating_point or dtype.is_complex else OTHERS
    return torch.tensor(samples * BLOCKS, device="cpu").to(dtype)


class Recorder(Protocol):
    """The trace that a call belongs to."""

    atoms: Atoms
    facts: Facts
    groups: dict[str, int]
    tensors: dict[str, tuple[Map, ...]]

    @property
    def module(self) -> str:
        """The path of the module whose forward is running."""

    def place(self) -> str:
        """File and line in the user's program."""

    def is_batch_norm(self, module: str) -> bool:
        """Whether a path names a BatchNorm of the model."""


# Until 0.2: the names that rules were written with in 0.1.
_DEPRECATED = {"leave": "label_output", "even": "require_equal_rows", "grid": "require_grid", "lossy": "mark_lossy"}


class Call(Algebra):
    """One operation of the forward pass, as its rule sees it.

    Attributes:
        name: The operation without its overload and the underscore of in-place variants, such as ``aten::add``.
        inputs: The tensors among its arguments, in order.
        outputs: The tensors that it returned.
        taken: The atoms of single channels that it takes by number, as in ``x[:, 0]``.
        counts: The numbers among its arguments that are sizes, each with maps of the channels it counts.
    """

    def __init__(
        self, trace: "Recorder", operation: Any, arguments: tuple[Sequence[Any], dict[str, Any]], result: Any
    ) -> None:
        super().__init__(trace.atoms, trace.facts)
        self._trace, self.operation, self._arguments = trace, operation, arguments
        self.name = base_name(operation)
        self.inputs = tensors_in(arguments)
        self.outputs = tensors_in(result)
        self.taken: list[int] = []
        self.counts: list[tuple[int, tuple[Map, ...]]] = []

    def __getitem__(self, argument: str) -> Any:
        """An argument by its name in the operation's schema."""
        return self.arguments[argument]

    if not TYPE_CHECKING:  # mypy would accept any attribute of a class that has __getattr__

        def __getattr__(self, name: str) -> Any:
            if name not in _DEPRECATED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warnings.warn(f"Call.{name} is now Call.{_DEPRECATED[name]}", DeprecationWarning, stacklevel=2)
            return getattr(self, _DEPRECATED[name])

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument by its name in the operation's schema.

        Args:
            argument: The name.
            default: Returned if the operation does not have the argument, or if it is None.
        """
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
        """An argument that is a dim or a list of dims, as a list of non-negative ints.

        Args:
            argument: The name of the argument. If it is None or an empty list, it means all dims.
            rank: The number of dims of the tensor.
        """
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
        """The path of the module whose forward is running."""
        return self._trace.module

    def reason(self, why: str) -> Reason:
        """A reason that names this operation and its place in the user's program."""
        return Reason(why, self.name, self.module, self.place)

    def maps(self, tensor: Tensor) -> tuple[Map, ...]:
        """The index maps of a tensor; see `keepk.graph.ids.maps`.

        Args:
            tensor: An input or output of the operation.

        Returns:
            The maps, each of the tensor's rank; empty for a tensor without channels.
        """
        return label_of(tensor).maps

    def operand(self, tensor: Tensor, rank: int) -> Operand:
        """The tensor as an operand of `merge`; expanded dims count as size 1.

        Args:
            tensor: An input of the operation.
            rank: The number of dims of the result.
        """
        shape = (1,) * (rank - tensor.ndim) + shape_before_expansion(tensor)
        return self.shaped_operand(tensor, lambda m: aligned(m, rank), shape)

    def shaped_operand(self, tensor: Tensor, transform: Callable[[Map], Map], shape: tuple[int, ...]) -> Operand:
        """The tensor as an operand of another shape, for `merge` or `contract`.

        Args:
            tensor: An input of the operation.
            transform: Applied to each of its maps.
            shape: The shape of the operand.
        """
        label = label_of(tensor)
        neutral = label.neutral or tensor.numel() == 1
        return Operand([transform(m) for m in label.maps], shape, label.zeros, neutral, label.all_zero)

    def input_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs; for pointwise operations, expanded dims count as size 1."""
        if is_pointwise(self.operation):
            return [shape_before_expansion(tensor) for tensor in self.inputs]
        return [tuple(tensor.shape) for tensor in self.inputs]

    def zero_in(self, tensors: Sequence[Tensor], maps: Iterable[Map]) -> list[bool]:
        """Whether the elements of a removed channel are 0 in all of these tensors.

        Args:
            tensors: Inputs of the operation.
            maps: Merged maps, of the first output's rank.

        Returns:
            One bool for each map.
        """
        rank = self.outputs[0].ndim
        operands = [self.operand(tensor, rank) for tensor in tensors]
        return [all(operand.zero_along(m) for operand in operands) for m in maps]

    def label_output(
        self, maps: Iterable[Map], *, to: Tensor | None = None, zero: bool | Tensor | Sequence[bool] | None = None
    ) -> None:
        """Label an output with its index maps. It is neutral if all inputs are.

        Args:
            maps: The maps of the output.
            to: The output; by default the first one.
            zero: Whether the elements of a removed channel are 0 in the output once they are 0 in the weights. Either a
                bool for all maps, or one for each, or an input with the same atoms to take the answer from. By default
                an element is 0 where it is 0 in every input, which is right for sums, products and data movement.
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
            from_parameters=bool(labels) and all(label.from_parameters for label in labels),
            zeros=tuple(flags[place] for place in kept),
            undefined=any(label.undefined for label in labels),
        )
        set_label(self.outputs[0] if to is None else to, label)

    def pin_inputs(self, why: str) -> None:
        """Pin every channel of every input.

        Args:
            why: A few words for the reason, such as "is ordered by value".
        """
        for tensor in self.inputs:
            for index_map in self.maps(tensor):
                self.pin(index_map, why)

    def take_by_number(self, channel: Map) -> None:
        """Pin a channel that is taken by its number; replays on cut copies must take the same one."""
        # The result has no dim left for a map, so nothing else would notice that x[:, 0] reads another channel after
        # channel 0 is removed.
        self.taken += channel.ravel().tolist()
        self.pin(channel, "one channel is taken by its number")

    def note_count(self, number: int, rows: Sequence[Map]) -> None:
        """Record that an argument is a number of channels or groups, which has to follow a cut.

        Args:
            number: The argument's value.
            rows: Maps with one entry for each thing that is counted.
        """
        self.counts.append((number, tuple(row.ravel() for row in rows)))

    def pointwise(self) -> None:
        """Apply the rule of elementwise operations with broadcasting: merge all inputs, label all outputs."""
        if not self.outputs:
            return
        rank = self.outputs[0].ndim
        everything = [self.operand(tensor, rank) for tensor in self.inputs]
        inputs = [place for place, tensor in enumerate(self.inputs) if tensor.ndim <= rank]
        if all(label_of(self.inputs[place]).from_parameters for place in inputs):
            # weight * mask: merged maps get the ids of the first operand. It must be the weight, or the mask would
            # count as the producer of the channels.
            inputs.sort(key=lambda place: _is_weight(self.inputs[place]), reverse=True)
        operands = [everything[place] for place in inputs]
        maps = list(operands[0].maps) if len(operands) == 1 else self.merge(operands, "meets")
        flags = [[operand.zero_along(m) for operand in everything] for m in maps]
        zeros = [self.maps_to_zero(zero) for zero in flags]
        undefined = [label_of(tensor).undefined for tensor in self.inputs]
        unknown = any(is_undefined(self.operation, self._arguments, zero, undefined) for zero in flags)
        for output in self.outputs:
            self.label_output(maps, to=output, zero=zeros)
            if unknown:
                set_label(output, replace(label_of(output), undefined=True))

    def maps_to_zero(self, zero: Sequence[bool]) -> bool:
        """Whether the operation returns 0 where some of its inputs are 0, found by running it on a few numbers.

        Args:
            zero: For each input, whether it is 0.
        """
        undefined = [label_of(tensor).undefined for tensor in self.inputs]
        return stays_zero(self.operation, self._arguments, zero, undefined)

    def note_reader(self, reader: str, maps: Iterable[Map], dims: Iterable[int]) -> None:
        """Record that the channels along some dims are read.

        Args:
            reader: The name of the reader, such as the path of a module.
            maps: The maps of the tensor that is read.
            dims: The dims along which it is read.
        """
        wanted = set(dims)
        for index_map in maps:
            if wanted & set(support(index_map)):
                self.facts.uses.append((index_map.ravel(), reader))

    def note_weight(self, weight: Tensor, *, read: int, produced: int) -> None:
        """Record which dim of a weight reads channels and which one produces them.

        Args:
            weight: The weight.
            read: The dim that reads channels.
            produced: The dim that produces channels.
        """
        self._role(weight, read, Role.READER)
        self._role(weight, produced, Role.PRODUCER)

    def note_producer(self, weight: Tensor, dim: int) -> None:
        """Record which dim of a weight produces channels."""
        self._role(weight, dim, Role.PRODUCER)

    def note_carrier(self, tensor: Tensor) -> None:
        """Record that a tensor scales or shifts channels: a bias, the parameters of a BatchNorm."""
        self._role(tensor, tensor.ndim - 1, Role.CARRIER)

    def note_groups(self, index_map: Map, groups: int, rows: int) -> None:
        """Record that the second axis of a weight is a separate axis for each group; the trace starts over with that.

        Args:
            index_map: The map over the weight's second axis.
            groups: The convolution's groups.
            rows: The number of the weight's rows.
        """
        axis = self.atoms.axis(int(index_map.max()))
        # A weight computed per image (CondConv, dynamic filters) has a different number of rows than its parameter.
        # Its groups are images, not groups of the parameter.
        if axis.tensor and rows == max(m.shape[0] for m in self._trace.tensors[axis.tensor]):
            self._trace.groups[axis.tensor] = groups

    def can_select(self, maps: Sequence[Map], carriers: Sequence[Tensor]) -> bool:
        """Whether this is a BatchNorm module of the model, which can be made to read a selection of these channels."""
        channels = [m for m in maps if 1 in support(m)]
        own = [m for tensor in carriers for m in self.maps(tensor)]
        return (
            self._trace.is_batch_norm(self.module)
            and len(channels) == 1
            and bool((channels[0] > 0).all())
            and len(own) == len(carriers) >= 2
            and self.atoms.axis(int(own[0].max())).tensor.rpartition(".")[0] == self.module
        )

    def note_read(self, sources: Map, readers: Map) -> None:
        """Record that the running module reads the channels `sources` with its parameters' atoms `readers`."""
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
    """The positions of the maps that depend on any dim, without duplicates."""
    found = dict[int, int]()
    for place, index_map in enumerate(maps):
        if support(index_map):
            found.setdefault(id(index_map), place)
    return list(found.values())


def _is_weight(tensor: Tensor) -> tuple[bool, int]:
    """A sort key that is largest for the weight among the tensors that a weight is computed from."""
    # `zeros` is set for parameters and not for buffers: a mask in a buffer stays 1 when its channel is removed.
    return any(label_of(tensor).zeros), tensor.numel()


def shape_before_expansion(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape with 1 for every expanded dim (stride 0) that no map tracks."""
    # An expanded mask repeats one value along the channels. Counted at its full size it would be an axis without
    # channels and pin those that it is multiplied with.
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tuple(tensor.shape)
    tracked = {dim for index_map in label_of(tensor).maps for dim in support(index_map)}
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(1 if stride == 0 and dim not in tracked else size for dim, (size, stride) in sizes)


def base_name(operation: Any) -> str:
    """The name under which an operation's rule is registered: ``aten::add`` for ``aten::add_.Tensor``."""
    name: str = operation._schema.name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_pointwise(operation: Any) -> bool:
    """Whether torch tags the operation as elementwise."""
    return torch.Tag.pointwise in getattr(operation, "tags", ())
