"""From facts to classes of atoms: what goes together, what stays, and of what equal numbers must go.

Equal atoms and collapsed lines are united first, then what grids and matrices ask for (`bindings`), then parents with
cells that have become one.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from keepk.graph.bindings import Binding, bind, count_by_row, straighten
from keepk.graph.facts import Bound, Facts, Line, Lines, Read, Reason
from keepk.graph.maps import Flags, Map
from keepk.graph.union import Classes, Union

ALIGNED = 8  # widths that are multiples of this suit every kernel of torch


@dataclass
class Solution:
    """What the facts amount to.

    Attributes:
        classes: For each atom the smallest atom that goes with it.
        pinned: By class, why it stays.
        lossy: By class, why its removal changes more than zeroing it would.
        bindings: What must go in equal numbers.
        aligned: By class, why a multiple of `ALIGNED` must be left of its like.
        reads: The normalisations that read a selection; all others were united with what they read.
        used: The classes that somebody reads other than through `reads`.
    """

    classes: Classes
    pinned: dict[int, Reason] = field(default_factory=dict)
    lossy: dict[int, Reason] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    aligned: dict[int, Reason] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    used: Classes = field(default_factory=lambda: np.zeros(0, np.int32))


def solve(
    facts: Facts,
    count: int,
    extra_pins: Sequence[Bound] = (),
    loosened: Collection[Lines] = (),
    aligned: Sequence[Bound] = (),
) -> Solution:
    """All classes of `count` atoms under the facts; lines of heads that are `loosened` leave their cells apart."""
    united = Union(count)
    heads = [lines for lines in facts.lines[Line.HEADS] if lines not in loosened]
    facts = replace(facts, lines={**facts.lines, Line.LOOSE: [*facts.lines[Line.LOOSE], *loosened]})
    for lines in (*facts.equal, *facts.lines[Line.COLLAPSE], *heads):
        united.add(lines.parents, lines.cells)
    reads = list(_apart(facts, united))
    stuck = straighten(facts.grids, united)
    while True:
        bindings, uneven = bind(facts.even, united)
        bound = united.classes
        shared = _shared_parents(facts, united)
        mixed = [read for read in reads if _is_mixed(read, united.classes)]
        if not mixed and np.array_equal(bound, united.classes):
            break
        for read in mixed:  # what reads and what is read go together anyway, so that it is no choice of its own
            united.add(read.sources, read.readers)
        united.settle()
        reads = [read for read in reads if read not in mixed]
    solution = Solution(united.classes, bindings=bindings, reads=reads)
    solution.pinned = _reasons([*facts.pins, *extra_pins, *stuck, *uneven, *shared], united)
    solution.aligned = _reasons(aligned, united)
    solution.classes = united.classes
    _pin_with_blocks(solution)
    solution.lossy = _lossy(facts.lossy, united.classes)
    _mark_lossy_sources(solution)
    others = [atoms for atoms, who in facts.uses if who.removeprefix("read ") not in {r.module for r in reads}]
    if others:
        solution.used = np.unique(united.classes[np.concatenate(others)])
    return solution


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


def _shared_parents(facts: Facts, united: Union) -> list[Bound]:
    """A parent whose cells are one class joins it; one whose cells may go apart stays."""
    lines = [*facts.lines[Line.SHARE], *facts.lines[Line.LOOSE]]
    if not lines:
        return []
    parents = np.concatenate([line.parents for line in lines])
    cells = np.concatenate([line.cells for line in lines])
    starts = np.cumsum([0, *(len(line.parents) for line in lines)])
    while True:  # each round but the last unites something
        fixed = list[Map]()
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


def _reasons(bounds: Iterable[Bound], united: Union) -> dict[int, Reason]:
    """By class, the first reason that is given for one of its atoms."""
    reasons = dict[int, Reason]()
    for bound in bounds:
        for found in np.unique(united.classes[bound.array]).tolist():
            reasons.setdefault(found, bound.reason)
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
        found, counts = count_by_row(matrix)
        partly = ~((counts == 0) | (counts == matrix.shape[1])).all(axis=1)
        for member in found[partly & (found > 0)].tolist():
            reasons.setdefault(member, bound.reason)
    return reasons


def _mark_lossy_sources(solution: Solution) -> None:
    """With a source its readings go: where one of them is lossy, so is the source."""
    classes, known = solution.classes, -1
    while len(solution.lossy) != known:  # a reading may be a source for another
        known = len(solution.lossy)
        for read in solution.reads:
            pairs = zip(classes[read.sources].tolist(), classes[read.readers].tolist(), strict=True)
            for source, reader in pairs:
                if reader in solution.lossy:
                    solution.lossy.setdefault(source, solution.lossy[reader])


def alive_atoms(classes: Classes, removed: NDArray[np.int64]) -> Flags:
    """Which atoms are left when classes are removed."""
    gone = np.zeros(len(classes), bool)
    gone[removed] = True
    alive = ~gone[classes]
    alive[0] = True
    return alive
