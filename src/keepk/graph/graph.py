"""`Graph`: the units of a model, the groups they form, and the axes that cannot shrink.

The class is a view of a `Solution` plus one piece of state: the units that are still in the model. The work is done
elsewhere: `units` finds the units and their groups, `choose` chooses units for trial cuts, and `remaining` plans a
removal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keepk.errors import ShrinkError
from keepk.graph.choose import choose
from keepk.graph.ids.maps import Flags
from keepk.graph.remaining import Left, lost_units, plan_edits
from keepk.graph.solve.solve import Solution, alive_atoms
from keepk.graph.units import Constant, Fixed, Group, Units, Wiring, find_fixed, find_groups, find_units
from keepk.model.edits import Cut, Edits, Indices

if TYPE_CHECKING:
    from keepk.graph.probe.replay import Replays

SHOWN = 12  # groups in a repr, so that it fits on a screen
NAME = 40  # characters of a group's name there


@dataclass(eq=False, repr=False)
class Graph:
    """The channels of a model, as found by `keepk.trace`.

    Units are numbered from 0. A number keeps its meaning through any number of removals.

    Attributes:
        units: All units, as arrays.
        groups: The units by group: those that have their slices in the same axes.
        fixed: The axes that cannot shrink, with the reasons.
        bindings: Blocks of units that must lose the same number of units.
        constants: Attributes found by probing that follow sizes.
        beside: Attributes that equal a size but that forward does not use; a removal leaves them unchanged.
        replays: The forward passes that a cut model must repeat.
        unknown: Messages about behaviour of forward that the trace has not seen.

    Examples:
        >>> import keepk, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> graph = keepk.trace(net, torch.zeros(2, 8))
        >>> graph
        Graph: 6 of 6 units in 1 group; 3 axes are fixed
          0    6 of 6
        >>> print(graph.edits([0, 5]))
        2 units removed: 3 tensors cut, 24 of their 72 numbers gone
    """

    wiring: Wiring
    solution: Solution
    constants: list[Constant] = field(default_factory=list)
    beside: tuple[Constant, ...] = ()

    def __post_init__(self) -> None:
        wiring, solution = self.wiring, self.solution
        self.units: Units = find_units(wiring.axes, wiring.parameters, solution)
        self.groups: tuple[Group, ...] = tuple(find_groups(self.units, wiring.axes, solution, wiring.roles))
        self.fixed: tuple[Fixed, ...] = tuple(find_fixed(wiring.axes, solution))
        # The only mutable state of the graph: the part of the model that is left. A removal replaces the whole value.
        self.left = Left(wiring, np.ones(len(solution.classes), bool))
        self._unit_of = np.full(len(solution.classes), -1, np.int64)  # by class; -1 for those that are not units
        self._unit_of[self.units.classes] = np.arange(len(self.units))
        self.bindings: tuple[tuple[Indices, ...], ...] = tuple(self._blocks())
        self.replays: Replays | None = None
        self.unknown: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The groups, each with the number of units left; see `keepk.inspect` for a report."""
        rows = self._rows()[:SHOWN]
        width = max((len(name) for name, *_ in rows), default=0)
        lines = [f"  {name:{width}}  {left:>5,} of {total:,}{note}" for name, left, total, note in rows]
        more = [f"  ... and {len(self.groups) - SHOWN} more groups"] if len(self.groups) > SHOWN else []
        return "\n".join([f"Graph: {self._summary()}", *lines, *more])

    def _repr_html_(self) -> str:
        """A table of the groups, for notebooks."""
        cells = "".join(
            f"<tr><td>{escape(name)}</td><td>{left:,}</td><td>{total:,}</td><td>{escape(note.strip(' ,'))}</td></tr>"
            for name, left, total, note in self._rows()
        )
        head = "<tr><th>group</th><th>units left</th><th>units</th><th></th></tr>"
        return f"<p>Graph: {escape(self._summary())}</p><table>{head}{cells}</table>"

    def _summary(self) -> str:
        count, axes = len(self.groups), len(self.fixed)
        groups = f"{count} group{'s' if count != 1 else ''}"
        fixed = f"{axes} ax{'es are' if axes != 1 else 'is is'} fixed"
        return f"{int(self.alive.sum()):,} of {len(self.units):,} units in {groups}; {fixed}"

    def _rows(self) -> list[tuple[str, int, int, str]]:
        """Name, number of units left, total number of units and remarks of each group."""
        rows, alive = [], self.alive
        for group in self.groups:
            name = group.name if len(group.name) <= NAME else f"...{group.name[3 - NAME :]}"
            notes = [group.kind] if group.kind != "channel" else []
            notes += ["lossy"] if group.lossy else []
            notes += [f"multiples of {group.multiple}"] if group.multiple > 1 else []
            rows.append((name, int(alive[group.units].sum()), len(group.units), "".join(f", {it}" for it in notes)))
        return rows

    @property
    def spaces(self) -> tuple[Group, ...]:
        """Deprecated: use `groups`. Here the names are those of modules, which several groups may share."""
        warnings.warn("Graph.spaces is deprecated; use Graph.groups.", DeprecationWarning, stacklevel=2)
        return tuple(replace(group, name=group.module) for group in self.groups)

    @property
    def alive(self) -> NDArray[np.bool_]:
        """Whether each unit is still in the model, as a bool array of shape [units]."""
        return self.left.alive[self.units.classes]

    def slices(self, unit: int) -> list[tuple[str, int, int]]:
        """The slices of a unit in the model when it was traced.

        Args:
            unit: The number of the unit.

        Returns:
            A list of (tensor, axis, index). On the second axis of a grouped convolution's weight, the index is group *
            channels of a group + channel.

        Raises:
            ShrinkError: The number is out of range.
        """
        if not 0 <= unit < len(self.units):
            raise ShrinkError(f"slices: unit {unit} does not exist; the graph has units 0 to {len(self.units) - 1}.")
        axes = self.wiring.axes
        return [(axes[axis].tensor, axes[axis].dim, index) for axis, index in self.units.slices(unit)]

    def choose(self, share: float, *, seed: int | None = None, lossy: bool = False) -> Indices:
        """Choose a share of the units of every group, without ranking them; a `Pruner` ranks.

        Bound blocks lose equal numbers, and every block keeps at least one unit. The ranks of LoRA adapters are not
        chosen.

        Args:
            share: The share to remove of each group, rounded down exactly (0.29 of 100 is 29).
            seed: Choose at random with this seed; None chooses the first units.
            lossy: Whether to include units whose removal changes more than setting them to zero.

        Returns:
            The numbers of the units, sorted.

        Raises:
            ShrinkError: `share` is not between 0 and 1, or `seed` is not an int of 0 or more.
        """
        return choose(self, share, seed=seed, lossy=lossy)

    def adapter_of(self, group: Group) -> str:
        """The path of the LoRA adapter whose ranks are the units of a group.

        Args:
            group: One of `groups`.

        Returns:
            The path, or an empty string if the units are not ranks of an adapter.
        """
        owners = [self.wiring.adapters.get(tensor, "") for tensor, _, _ in group.axes]
        return owners[0] if all(owners) else ""

    def multiple(self, blocks: Sequence[Indices]) -> int:
        """The number that each block's remaining count must be divisible by.

        Args:
            blocks: The blocks of one of `choices`.
        """
        numbers: list[int] = np.unique(self.units.group[np.concatenate(blocks)]).tolist()
        return max(self.groups[number].multiple for number in numbers)

    def choices(self) -> list[tuple[Indices, ...]]:
        """The sets that units are chosen from independently: bindings, and the unbound units of each group.

        Returns:
            A list of tuples of blocks, each an array of unit numbers. All blocks of a tuple lose equal numbers.
        """
        bound = self.bound()
        loose = [group.units[~bound[group.units]] for group in self.groups]
        return [*self.bindings, *((units,) for units in loose if len(units))]

    def bound(self) -> Flags:
        """Whether each unit is part of a binding, as a bool array of shape [units]."""
        bound = np.zeros(len(self.units), bool)
        for blocks in self.bindings:
            bound[np.concatenate(blocks)] = True
        return bound

    def bound_reasons(self) -> list[str]:
        """The reason of each of `bindings`."""
        return [
            str(binding.reason)
            for binding in self.solution.bindings
            if any((self._unit_of[block] >= 0).any() for block in binding.blocks)
        ]

    def _blocks(self) -> Iterable[tuple[Indices, ...]]:
        """The bindings of the solution in unit numbers, without those that have no units."""
        for binding in self.solution.bindings:
            blocks = tuple(self._unit_of[block] for block in binding.blocks)
            blocks = tuple(block[block >= 0] for block in blocks)
            if any(len(block) for block in blocks):
                yield blocks

    def links(self) -> NDArray[np.int64]:
        """Pairs of units: a BatchNorm's reading of a channel that has other readers too.

        Returns:
            An array of shape [pairs, 2] with (source, reader) in each row.
        """
        return self._links

    # Cached, since each planned removal reads it; the solution never changes.
    @cached_property
    def _links(self) -> NDArray[np.int64]:
        classes = self.solution.classes
        pairs = [
            np.stack([self._unit_of[classes[read.sources]], self._unit_of[classes[read.readers]]], 1)
            for read in self.solution.reads
        ]
        links = np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64)
        return links[(links >= 0).all(axis=1)]

    def otherwise_used(self) -> Flags:
        """Whether each unit is used by anything other than the norms of `links`, as a bool array of shape [units]."""
        used = np.zeros(len(self.units), bool)
        found = self._unit_of[self.solution.used]
        used[found[found >= 0]] = True
        return used

    def with_constants(self, constants: Iterable[Constant]) -> Graph:
        """The same graph with other `constants`; everything else is shared.

        Args:
            constants: Attributes that follow sizes.
        """
        # Units and groups depend on the solution alone; probing tries many sets of constants with one solution.
        other = copy.copy(self)
        other.constants = list(constants)
        return other

    def edits(self, units: Iterable[int]) -> Edits:
        """Plan the removal of units; nothing is changed.

        Args:
            units: The numbers of the units.

        Returns:
            The edits. Their `units` include those that have to be removed with the requested ones.

        Raises:
            ShrinkError: A unit does not exist or was already removed, or the removal is impossible: an axis would
                become empty, blocks would become unequal, or a count would not be the required multiple.
        """
        return plan_edits(self, units)

    def alive_after(self, units: Indices) -> Flags:
        """Which atoms are left once these units are removed too, as a bool array of shape [atoms]."""
        return self.left_without(units).alive

    def left_without(self, units: Indices) -> Left:
        """The part of the model that is left once these units are removed too."""
        return Left(self.wiring, self.left.alive & alive_atoms(self.solution.classes, self.units.classes[units]))

    def removed(self, units: Indices) -> None:
        """Record that these units have been removed from the model."""
        self.left = self.left_without(units)

    def restored(self, units: Indices) -> None:
        """Record that a removal of these units was undone."""
        back = ~alive_atoms(self.solution.classes, self.units.classes[units])
        self.left = Left(self.wiring, self.left.alive | back)

    def lost(self, cuts: Iterable[Cut]) -> Indices:
        """The units that cuts remove, for cuts that were not planned by this graph.

        Args:
            cuts: Cuts that start from the model in its current state, as recorded by this graph.

        Returns:
            The numbers of the units, sorted.
        """
        return lost_units(self, cuts)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The current shape of a tensor.

        Args:
            tensor: The name of a parameter or buffer.
        """
        return self.left.shape(tensor)

    def owners(self, tensor: str) -> dict[int, Indices]:
        """The units that the indices of a tensor belong to, in its current shape.

        Args:
            tensor: The name of a parameter or buffer.

        Returns:
            By axis, an array of shape [size] with the unit of each index; -1 for none. If the in-channels of a grouped
            convolution differ from row to row, the array has the shape [rows, columns].
        """
        left = self.left.atoms(tensor)
        return {axis: self._unit_of[self.solution.classes[atoms]] for axis, atoms in left.items()}
