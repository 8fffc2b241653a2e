"""Atoms, the ids of channels, and labels, which say where they are in a tensor.

Atoms are integer ids, one for each index along each axis of each parameter and buffer.

Removing channel 5 of a convolution removes row 5 of its weight and entry 5 of its bias. The trace gives each of them an
id (an "atom"), and learns from the forward pass which atoms must be removed together. Operations that create tensors or
reduce several atoms to one use new ids too.

>>> atoms = Atoms()
>>> atoms.new(4, "conv.weight", dim=0)  # a convolution with 4 filters
array([1, 2, 3, 4], dtype=int32)
>>> atoms.new(4, "conv.bias")  # its bias: different atoms, until the trace finds that they belong together
array([5, 6, 7, 8], dtype=int32)
>>> atoms.axis(6)  # which axis atom 6 belongs to
Axis(start=5, size=4, tensor='conv.bias', dim=0, groups=1)

A label is what the trace knows about one tensor of the forward pass. It is attached to the tensor object of the traced
copy, so it follows the tensor wherever the model's Python takes it: into lists, dicts, attributes and closures.
"""

import gc
import threading
from bisect import bisect_right
from dataclasses import dataclass
from itertools import count
from numbers import Number
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keepk.graph.ids.maps import Map

COPIES = -1


@dataclass(frozen=True)
class Axis:
    """A run of consecutive atoms: one axis of a parameter or buffer.

    Attributes:
        start: The first atom.
        size: The number of atoms.
        tensor: The name of the parameter or buffer; empty if an operation of the forward pass created the atoms.
        dim: The dim of that tensor; `COPIES` for atoms along which a tensor repeats one value (`expand`).
        groups: Above 1 for the second axis of a grouped convolution's weight: its atoms are (group, local index).
    """

    start: int
    size: int
    tensor: str
    dim: int
    groups: int = 1


class Atoms:
    """Hands out ids in runs of consecutive numbers. Id 0 means "no atom"."""

    def __init__(self) -> None:
        # Ids begin at 1. With 0 for "not tracked", a map can have gaps (padding, a part of a concatenation that has no
        # channels) without a second array of flags, and `array > 0` selects what is tracked.
        self.count = 1
        self.axes: list[Axis] = []
        self._starts: list[int] = []

    def new(self, size: int, tensor: str = "", dim: int = 0, groups: int = 1) -> Map:
        """A run of fresh atoms; see `Axis` for the arguments."""
        axis = Axis(self.count, size, tensor, dim, groups)
        self.axes.append(axis)
        self._starts.append(self.count)
        self.count += size
        return np.arange(axis.start, self.count, dtype=np.int32)

    def axis(self, atom: int) -> Axis:
        """The run that contains an atom."""
        # Runs are stored instead of one record per atom: a large model has millions of atoms and a few hundred axes.
        return self.axes[bisect_right(self._starts, atom) - 1]

    def branch(self) -> "Atoms":
        """A copy that hands out further ids without changing the original.

        Further forward passes (train mode, the opposite outcome of a branch) share the atoms of the parameters and add
        ids for the tensors that only they create.
        """
        other = Atoms()
        other.count, other.axes, other._starts = self.count, list(self.axes), list(self._starts)
        return other


_ATTRIBUTE = "_keepk_label"  # lives on tensors of the traced copy only
_ORIGIN = "_keepk_origin"  # so does this
# Where a tensor comes from: the name of a parameter or buffer, the number of an input, or the operation (by its number
# in the pass) and which of its outputs it is. None if unknown.
Origin: TypeAlias = str | tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Label:
    """The maps of a tensor and facts about its values.

    Attributes:
        maps: Index maps; a dim larger than 1 that no map covers is untracked.
        neutral: All elements are the same constant, so it fits any channels.
        from_parameters: It is computed from the model's parameters and buffers alone, not from the input.
        zeros: For each map, whether the elements of a removed channel are exactly 0 once all slices of that channel
            are zero in the weights. In ``relu(a)[:, :, None] * sigmoid(b)[:, None, :]`` this is true of the map over
            a's channels and false of the map over b's, since sigmoid(0) is not 0.
        all_zero: Every element is 0, whatever is removed.
        undefined: Elements that count as 0 in `zeros` may be NaN instead, because 0 was divided by 0.
    """

    maps: tuple[Map, ...] = ()
    neutral: bool = False
    from_parameters: bool = False
    zeros: tuple[bool, ...] = ()
    all_zero: bool = False
    undefined: bool = False

    def __post_init__(self) -> None:
        if len(self.zeros) != len(self.maps):
            raise ValueError(f"a label with {len(self.maps)} maps and {len(self.zeros)} flags")

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.shape}{' zero' if zero else ''}" for m, zero in zip(self.maps, self.zeros, strict=True))
        flags = [name for name in ("neutral", "from_parameters", "all_zero", "undefined") if getattr(self, name)]
        return f"<Label: {', '.join([f'maps [{shapes}]', *flags])}>"

    def zero_along(self, index_map: Map) -> bool:
        """Whether the elements of a channel removed from a map are 0; the map consists of this label's atoms."""
        if self.all_zero or not any(self.zeros):
            return self.all_zero
        same = [own.shape == index_map.shape and (own == index_map).all() for own in self.maps]
        if all(self.zeros) and any(same):
            return True  # the usual cases, found in a tenth of the time of the rest
        atoms = index_map[index_map > 0]
        if len(atoms) and any(equal and not zero for equal, zero in zip(same, self.zeros, strict=True)):
            return False
        # An atom may be in two maps of one tensor (an outer product of a layer with itself). Then both must be zero.
        known = [(m.ravel(), zero) for m, zero in zip(self.maps, self.zeros, strict=True)]
        return bool(
            np.isin(atoms, np.concatenate([ids for ids, zero in known if zero])).all()
            and not any(np.isin(atoms, ids).any() for ids, zero in known if not zero)
        )


