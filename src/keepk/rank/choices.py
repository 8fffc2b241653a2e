"""The exact selection of channels: exactly k are kept, in numbers that the network can have.

Two layers of four channels each share one space, units 0-3 and 4-7. Keep 5 of the 8, whatever the ties:

>>> units, alive = np.arange(8), np.ones(8, bool)
>>> scores = np.array([3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 0.0])
>>> values = rank_values(units, scores, forced=np.zeros(8, bool))
>>> values.tolist()  # places in the order of scores, so equal scores get different values, the lower unit more
[8.0, 6.0, 5.0, 4.0, 7.0, 3.0, 2.0, 1.0]
>>> any_number = Portion((1, 2, 3, 4))
>>> free = [Choice((units[:4],), any_number), Choice((units[4:],), any_number)]
>>> keep_best(free, alive, values, counts=[5], known=()).removed.tolist()
[5, 6, 7]

Units 0, 4, 1, 2, 3 are kept: the two best and, of the five that tie at 1.0, the first three. If each layer must keep an
even number (``round_to=2``), 5 cannot be met and the plan would have been moved to 4 or 6 before training. With 6, the
best split is 4 + 2:

>>> even = Portion((2, 4))
>>> rounded = [Choice((units[:4],), even), Choice((units[4:],), even)]
>>> keep_best(rounded, alive, values, counts=[6], known=()).removed.tolist()
[6, 7]

If the two layers are halves of a chunk, they are two blocks of one choice and lose equally many:

>>> halves = [Choice((units[:4], units[4:]), Portion((2, 4, 6, 8)))]
>>> keep_best(halves, alive, values, counts=[6], known=()).removed.tolist()
[3, 7]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.edits import Indices
from keepk.graph.maps import Flags
from keepk.plan.portions import Portion, Split, chain, has_even_steps, split
from keepk.rank.links import Links


@dataclass(frozen=True, eq=False)
class Choice:
    """A set of units that is chosen from as one, such as the channels of a layer.

    Attributes:
        blocks: The units. Several blocks lose equally many each: groups of a convolution, halves of a chunk.
        portion: How many units may be kept in all blocks together.
    """

    blocks: tuple[Indices, ...]
    portion: Portion

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(block)) for block in self.blocks)
        return f"<Choice: {sizes} units, keep {self.portion}>"

    def living(self, alive: Flags) -> list[Indices]:
        """The units of each block that have not been removed."""
        return [block[alive[block]] for block in self.blocks]


@dataclass(frozen=True)
class Decision:
    """The units to remove, and a chain of splits that leads on to K (empty where every split does)."""

    removed: Indices
    chain: tuple[Split, ...]


def rank_values(
    units: Indices, scores: NDArray[np.float64], forced: Flags, links: Links | None = None
) -> NDArray[np.float64]:
    """By unit, its value: its place in the order of scores, the lower unit first among equal scores.

    Args:
        units: The units that are ranked.
        scores: Their scores.
        forced: By unit, whether it must be kept. Such a unit is worth more than all others together.
        links: Units that read others. A source is worth more than its reads, so it is not removed before them.
    """
    # Places instead of scores: the largest sum of k places is then reached by the k best scores, and by no other
    # choice. Sums of scores could tie or round, and infinite scores would make all sums equal. Places are integers,
    # exact in float64.
    heights = np.zeros(len(units), np.int64)
    if links is not None:
        by_unit = np.full(len(forced), -np.inf)
        by_unit[units] = scores
        scores, heights = links.raised(by_unit)[units], links.heights[units]
    order = np.lexsort((-units, heights, scores))
    values = np.full(len(forced), -1.0)
    values[units[order]] = np.arange(1.0, len(units) + 1)
    values[forced] += float(len(units) + 1) ** 2  # above n (n + 1) / 2, the sum of all places
    return values


def keep_best(
    choices: Sequence[Choice], alive: Flags, values: NDArray[np.float64], counts: Sequence[int], known: Sequence[Split]
) -> Decision:
    """The units to remove so that exactly ``counts[0]`` are kept, with the largest sum of values.

    Args:
        choices: The sets of units that are chosen from.
        alive: By unit, whether it has not been removed.
        values: By unit, its value.
        counts: How many units are left after this event and after each following one, down to K.
        known: A chain of splits for `counts`; needed if not every split leads on to K.
    """
    # Within a block the choice is simple: the best stay. So only the number kept in each choice is open, and the best
    # numbers are found by a small dynamic program over counts (`portions.split`).
    blocks = [
        [block[np.argsort(-values[block], kind="stable")] for block in choice.living(alive)] for choice in choices
    ]
    left = [sum(map(len, living)) for living in blocks]
    portions = [choice.portion.within(0, count) for choice, count in zip(choices, left, strict=True)]
    chosen, following = _split(portions, blocks, values, counts, known)
    removed = [
        block[len(block) - (count - stay) // len(living) :]
        for living, count, stay in zip(blocks, left, chosen, strict=True)
        for block in living
    ]
    return Decision(np.sort(np.concatenate(removed)), following)


def _split(
    portions: Sequence[Portion],
    blocks: Sequence[Sequence[Indices]],
    values: NDArray[np.float64],
    counts: Sequence[int],
    known: Sequence[Split],
) -> tuple[Split, tuple[Split, ...]]:
    """The best split from which K can still be reached, and a chain of splits for the events after it."""
    best = split(portions, counts[0], _gains(portions, blocks, values))
    assert best is not None  # plans contain only totals that can be met
    if has_even_steps(portions) or len(counts) == 1:
        return best, tuple(known[1:])
    # With uneven steps the best split may strand the plan: of steps of 3 and 5, 3 + 10 cannot go on to 6 + 5 = 11. It
    # is taken only if a chain leads on from it.
    below = [portion.within(0, count) for portion, count in zip(portions, best, strict=True)]
    onward = chain(below, counts[1:])
    if onward is not None:
        return best, onward
    # Otherwise take the best split from which the known chain can be continued.
    above = [portion.within(least, portion.counts[-1]) for portion, least in zip(portions, known[1], strict=True)]
    safe = split(above, counts[0], _gains(above, blocks, values))
    assert safe is not None  # the known chain itself is such a split
    return safe, tuple(known[1:])


def _gains(
    portions: Sequence[Portion], blocks: Sequence[Sequence[Indices]], values: NDArray[np.float64]
) -> list[NDArray[np.float64]]:
    """By portion, for each of its counts, the sum of the values of the units kept."""
    gains = []
    for portion, living in zip(portions, blocks, strict=True):
        lost = (sum(map(len, living)) - np.asarray(portion.counts, np.int64)) // len(living)
        sums = [np.concatenate([[0.0], np.cumsum(values[block])]) for block in living]
        gains.append(sum((total[len(block) - lost] for total, block in zip(sums, living, strict=True)), np.zeros(1)))
    return gains
