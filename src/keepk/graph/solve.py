"""From facts to classes of atoms: what goes together, what stays, and of what equal numbers must go.

Equal atoms and collapsed lines are united first. Grids are then checked to a fixed point: where neither whole rows nor
whole columns would go, the columns are united. A matrix of which every row must keep the same number is left as a
binding on the choice, wherever each class has its cells in one row; only where that cannot be said are its columns
united as well.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from keepk.graph.facts import Bound, Facts, Line, Lines, Read, Reason
from keepk.graph.maps import Flags, Map

Classes = NDArray[np.int32]
ROUNDS = 60


@dataclass(frozen=True, eq=False)
class Binding:
    """Blocks of classes of which equal numbers must go."""

    blocks: tuple[Classes, ...]
    reason: Reason


@dataclass
class Solution:
    """What the facts amount to.

    Attributes:
        classes: For each atom the smallest atom that goes with it.
        pinned: By class, why it stays.
        lossy: By class, why its removal changes more than zeroing it would.
        bindings: What must go in equal numbers.
        reads: The normalisations that read a selection; all others were united with what they read.
        used: The classes that somebody reads other than through `reads`.
    """

    classes: Classes
    pinned: dict[int, Reason] = field(default_factory=dict)
    lossy: dict[int, Reason] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    used: Classes = field(default_factory=lambda: np.zeros(0, np.int32))


def solve(facts: Facts, count: int, extra_pins: Sequence[Bound] = (), loosened: Collection[Lines] = ()) -> Solution:
    """All classes of `count` atoms under the facts; lines of heads that are `loosened` leave their cells apart."""
    united = Union(count)
    heads = [lines for lines in facts.lines[Line.HEADS] if lines not in loosened]
    facts = replace(facts, lines={**facts.lines, Line.LOOSE: [*facts.lines[Line.LOOSE], *loosened]})
    for lines in (*facts.equal, *facts.lines[Line.COLLAPSE], *heads):
        united.add(lines.parents, lines.cells)
    reads = list(_apart(facts, united))
    while True:
        stuck = _straighten(facts, united)
        bindings, uneven = _bind(facts.even, united, facts)
        shared = _shared_parents(facts, united)
        mixed = [read for read in reads if _is_mixed(read, united.classes)]
        if not mixed:
            break
        for read in mixed:  # what reads and what is read go together anyway, so that it is no choice of its own
            united.add(read.sources, read.readers)
        united.settle()
        reads = [read for read in reads if read not in mixed]
    solution = Solution(united.classes, bindings=bindings, reads=reads)
    solution.pinned = _pinned([*facts.pins, *extra_pins, *stuck, *uneven, *shared], united)
    solution.classes = united.classes
    _pin_with_blocks(solution)
    solution.lossy = _lossy(facts.lossy, united.classes)
    others = [atoms for atoms, who in facts.uses if who.removeprefix("read ") not in {r.module for r in reads}]
    if others:
        solution.used = np.unique(united.classes[np.concatenate(others)])
    return solution


class Union:
    """Classes of atoms, each named by its smallest member."""

    def __init__(self, count: int) -> None:
        self.classes: Classes = np.arange(count, dtype=np.int32)
        self._ones: list[Map] = []
        self._others: list[Map] = []
        self._fresh = False

    def add(self, ones: Map, others: Map) -> None:
        """Atoms at the same place go together; takes effect at the next `settle`."""
        self._ones.append(ones.ravel())
        self._others.append(others.ravel())
        self._fresh = True

    def settle(self) -> bool:
        """Unite all that was added; whether anything changed."""
        if not self._fresh:
            return False
        self._fresh = False
        before = self.classes
        self.classes = _components(before, np.concatenate(self._ones), np.concatenate(self._others))
        self._ones, self._others = [], []
        return not np.array_equal(before, self.classes)


def _components(labels: Classes, ones: Map, others: Map) -> Classes:
    """Label propagation: the smaller label wins until nothing changes."""
    labels = labels.copy()
    while True:
        left, right = labels[ones], labels[others]
        apart = left != right
        if not apart.any():
            return labels
        ones, others, left, right = ones[apart], others[apart], left[apart], right[apart]
        np.minimum.at(labels, np.maximum(left, right), np.minimum(left, right))
        while not np.array_equal(jumped := labels[labels], labels):
            labels = jumped


def _apart(facts: Facts, united: Union) -> Iterator[Read]:
    """Unite a normalisation with what it reads if it is the only reader; otherwise it is a read of its own."""
    united.settle()
    pinned = np.zeros(len(united.classes), bool)
    for pin in facts.pins:
        pinned[united.classes[pin.array]] = True
    readers = _count_readers(facts, united.classes)
    for read in facts.reads:
        sources = united.classes[read.sources]
        alone = (readers[sources] <= 1).all() and len(np.unique(sources)) == len(sources)
        twice = sum(other.module == read.module for other in facts.reads) > 1  # one selection cannot serve two inputs
        if twice or (alone and not pinned[sources].any()):
            united.add(read.sources, read.readers)
        else:
            yield read
    united.settle()


def _is_mixed(read: Read, classes: Classes) -> bool:
    return bool(np.isin(classes[read.readers], classes[read.sources]).any())


def _count_readers(facts: Facts, classes: Classes) -> NDArray[np.int64]:
    """How many different readers each class has."""
    names = {who: number for number, who in enumerate({who for _, who in facts.uses})}
    pairs = [
        np.unique(classes[atoms[atoms > 0]]).astype(np.int64) * len(names) + names[who] for atoms, who in facts.uses
    ]
    if not pairs:
        return np.zeros(len(classes), np.int64)
    return np.bincount(np.unique(np.concatenate(pairs)) // len(names), minlength=len(classes))


def _straighten(facts: Facts, united: Union) -> list[Bound]:
    """Unite columns until every grid loses whole rows or whole columns; what cannot be mended stays."""
    united.settle()
    for _ in range(ROUNDS):
        bad = [bound for bound in facts.grids if len(_crooked(bound, united.classes))]
        if not bad:
            return []
        for bound in bad:
            rows_are_finer = bound.array.ndim == 2 and bound.array.shape[0] > bound.array.shape[1]
            _unite_columns(bound.array.T if rows_are_finer else bound.array, united)
        if not united.settle():
            return [Bound(_crooked(bound, united.classes), bound.reason) for bound in bad]
    return []


def _unite_columns(array: Map, united: Union) -> None:
    matrix = array.reshape(-1, array.shape[-1])
    first = np.broadcast_to(matrix[:1], matrix.shape)
    tracked = (first > 0) & (matrix > 0)
    united.add(first[tracked], matrix[tracked])


def _crooked(bound: Bound, classes: Classes) -> Map:
    """The atoms of a grid whose classes are neither whole rows nor whole columns, at the first level that has any."""
    array = bound.array
    for level in range(1, array.ndim):
        matrix = array.reshape(int(np.prod(array.shape[:level])), -1)
        bad = _uneven_classes(classes[matrix])
        if len(bad):
            return matrix[np.isin(classes[matrix], bad) & (matrix > 0)]
    return np.zeros(0, np.int32)


def _uneven_classes(matrix: Classes) -> Classes:
    """The classes that have neither the same number in every row nor only whole rows."""
    if (matrix == matrix[:1]).all() or (matrix == matrix[:, :1]).all():
        return np.zeros(0, np.int32)
    found, counts = _count_by_row(matrix)
    same = (counts == counts[:, :1]).all(axis=1)
    whole = ((counts == 0) | (counts == matrix.shape[1])).all(axis=1)
    uneven: Classes = found[~(same | whole)]
    return uneven


def _count_by_row(matrix: Classes) -> tuple[Classes, NDArray[np.int64]]:
    """The classes of a matrix, and how often each is in each row."""
    found, which = np.unique(matrix, return_inverse=True)
    rows = matrix.shape[0]
    places = which.reshape(matrix.shape) * rows + np.arange(rows)[:, None]
    return found, np.bincount(places.ravel(), minlength=len(found) * rows).reshape(len(found), rows)


def _bind(even: Iterable[Bound], united: Union, facts: Facts) -> tuple[list[Binding], list[Bound]]:
    """What must go in equal numbers; what cannot be said so simply is united column by column."""
    waiting = list(even)
    for _ in range(ROUNDS):
        bindings, crooked = _bindings(waiting, united.classes)
        if not crooked:
            return bindings, []
        for bound in crooked:
            _unite_columns(bound.array, united)
        if not united.settle():
            return bindings, [Bound(_crooked(bound, united.classes), bound.reason) for bound in crooked]
        stuck = _straighten(facts, united)
        if stuck:
            return bindings, stuck
    return [], [Bound(bound.array[bound.array > 0], bound.reason) for bound in waiting]


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
    found, counts = _count_by_row(matrix)
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
    # Each block of the known binding lies in one of these, and all of these have equally many of them.
    inside = [{place[1] for place in places if place is not None} for places in known]
    total = sum(map(len, inside))
    finer = total == len(set().union(*inside)) and len({len(numbers) for numbers in inside}) == 1
    return "known" if finer and total == len(bindings[owners.pop()].blocks) else "conflict"


def _shared_parents(facts: Facts, united: Union) -> list[Bound]:
    """A parent whose cells are one class joins it; one whose cells may go apart stays."""
    lines = [*facts.lines[Line.SHARE], *facts.lines[Line.LOOSE]]
    if not lines:
        return []
    parents = np.concatenate([line.parents for line in lines])
    cells = np.concatenate([line.cells for line in lines])
    starts = np.cumsum([0, *(len(line.parents) for line in lines)])
    fixed = list[Map]()
    for _ in range(ROUNDS):
        fixed = []
        for first, last in pairwise(starts):
            one, apart = _joined(united.classes[parents[first:last]], united.classes[cells[first:last]])
            united.add(*one)
            fixed.append(apart)
        if not united.settle():
            break
    stay = np.concatenate(fixed)
    return [Bound(stay, Reason("is shared by channels that may go one by one"))] if len(stay) else []


def _joined(parents: Classes, cells: Classes) -> tuple[tuple[Map, Map], Map]:
    """Parents with one class of cells beside that class, and the parents with several."""
    order = np.lexsort((cells, parents))
    parents, cells = parents[order], cells[order]
    starts = np.flatnonzero(np.r_[True, parents[1:] != parents[:-1]])
    lowest, highest = np.minimum.reduceat(cells, starts), np.maximum.reduceat(cells, starts)
    one = lowest == highest
    return (parents[starts][one], lowest[one]), parents[starts][~one]


def _pinned(pins: Iterable[Bound], united: Union) -> dict[int, Reason]:
    reasons = dict[int, Reason]()
    for pin in pins:
        for found in np.unique(united.classes[pin.array]).tolist():
            reasons.setdefault(found, pin.reason)
    return reasons


def _pin_with_blocks(solution: Solution) -> None:
    """Where a whole block stays, the other blocks stay too."""
    changed = True
    while changed:
        changed = False
        for binding in solution.bindings:
            free = [[m for m in block.tolist() if m not in solution.pinned] for block in binding.blocks]
            if any(free) and not all(free):
                changed = True
                for member in (m for block in free for m in block):
                    solution.pinned[member] = Reason(
                        f"{binding.reason.why}, and another part of it stays", binding.reason.operation,
                        binding.reason.module, binding.reason.place,
                    )  # fmt: skip


def _lossy(bounds: Iterable[Bound], classes: Classes) -> dict[int, Reason]:
    reasons = dict[int, Reason]()
    for bound in bounds:
        matrix = classes[bound.array]
        if matrix.size == 0:
            continue
        found, counts = _count_by_row(matrix)
        partly = ~((counts == 0) | (counts == matrix.shape[1])).all(axis=1)
        for member in found[partly & (found > 0)].tolist():
            reasons.setdefault(member, bound.reason)
    return reasons


def alive_atoms(classes: Classes, removed: NDArray[np.int64]) -> Flags:
    """Which atoms are left when classes are removed."""
    gone = np.zeros(len(classes), bool)
    gone[removed] = True
    alive = ~gone[classes]
    alive[0] = True
    return alive
