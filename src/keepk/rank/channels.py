"""The exact selection of channels: exactly k are kept, in numbers per layer that the model allows.

Two layers of four channels each, units 0-3 and 4-7, are in one space. Keep 5 of the 8, with ties among the scores:

>>> units, alive = np.arange(8), np.ones(8, bool)
>>> scores = np.array([3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 0.0])
>>> values = rank_values(units, scores, forced=np.zeros(8, bool))
>>> values.tolist()  # ranks by score; of equal scores, the lower unit gets the higher rank
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

If the two layers are halves of a chunk, they are two blocks of one choice and lose equal numbers:

>>> halves = [Choice((units[:4], units[4:]), Portion((2, 4, 6, 8)))]
>>> keep_best(halves, alive, values, counts=[6], known=()).removed.tolist()
[3, 7]

Channels of a space may be read by other units of the same space. Where several BatchNorms read a channel, each read is
a unit (see docs/decisions/0010). Removing the channel, the source, removes its reads too. A source has to be kept while
one of its reads is, so it is ranked by the best of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepk.errors import SpaceError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.graph.units import Group
from keepk.model.edits import Indices
from keepk.plan.portions import Portion, Split, chain, has_even_steps, split
from keepk.plan.spaces import ChannelSpace


@dataclass(frozen=True, eq=False)
class Links:
    """Which channels of a space are read by other units of it.

    Attributes:
        pairs: (source, read) pairs of units.
        heights: By unit, the length of the longest chain of layers that read its layer; 0 for most.
    """

    pairs: NDArray[np.int64]
    heights: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"<Links: {len(self.pairs)} reads>"

    def raised(self, values: np.ndarray) -> np.ndarray:
        """By unit, the largest of its own value and the values of its reads, their reads, and so on.

        >>> Links(np.array([[0, 1], [1, 2]]), np.array([2, 1, 0, 0])).raised(np.array([1.0, 3.0, 2.0, 9.0]))
        array([3., 3., 2., 9.])
        """
        raised = values.copy()
        heights = self.heights[self.pairs[:, 0]]
        # From low to high, so that a read that is a source itself has its final value before its source takes it.
        for height in range(1, int(heights.max(initial=0)) + 1):
            sources, reads = self.pairs[heights == height].T
            np.maximum.at(raised, sources, raised[reads])
        return raised

    def needed(self, layers: Sequence[Indices], floors: Sequence[int]) -> list[int]:
        """By layer, how many units may have to be kept so that every layer keeps its floor.

        A layer must also keep the sources of the units that its readers keep.

        >>> links = Links(np.array([[0, 3], [1, 4]]), np.array([1, 1, 1, 0, 0]))
        >>> links.needed([np.arange(3), np.array([3, 4])], floors=[2, 2])
        [2, 2]
        """
        home = np.full(len(self.heights), -1)
        for number, units in enumerate(layers):
            home[units] = number
        needed = [min(floor, len(units)) for floor, units in zip(floors, layers, strict=True)]
        for number in sorted(range(len(layers)), key=lambda it: int(self.heights[layers[it][0]])):
            reads = self.pairs[home[self.pairs[:, 0]] == number, 1]
            # An upper bound: readers might share sources, but which units they keep is not known before the run.
            sources_of = np.bincount(reads, minlength=len(home))
            wanted = sum(
                needed[reader] * int(sources_of[layers[reader]].max()) for reader in np.unique(home[reads]).tolist()
            )
            needed[number] = min(max(needed[number], wanted), len(layers[number]))
        return needed


@dataclass(frozen=True, eq=False)
class Choice:
    """A set of units that are ranked and chosen together, such as the channels of a layer.

    Attributes:
        blocks: The units. If there are several blocks (groups of a convolution, halves of a chunk), they lose units
            together: equal numbers, or numbers in the ratio of `rates`.
        portion: How many units may be kept in all blocks together.
        rates: For each block, how many units it loses at a time; empty if it is one unit from each.
        free: Whether any unit may be removed that no floor forces to stay. The least count of `portion` then has room
            for every set of forced units, so a particular one may leave fewer units.
    """

    blocks: tuple[Indices, ...]
    portion: Portion
    rates: tuple[int, ...] = ()
    free: bool = False

    @property
    def step(self) -> int:
        """How many units all blocks lose at a time."""
        return sum(self.rates) or len(self.blocks)

    def lost(self, number: NDArray[np.int64] | int) -> list[Any]:
        """By block, how many of `number` removed units it loses; for an array, that of each of its entries.

        >>> Choice((np.arange(4), np.arange(4, 12)), Portion((3, 6, 9, 12)), rates=(1, 2)).lost(6)
        [2, 4]
        """
        rates = self.rates or (1,) * len(self.blocks)
        return [number // self.step * rate for rate in rates]

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(block)) for block in self.blocks)
        return f"<Choice: {sizes} units, keep {self.portion}>"

    def allows(self, dead: Flags) -> bool:
        """Whether the numbers of units that are left of each block may be kept."""
        gone = [int(dead[block].sum()) for block in self.blocks]
        total = sum(map(len, self.blocks)) - sum(gone)
        return total in self.portion.counts and gone == self.lost(sum(gone))

    def living(self, alive: Flags) -> list[Indices]:
        """The units of each block that have not been removed."""
        return [block[alive[block]] for block in self.blocks]


@dataclass(frozen=True)
class Decision:
    """The units to remove, and a chain of splits that leads on to K; empty if every split leads to K."""

    removed: Indices
    chain: tuple[Split, ...]


def rank_values(
    units: Indices, scores: NDArray[np.float64], forced: Flags, links: Links | None = None
) -> NDArray[np.float64]:
    """By unit, its rank by score, from 1 for the lowest; of equal scores, the lower unit ranks higher.

    Args:
        units: The units that are ranked.
        scores: Their scores.
        forced: By unit, whether it must be kept. Such a unit is worth more than all others together.
        links: Units that read others. A source is ranked above its reads, so it is not removed before them.
    """
    # Ranks instead of scores: the largest sum of k ranks belongs to the k best scores and to no other choice. Sums of
    # scores could tie or be rounded, and infinite scores would make all sums equal. Ranks are integers, exact in
    # float64.
    heights = np.zeros(len(units), np.int64)
    if links is not None:
        by_unit = np.full(len(forced), -np.inf)
        by_unit[units] = scores
        scores, heights = links.raised(by_unit)[units], links.heights[units]
    order = np.lexsort((-units, heights, scores))
    values = np.full(len(forced), -1.0)
    values[units[order]] = np.arange(1.0, len(units) + 1)
    values[forced] += float(len(units) + 1) ** 2  # above n (n + 1) / 2, the sum of all ranks
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
        known: A chain of splits for `counts`; needed only if some splits cannot lead on to K.
    """
    # Within a block, simply keep the best. Only the number to keep in each choice is left to decide, by a small dynamic
    # program over counts (`portions.split`).
    blocks = [
        [block[np.argsort(-values[block], kind="stable")] for block in choice.living(alive)] for choice in choices
    ]
    left = [sum(map(len, living)) for living in blocks]
    portions = [choice.portion.within(0, count) for choice, count in zip(choices, left, strict=True)]
    chosen, following = _split(portions, lambda found: _gains(choices, found, blocks, values), counts, known)
    removed = [
        block[len(block) - lost :]
        for choice, living, count, stay in zip(choices, blocks, left, chosen, strict=True)
        for block, lost in zip(living, choice.lost(count - stay), strict=True)
    ]
    return Decision(np.sort(np.concatenate(removed)), following)


