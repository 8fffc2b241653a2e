"""The removal sequence of a budget: units in the order in which they are removed until the model is cheap enough.

A *block* is the smallest set of units that can be removed from a layer of the present width: one unit; one unit of each
group of a convolution; as many as it takes to reach the next multiple of ``round_to``. The score of a block is the mean
rank of its units, and the block with the lowest score is removed first.

For example, two layers have four channels each, units 0-3 and 4-7. The first may lose any number of channels but keeps
at least one, the second keeps an even number (``round_to=2``):

>>> from keepk.plan.portions import Portion
>>> ranks = np.array([8.0, 1.0, 2.0, 5.0, 7.0, 3.0, 6.0, 4.0])
>>> any_number, even = Portion((1, 2, 3, 4)), Portion((2, 4))
>>> choices = [Choice((np.arange(4),), any_number, free=True), Choice((np.arange(4, 8),), even)]
>>> forced = ranks == 8  # unit 0 is the best of the first layer, which must not become empty
>>> sequence = removals(choices, np.ones(8, bool), ranks, forced)
>>> sequence
<Removals: 5 units in 4 blocks>
>>> [block.tolist() for block in sequence.blocks()]
[[1], [2], [5, 7], [3]]

Units 5 and 7, with ranks 3 and 4, go together and score 3.5, less than unit 3 with rank 5. If each unit of the first
layer costs 10 and each of the second one 1, the dense model costs 44, and it takes two blocks to get to at most 25:

>>> cost = lambda removed: 44 - 10 * int((removed < 4).sum()) - int((removed >= 4).sum())
>>> [cost(sequence.prefix(number)) for number in range(5)]
[44, 34, 24, 22, 12]
>>> shortest(sequence, cost, 25), shortest(sequence, cost, 22), shortest(sequence, cost, 11)
(2, 3, None)

Every prefix contains the ones before it, so the cost never rises along the sequence, and bisection finds the shortest
prefix within the budget: without its last block, the model would exceed the budget.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.ids.maps import Flags
from keepk.model.edits import Indices
from keepk.rank.channels import Choice

NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Removals:
    """Units in the order in which they are removed.

    Attributes:
        units: The units, block after block.
        ends: For each block, the number of units up to its end.
    """

    units: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def __repr__(self) -> str:
        return f"<Removals: {len(self.units)} units in {len(self)} blocks>"

    def prefix(self, number: int) -> Indices:
        """The units of the first `number` blocks."""
        return self.units[: self.ends[number - 1]] if number else self.units[:0]

    def blocks(self) -> Iterator[Indices]:
        """The units of each block."""
        yield from np.split(self.units, self.ends[:-1]) if len(self) else ()


def removals(choices: Sequence[Choice], alive: Flags, values: NDArray[np.float64], forced: Flags) -> Removals:
    """The blocks of a space in the order of their mean ranks; of equal ones, the block with the lowest unit goes first.

    Args:
        choices: The sets of units that are chosen from, with the numbers that may be kept of each.
        alive: By unit, whether it has not been removed.
        values: By unit, its rank.
        forced: By unit, whether it must stay.

    Returns:
        All blocks that can be removed, down to the floors.
    """
    # Within a choice units go in the order of their ranks, so later blocks have higher means. Sorting all blocks by
    # their means therefore never takes a block before the ones that have to go first.
    found = [_blocks_of(choice, alive, values, forced) for choice in choices]
    units = np.concatenate([NOTHING, *(units for units, _ in found)])
    sizes = np.concatenate([NOTHING, *(sizes for _, sizes in found)])
    if not len(sizes):
        return Removals(units, sizes)
    starts = np.cumsum(sizes) - sizes
    # Sums of ranks and sizes are integers, exact in float64, so equal means are equal numbers.
    means = np.add.reduceat(values[units], starts) / sizes
    return _reordered(units, sizes, np.lexsort((np.minimum.reduceat(units, starts), means)))


def _blocks_of(choice: Choice, alive: Flags, values: NDArray[np.float64], forced: Flags) -> tuple[Indices, Indices]:
    """The removable units of a choice, block after block, and the sizes of its blocks."""
    living = [it[np.lexsort((values[it], forced[it]))] for it in choice.living(alive)]  # forced units come last
    if choice.free:
        units = living[0][~forced[living[0]]]
        return units, np.ones(len(units), np.int64)
    counts = np.asarray(choice.portion.within(0, sum(map(len, living))).counts[::-1], np.int64)
    lost = choice.lost(counts[0] - counts)  # by part, after each block
    # One block after the other: from each part the units between two counts.
    order = np.concatenate([np.arange(1, len(counts)).repeat(np.diff(it)) for it in lost])
    parts = np.concatenate([part[: it[-1]] for part, it in zip(living, lost, strict=True)])
    assert not forced[parts].any()  # every allowed count leaves room for the forced units
    return parts[np.argsort(order, kind="stable")], -np.diff(counts)


def _reordered(units: Indices, sizes: Indices, order: Indices) -> Removals:
    """The blocks of these sizes in another order."""
    starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
    ends = np.cumsum(sizes)
    places = np.arange(len(units)) - (ends - sizes).repeat(sizes) + starts.repeat(sizes)
    return Removals(units[places], ends)


def interleaved(sequences: Sequence[Removals], removed: Sequence[int], totals: Sequence[int]) -> Removals:
    """One sequence of several spaces, in which all of them lose the same share, to the block.

    The next block always comes from the space that has lost the smallest share so far; of equal ones, from the first.

    Args:
        sequences: The sequences of the spaces.
        removed: How many units each of them has lost before.
        totals: The number of units that each of them began with.

    >>> ten, four = (Removals(np.arange(10 * n, 10 * n + size), np.arange(1, size + 1)) for n, size in ((0, 9), (1, 3)))
    >>> interleaved([ten, four], removed=[0, 0], totals=[10, 4]).units.tolist()
    [0, 10, 1, 2, 11, 3, 4, 5, 12, 6, 7, 8]
    """
    if len(sequences) == 1:
        return sequences[0]
    sizes = [np.diff(it.ends, prepend=0) for it in sequences]
    shares = [
        (lost + it.ends - size) / total for it, size, lost, total in zip(sequences, sizes, removed, totals, strict=True)
    ]
    order = np.argsort(np.concatenate(shares), kind="stable")
    return _reordered(np.concatenate([it.units for it in sequences]), np.concatenate(sizes), order)


def shortest(sequence: Removals, cost: Callable[[Indices], int], bound: int, *, least: int = 0) -> int | None:
    """The smallest number of blocks without which the cost is at most `bound`.

    Args:
        sequence: The blocks.
        cost: The cost of the model without some units.
        bound: The bound.
        least: A number of blocks that are removed in any case.

    Returns:
        The number; None if the cost is above the bound even without all of them.
    """
    if cost(sequence.prefix(least)) <= bound:
        return least
    low, high = least, len(sequence)  # the cost is above the bound at `low`
    if cost(sequence.prefix(high)) > bound:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if cost(sequence.prefix(middle)) <= bound:
            high = middle
        else:
            low = middle
    return high
