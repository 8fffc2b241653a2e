"""The algebra of index maps: what an operation on two tensors says about their atoms.

`merge` is the one primitive: an elementwise operation on tensors that broadcast against each other.

* Two maps over the same dims: atoms at the same position are equal.
* One map over some of the other's dims: each of its atoms is the parent of a line of cells.
* Maps that overlap in some dims: they share a fresh parent for each position in those dims.
* The other tensor has the dim, but no map for it: the atoms are pinned.

A contraction (convolution, matrix product) is a merge in the joint index space, then a reduction over the contracted
dim. Two 1x1 convolutions of 3 channels and a residual add, ``y = w2 @ h + h`` with ``h = w1 @ x``:

>>> atoms, facts = Atoms(), Facts()
>>> algebra = Algebra(atoms, facts)
>>> out1 = atoms.new(3, "conv1.weight", dim=0)  # the filters of conv1, hence the channels of h
>>> out2, in2 = atoms.new(3, "conv2.weight", dim=0), atoms.new(3, "conv2.weight", dim=1)

conv2 multiplies h with its weight in the joint space (out, in) and sums over dim 1. The merge pairs the channels of h
with the input channels of conv2, and the sum leaves the map over the filters of conv2:

>>> h = Operand([out1.reshape(1, 3)], shape=(1, 3), zeros=[True])
>>> weight = Operand([out2.reshape(3, 1), in2.reshape(1, 3)], shape=(3, 3), zeros=[True, True])
>>> [(filters, zero)] = algebra.contract((h, weight), dim=1, why="is convolved")
>>> filters.ravel().tolist()
[4, 5, 6]
>>> [list(zip(pairs.parents.tolist(), pairs.cells.tolist())) for pairs in facts.equal]
[[(1, 7), (2, 8), (3, 9)]]

The residual add pairs the channels of h with the filters of conv2. With the pairs above, channel 0 is {1, 4, 7}:

>>> merged = algebra.merge([Operand([filters.reshape(3)], (3,), [zero]), Operand([out1], (3,), [True])], "is added")
>>> [list(zip(pairs.parents.tolist(), pairs.cells.tolist())) for pairs in facts.equal[1:]]
[[(4, 1), (5, 2), (6, 3)]]
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from keepk.graph.ids.atoms import Atoms
from keepk.graph.ids.facts import Bound, Facts, Line, Reason
from keepk.graph.ids.maps import Map, compress, fibres, row_matrices, squeeze, support


@dataclass(frozen=True)
class Operand:
    """A tensor as a merge sees it: maps and shape, aligned with the dims of the other operands.

    Attributes:
        maps: Its index maps.
        shape: Its shape.
        zeros: For each map, whether the elements of a removed channel are 0; see `Label`.
        neutral: All elements are the same constant, so it fits any channels.
        all_zero: All elements are 0.
    """

    maps: Sequence[Map]
    shape: tuple[int, ...]
    zeros: Sequence[bool]
    neutral: bool = False
    all_zero: bool = False

    def zero_along(self, index_map: Map) -> bool:
        """Whether the elements of a channel removed from a merged map are 0 in this operand."""
        # Only a map over exactly the same dims counts. One over fewer dims is shared by cells that may be removed one
        # by one, and does not become 0 with one of them.
        same = [(m, zero) for m, zero in zip(self.maps, self.zeros, strict=True) if support(m) == support(index_map)]
        if len(same) > 1:  # two axes folded into one
            same = [(m, zero) for m, zero in same if _pattern(m) == _pattern(index_map)]
        return self.all_zero or (len(same) == 1 and same[0][1])


class Tracked(NamedTuple):
    """A map of a result, and whether the elements of a removed channel are 0 there."""

    map: Map
    zero: bool


@dataclass(frozen=True)
class _Merge:
    """The arguments of one merge; see `Algebra.merge`."""

    why: str
    nested: Line
    contracted: int | None


class Algebra:
    """Merges and reductions of index maps that record facts.

    Args:
        atoms: Hands out fresh ids.
        facts: The facts are added to it.
    """

    def __init__(self, atoms: Atoms, facts: Facts) -> None:
        self.atoms, self.facts = atoms, facts

    def reason(self, why: str) -> Reason:
        """A `Reason` from a few words; a subclass adds the operation and its place in the user's program."""
        return Reason(why)

    def merge(
        self, operands: Sequence[Operand], why: str, nested: Line = Line.SHARE, contracted: int | None = None
    ) -> list[Map]:
        """Merge the maps of tensors that an elementwise operation combines.

        Args:
            operands: The tensors, broadcast against each other.
            why: A few words about the operation for the reasons of its facts: "is added".
            nested: The kind of line between a map and a finer one.
            contracted: The dim that is summed over afterwards. A map over this dim is a weight that every row shares.

        Returns:
            The maps of the result.
        """
        merge = _Merge(why, nested, contracted)
        # Every ordered pair, because each operand affects the maps of the other: a dim that one of them does not track
        # pins the maps of the other. Symmetric facts are recorded for the first order only.
        dropped = {
            id(index_map)
            for (one, operand), (other, against) in permutations(enumerate(operands), 2)
            for index_map in operand.maps
            if not self._meet(index_map, against, merge, first=one < other, folded=_is_folded(index_map, operand.maps))
        }
        return _merged([[m for m in operand.maps if id(m) not in dropped] for operand in operands])

    def contract(self, operands: tuple[Operand, Operand], dim: int, why: str) -> list[Tracked]:
        """The maps after a sum of products over `dim`, which stays as a dim of size 1."""
        left, right = ({support(m) for m in operand.maps if m.shape[dim] > 1} for operand in operands)
        merged = self.merge(operands, why, Line.HEADS, dim)
        # Both factors have rows (queries times keys, head by head): a row is a head and is removed as a whole. If one
        # factor is a weight that all rows share, the cells of a row can be removed one by one.
        return self.sum_of_products(operands, merged, dim, (Line.HEADS if left == right else Line.LOOSE, Line.HEADS))

    def sum_of_products(
        self, operands: Sequence[Operand], merged: Iterable[Map], dim: int, kinds: tuple[Line, Line]
    ) -> list[Tracked]:
        """The maps after the products of `operands` are summed over `dim`.

        Args:
            operands: The factors.
            merged: Their merged maps.
            dim: The dim that is summed over.
            kinds: The kind of line from the sums to the summands, and from a map to a finer one of the result.
        """
        left = list[Tracked]()
        for index_map in merged:
            # A removed channel must vanish from the sum, so one of its factors must be 0. sigmoid(0) = 1/2 times a
            # weight that stays would be missing from the sum after the removal.
            zero = any(operand.zero_along(index_map) for operand in operands)
            if not zero:
                self.mark_lossy(index_map, (dim,), "sums over channels that do not vanish")
            left += [Tracked(rows, zero) for rows in self.reduce([index_map], (dim,), kinds[0])]
        kept = {id(m) for m in self.nest([rows for rows, _ in left], kinds[1])}
        return [tracked for tracked in left if id(tracked.map) in kept]

    def reduce(self, maps: Iterable[Map], dims: Sequence[int], kind: Line = Line.LOOSE) -> list[Map]:
        """The maps after a sum over `dims`, which stay as dims of size 1."""
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
        """A map of fresh atoms over `dims`, one for each distinct fibre."""
        # Positions with the same cells share an atom, so a map that repeats along the batch does not depend on it.
        distinct, which = np.unique(fibres(index_map, dims), axis=0, return_inverse=True)
        fresh = self.atoms.new(len(distinct))[which.ravel()]
        return fresh.reshape([size if dim in dims else 1 for dim, size in enumerate(index_map.shape)])

    def nest(self, maps: Sequence[Map], kind: Line) -> list[Map]:
        """Of one tensor's maps, those that no finer one refines; a coarser one becomes the parent of the finer one."""
        left = []
        for index_map in maps:
            finer = [m for m in maps if set(support(index_map)) < set(support(m))]
            for cells in finer:
                self.facts.add_line(index_map, cells, kind)
            if not finer:
                left.append(index_map)
        return left

    def union_over(self, index_map: Map, dims: Iterable[int]) -> Map:
        """Unite all atoms along `dims`; returns the map with these dims reduced to size 1."""
        for dim in dims:
            first = np.take(index_map, [0], axis=dim)
            self.facts.add_equal(first, index_map)
            index_map = first
        return index_map

    def require_equal_rows(self, index_map: Map, why: str) -> None:
        """Require that all rows of a map keep equally many entries, so that the rest fills a box in row-major order.

        This is what a reshape or a split into equal parts needs.
        """
        for matrix in row_matrices(index_map):
            self.facts.even.append(Bound(matrix, self.reason(why)))

    def require_grid(self, index_map: Map, why: str) -> None:
        """Require that only whole rows or whole columns of a map over two or more dims are removed.

        This is what a transpose needs: (heads, head_dim) -> (head_dim, heads) is a rectangle again only if every head
        loses the same positions. Equal counts at different positions would interleave the survivors in another order.
        """
        if len(support(index_map)) > 1:
            self.facts.grids.append(Bound(squeeze(index_map), self.reason(why)))

    def require_aligned(self, index_map: Map, dims: Sequence[int], why: str) -> None:
        """Require that the summands of a sum over outer `dims` stay aligned, by whole rows or columns."""
        # Branches that are stacked and summed (torch.stack(...).sum(0)) add entry i of one to entry i of the other.
        kept = {dim for dim in support(index_map) if dim not in dims}
        if any(dim < last for dim in support(index_map) if dim in dims for last in kept):
            self.require_grid(_with_last(index_map, kept), why)

    def pin(self, index_map: Map, why: str) -> None:
        """Record that the atoms of a map cannot be removed."""
        self.facts.add_pin(index_map, self.reason(why))

    def mark_lossy(self, index_map: Map, dims: Iterable[int], why: str) -> None:
        """Record that removing part of the entries along `dims` changes the others, as in a softmax or a mean."""
        over = [dim for dim in support(index_map) if dim in set(dims)]
        if over:
            others = [dim for dim in support(index_map) if dim not in over]
            self.facts.lossy.append(Bound(fibres(index_map, others), self.reason(why)))

    def _meet(self, index_map: Map, other: Operand, merge: _Merge, *, first: bool, folded: bool) -> bool:
        """Record what another operand says about a map; returns whether the result can have the map.

        `folded`: another map of the same tensor has the same dims, because two axes were folded into one.
        """
        own = set(support(index_map))
        covered = set[int]()
        unrelated = False
        for against in other.maps:
            theirs = set(support(against))
            if not theirs & own:
                continue
            covered |= theirs
            if theirs == own and (folded or _is_folded(against, other.maps)):
                related = self._pair_folded(index_map, against, other.maps, merge, first=first)
                unrelated = not related if len(other.maps) == 1 else unrelated
            else:
                self._pair(index_map, against, merge, first=first, neutral=other.neutral)
        if unrelated:
            self.pin(index_map, f"{merge.why} with an axis that is folded differently")
            return False
        # The other tensor has these dims and no map for them: its entries there belong to no unit and cannot shrink
        # with this one. A constant fits any size, since the model creates it from a size that follows.
        missing = {dim for dim in own if other.shape[dim] > 1} - covered
        if not missing or other.neutral:
            return True
        return self._pin_dims(index_map, missing, merge.why, f"{merge.why} with an axis that has no channels")

    def _pair(self, index_map: Map, against: Map, merge: _Merge, *, first: bool, neutral: bool) -> None:
        """Record how two maps of different operands relate: equal, parent and cells, or with a parent in common."""
        own, theirs = set(support(index_map)), set(support(against))
        kind = Line.SHARE if merge.contracted in theirs else merge.nested
        if theirs == own:
            if first:
                self.facts.add_equal(index_map, against)
            untracked = (index_map > 0) & (np.broadcast_to(against, index_map.shape) == 0)
            if untracked.any() and not neutral:
                self.pin(index_map[untracked], f"{merge.why} with a slice that has no channels")
        elif theirs < own:
            self._line(against, index_map, theirs, kind, merge.why)
        elif not own < theirs and first:
            # (batch, heads) against (heads, width): neither contains the other, so heads get parents of both.
            rows = self.rows(index_map, sorted(own & theirs))
            for cells in (index_map, against):
                self._line(rows, cells, own & theirs, kind, merge.why)

    def _pair_folded(self, index_map: Map, against: Map, others: Sequence[Map], merge: _Merge, *, first: bool) -> bool:
        """Relate maps over one dim into which two axes were folded; returns whether they are related at all.

        An axis (heads * width) made of two maps, one that repeats over heads and one that repeats over width, can meet
        another such axis. Maps that repeat in the same pattern are equal.
        """
        if _pattern(index_map) == _pattern(against):
            if first:
                self.facts.add_equal(index_map, against)
            return True
        if not _is_coarser(against, index_map):
            return _is_coarser(index_map, against)
        # A folded axis meets a whole one: an element of the whole axis could be removed along either of the folded
        # maps, and the two could not be told apart. So only the finer one can be removed, and the coarser one is
        # pinned.
        finest = max((m for m in others if support(m) == support(against)), key=lambda m: len(np.unique(m)))
        if against is finest:
            self.facts.add_line(against, index_map, Line.COLLAPSE)
        else:
            self.pin(against, f"{merge.why} while it is folded with a finer axis")
        return True

    def _line(self, parent: Map, cells: Map, dims: set[int], kind: Line, why: str) -> None:
        self.facts.add_line(parent, cells, kind)
        if kind is Line.SHARE:
            self.require_grid(_with_last(cells, dims), why)

    def pin_along(self, index_map: Map, dim: int, why: str) -> bool:
        """Pin positions along one dim; returns whether rows across other dims of the map can still be removed."""
        return self._pin_dims(index_map, {dim}, why, why)

    def _pin_dims(self, index_map: Map, dims: set[int], why: str, pinned: str) -> bool:
        if dims == set(support(index_map)):
            self.pin(index_map, pinned)
            return False
        # Pinning the map itself would pin whole heads only because their width cannot change. Pinned parents along
        # `dims` fix the positions there, and a grid still allows removing rows across them.
        sizes = [size if dim in dims else 1 for dim, size in enumerate(index_map.shape)]
        parents = self.atoms.new(int(np.prod(sizes))).reshape(sizes)
        self.pin(parents, pinned)
        self.facts.add_line(parents, index_map, Line.SHARE)
        self.require_grid(_with_last(index_map, dims), why)
        return True


