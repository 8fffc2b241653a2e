"""Labels: what the trace knows about one tensor of the forward pass."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from keepk.graph.maps import Map

_ATTRIBUTE = "_keepk_label"  # lives on tensors of the traced copy only
_ORIGIN = "_keepk_origin"  # so does this
# Where a tensor comes from: the name of a parameter or buffer, the number of an input, or the operation (by its number
# in the pass) and which of its outputs it is. None if that is not known.
Origin: TypeAlias = str | tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Label:
    """The maps of a tensor and facts about its values.

    Attributes:
        maps: Index maps; a dim larger than 1 that no map covers is untracked.
        neutral: All elements are one constant, so that it matches anything.
        own: It is made of the model's own parameters and buffers alone.
        zeros: For each map, whether the elements of a removed channel are exactly 0 once all slices of that channel
            are zero in the weights. In ``relu(a)[:, :, None] * sigmoid(b)[:, None, :]`` this is true of the map over
            a's channels and false of the map over b's, since sigmoid(0) is not 0.
        null: Every element is 0, whatever is removed.
    """

    maps: tuple[Map, ...] = ()
    neutral: bool = False
    own: bool = False
    zeros: tuple[bool, ...] = ()
    null: bool = False

    def __post_init__(self) -> None:
        if len(self.zeros) != len(self.maps):
            raise ValueError(f"a label with {len(self.maps)} maps and {len(self.zeros)} flags")

    def zero_along(self, index_map: Map) -> bool:
        """Whether the elements of a channel removed from this map are 0; the map has atoms of this label's maps.

        An atom may be in two maps of one tensor (an outer product of a layer with itself); both must be zero then.
        """
        if self.null or not any(self.zeros):
            return self.null
        if all(self.zeros) and any(index_map is own for own in self.maps):
            return True
        atoms = index_map[index_map > 0]
        known = [(m.ravel(), zero) for m, zero in zip(self.maps, self.zeros, strict=True)]
        return bool(
            np.isin(atoms, np.concatenate([ids for ids, zero in known if zero])).all()
            and not any(np.isin(atoms, ids).any() for ids, zero in known if not zero)
        )


UNLABELLED = Label()


# Labels count only in the forward pass that set them: a model may keep tensors of one pass for the next one, in a
# dict or an lru_cache, and their atoms mean nothing there.
class _ForwardPass(threading.local):
    number = 0


_numbers = count(1)
_current = _ForwardPass()  # each thread may run a separate trace


def begin_forward_pass() -> None:
    """Forget all labels."""
    _current.number = next(_numbers)


def label_of(tensor: Tensor) -> Label:
    """The tensor's label; an input of the model has an empty one."""
    label: Label
    number, label = getattr(tensor, _ATTRIBUTE, (0, UNLABELLED))
    return label if number == _current.number else UNLABELLED


def is_labelled(tensor: Tensor) -> bool:
    """Whether the trace has seen where it comes from."""
    return bool(_current.number) and getattr(tensor, _ATTRIBUTE, (0,))[0] == _current.number


def set_label(tensor: Tensor, label: Label) -> None:
    """Give the tensor a label."""
    setattr(tensor, _ATTRIBUTE, (_current.number, label))


def origin_of(tensor: Tensor) -> Origin:
    """Where the tensor comes from."""
    origin: Origin
    number, origin = getattr(tensor, _ORIGIN, (0, None))
    return origin if number == _current.number else None


def set_origin(tensor: Tensor, origin: Origin) -> None:
    """Write down where the tensor comes from."""
    setattr(tensor, _ORIGIN, (_current.number, origin))


def tensors_in(tree: object) -> Iterable[Tensor]:
    """The tensors of a model's output or an operation's arguments, however nested."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple | set):
        for value in tree:
            yield from tensors_in(value)
    elif hasattr(tree, "__dict__") and not isinstance(tree, torch.nn.Module | type):
        yield from tensors_in({key: value for key, value in vars(tree).items() if not key.startswith("_keepk_")})
