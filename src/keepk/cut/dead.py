"""Which units of a graph are dead: all of their weights are zero or needed by no output.

Removing a unit is setting all of its weights to zero. Where each of them is zero already, or no output needs it, that
changes nothing.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor, nn

from keepk.cut.dead_flow import Flow
from keepk.errors import ShrinkError
from keepk.graph.atoms import Axis
from keepk.graph.edits import Indices
from keepk.graph.facts import Role
from keepk.graph.graph import Graph
from keepk.graph.maps import Flags
from keepk.graph.shares import fitting


def dead_units(graph: Graph, model: nn.Module, flow: Flow) -> Flags:
    """Which units can go without a change; those whose removal does more than zeroing never."""
    parameters = dict(model.named_parameters())
    used = {name: flow.needed(tensor) & (tensor != 0) for name, tensor in parameters.items()}
    return ~_touched(graph, used) & ~graph.units.lossy


def would_matter(graph: Graph, model: nn.Module, flow: Flow) -> Flags:
    """Of which units an output would depend on the weights that make them, were they not zero."""
    made = {(tensor, dim) for (tensor, dim), role in graph.wiring.roles.items() if role is Role.PRODUCER}
    parameters = dict(model.named_parameters())
    needed = {name: flow.needed(tensor) for name, tensor in parameters.items()}
    return _touched(graph, needed, made)


def _touched(graph: Graph, marks: Mapping[str, Tensor], only: set[tuple[str, int]] | None = None) -> Flags:
    """Units with a mark in one of their slices."""
    touched = np.zeros(len(graph.units), bool)
    for axis, units, places in _slices(graph):
        if axis.tensor in marks and (only is None or (axis.tensor, axis.dim) in only):
            along = _by_index(marks[axis.tensor], axis).cpu().numpy()
            touched[units[along[places]]] = True
    return touched


def _slices(graph: Graph) -> Iterator[tuple[Axis, Indices, Indices]]:
    """Axis by axis, the units that have slices there, and where."""
    units = graph.units
    owner = np.repeat(np.arange(len(units)), np.diff(units.starts))
    for number in np.unique(units.axis).tolist():
        mine = units.axis == number
        yield graph.wiring.axes[number], owner[mine], units.index[mine]


def _by_index(marks: Tensor, axis: Axis) -> Tensor:
    """Whether anything is marked at each index of an axis."""
    if axis.groups > 1:
        grouped = marks.reshape(axis.groups, -1, *marks.shape[1:]).any(dim=1)
        return grouped.reshape(axis.size, -1).any(dim=1)
    return marks.movedim(axis.dim, 0).reshape(axis.size, -1).any(dim=1)


def column_units(graph: Graph, tensor: str, dim: int) -> Indices:
    """The unit of each index of an axis of a tensor; -1 where there is none."""
    found = np.full(graph.wiring.shapes[tensor][dim], -1, np.int64)
    for axis, units, places in _slices(graph):
        if (axis.tensor, axis.dim, axis.groups) == (tensor, dim, 1):
            found[places] = units
    return found


def removable(graph: Graph, dead: Flags) -> Flags:
    """As many of the dead units as can go.

    One unit stays of every layer, equal numbers go of blocks that are bound, and nothing goes along that is not dead.
    """
    picks = [pick for blocks in graph.choices() if len(pick := _pick(graph, blocks, dead))]
    together = _closed(graph, np.concatenate([*picks, np.zeros(0, np.int64)]), dead)
    if together is not None:
        return together
    chosen = np.zeros(len(dead), bool)
    for pick in picks:
        closed = _closed(graph, np.union1d(np.flatnonzero(chosen), pick), dead)
        chosen = chosen if closed is None else closed
    return chosen


def _pick(graph: Graph, blocks: tuple[Indices, ...], dead: Flags) -> Indices:
    """The same number of each block, the first ones. A channel that others read goes with its last reading."""
    if any(graph.groups[space].kind == "source" for space in np.unique(graph.units.group[np.concatenate(blocks)])):
        return np.zeros(0, np.int64)
    count = min(min(int(dead[block].sum()), len(block) - 1) for block in blocks)
    count = fitting(count, map(len, blocks), graph.multiple(blocks))
    return np.concatenate([block[dead[block]][:count] for block in blocks])


def _closed(graph: Graph, units: Indices, dead: Flags) -> Flags | None:
    """The units with those that go along with them; None if that cannot be."""
    try:
        edits = graph.edits(np.unique(units).tolist())
    except ShrinkError:
        return None
    closed = np.zeros(len(dead), bool)
    closed[edits.units] = True
    return closed if dead[closed].all() else None
