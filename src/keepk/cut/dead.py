"""Finding the dead units of a graph: each of their weights is zero, or is needed by no output.

Removing a unit has the same effect as setting all of its weights to zero. If each of them is zero already or is not
needed by any output, that changes nothing.
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
    """Flags of the units that can be removed without changing an output.

    Inexact units (`lossy`) are never among them: removing them does more than zeroing their weights.
    """
    parameters = dict(model.named_parameters())
    used = {name: flow.needed(tensor) & (tensor != 0) for name, tensor in parameters.items()}
    return ~_touched(graph, used) & ~graph.units.lossy


def would_matter(graph: Graph, model: nn.Module, flow: Flow) -> Flags:
    """Flags of the units whose producing weights would influence an output if they were not zero.

    A dead unit with this flag is dead for lack of inputs, one without it for lack of readers.
    """
    made = {(tensor, dim) for (tensor, dim), role in graph.wiring.roles.items() if role is Role.PRODUCER}
    parameters = dict(model.named_parameters())
    needed = {name: flow.needed(tensor) for name, tensor in parameters.items()}
    return _touched(graph, needed, made)


def _touched(graph: Graph, marks: Mapping[str, Tensor], only: set[tuple[str, int]] | None = None) -> Flags:
    """Flags of the units that have a marked element in one of their slices; `only` limits the axes."""
    touched = np.zeros(len(graph.units), bool)
    for axis, units, places in _slices(graph):
        if axis.tensor in marks and (only is None or (axis.tensor, axis.dim) in only):
            along = _by_index(marks[axis.tensor], axis).cpu().numpy()
            touched[units[along[places]]] = True
    return touched


def _slices(graph: Graph) -> Iterator[tuple[Axis, Indices, Indices]]:
    """Axis by axis, the units that have slices on it, and the indices of these slices."""
    units = graph.units
    owner = np.repeat(np.arange(len(units)), np.diff(units.starts))
    for number in np.unique(units.axis).tolist():
        mine = units.axis == number
        yield graph.wiring.axes[number], owner[mine], units.index[mine]


def _by_index(marks: Tensor, axis: Axis) -> Tensor:
    """For each index of an axis, whether any element there is marked."""
    # The in-channels of a grouped convolution count through all groups, but each row of the weight has one group's.
    if axis.groups > 1:
        grouped = marks.reshape(axis.groups, -1, *marks.shape[1:]).any(dim=1)
        return grouped.reshape(axis.size, -1).any(dim=1)
    return marks.movedim(axis.dim, 0).reshape(axis.size, -1).any(dim=1)


def column_units(graph: Graph, tensor: str, dim: int) -> Indices:
    """The unit of each index of a tensor's axis; -1 for an index without one."""
    found = np.full(graph.wiring.shapes[tensor][dim], -1, np.int64)
    for axis, units, places in _slices(graph):
        if (axis.tensor, axis.dim, axis.groups) == (tensor, dim, 1):
            found[places] = units
    return found


def removable(graph: Graph, dead: Flags) -> Flags:
    """Flags of as many dead units as can be removed.

    Every layer keeps one unit, bound blocks lose equal numbers, and no unit is removed with them that is not dead.
    """
    picks = [pick for blocks in graph.choices() if len(pick := _pick(graph, blocks, dead))]
    # All at once is the usual case. If the groups' picks do not fit together, add them one by one.
    together = _closed(graph, np.concatenate([*picks, np.zeros(0, np.int64)]), dead)
    if together is not None:
        return together
    chosen = np.zeros(len(dead), bool)
    for pick in picks:
        closed = _closed(graph, np.union1d(np.flatnonzero(chosen), pick), dead)
        chosen = chosen if closed is None else closed
    return chosen


def _pick(graph: Graph, blocks: tuple[Indices, ...], dead: Flags) -> Indices:
    """The first dead units of each block, the same number from each."""
    # Channels that several BatchNorms read separately ("source") are removed with their last read, not picked here.
    if any(graph.groups[group].kind == "source" for group in np.unique(graph.units.group[np.concatenate(blocks)])):
        return np.zeros(0, np.int64)
    count = min(min(int(dead[block].sum()), len(block) - 1) for block in blocks)
    count = fitting(count, map(len, blocks), graph.multiple(blocks))
    return np.concatenate([block[dead[block]][:count] for block in blocks])


def _closed(graph: Graph, units: Indices, dead: Flags) -> Flags | None:
    """Flags of the units and of those removed with them; None if they cannot be removed, or not all are dead."""
    try:
        edits = graph.edits(np.unique(units).tolist())
    except ShrinkError:
        return None
    closed = np.zeros(len(dead), bool)
    closed[edits.units] = True
    return closed if dead[closed].all() else None
