"""The algebra of index maps: what two tensors that meet say about each other's atoms.

`merge` is the one primitive. Where two maps cover the same dims, their atoms are equal. Where one covers a part of the
other's dims, its atom is the parent of a line of cells. Where they cross, they share a parent for each place in common.
Where the other tensor has a dim but no map for it, the atoms are pinned. A contraction is a merge in the joint index
space, then a reduction over the contracted dim.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from keepk.graph.atoms import Atoms
from keepk.graph.facts import Bound, Facts, Line, Reason
from keepk.graph.maps import Map, compress, fibres, row_matrices, squeeze, support


@dataclass(frozen=True)
class Operand:
    """A tensor as a merge sees it: its maps and shape, aligned with the others' dims.

    Attributes:
        maps: Its index maps.
        shape: Its shape.
        zeros: For each map, whether the elements of a removed channel are 0; see `Label`.
        neutral: All elements are one constant, so that it matches anything.
        null: All elements are 0.
    """

    maps: Sequence[Map]
    shape: tuple[int, ...]
    zeros: Sequence[bool]
    neutral: bool = False
    null: bool = False

    def zero_along(self, index_map: Map) -> bool:
        """Whether the elements of a channel removed from a merged map are 0 in this operand.

        Only a map over the very same dims counts. One over fewer dims is shared by cells that may go one by one, and
        does not become 0 with one of them.
        """
        same = [(m, zero) for m, zero in zip(self.maps, self.zeros, strict=True) if support(m) == support(index_map)]
        if len(same) > 1:  # two axes folded into one
            same = [(m, zero) for m, zero in same if _pattern(m) == _pattern(index_map)]
        return self.null or (len(same) == 1 and same[0][1])


class Tracked(NamedTuple):
    """A map of a result, and whether the elements of a removed channel are 0 there."""

    map: Map
    zero: bool


@dataclass(frozen=True)
class Meeting:
    """How the operands of a merge meet."""

    why: str
    nested: Line
    contracted: int | None


class Algebra:
    """Merges and reductions that write down facts."""

    def __init__(self, atoms: Atoms, facts: Facts, reason: Callable[[str], Reason]) -> None:
        self.atoms, self.facts, self._reason = atoms, facts, reason

    def merge(
        self, operands: Sequence[Operand], why: str, nested: Line = Line.SHARE, contracted: int | None = None
    ) -> list[Map]:
        """The maps of what an elementwise operation makes of its operands.

        `nested` is the kind of line between a map and a finer one; a parent over the `contracted` dim is a weight that
        every row shares.
        """
        meeting = Meeting(why, nested, contracted)
        dropped = {
            id(index_map)
            for (one, operand), (other, against) in permutations(enumerate(operands), 2)
            for index_map in operand.maps
            if not self._meet(
                index_map, against, meeting, first=one < other, folded=_is_folded(index_map, operand.maps)
            )
        }
        return _merged([[m for m in operand.maps if id(m) not in dropped] for operand in operands])

    def contract(self, operands: tuple[Operand, Operand], dim: int, why: str) -> list[Tracked]:
        """The maps after a sum of products over `dim`, which keeps its place with size 1."""
        left, right = ({support(m) for m in operand.maps if m.shape[dim] > 1} for operand in operands)
        merged = self.merge(operands, why, Line.HEADS, dim)
        # Heads: both factors have rows of their own. A weight that all rows share leaves the cells apart.
        return self.sum_of_products(operands, merged, dim, (Line.HEADS if left == right else Line.LOOSE, Line.HEADS))

    def sum_of_products(
        self, operands: Sequence[Operand], merged: Iterable[Map], dim: int, kinds: tuple[Line, Line]
    ) -> list[Tracked]:
        """The maps after the products of `operands` are summed over `dim`.

        A channel that is summed over must vanish from the sum: one of its factors is 0 once it is removed. Otherwise
        removing it changes the rest. `kinds` are the lines of the sum, and of maps inside finer ones.
        """
        left = list[Tracked]()
        for index_map in merged:
            zero = any(operand.zero_along(index_map) for operand in operands)
            if not zero:
                self.lossy(index_map, (dim,), "sums over channels that do not vanish")
            left += [Tracked(rows, zero) for rows in self.reduce([index_map], (dim,), kinds[0])]
        kept = {id(m) for m in self.nest([rows for rows, _ in left], kinds[1])}
        return [tracked for tracked in left if id(tracked.map) in kept]

    def reduce(self, maps: Iterable[Map], dims: Sequence[int], kind: Line = Line.LOOSE) -> list[Map]:
        """The maps after `dims` are summed away; they keep their places with size 1."""
        left = list[Map]()
        for index_map in maps:
            kept = [dim for dim in support(index_map) if dim not in dims]
            if len(kept) == len(support(index_map)):
                rows = index_map
            elif not kept:
                continue
            else:
                rows = compress(self.rows(index_map, kept))
                self.facts.add_line(rows, index_map, kind)
            if support(rows) and not any(rows is other for other in left):
                left.append(rows)
        return left

    def rows(self, index_map: Map, dims: Sequence[int]) -> Map:
        """A fresh atom for each distinct fibre over `dims`: copies along a batch share one."""
        distinct, which = np.unique(fibres(index_map, dims), axis=0, return_inverse=True)
        fresh = self.atoms.new(len(distinct))[which.ravel()]
        return fresh.reshape([size if dim in dims else 1 for dim, size in enumerate(index_map.shape)])

    def nest(self, maps: Sequence[Map], kind: Line) -> list[Map]:
        """Within one tensor: a map inside a finer one is its parent, and the finer one says it all."""
        left = []
        for index_map in maps:
            finer = [m for m in maps if set(support(index_map)) < set(support(m))]
            for cells in finer:
                self.facts.add_line(index_map, cells, kind)
            if not finer:
                left.append(index_map)
        return left

    def union_over(self, index_map: Map, dims: Iterable[int]) -> Map:
        """Everything along `dims` goes together; returns the map without them."""
        for dim in dims:
            first = np.take(index_map, [0], axis=dim)
            self.facts.add_equal(first, index_map)
            index_map = first
        return index_map

    def even(self, index_map: Map, why: str) -> None:
        """What is left of a map over two or more dims must fill a box in row-major order."""
        for matrix in row_matrices(index_map):
            self.facts.even.append(Bound(matrix, self._reason(why)))

    def grid(self, index_map: Map, why: str) -> None:
        """What is left of a map over two or more dims must be whole rows and whole columns."""
        if len(support(index_map)) > 1:
            self.facts.grids.append(Bound(squeeze(index_map), self._reason(why)))

    def align(self, index_map: Map, dims: Sequence[int], why: str) -> None:
        """What is summed over outer `dims` must stay aligned: whole rows or whole columns go."""
        kept = {dim for dim in support(index_map) if dim not in dims}
        if any(dim < last for dim in support(index_map) if dim in dims for last in kept):
            self.grid(_with_last(index_map, kept), why)

    def pin(self, index_map: Map, why: str) -> None:
        """The map's atoms stay."""
        self.facts.add_pin(index_map, self._reason(why))

    def lossy(self, index_map: Map, dims: Iterable[int], why: str) -> None:
        """Removing a part of what lies along `dims` changes the rest."""
        over = [dim for dim in support(index_map) if dim in set(dims)]
        if over:
            others = [dim for dim in support(index_map) if dim not in over]
            self.facts.lossy.append(Bound(fibres(index_map, others), self._reason(why)))

    def _meet(self, index_map: Map, other: Operand, meeting: Meeting, *, first: bool, folded: bool) -> bool:
        """Write down what `other` says about a map; False if it cannot go on.

        `folded`: the map shares its dims with another one, as two axes that were folded into one do.
        """
        own = set(support(index_map))
        covered = set[int]()
        strange = False
        for against in other.maps:
            theirs = set(support(against))
            if not theirs & own:
                continue
            covered |= theirs
            if theirs == own and (folded or _is_folded(against, other.maps)):
                related = self._pair_folded(index_map, against, other.maps, meeting, first=first)
                strange = not related if len(other.maps) == 1 else strange
            else:
                self._pair(index_map, against, meeting, first=first, neutral=other.neutral)
        if strange:
            self.pin(index_map, f"{meeting.why} with an axis that is folded in another way")
            return False
        missing = {dim for dim in own if other.shape[dim] > 1} - covered
        if not missing or other.neutral:
            return True
        return self._meet_untracked(index_map, missing, meeting.why)

    def _pair(self, index_map: Map, against: Map, meeting: Meeting, *, first: bool, neutral: bool) -> None:
        own, theirs = set(support(index_map)), set(support(against))
        kind = Line.SHARE if meeting.contracted in theirs else meeting.nested
        if theirs == own:
            if first:
                self.facts.add_equal(index_map, against)
            untracked = (index_map > 0) & (np.broadcast_to(against, index_map.shape) == 0)
            if untracked.any() and not neutral:
                self.pin(index_map[untracked], f"{meeting.why} with a slice that has no channels")
        elif theirs < own:
            self._line(against, index_map, theirs, kind, meeting.why)
        elif not own < theirs and first:
            rows = self.rows(index_map, sorted(own & theirs))
            for cells in (index_map, against):
                self._line(rows, cells, own & theirs, kind, meeting.why)

    def _pair_folded(
        self, index_map: Map, against: Map, others: Sequence[Map], meeting: Meeting, *, first: bool
    ) -> bool:
        """Two axes folded into one: each is equal to what repeats itself in the same way; whether they are related.

        Against a whole axis, an element goes if it goes along either; only the finer of the two is let go.
        """
        if _pattern(index_map) == _pattern(against):
            if first:
                self.facts.add_equal(index_map, against)
            return True
        if not _is_coarser(against, index_map):
            return _is_coarser(index_map, against)
        finest = max((m for m in others if support(m) == support(against)), key=lambda m: len(np.unique(m)))
        if against is finest:
            self.facts.add_line(against, index_map, Line.COLLAPSE)
        else:
            self.pin(against, f"{meeting.why} while it is folded with a finer axis")
        return True

    def _line(self, parent: Map, cells: Map, dims: set[int], kind: Line, why: str) -> None:
        self.facts.add_line(parent, cells, kind)
        if kind is Line.SHARE:
            self.grid(_with_last(cells, dims), why)

    def stays_along(self, index_map: Map, dim: int, why: str) -> bool:
        """Nothing goes along a dim; whether there are others, along which rows may go as a whole."""
        return self._stays(index_map, {dim}, why, why)

    def _meet_untracked(self, index_map: Map, missing: set[int], why: str) -> bool:
        return self._stays(index_map, missing, why, f"{why} with an axis that has no channels")

    def _stays(self, index_map: Map, dims: set[int], why: str, pinned: str) -> bool:
        if dims == set(support(index_map)):
            self.pin(index_map, pinned)
            return False
        sizes = [size if dim in dims else 1 for dim, size in enumerate(index_map.shape)]
        parents = self.atoms.new(int(np.prod(sizes))).reshape(sizes)
        self.pin(parents, pinned)
        self.facts.add_line(parents, index_map, Line.SHARE)
        self.grid(_with_last(index_map, dims), why)
        return True