def _with_last(index_map: Map, dims: set[int]) -> Map:
    """The map with `dims` moved to the end."""
    return index_map.transpose([*(dim for dim in range(index_map.ndim) if dim not in dims), *sorted(dims)])


def _merged(groups: Sequence[Sequence[Map]]) -> list[Map]:
    """One map for each support; a coarser map of another operand is left out, since the finer one implies it."""
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
    """Two operands' maps over the same dims as one: gaps of the first are filled from the second."""
    # A folded axis has two maps over the same dims, a whole one has one: the whole one is finer.
    if len(known) == len(others) == 1:
        return [np.where(known[0] > 0, known[0], others[0])]
    return known if len(known) <= len(others) else others


def _is_folded(index_map: Map, maps: Sequence[Map]) -> bool:
    """Whether another of these maps has the same dims: two axes were folded into one."""
    return sum(support(m) == support(index_map) for m in maps) > 1


def _pattern(index_map: Map) -> bytes:
    """How a map repeats itself, independent of its ids: (1, 1, 2, 2) and (5, 5, 7, 7) have the same pattern."""
    _, first, which = np.unique(index_map, return_index=True, return_inverse=True)
    return first[which.ravel()].tobytes()


def _is_coarser(one: Map, other: Map) -> bool:
    """Whether the first map is a function of the second with fewer values: one of two folded axes, and the whole."""
    pairs = np.unique(np.stack([one.ravel(), other.ravel()]), axis=1).shape[1]
    return bool(one.min() > 0) and len(np.unique(one)) < len(np.unique(other)) == pairs