def _split(
    portions: Sequence[Portion],
    gains: Callable[[Sequence[Portion]], list[NDArray[np.float64]]],
    counts: Sequence[int],
    known: Sequence[Split],
) -> tuple[Split, tuple[Split, ...]]:
    """The best split from which K can still be reached, and a chain of splits for the events after it."""
    best = split(portions, counts[0], gains(portions))
    assert best is not None  # plans contain only totals that can be met
    if has_even_steps(portions) or len(counts) == 1:
        return best, tuple(known[1:])
    # With uneven steps the best split may be a dead end: with steps of 3 and 5, 3 + 10 cannot go on to 6 + 5 = 11. Use
    # it only if a chain leads on from it.
    below = [portion.within(0, count) for portion, count in zip(portions, best, strict=True)]
    onward = chain(below, counts[1:])
    if onward is not None:
        return best, onward
    # Otherwise use the best split from which the known chain can be continued.
    above = [portion.within(least, portion.counts[-1]) for portion, least in zip(portions, known[1], strict=True)]
    safe = split(above, counts[0], gains(above))
    assert safe is not None  # the known chain itself is such a split
    return safe, tuple(known[1:])


def _gains(
    choices: Sequence[Choice],
    portions: Sequence[Portion],
    blocks: Sequence[Sequence[Indices]],
    values: NDArray[np.float64],
) -> list[NDArray[np.float64]]:
    """By portion, for each of its counts, the sum of the values of the units kept."""
    gains = []
    for choice, portion, living in zip(choices, portions, blocks, strict=True):
        lost = choice.lost(sum(map(len, living)) - np.asarray(portion.counts, np.int64))
        sums = [np.concatenate([[0.0], np.cumsum(values[block])]) for block in living]
        each = (total[len(block) - it] for total, block, it in zip(sums, living, lost, strict=True))
        gains.append(sum(each, np.zeros(1)))
    return gains


