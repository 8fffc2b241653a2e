"""Removals: the indices and sizes that are left of a model (`Left`), and the edits that remove units (`plan_edits`).

A removal is planned before anything changes, in four steps. The request is checked (`_checked`). Units that have to be
removed with the requested ones are added (`_closed`). Cuts that the model's wiring does not allow are refused. Then the
current model is compared with the model after the removal, tensor by tensor and attribute by attribute; the differences
are the `Edits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keepk.errors import ShrinkError
from keepk.graph.ids.maps import Flags, Map, predict, support
from keepk.graph.units import Constant, Wiring
from keepk.model.edits import Cut, Edits, Indices, Selection, Setting, Unchanged
from keepk.model.layer_sizes import Sized

if TYPE_CHECKING:
    from keepk.graph.graph import Graph


class Left:
    """The part of a model that is left while some atoms are alive; immutable.

    Tensors are computed on request and cached, because a removal usually changes few of them.
    """

    def __init__(self, wiring: Wiring, alive: Flags) -> None:
        self.alive = alive
        self._wiring = wiring
        self._atoms = dict[str, dict[int, Map]]()
        self._groups = {sized.module: sized for sized in wiring.sized if sized.attribute == "groups"}

    def atoms(self, tensor: str) -> dict[int, Map]:
        """By axis of a tensor, the atoms that are left; a matrix where they differ from row to row."""
        if tensor not in self._atoms:
            self._atoms[tensor] = _living(self._wiring.tensors[tensor], self.alive)
        return self._atoms[tensor]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        sizes = list(self._wiring.shapes[tensor])
        for dim, atoms in self.atoms(tensor).items():
            sizes[dim] = atoms.shape[-1]
        return tuple(sizes)

    def size(self, sized: Sized) -> int:
        """The value of an attribute of a known layer, such as ``out_channels``."""
        if sized.blocks:
            return self._blocks(sized.tensor, sized.blocks)
        size = self.shape(sized.tensor)[sized.dim]
        # ``in_channels`` of a grouped convolution counts all groups, its weight the channels of one.
        groups = self._groups.get(sized.module) if sized.times_groups else None
        if groups is not None:
            size *= self._blocks(groups.tensor, groups.blocks)
        return size // sized.parts

    def constant(self, constant: Constant) -> int | None:
        """The value of a constant; None if the remaining atoms do not form a box."""
        shape = predict(constant.shape, constant.maps, self.alive)
        return shape[constant.dim] if shape else None

    def _blocks(self, tensor: str, blocks: int) -> int:
        """The number of equal blocks of a tensor's rows that have a row left."""
        rows = _rows(self._wiring.tensors[tensor])
        return blocks if rows is None else int(self.alive[rows].reshape(blocks, -1).any(axis=1).sum())


def cut_between(now: Left, then: Left, tensor: str) -> Cut | None:
    """The cut of one tensor; None if it keeps its shape.

    Raises:
        ShrinkError: Nothing would be left of an axis.
    """
    before, after = now.atoms(tensor), then.atoms(tensor)
    kept = dict[int, Indices]()
    for dim in before:
        if after[dim].size == 0:
            raise ShrinkError(
                f"shrink: nothing would be left of axis {dim} of {tensor!r} ({before[dim].shape[-1]} now). "
                f"Leave at least one unit of each layer."
            )
        if before[dim].shape[-1] != after[dim].shape[-1]:
            kept[dim] = _positions(before, after, dim, then.alive)
    return Cut(tensor, kept, now.shape(tensor), then.shape(tensor)) if kept else None


def settings_between(now: Left, then: Left, sized: Iterable[Sized], constants: Iterable[Constant]) -> Iterable[Setting]:
    """The new values of attributes that repeat sizes: those of known layers, and those found by probing."""
    for it in sized:
        if (old := now.size(it)) != (new := then.size(it)):
            yield Setting(it.module, it.attribute, it.item, old, new)
    for found in constants:
        before, after = now.constant(found), then.constant(found)
        if before is not None and after is not None and before != after:
            yield Setting(found.module, found.attribute, found.item, before, after)