def _with_last(index_map: Map, dims: set[int]) -> Map:
    """The map with `dims` as its last ones."""
    return index_map.transpose([*(dim for dim in range(index_map.ndim) if dim not in dims), *sorted(dims)])


def _merged(groups: Sequence[Sequence[Map]]) -> list[Map]:
    """One map for each support; a coarser one of another operand is said by the finer one."""
    merged = dict[tuple[int, ...], list[Map]]()
    owners = dict[tuple[int, ...], set[int]]()
    for owner, maps in enumerate(groups):
        for place in dict.fromkeys(map(support, maps)):
            mine = [m for m in maps if support(m) == place]
            merged[place] = _filled(merged[place], mine) if place in merged else mine
            owners.setdefault(place, set()).add(owner)
    return [
        index_map
        for place, maps in merged.items()
        for index_map in maps
        if not any(set(place) < set(finer) and not owners[place] & owners[finer] for finer in merged)
    ]


def _filled(known: list[Map], others: list[Map]) -> list[Map]:
    """A map with what another one adds where it has no atoms; of a folded axis and a whole one, the whole one."""
    if len(known) == len(others) == 1:
        return [np.where(known[0] > 0, known[0], others[0])]
    return known if len(known) <= len(others) else others


def _is_folded(index_map: Map, maps: Sequence[Map]) -> bool:
    return sum(support(m) == support(index_map) for m in maps) > 1


def _pattern(index_map: Map) -> bytes:
    """How a map repeats itself, whatever its ids are."""
    _, first, which = np.unique(index_map, return_index=True, return_inverse=True)
    return first[which.ravel()].tobytes()


def _is_coarser(one: Map, other: Map) -> bool:
    """Whether a map repeats itself where the other does not: one of two folded axes against the whole."""
    pairs = np.unique(np.stack([one.ravel(), other.ravel()]), axis=1).shape[1]
    return bool(one.min() > 0) and len(np.unique(one)) < len(np.unique(other)) == pairs