UNLABELLED = Label()


# Labels are valid only in the forward pass that set them: a model may keep tensors from one pass to the next, in a
# dict or an lru_cache, and their atoms mean nothing there.
class _ForwardPass(threading.local):
    number = 0


_numbers = count(1)
_current = _ForwardPass()  # each thread may run a separate trace


def begin_forward_pass() -> None:
    """Invalidate all labels of this thread."""
    _current.number = next(_numbers)


def label_of(tensor: Tensor) -> Label:
    """The tensor's label; empty for inputs of the model and for tensors of an earlier pass."""
    label: Label
    number, label = getattr(tensor, _ATTRIBUTE, (0, UNLABELLED))
    return label if number == _current.number else UNLABELLED


def is_labelled(tensor: Tensor) -> bool:
    """Whether the tensor got a label in this forward pass."""
    return bool(_current.number) and getattr(tensor, _ATTRIBUTE, (0,))[0] == _current.number


def set_label(tensor: Tensor, label: Label) -> None:
    """Attach a label to the tensor."""
    setattr(tensor, _ATTRIBUTE, (_current.number, label))


def origin_of(tensor: Tensor) -> Origin:
    """Where the tensor comes from; None if that is unknown or it is from an earlier pass."""
    origin: Origin
    number, origin = getattr(tensor, _ORIGIN, (0, None))
    return origin if number == _current.number else None


def set_origin(tensor: Tensor, origin: Origin) -> None:
    """Record where the tensor comes from."""
    setattr(tensor, _ORIGIN, (_current.number, origin))


def is_from_trace(tensor: Tensor) -> bool:
    """Whether a trace has seen where the tensor comes from, in this pass or an earlier one."""
    return hasattr(tensor, _ORIGIN)


def copy_label(source: Tensor, target: Tensor) -> None:
    """Attach to a tensor what is known about another one, which has the same elements."""
    set_label(target, label_of(source))
    set_origin(target, origin_of(source))


# Objects that an output may refer to without returning the tensors in them. The tensors of a module are its parameters.
_NOT_RETURNED = (nn.Module, type, ModuleType, CodeType, str, bytes, Number, torch.dtype, torch.device)


def tensors_kept_by(output: object) -> list[Tensor]:
    """All tensors that a model's output keeps alive, each once, in an order that depends only on its structure.

    A caller can get at a tensor in any object: in a dataclass with slots, a deque, an iterator, a closure, an attribute
    of another tensor. So every reference is followed, as the garbage collector does.

    >>> features = torch.zeros(2)
    >>> [found is features for found in tensors_kept_by(iter([{"features": lambda it=features: it}]))]
    [True]
    """
    found, seen, waiting = list[Tensor](), dict[int, object](), [output]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _NOT_RETURNED):
            continue
        seen[id(item)] = item  # the reference keeps the id from being reused
        if isinstance(item, Tensor):
            found.append(item)
        waiting += reversed(_references(item))
    return found


def _references(item: object) -> list[object]:
    """The objects that an object refers to directly."""
    if isinstance(item, Tensor):
        return [value for name, value in vars(item).items() if not name.startswith("_keepk_")]
    if isinstance(item, dict):
        return [*item.keys(), *item.values(), *getattr(item, "__dict__", {}).values()]
    if isinstance(item, list | tuple):  # the garbage collector visits them backwards
        return [*item, *getattr(item, "__dict__", {}).values()]
    if isinstance(item, set | frozenset):  # the order of a set of tensors differs between two passes
        return sorted(item, key=lambda it: repr(origin_of(it)) if isinstance(it, Tensor) else repr(type(it)))
    if isinstance(item, FunctionType):  # without its globals, which are not part of the output
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY_CELL]
        return [*cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values(), *vars(item).values()]
    if isinstance(item, np.ndarray):  # which hides its objects from the garbage collector
        return item.ravel().tolist() if item.dtype == object else []
    return gc.get_referents(item)


_EMPTY_CELL = CellType()
