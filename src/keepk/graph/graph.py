"""The graph of a model: its units, their spaces, what is fixed and why, and what a removal would cut."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits, Indices, Selection
from keepk.graph.left import Left, cut_between, settings_between, unchanged_between
from keepk.graph.maps import Flags
from keepk.graph.shares import choose
from keepk.graph.solve import Solution, alive_atoms
from keepk.graph.units import Fixed, GraphSpace, Units, find_fixed, find_spaces, find_units
from keepk.graph.wiring import Constant, Wiring

if TYPE_CHECKING:
    from keepk.graph.replay import Replays


@dataclass(eq=False)
class Graph:
    """How a model is wired; made by `keepk.trace`.

    Units are numbered from 0; a number keeps its meaning through any number of shrinks. `constants` are attributes that
    follow sizes; `beside` are others that are equal to a size, which forward does not need.
    """

    wiring: Wiring
    solution: Solution
    constants: list[Constant] = field(default_factory=list)
    beside: tuple[Constant, ...] = ()

    def __post_init__(self) -> None:
        wiring, solution = self.wiring, self.solution
        self.units: Units = find_units(wiring.axes, wiring.parameters, solution)
        self.spaces: tuple[GraphSpace, ...] = tuple(find_spaces(self.units, wiring.axes, solution, wiring.roles))
        self.fixed: tuple[Fixed, ...] = tuple(find_fixed(wiring.axes, solution))
        self._left = Left(wiring, np.ones(len(solution.classes), bool))  # of the model as it is now
        self._unit_of = np.full(len(solution.classes), -1, np.int64)
        self._unit_of[self.units.classes] = np.arange(len(self.units))
        self.bindings: tuple[tuple[Indices, ...], ...] = tuple(self._blocks())
        self.replays: Replays | None = None  # the forward passes that a cut model must repeat
        self.unknown: tuple[str, ...] = ()  # parts of the model's forward that the trace has not seen

    @property
    def alive(self) -> NDArray[np.bool_]:
        """Which units are still there."""
        return self._left.alive[self.units.classes]

    def slices(self, unit: int) -> list[tuple[str, int, int]]:
        """(tensor, axis, index) of every slice of a unit, in the model as it was traced.

        On the second axis of a grouped convolution's weight the index is group * channels of a group + channel.
        """
        if not 0 <= unit < len(self.units):
            raise ShrinkError(f"slices: unit {unit} does not exist; the graph has units 0 to {len(self.units) - 1}.")
        axes = self.wiring.axes
        return [(axes[axis].tensor, axes[axis].dim, index) for axis, index in self.units.slices(unit)]

    def choose(self, share: float, *, seed: int | None = None, lossy: bool = False) -> Indices:
        """About this share of the units of every space that can go together: the first ones, or random ones by seed.

        Nothing is ranked; a `Pruner` does that. The ranks of adapters (LoRA) are not among them. Shares are rounded
        down, exactly in the decimals written. Equal numbers are taken of blocks that are bound, and something is left
        everywhere.
        """
        return choose(self, share, seed=seed, lossy=lossy)

    def adapter_of(self, space: GraphSpace) -> str:
        """The path of the adapter whose ranks the units of a space are; empty if they are anything else."""
        owners = [self.wiring.adapters.get(tensor, "") for tensor, _, _ in space.axes]
        return owners[0] if all(owners) else ""

    def multiple(self, blocks: Sequence[Indices]) -> int:
        """Of what a multiple must be left of each block."""
        numbers: list[int] = np.unique(self.units.space[np.concatenate(blocks)]).tolist()
        return max(self.spaces[number].multiple for number in numbers)

    def choices(self) -> list[tuple[Indices, ...]]:
        """What is chosen from as one: bound blocks, and what is not bound space by space."""
        bound = self._bound()
        loose = [space.units[~bound[space.units]] for space in self.spaces]
        return [*self.bindings, *((units,) for units in loose if len(units))]

    def _bound(self) -> Flags:
        """Which units are in a binding."""
        bound = np.zeros(len(self.units), bool)
        for blocks in self.bindings:
            bound[np.concatenate(blocks)] = True
        return bound

    def _blocks(self) -> Iterable[tuple[Indices, ...]]:
        for binding in self.solution.bindings:
            blocks = tuple(self._unit_of[block] for block in binding.blocks)
            blocks = tuple(block[block >= 0] for block in blocks)
            if any(len(block) for block in blocks):
                yield blocks

    def with_constants(self, constants: Iterable[Constant]) -> Graph:
        """The same graph with other attributes that follow sizes; everything else is shared."""
        other = copy.copy(self)
        other.constants = list(constants)
        return other

    def edits(self, units: Iterable[int]) -> Edits:
        """What removing these units would do; nothing is done."""
        removed = self._closed(self._checked(units))
        then = self._without(removed)
        cuts = [cut for name in self.wiring.tensors if (cut := cut_between(self._left, then, name)) is not None]
        touched = {cut.tensor for cut in cuts}
        settings = tuple(settings_between(self._left, then, self.wiring.sized, self.constants))
        return Edits(
            units=removed,
            cuts=tuple(cuts),
            settings=settings,
            selections=tuple(self._selections(then.alive)),
            headwise=tuple(path for path, names in self.wiring.headwise.items() if names & touched),
            unchanged=tuple(unchanged_between(self._left, then, self.beside)),
        )

    def alive_after(self, units: Indices) -> Flags:
        """Which atoms are left once these units are removed as well."""
        return self._without(units).alive

    def removed(self, units: Indices) -> None:
        """Take note that these units are gone from the model."""
        self._left = self._without(units)

    def restored(self, units: Indices) -> None:
        """Take note that they are not gone after all."""
        back = ~alive_atoms(self.solution.classes, self.units.classes[units])
        self._left = Left(self.wiring, self._left.alive | back)

    def lost(self, cuts: Iterable[Cut]) -> Indices:
        """The units that went by cuts of somebody else."""
        gone = np.zeros(len(self.units) + 1, bool)  # the last entry is for what belongs to no unit
        for cut in (cut for cut in cuts if cut.tensor in self.wiring.tensors):
            owners = self.owners(cut.tensor)
            for axis, kept in cut.kept.items():
                rows = cut.kept.get(0) if kept.ndim == 2 else None
                owned = owners[axis] if rows is None else owners[axis][rows]
                stays = np.zeros(owned.shape, bool)
                np.put_along_axis(stays, kept, True, axis=-1)
                gone[owned[~stays]] = True
        return np.flatnonzero(gone[:-1])

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape that a tensor has after what was removed so far."""
        return self._left.shape(tensor)

    def owners(self, tensor: str) -> dict[int, Indices]:
        """By axis of a tensor as it is now, the unit that each index belongs to, -1 for none.

        A matrix, by row and column, where the in-channels of a grouped convolution differ from row to row.
        """
        left = self._left.atoms(tensor)
        return {axis: self._unit_of[self.solution.classes[atoms]] for axis, atoms in left.items()}

    def _without(self, units: Indices) -> Left:
        """What is left after units are removed."""
        return Left(self.wiring, self._left.alive & alive_atoms(self.solution.classes, self.units.classes[units]))

    def _checked(self, units: Iterable[int]) -> Indices:
        given = units if isinstance(units, np.ndarray) else np.array([int(unit) for unit in units], object)
        if len(given) and not 0 <= given.min() <= given.max() < len(self.units):
            raise ShrinkError(
                f"shrink: unit {given.max() if given.min() >= 0 else given.min()} does not exist; the graph has "
                f"{len(self.units)} units, 0 to {len(self.units) - 1}. Take them from graph.spaces."
            )
        asked = np.unique(given.astype(np.int64))
        gone = asked[~self.alive[asked]]
        if len(gone):
            raise ShrinkError(
                f"shrink: unit {gone[0]} of {self._home(gone[0])!r} ({len(gone)} in all) was removed before. "
                f"Choose among those where graph.alive is True."
            )
        return asked

    def _home(self, unit: int) -> str:
        return self.spaces[int(self.units.space[unit])].name

    def _closed(self, asked: Indices) -> Indices:
        """With a source all of its readings go; a source that nobody reads any more goes too."""
        gone = ~self.alive
        gone[asked] = True
        links = self.links()
        sources, readers = links[:, 0], links[:, 1]
        used, bound, count = self._otherwise_used(), self._bound(), -1
        while gone.sum() != count:  # a reading may be a source for another
            count = gone.sum()
            gone[readers[gone[sources]]] = True
            still_read = used | bound
            still_read[sources[~gone[readers]]] = True
            gone[sources[~still_read[sources]]] = True
        removed = np.flatnonzero(gone & self.alive)
        self._refuse_unequal(removed)
        self._refuse_misaligned(removed)
        return removed

    def links(self) -> NDArray[np.int64]:
        """(source, reader) pairs of units."""
        return self._links

    @cached_property
    def _links(self) -> NDArray[np.int64]:
        pairs = [
            np.stack(
                [self._unit_of[self.solution.classes[r.sources]], self._unit_of[self.solution.classes[r.readers]]], 1
            )
            for r in self.solution.reads
        ]
        links = np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64)
        return links[(links >= 0).all(axis=1)]

    def _otherwise_used(self) -> Flags:
        used = np.zeros(len(self.units), bool)
        found = self._unit_of[self.solution.used]
        used[found[found >= 0]] = True
        return used

    def _refuse_unequal(self, removed: Indices) -> None:
        going = np.zeros(len(self.units), bool)
        going[removed] = True
        for blocks, binding in zip(self.bindings, self._bound_reasons(), strict=True):
            counts = [int(going[block].sum()) for block in blocks]
            if len(set(counts)) > 1:
                raise ShrinkError(
                    f"shrink: {self._home(int(blocks[0][0]))!r} must lose equally many of each of its {len(blocks)} "
                    f"parts, because it {binding}; got {', '.join(map(str, counts[:8]))}. "
                    f"Choose equal numbers of each part in graph.bindings."
                )

    def _refuse_misaligned(self, removed: Indices) -> None:
        for space in (space for space in self.spaces if space.multiple > 1):
            going = np.isin(space.units, removed)
            left = int((self.alive[space.units] & ~going).sum())
            if going.any() and left % space.multiple:
                nearest = max(left - left % space.multiple, space.multiple)
                raise ShrinkError(
                    f"shrink: {left} units of {space.name!r} would be left, which must be a multiple of "
                    f"{space.multiple}, because {space.aligned}. Leave {nearest}, or another one."
                )

    def _bound_reasons(self) -> list[str]:
        return [
            str(binding.reason)
            for binding in self.solution.bindings
            if any((self._unit_of[block] >= 0).any() for block in binding.blocks)
        ]

    def _selections(self, after: Flags) -> Iterable[Selection]:
        for read in self.solution.reads:
            before = self._left.alive[read.sources], self._left.alive[read.readers]
            sources, readers = after[read.sources], after[read.readers]
            if (readers & ~sources).any():
                raise ShrinkError(f"shrink: {read.module!r} would read channels that go. Remove its readings as well.")
            changed = (before[0] != sources).any() or (before[1] != readers).any()
            selects = (sources != readers).any() or (before[0] != before[1]).any()
            if changed and selects:
                positions = np.cumsum(sources) - 1
                yield Selection(read.module, positions[readers])