def find_links(graph: Graph, space: ChannelSpace, layers: Sequence[Group]) -> Links:
    """The links between channels of a space; refuses links with which some counts could not be met."""
    mine = np.zeros(len(graph.units), bool)
    for layer in layers:
        mine[layer.units] = True
    pairs = graph.links()
    pairs = np.unique(pairs[mine[pairs].all(axis=1)], axis=0)
    # A source that is also read outside of the space stays when its last read is removed.
    used = np.isin(graph.units.classes[pairs[:, 0]], graph.solution.used)
    if len(alone := pairs[~used]):
        raise _uncountable(
            graph, space, alone[0], "nothing else reads them, so they would be removed with their last read"
        )
    return Links(pairs, _heights(graph, space, pairs))


def refuse_bound_links(graph: Graph, space: ChannelSpace, links: Links, free: Indices) -> None:
    """Refuse links between channels whose counts are restricted: the exact selection cannot handle both together.

    Args:
        graph: The graph.
        space: The space, for the error.
        links: The links between its channels.
        free: The channels without conditions on their counts.
    """
    bound = ~np.isin(links.pairs, free).all(axis=1)
    if bound.any():
        why = "only certain numbers of them may be kept, because of round_to, per_layer or equal parts"
        raise _uncountable(graph, space, links.pairs[bound][0], why)


def _heights(graph: Graph, space: ChannelSpace, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """By unit, the length of the longest chain of layers that read its layer, one after another."""
    homes = graph.units.group[pairs]
    readers: dict[int, set[int]] = {}
    for source, read in np.unique(homes, axis=0).tolist():
        readers.setdefault(source, set()).add(read)
    try:
        order = [*TopologicalSorter(readers).static_order()]  # readers first
    except CycleError as error:
        circle = np.isin(homes, error.args[1]).all(axis=1)
        raise _uncountable(graph, space, pairs[circle][0], "both layers read each other") from None
    heights = dict[int, int]()
    for layer in order:
        heights[layer] = max((heights[reader] + 1 for reader in readers.get(layer, ())), default=0)
    by_layer = np.array([heights.get(number, 0) for number in range(len(graph.groups))])
    return by_layer[graph.units.group]


def _uncountable(graph: Graph, space: ChannelSpace, pair: Indices, why: str) -> SpaceError:
    source, read = (graph.groups[int(graph.units.group[unit])].name for unit in pair)
    return SpaceError(
        f"space {space.name!r}: channels of {source!r} are read by {read!r}, whose channels are removed with them "
        f"and are in the space too; {why}, so the count could not be met. Exclude one of the two, or count reads "
        f'instead: at="input".'
    )
