"""Which atoms an operation that failed on a cut copy has to do with."""

from collections.abc import Iterable, Sequence

import numpy as np

from keepk.graph.maps import Flags, Map
from keepk.graph.tracer import Shaped, Step

PICKS = ("aten::select", "aten::unbind")  # these take rows by their number


def passing_through(steps: Sequence[Step], number: int, removable: Flags) -> Map:
    """The removable atoms that come out of an operation, or go into it, wherever that line runs."""
    if number < 0:
        return np.zeros(0, np.int32)
    origin = steps[number]
    same = [step for step in steps if step.name == origin.name and step.place == origin.place and step.place]
    outside = _atoms((step.outputs for step in same or [origin]), removable)
    inside = _atoms((step.inputs for step in same or [origin]), removable)
    if origin.name in PICKS:
        inside = np.setdiff1d(inside, outside)  # the rows, of which one is there no more
        return inside if len(inside) else outside
    return outside if len(outside) else inside


def _atoms(sides: Iterable[Sequence[Shaped]], removable: Flags) -> Map:
    found = [index_map.ravel() for side in sides for _, maps in side for index_map in maps]
    atoms: Map = np.unique(np.concatenate([*found, np.zeros(0, np.int32)]))
    return atoms[removable[atoms]]
