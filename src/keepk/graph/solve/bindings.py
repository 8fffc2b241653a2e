"""Conditions on removals: whole rows or columns of a grid, and equal counts of the rows of a matrix.

If a grid could lose anything but whole rows or whole columns, its columns are united. A matrix whose rows must keep
equal counts becomes a `Binding`, a condition that every choice of units must meet, if each class lies in one row.
Otherwise its columns are united too.

>>> united = UnionFind(7)
>>> halves = Bound(np.arange(1, 7, dtype=np.int32).reshape(2, 3), Reason("is split in equal parts"))
>>> bindings, _ = bind_equal_counts([halves], united)
>>> bindings  # 1, 2, 3 are the first half and 4, 5, 6 the second; each half must lose equally many
[<Binding: 2 blocks of 3 classes, is split in equal parts>]
>>> united.classes.tolist()  # no atom was united with another
[0, 1, 2, 3, 4, 5, 6]

`UnionFind` unites atoms into classes that are removed together:

>>> united = UnionFind(6)
>>> united.add(np.array([1, 2], np.int32), np.array([3, 4], np.int32))
>>> united.add(np.array([3], np.int32), np.array([5], np.int32))
>>> united.settle()
True
>>> united.classes.tolist()  # 1, 3 and 5 are one class, 2 and 4 another; each is named by its smallest member
[0, 1, 2, 1, 2, 1]
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.ids.facts import Bound, Reason
from keepk.graph.ids.maps import Map, row_matrices

Classes = NDArray[np.int32]


class UnionFind:
    """Classes of atoms, each named by its smallest member.

    Pairs are collected by `add` and united by `settle`, all at once: one numpy pass over a million pairs instead of a
    million steps in Python.
    """

    def __init__(self, count: int) -> None:
        self.classes: Classes = np.arange(count, dtype=np.int32)
        self._ones: list[Map] = []
        self._others: list[Map] = []
        self._fresh = False

    def add(self, ones: Map, others: Map) -> None:
        """Unite the atoms at the same positions; takes effect at the next `settle`."""
        self._ones.append(ones.ravel())
        self._others.append(others.ravel())
        self._fresh = True

    def settle(self) -> bool:
        """Unite all pairs that were added; returns whether any class changed."""
        if not self._fresh:
            return False
        self._fresh = False
        before = self.classes
        self.classes = _components(before, np.concatenate(self._ones), np.concatenate(self._others))
        self._ones, self._others = [], []
        return not np.array_equal(before, self.classes)


def _components(labels: Classes, ones: Map, others: Map) -> Classes:
    """Connected components by label propagation: the smaller label wins until nothing changes."""
    labels = labels.copy()
    while True:
        left, right = labels[ones], labels[others]
        apart = left != right
        if not apart.any():
            return labels
        ones, others, left, right = ones[apart], others[apart], left[apart], right[apart]
        # minimum.at and not plain assignment: of several pairs that lower the same label, the smallest must win.
        np.minimum.at(labels, np.maximum(left, right), np.minimum(left, right))
        # Follow labels to their roots (pointer jumping), so that a chain of n pairs takes log n rounds instead of n.
        while not np.array_equal(jumped := labels[labels], labels):
            labels = jumped


@dataclass(frozen=True, eq=False)
class Binding:
    """Blocks of classes that must lose equal numbers."""

    blocks: tuple[Classes, ...]
    reason: Reason

    def __repr__(self) -> str:
        sizes = " or ".join(map(str, sorted({len(block) for block in self.blocks})))
        return f"<Binding: {len(self.blocks)} blocks of {sizes} classes, {self.reason}>"


def enforce_grids(grids: Iterable[Bound], united: UnionFind) -> list[Bound]:
    """Unite the columns of each grid that could lose anything but whole rows or whole columns.

    Returns:
        The atoms of grids that are still irregular afterwards, which have to be pinned.
    """
    # One round is enough, and it need not be repeated when more atoms are united later: a class of whole rows joined
    # with another one still consists of whole rows, and one with equally many cells in every row keeps that, too.
    united.settle()
    bad = [bound for bound in grids if len(_irregular(bound, united.classes))]
    for bound in bad:
        # Uniting columns leaves one class per column. A tall matrix is transposed first, so that more classes remain.
        rows_are_finer = bound.array.ndim == 2 and bound.array.shape[0] > bound.array.shape[1]
        _unite_columns(bound.array.T if rows_are_finer else bound.array, united)
    united.settle()
    return _irregular_parts(bad, united.classes)


def bind_equal_counts(even: Sequence[Bound], united: UnionFind) -> tuple[list[Binding], list[Bound]]:
    """Turn matrices whose rows must keep equal counts into bindings, uniting columns where that is not possible.

    Returns:
        The bindings, and the atoms of matrices that are still irregular, which have to be pinned.
    """
    while True:  # every round but the last unites something, so this ends
        bindings, unbindable = _bindings(even, united.classes)
        for bound in unbindable:
            _unite_columns(bound.array, united)
        if not united.settle():
            return bindings, _irregular_parts(unbindable, united.classes)


def _unite_columns(array: Map, united: UnionFind) -> None:
    matrix = array.reshape(-1, array.shape[-1])
    first = np.broadcast_to(matrix[:1], matrix.shape)
    tracked = (first > 0) & (matrix > 0)
    united.add(first[tracked], matrix[tracked])


def _irregular_parts(bounds: Iterable[Bound], classes: Classes) -> list[Bound]:
    return [Bound(_irregular(bound, classes), bound.reason) for bound in bounds]


def _irregular(bound: Bound, classes: Classes) -> Map:
    """The atoms of a grid whose classes are, at any level, neither whole rows nor whole columns."""
    found = [np.zeros(0, np.int32)]
    for matrix in row_matrices(bound.array):
        bad = _uneven_classes(classes[matrix])
        if len(bad):
            found.append(matrix[np.isin(classes[matrix], bad) & (matrix > 0)])
    return np.concatenate(found)


def _uneven_classes(matrix: Classes) -> Classes:
    """The classes that neither have the same number of entries in every row nor consist of whole rows."""
    # The two common cases (classes are columns, classes are rows) without the sort that counting needs.
    if (matrix == matrix[:1]).all() or (matrix == matrix[:, :1]).all():
        return np.zeros(0, np.int32)
    found, counts = count_by_row(matrix)
    same = (counts == counts[:, :1]).all(axis=1)
    whole = ((counts == 0) | (counts == matrix.shape[1])).all(axis=1)
    uneven: Classes = found[~(same | whole)]
    return uneven


def count_by_row(matrix: Classes) -> tuple[Classes, NDArray[np.int64]]:
    """The classes of a matrix, and how often each one occurs in each row.

    >>> classes, counts = count_by_row(np.array([[1, 1, 2], [2, 2, 2]], np.int32))
    >>> classes.tolist(), counts.tolist()
    ([1, 2], [[2, 0], [1, 3]])
    """
    found, which = np.unique(matrix, return_inverse=True)
    rows = matrix.shape[0]
    places = which.reshape(matrix.shape) * rows + np.arange(rows)[:, None]
    return found, np.bincount(places.ravel(), minlength=len(found) * rows).reshape(len(found), rows)


def _bindings(even: Iterable[Bound], classes: Classes) -> tuple[list[Binding], list[Bound]]:
    """The bindings, and the matrices that cannot become one."""
    bindings, unbindable = list[Binding](), list[Bound]()
    block_of = dict[int, tuple[int, int]]()
    # Finest first: (6, 4) before (2, 12) of the same channels. Equal counts in the six rows imply equal counts in the
    # two halves, so the coarser matrix is then recognised as known. In the other order they would conflict.
    for bound in sorted(even, key=lambda bound: -bound.array.shape[0]):
        matrix = classes[bound.array]
        if not len(_uneven_classes(matrix)):
            continue
        blocks = _blocks(matrix)
        state = "new" if blocks is None else _compared(blocks, block_of, bindings)
        if blocks is None or state == "conflict":
            unbindable.append(bound)
        elif state == "new":
            for number, block in enumerate(blocks):
                block_of.update(dict.fromkeys(block.tolist(), (len(bindings), number)))
            bindings.append(Binding(blocks, bound.reason))
    return bindings, unbindable


def _blocks(matrix: Classes) -> tuple[Classes, ...] | None:
    """The rows as blocks, if every class has all of its cells in one row and all classes have equally many cells."""
    # Then "equal numbers of cells" means "equal numbers of classes", which is all that a binding can say.
    found, counts = count_by_row(matrix)
    tracked = found > 0
    found, counts = found[tracked], counts[tracked]
    simple = ((counts > 0).sum(axis=1) == 1).all() and len(np.unique(counts.max(axis=1))) == 1
    if not simple:
        return None
    return tuple(map(_in_order, matrix))


def _in_order(row: Classes) -> Classes:
    """The distinct classes of a row, in the order of their first positions."""
    # np.unique sorts by id. A trial that removes the first of each block must remove the same positions in all blocks.
    found, first = np.unique(row, return_index=True)
    ordered: Classes = found[np.argsort(first)]
    return ordered[ordered > 0]


def _compared(blocks: Sequence[Classes], block_of: dict[int, tuple[int, int]], bindings: Sequence[Binding]) -> str:
    """Whether blocks are "new", "known" (implied by a finer binding), or in "conflict" with other bindings."""
    known = [[block_of.get(int(member)) for member in block] for block in blocks]
    flat = [place for places in known for place in places]
    if all(place is None for place in flat):
        return "new"
    owners = {place[0] for place in flat if place is not None}
    # A class may be in one binding only: the selection splits counts over bindings independently of each other.
    if len(owners) > 1 or any(place is None for place in flat):
        return "conflict"
    # Implied: each block consists of whole blocks of the known binding, and of equally many.
    inside = [{place[1] for place in places if place is not None} for places in known]
    finer = bindings[owners.pop()].blocks
    whole = all(
        len(block) == sum(len(finer[n]) for n in numbers) for block, numbers in zip(blocks, inside, strict=True)
    )
    return "known" if whole and len({len(numbers) for numbers in inside}) == 1 else "conflict"
