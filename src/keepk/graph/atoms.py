"""Atoms: integer ids, one for each index along each axis of each parameter and buffer.

Removing channel 5 of a convolution removes row 5 of its weight and entry 5 of its bias. The trace gives both an id (an
"atom"), and learns from the forward pass which atoms must be removed together. Operations that create tensors, or that
reduce several atoms to one, take fresh ids as well.

>>> atoms = Atoms()
>>> atoms.new(4, "conv.weight", dim=0)  # a convolution with 4 filters
array([1, 2, 3, 4], dtype=int32)
>>> atoms.new(4, "conv.bias")  # its bias: different atoms, until the trace finds that they belong together
array([5, 6, 7, 8], dtype=int32)
>>> atoms.axis(6)  # which axis atom 6 belongs to
Axis(start=5, size=4, tensor='conv.bias', dim=0, groups=1)
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from keepk.graph.maps import Map

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