def unchanged_between(now: Left, then: Left, beside: Iterable[Constant]) -> Iterable[Unchanged]:
    """The attributes that equal a size that changes, and do not follow it."""
    gone, seen = now.alive & ~then.alive, set[tuple[str, str, int | None]]()
    for found in beside:
        key = (found.module, found.attribute, found.item)
        if key in seen or not any(gone[index_map].any() for index_map in found.maps):
            continue
        before, after = now.constant(found), then.constant(found)
        if before is not None and after is not None and before != after:
            seen.add(key)
            yield Unchanged(*key, found.shape[found.dim], after)


def _living(maps: Sequence[Map], alive: Flags) -> dict[int, Map]:
    """By axis, the living atoms of a tensor. Only the weight of a grouped convolution has a map over two dims."""
    supports = [support(index_map) for index_map in maps]
    left = {dims[0]: _of_row(m, alive) for m, dims in zip(maps, supports, strict=True) if len(dims) == 1}
    for index_map, dims in zip(maps, supports, strict=True):
        if len(dims) > 1:
            left[1] = _by_row(index_map, _rows(maps), alive)
    return left


def _of_row(index_map: Map, alive: Flags) -> Map:
    atoms = index_map.ravel()
    return atoms[alive[atoms]]


def _rows(maps: Iterable[Map]) -> Map | None:
    """The atoms of a tensor's first axis."""
    return next((index_map.ravel() for index_map in maps if support(index_map) == (0,)), None)


def _by_row(index_map: Map, rows: Map | None, alive: Flags) -> Map:
    """The living atoms of each living row; no columns if rows have different numbers, since no tensor is ragged."""
    matrix = index_map.reshape(index_map.shape[:2])
    if rows is not None:
        matrix = matrix[alive[rows]]
    living = alive[matrix]
    counts = living.sum(axis=1)
    if len(counts) == 0 or (counts != counts[0]).any():
        return matrix[:, :0]
    return matrix[living].reshape(len(matrix), int(counts[0]))


def _positions(before: dict[int, Map], after: dict[int, Map], dim: int, alive: Flags) -> Indices:
    """The positions, within the tensor as it is now, of the atoms that are left afterwards."""
    if before[dim].ndim == 1:
        return np.flatnonzero(alive[before[dim]])
    rows = before[dim]
    if 0 in before and len(before[0]) != len(after[0]):
        rows = rows[alive[before[0]]]
    return np.nonzero(alive[rows])[1].reshape(after[dim].shape)


def plan_edits(graph: Graph, units: Iterable[int]) -> Edits:
    """See `Graph.edits`."""
    removed = _closed(graph, _checked(graph, units))
    _refuse_unequal(graph, removed)
    _refuse_misaligned(graph, removed)
    now, then = graph.left, graph.left_without(removed)
    cuts = [cut for name in graph.wiring.tensors if (cut := cut_between(now, then, name)) is not None]
    touched = {cut.tensor for cut in cuts}
    return Edits(
        units=removed,
        cuts=tuple(cuts),
        settings=tuple(settings_between(now, then, graph.wiring.sized, graph.constants)),
        selections=tuple(_selections(graph, then.alive)),
        headwise=tuple(path for path, names in graph.wiring.headwise.items() if names & touched),
        unchanged=tuple(unchanged_between(now, then, graph.beside)),
    )


def _checked(graph: Graph, units: Iterable[int]) -> Indices:
    """The requested units, sorted and unique; raises if one does not exist or is gone."""
    # Python ints are compared before they become int64, which would wrap around on huge ones.
    given = units if isinstance(units, np.ndarray) else np.array([int(unit) for unit in units], object)
    if len(given) and not 0 <= given.min() <= given.max() < len(graph.units):
        raise ShrinkError(
            f"shrink: unit {given.max() if given.min() >= 0 else given.min()} does not exist; the graph has "
            f"{len(graph.units)} units, 0 to {len(graph.units) - 1}. graph.groups lists them."
        )
    asked = np.unique(given.astype(np.int64))
    gone = asked[~graph.alive[asked]]
    if len(gone):
        raise ShrinkError(
            f"shrink: unit {gone[0]} of {_home(graph, gone[0])!r} ({len(gone)} in total) was already removed. "
            f"Choose units for which graph.alive is True."
        )
    return asked


