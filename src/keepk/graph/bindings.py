"""What must go by whole rows or columns, and what in equal numbers.

Where neither whole rows nor whole columns of a grid would go, its columns are united. A matrix of which every row must
keep the same number is left as a binding on the choice, wherever each class has its cells in one row; only where that
cannot be said are its columns united as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.facts import Bound, Reason
from keepk.graph.maps import Map, levels
from keepk.graph.union import Classes, Union


@dataclass(frozen=True, eq=False)
class Binding:
    """Blocks of classes of which equal numbers must go."""

    blocks: tuple[Classes, ...]
    reason: Reason


def straighten(grids: Iterable[Bound], united: Union) -> list[Bound]:
    """Unite columns where a grid would lose neither whole rows nor whole columns; what that does not mend stays.

    Once is enough: whatever is united later, a class with whole rows keeps whole rows, and one with equally many cells
    in every row keeps those.
    """
    united.settle()
    bad = [bound for bound in grids if len(_crooked(bound, united.classes))]
    for bound in bad:
        rows_are_finer = bound.array.ndim == 2 and bound.array.shape[0] > bound.array.shape[1]
        _unite_columns(bound.array.T if rows_are_finer else bound.array, united)
    united.settle()
    return _crooked_parts(bad, united.classes)


def bind(even: Sequence[Bound], united: Union) -> tuple[list[Binding], list[Bound]]:
    """What must go in equal numbers; what cannot be said so simply is united column by column, or stays."""
    while True:  # each round but the last unites something, so that there is a last one
        bindings, crooked = _bindings(even, united.classes)
        for bound in crooked:
            _unite_columns(bound.array, united)
        if not united.settle():
            return bindings, _crooked_parts(crooked, united.classes)


def _unite_columns(array: Map, united: Union) -> None:
    matrix = array.reshape(-1, array.shape[-1])
    first = np.broadcast_to(matrix[:1], matrix.shape)
    tracked = (first > 0) & (matrix > 0)
    united.add(first[tracked], matrix[tracked])


def _crooked_parts(bounds: Iterable[Bound], classes: Classes) -> list[Bound]:
    return [Bound(_crooked(bound, classes), bound.reason) for bound in bounds]


def _crooked(bound: Bound, classes: Classes) -> Map:
    """The atoms of a grid whose classes are, at any level, neither whole rows nor whole columns."""
    found = [np.zeros(0, np.int32)]
    for matrix in levels(bound.array):
        bad = _uneven_classes(classes[matrix])
        if len(bad):
            found.append(matrix[np.isin(classes[matrix], bad) & (matrix > 0)])
    return np.concatenate(found)


def _uneven_classes(matrix: Classes) -> Classes:
    """The classes that have neither the same number in every row nor only whole rows."""
    if (matrix == matrix[:1]).all() or (matrix == matrix[:, :1]).all():
        return np.zeros(0, np.int32)
    found, counts = count_by_row(matrix)
    same = (counts == counts[:, :1]).all(axis=1)
    whole = ((counts == 0) | (counts == matrix.shape[1])).all(axis=1)
    uneven: Classes = found[~(same | whole)]
    return uneven


def count_by_row(matrix: Classes) -> tuple[Classes, NDArray[np.int64]]:
    """The classes of a matrix, and how often each is in each row."""
    found, which = np.unique(matrix, return_inverse=True)
    rows = matrix.shape[0]
    places = which.reshape(matrix.shape) * rows + np.arange(rows)[:, None]
    return found, np.bincount(places.ravel(), minlength=len(found) * rows).reshape(len(found), rows)


def _bindings(even: Iterable[Bound], classes: Classes) -> tuple[list[Binding], list[Bound]]:
    """The bindings, finest first, and the matrices that cannot be one."""
    bindings, crooked = list[Binding](), list[Bound]()
    block_of = dict[int, tuple[int, int]]()
    for bound in sorted(even, key=lambda bound: -bound.array.shape[0]):
        matrix = classes[bound.array]
        if not len(_uneven_classes(matrix)):
            continue
        blocks = _blocks(matrix)
        state = "new" if blocks is None else _against(blocks, block_of, bindings)
        if blocks is None or state == "conflict":
            crooked.append(bound)
        elif state == "new":
            for number, block in enumerate(blocks):
                block_of.update(dict.fromkeys(block.tolist(), (len(bindings), number)))
            bindings.append(Binding(blocks, bound.reason))
    return bindings, crooked


def _blocks(matrix: Classes) -> tuple[Classes, ...] | None:
    """The rows as blocks, if every class has all of its cells in one row, and all classes equally many."""
    found, counts = count_by_row(matrix)
    tracked = found > 0
    found, counts = found[tracked], counts[tracked]
    simple = ((counts > 0).sum(axis=1) == 1).all() and len(np.unique(counts.max(axis=1))) == 1
    if not simple:
        return None
    return tuple(map(_in_order, matrix))


def _in_order(row: Classes) -> Classes:
    """The classes of a row, each once, in the order of their places."""
    found, first = np.unique(row, return_index=True)
    ordered: Classes = found[np.argsort(first)]
    return ordered[ordered > 0]


def _against(blocks: Sequence[Classes], block_of: dict[int, tuple[int, int]], bindings: Sequence[Binding]) -> str:
    """Whether blocks are new, said already by finer ones, or in conflict with others."""
    known = [[block_of.get(int(member)) for member in block] for block in blocks]
    flat = [place for places in known for place in places]
    if all(place is None for place in flat):
        return "new"
    owners = {place[0] for place in flat if place is not None}
    if len(owners) > 1 or any(place is None for place in flat):
        return "conflict"
    # Each of these is made of whole blocks of the known binding, and of equally many.
    inside = [{place[1] for place in places if place is not None} for places in known]
    finer = bindings[owners.pop()].blocks
    whole = all(
        len(block) == sum(len(finer[n]) for n in numbers) for block, numbers in zip(blocks, inside, strict=True)
    )
    return "known" if whole and len({len(numbers) for numbers in inside}) == 1 else "conflict"
