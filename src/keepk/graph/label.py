"""Labels: what the trace knows about one tensor of the forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from keepk.graph.maps import Map

_ATTRIBUTE = "_keepk_label"  # lives on tensors of the traced copy only


@dataclass(frozen=True, slots=True)
class Label:
    """The maps of a tensor and three things about its values.

    Attributes:
        maps: Index maps; a dim larger than 1 that no map covers is untracked.
        neutral: All elements are one constant, so that it matches anything.
        own: It is made of the model's own parameters and buffers alone.
        zero: When all slices of a removed channel are zero in the weights, its elements are exactly 0 here.
    """

    maps: tuple[Map, ...] = ()
    neutral: bool = False
    own: bool = False
    zero: bool = False


UNLABELLED = Label()


def label_of(tensor: Tensor) -> Label:
    """The tensor's label; an input of the model has an empty one."""
    return getattr(tensor, _ATTRIBUTE, UNLABELLED)


def is_labelled(tensor: Tensor) -> bool:
    """Whether the trace has seen where it comes from."""
    return hasattr(tensor, _ATTRIBUTE)


def set_label(tensor: Tensor, label: Label) -> None:
    """Give the tensor a label."""
    setattr(tensor, _ATTRIBUTE, label)


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
        yield from tensors_in({key: value for key, value in vars(tree).items() if key != _ATTRIBUTE})