def _home(graph: Graph, unit: int) -> str:
    return graph.groups[int(graph.units.group[unit])].name


def _closed(graph: Graph, asked: Indices) -> Indices:
    """The units and those that must be removed with them, without units that are gone already."""
    gone = ~graph.alive
    gone[asked] = True
    return np.flatnonzero(closure(graph, gone) & graph.alive)


def closure(graph: Graph, gone: Flags) -> Flags:
    """By unit, whether it is gone or must be removed with units that are.

    All readings of a removed source are removed, and so is a source that nothing reads any more.
    """
    links = graph.links()
    if not len(links):
        return gone
    gone, sources, readers = gone.copy(), links[:, 0], links[:, 1]
    # A source stays if something else uses it, or if it is bound: removing it alone would leave unequal numbers.
    kept, count = graph.otherwise_used() | graph.bound(), -1
    while gone.sum() != count:  # a reading may be a source for another
        count = gone.sum()
        gone[readers[gone[sources]]] = True
        still_read = kept.copy()
        still_read[sources[~gone[readers]]] = True
        gone[sources[~still_read[sources]]] = True
    return gone


def _refuse_unequal(graph: Graph, removed: Indices) -> None:
    going = np.zeros(len(graph.units), bool)
    going[removed] = True
    for blocks, binding in zip(graph.bindings, graph.bound_reasons(), strict=True):
        counts = [int(going[block].sum()) for block in blocks]
        if len(set(counts)) > 1:
            raise ShrinkError(
                f"shrink: {_home(graph, int(blocks[0][0]))!r} must lose equal numbers of units from each of its "
                f"{len(blocks)} parts, because it {binding}; got {', '.join(map(str, counts[:8]))}. "
                f"Choose equal numbers from each part in graph.bindings."
            )


def _refuse_misaligned(graph: Graph, removed: Indices) -> None:
    for group in (group for group in graph.groups if group.multiple > 1):
        going = np.isin(group.units, removed)
        left = int((graph.alive[group.units] & ~going).sum())
        if going.any() and left % group.multiple:
            nearest = max(left - left % group.multiple, group.multiple)
            raise ShrinkError(
                f"shrink: {left} units of {group.name!r} would be left, which must be a multiple of "
                f"{group.multiple}, because {group.aligned}. Leave {nearest}, or another multiple."
            )


def _selections(graph: Graph, after: Flags) -> Iterable[Selection]:
    """The BatchNorms that have to read a different selection of their input."""
    now = graph.left.alive
    for read in graph.solution.reads:
        before = now[read.sources], now[read.readers]
        sources, readers = after[read.sources], after[read.readers]
        if (readers & ~sources).any():
            raise ShrinkError(f"shrink: {read.module!r} would read removed channels. Remove its readings too.")
        changed = (before[0] != sources).any() or (before[1] != readers).any()
        # A norm that reads all of its input needs no selection, unless it has one already.
        selects = (sources != readers).any() or (before[0] != before[1]).any()
        if changed and selects:
            positions = np.cumsum(sources) - 1
            yield Selection(read.module, positions[readers])


def lost_units(graph: Graph, cuts: Iterable[Cut]) -> Indices:
    """See `Graph.lost`."""
    gone = np.zeros(len(graph.units) + 1, bool)  # index -1, the last entry, collects slices that belong to no unit
    for cut in (cut for cut in cuts if cut.tensor in graph.wiring.tensors):
        owners = graph.owners(cut.tensor)
        for axis, kept in cut.kept.items():
            rows = cut.kept.get(0) if kept.ndim == 2 else None
            owned = owners[axis] if rows is None else owners[axis][rows]
            stays = np.zeros(owned.shape, bool)
            np.put_along_axis(stays, kept, True, axis=-1)
            gone[owned[~stays]] = True
    return np.flatnonzero(gone[:-1])
