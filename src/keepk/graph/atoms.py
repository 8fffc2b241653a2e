"""Atoms: an id for every (tensor, axis, index) of a model, and for what operations make up on the way."""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from keepk.graph.maps import Map

COPIES = -1


@dataclass(frozen=True)
class Axis:
    """A run of atoms: one axis of a parameter or buffer.

    Attributes:
        start: Its first atom.
        size: How many.
        tensor: The name of the parameter or buffer; empty for what an operation made up.
        dim: Which of its dims; `COPIES` for what was made up for places that are all the same.
        groups: Above 1 for the second axis of a grouped convolution's weight: its atoms are (group, local index).
    """

    start: int
    size: int
    tensor: str
    dim: int
    groups: int = 1


class Atoms:
    """Hands out ids in runs. Id 0 means "no atom"."""

    def __init__(self) -> None:
        self.count = 1
        self.axes: list[Axis] = []
        self._starts: list[int] = []

    def new(self, size: int, tensor: str = "", dim: int = 0, groups: int = 1) -> Map:
        """A run of fresh atoms."""
        axis = Axis(self.count, size, tensor, dim, groups)
        self.axes.append(axis)
        self._starts.append(self.count)
        self.count += size
        return np.arange(axis.start, self.count, dtype=np.int32)

    def axis(self, atom: int) -> Axis:
        """The run that an atom is in."""
        return self.axes[bisect_right(self._starts, atom) - 1]

    def branch(self) -> "Atoms":
        """Atoms that go on from these without changing them."""
        other = Atoms()
        other.count, other.axes, other._starts = self.count, list(self.axes), list(self._starts)
        return other
