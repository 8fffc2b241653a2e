"""Labels: what the trace knows about one tensor of the forward pass.

A label is attached to the tensor object of the traced copy, so it follows the tensor wherever the model's Python takes
it: into lists, dicts, attributes and closures.
"""

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
    """

    maps: tuple[Map, ...] = ()
    neutral: bool = False
    from_parameters: bool = False
    zeros: tuple[bool, ...] = ()
    all_zero: bool = False

    def __post_init__(self) -> None:
        if len(self.zeros) != len(self.maps):
            raise ValueError(f"a label with {len(self.maps)} maps and {len(self.zeros)} flags")

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.shape}{' zero' if zero else ''}" for m, zero in zip(self.maps, self.zeros, strict=True))
        flags = [name for name in ("neutral", "from_parameters", "all_zero") if getattr(self, name)]
        return f"<Label: {', '.join([f'maps [{shapes}]', *flags])}>"

    def zero_along(self, index_map: Map) -> bool:
        """Whether the elements of a channel removed from a map are 0; the map consists of this label's atoms."""
        if self.all_zero or not any(self.zeros):
            return self.all_zero
        if all(self.zeros) and any(index_map is own for own in self.maps):
            return True
        atoms = index_map[index_map > 0]
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


def tensors_in(tree: object) -> Iterable[Tensor]:
    """The tensors in a model's output or an operation's arguments, at any depth."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple | set):
        for value in tree:
            yield from tensors_in(value)
    # Outputs of transformers and torchvision are dataclass-like objects. Modules are left out: their tensors are
    # parameters, and a type's attributes belong to no output.
    elif hasattr(tree, "__dict__") and not isinstance(tree, torch.nn.Module | type):
        yield from tensors_in({key: value for key, value in vars(tree).items() if not key.startswith("_keepk_")})
