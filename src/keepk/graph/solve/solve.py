"""From facts to classes of atoms: which are removed together, which cannot be removed, which need equal counts.

Equal atoms and collapsed lines are united first, then the columns that grids and matrices require (`bindings`), then
parents whose cells have become one class.

A residual block, ``y = conv2(conv1(x)) + conv1(x)``, with 3 channels. Its atoms are 1-3 (filters of conv1), 4-6 (input
channels of conv2) and 7-9 (filters of conv2). The convolution pairs 1-3 with 4-6, the add pairs 1-3 with 7-9:

>>> facts = Facts()
>>> conv1, conv2_in, conv2 = (np.arange(start, start + 3, dtype=np.int32) for start in (1, 4, 7))
>>> facts.add_equal(conv1, conv2_in)
>>> facts.add_equal(conv1, conv2)
>>> solve(facts, count=10).classes.tolist()  # class 1 is {1, 4, 7}: removing channel 0 cuts three axes
[0, 1, 2, 3, 1, 2, 3, 1, 2, 3]

If something else pins an atom, its whole class is pinned:

>>> facts.add_pin(np.array([8], np.int32), Reason("is part of the output"))
>>> solution = solve(facts, count=10)
>>> solution
<Solution: 3 classes of 9 atoms, 1 pinned, 0 lossy, 0 bindings, 0 reads>
>>> print(solution.pinned[2])
is part of the output

A chunk into two halves of equal size would add a condition on counts instead (see `bindings`):

>>> facts.even.append(Bound(np.arange(10, 14, dtype=np.int32).reshape(2, 2), Reason("is split in equal parts")))
>>> solve(facts, count=14).bindings
[<Binding: 2 blocks of 2 classes, is split in equal parts>]
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from keepk.graph.ids.facts import Bound, Facts, Line, Lines, Read, Reason
from keepk.graph.ids.maps import Flags, Map
from keepk.graph.solve.bindings import Binding, Classes, UnionFind, bind_equal_counts, count_by_row, enforce_grids

ALIGNED = 8  # torch's grouped products refuse rows that are not whole 16 bytes, which is 8 numbers of 16 bits


@dataclass
class Solution:
    """The classes of atoms and what is known about each.

    Attributes:
        classes: For each atom, the smallest atom that is removed together with it.
        pinned: By class, why it cannot be removed.
        lossy: By class, why removing it changes more than zeroing it would.
        bindings: Blocks of classes that must lose equal numbers.
        aligned: By class, why the remaining number of its kind must be a multiple of `ALIGNED`.
        reads: The BatchNorms that can read a selection; all others were united with the channels they read.
        used: The classes that are read by anything except `reads`.
    """

    classes: Classes
    pinned: dict[int, Reason] = field(default_factory=dict)
    lossy: dict[int, Reason] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    aligned: dict[int, Reason] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    used: Classes = field(default_factory=lambda: np.zeros(0, np.int32))

    def __repr__(self) -> str:
        return (
            f"<Solution: {len(np.unique(self.classes[1:]))} classes of {len(self.classes) - 1} atoms, "
            f"{len(self.pinned)} pinned, {len(self.lossy)} lossy, {len(self.bindings)} bindings, "
            f"{len(self.reads)} reads>"
        )


def solve(
    facts: Facts,
    count: int,
    extra_pins: Sequence[Bound] = (),
    loosened: Collection[Lines] = (),
    aligned: Sequence[Bound] = (),
) -> Solution:
    """The classes of atoms under the given facts.

    Args:
        facts: Everything that the forward passes recorded.
        count: The number of ids, 0 included.
        extra_pins: Atoms that probing found cannot be removed.
        loosened: Lines of heads whose cells may be removed one by one after all.
        aligned: Atoms whose remaining number must be a multiple of `ALIGNED`.
    """
    united = UnionFind(count)
    heads = [lines for lines in facts.lines[Line.HEADS] if lines not in loosened]
    facts = replace(facts, lines={**facts.lines, Line.LOOSE: [*facts.lines[Line.LOOSE], *loosened]})
    for lines in (*facts.equal, *facts.lines[Line.COLLAPSE], *heads):
        united.add(lines.parents, lines.cells)
    # Before grids and bindings, since uniting a BatchNorm with its input changes the classes that these depend on.
    reads = list(_separate_reads(facts, united))
    irregular = enforce_grids(facts.grids, united)
    while True:
        # Bindings depend on classes, and uniting parents with their cells changes classes: repeat until neither does.
        bindings, uneven = bind_equal_counts(facts.even, united)
        bound = united.classes
        shared = _shared_parents(facts, united)
        mixed = [read for read in reads if _is_mixed(read, united.classes)]
        if not mixed and np.array_equal(bound, united.classes):
            break
        # A BatchNorm with one channel in the same class as a channel it reads cannot drop its read of it alone, so it
        # gets no selection and is united with its input like any other layer.
        for read in mixed:
            united.add(read.sources, read.readers)
        united.settle()
        reads = [read for read in reads if read not in mixed]
    solution = Solution(united.classes, bindings=bindings, reads=reads)
    solution.pinned = _reasons([*facts.pins, *extra_pins, *irregular, *uneven, *shared], united)
    solution.aligned = _reasons(aligned, united)
    solution.classes = united.classes
    _pin_with_blocks(solution)
    solution.lossy = _lossy(facts.lossy, united.classes)
    _mark_lossy_sources(solution)
    others = [atoms for atoms, who in facts.uses if who.removeprefix("read ") not in {r.module for r in reads}]
    if others:
        solution.used = np.unique(united.classes[np.concatenate(others)])
    return solution


def _separate_reads(facts: Facts, united: UnionFind) -> Iterator[Read]:
    """The reads that become units; every other BatchNorm is united with the channels it reads.

    In a DenseNet many BatchNorms read the same channels, and each can drop one without the others. A BatchNorm that is
    the only reader of its channels has nothing to drop alone: there the channel itself is the unit.
    """
    united.settle()
    pinned = np.zeros(len(united.classes), bool)
    for pin in facts.pins:
        pinned[united.classes[pin.array]] = True
    readers = _count_readers(facts, united.classes)
    for read in facts.reads:
        sources = united.classes[read.sources]
        alone = (readers[sources] <= 1).all() and len(np.unique(sources)) == len(sources)
        twice = sum(other.module == read.module for other in facts.reads) > 1  # one selection cannot serve two inputs
        # Pinned channels may still be dropped by a reader, even by the only one.
        if twice or (alone and not pinned[sources].any()):
            united.add(read.sources, read.readers)
        else:
            yield read
    united.settle()


def _is_mixed(read: Read, classes: Classes) -> bool:
    return bool(np.isin(classes[read.readers], classes[read.sources]).any())


def _count_readers(facts: Facts, classes: Classes) -> NDArray[np.int64]:
    """The number of different readers of each class."""
    names = {who: number for number, who in enumerate({who for _, who in facts.uses})}
    # (class, reader) as one number, in int64: the product of the two counts can exceed int32.
    pairs = [
        np.unique(classes[atoms[atoms > 0]]).astype(np.int64) * len(names) + names[who] for atoms, who in facts.uses
    ]
    if not pairs:
        return np.zeros(len(classes), np.int64)
    return np.bincount(np.unique(np.concatenate(pairs)) // len(names), minlength=len(classes))


def _shared_parents(facts: Facts, united: UnionFind) -> list[Bound]:
    """Unite each parent with its cells where these are one class; return the other parents, which must be pinned."""
    lines = [*facts.lines[Line.SHARE], *facts.lines[Line.LOOSE]]
    if not lines:
        return []
    parents = np.concatenate([line.parents for line in lines])
    cells = np.concatenate([line.cells for line in lines])
    starts = np.cumsum([0, *(len(line.parents) for line in lines)])
    while True:  # every round but the last unites something
        fixed = list[Map]()
        for first, last in pairwise(starts):
            span = slice(first, last)
            one, several = _by_number_of_cells(united.classes[parents[span]], united.classes[cells[span]])
            united.add(*one)
            fixed.append(several)
        if not united.settle():
            break
    stay = np.concatenate(fixed)
    return [Bound(stay, Reason("is shared by channels that may be removed one by one"))] if len(stay) else []


def _by_number_of_cells(parents: Classes, cells: Classes) -> tuple[tuple[Map, Map], Map]:
    """The parents with a single class of cells, paired with that class, and the parents with several classes."""
    order = np.lexsort((cells, parents))
    parents, cells = parents[order], cells[order]
    starts = np.flatnonzero(np.r_[True, parents[1:] != parents[:-1]])
    lowest, highest = np.minimum.reduceat(cells, starts), np.maximum.reduceat(cells, starts)
    one = lowest == highest
    return (parents[starts][one], lowest[one]), parents[starts][~one]


def _reasons(bounds: Iterable[Bound], united: UnionFind) -> dict[int, Reason]:
    """By class, the first reason given for one of its atoms."""
    reasons = dict[int, Reason]()
    for bound in bounds:
        for found in np.unique(united.classes[bound.array]).tolist():
            reasons.setdefault(found, bound.reason)
    return reasons


def _pin_with_blocks(solution: Solution) -> None:
    """Pin all blocks of a binding if one of them is pinned as a whole: it can lose none, so neither can the others."""
    changed = True
    while changed:
        changed = False
        for binding in solution.bindings:
            free = [[m for m in block.tolist() if m not in solution.pinned] for block in binding.blocks]
            if any(free) and not all(free):
                changed = True
                for member in (m for block in free for m in block):
                    solution.pinned[member] = replace(
                        binding.reason, why=f"{binding.reason.why}, and another part of it cannot be removed"
                    )


def _lossy(bounds: Iterable[Bound], classes: Classes) -> dict[int, Reason]:
    """By class, why removing it changes the rest: it is part of a row that is normalised or summed."""
    reasons = dict[int, Reason]()
    for bound in bounds:
        matrix = classes[bound.array]
        if matrix.size == 0:
            continue
        found, counts = count_by_row(matrix)
        # Whole rows are exact: a GroupNorm that loses a whole group normalises the other groups as before.
        partly = ~((counts == 0) | (counts == matrix.shape[1])).all(axis=1)
        for member in found[partly & (found > 0)].tolist():
            reasons.setdefault(member, bound.reason)
    return reasons


def _mark_lossy_sources(solution: Solution) -> None:
    """Mark a source as lossy if one of its reads is, because removing the source removes its reads as well."""
    classes, known = solution.classes, -1
    while len(solution.lossy) != known:  # a read may be the source of another read
        known = len(solution.lossy)
        for read in solution.reads:
            pairs = zip(classes[read.sources].tolist(), classes[read.readers].tolist(), strict=True)
            for source, reader in pairs:
                if reader in solution.lossy:
                    solution.lossy.setdefault(source, solution.lossy[reader])


def alive_atoms(classes: Classes, removed: NDArray[np.int64]) -> Flags:
    """Which atoms remain when classes are removed.

    >>> alive_atoms(np.array([0, 1, 2, 1], np.int32), np.array([1])).tolist()
    [True, False, True, False]
    """
    gone = np.zeros(len(classes), bool)
    gone[removed] = True
    alive = ~gone[classes]
    alive[0] = True  # "no atom" is never removed: untracked elements stay where they are
    return alive
