"""Blame: the atoms that are involved in an operation that failed on a cut copy."""

from collections.abc import Iterable, Sequence

import numpy as np

from keepk.graph.maps import Flags, Map
from keepk.graph.tracer import Shaped, Step

PICKS = ("aten::select", "aten::unbind")  # operations that take rows by index


def passing_through(steps: Sequence[Step], number: int, removable: Flags) -> Map:
    """The removable atoms of the outputs of an operation, or of its inputs if the outputs have none.

    All steps that ran the same operation on the same line are included: a literal in a block's forward prevents the
    cut in every block, and one failure should settle all of them.
    """
    if number < 0:
        return np.zeros(0, np.int32)
    origin = steps[number]
    same = [step for step in steps if step.name == origin.name and step.place == origin.place and step.place]
    outside = _atoms((step.outputs for step in same or [origin]), removable)
    inside = _atoms((step.inputs for step in same or [origin]), removable)
    if origin.name in PICKS:
        inside = np.setdiff1d(inside, outside)  # the rows, one of which is missing, not the channels within a row
        return inside if len(inside) else outside
    return outside if len(outside) else inside


def _atoms(sides: Iterable[Sequence[Shaped]], removable: Flags) -> Map:
    found = [index_map.ravel() for side in sides for _, maps in side for index_map in maps]
    atoms: Map = np.unique(np.concatenate([*found, np.zeros(0, np.int32)]))
    return atoms[removable[atoms]]
