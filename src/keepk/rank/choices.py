"""The exact selection of channels: exactly k stay, in numbers that the network can have."""

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
    """Units that are chosen from as one: equally many go of each block, and only certain numbers may stay in all."""

    blocks: tuple[Indices, ...]
    portion: Portion

    def living(self, alive: Flags) -> list[Indices]:
        """What is left of each block."""
        return [block[alive[block]] for block in self.blocks]


@dataclass(frozen=True)
class Decision:
    """Which units go, and a chain of splits that leads on to K (empty where any split does)."""

    removed: Indices
    chain: tuple[Split, ...]


def rank_values(
    units: Indices, scores: NDArray[np.float64], forced: Flags, links: Links | None = None
) -> NDArray[np.float64]:
    """By unit, its worth: its place in the order of scores, the lower number first among equals.

    Places instead of scores make the best sum of k places the k best scores, and infinite scores harmless. Units that
    must stay are worth more than all others together, and a source more than its readings.
    """
    heights = np.zeros(len(units), np.int64)
    if links is not None:
        by_unit = np.full(len(forced), -np.inf)
        by_unit[units] = scores
        scores, heights = links.raised(by_unit)[units], links.heights[units]
    order = np.lexsort((-units, heights, scores))
    values = np.full(len(forced), -1.0)
    values[units[order]] = np.arange(1.0, len(units) + 1)
    values[forced] += float(len(units) + 1) ** 2
    return values


def keep_best(
    choices: Sequence[Choice], alive: Flags, values: NDArray[np.float64], rest: Sequence[int], known: Sequence[Split]
) -> Decision:
    """What goes so that exactly ``rest[0]`` of the living units stay, with the largest sum of values.

    Args:
        choices: What is chosen from.
        alive: By unit, whether it is still there.
        values: By unit, what it is worth.
        rest: The counts of this event and of those that follow, down to K.
        known: A chain of splits for `rest`; needed where not every split leads on to K.
    """
    blocks = [
        [block[np.argsort(-values[block], kind="stable")] for block in choice.living(alive)] for choice in choices
    ]
    left = [sum(map(len, living)) for living in blocks]
    portions = [choice.portion.within(0, count) for choice, count in zip(choices, left, strict=True)]
    chosen, following = _split(portions, blocks, values, rest, known)
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
    rest: Sequence[int],
    known: Sequence[Split],
) -> tuple[Split, tuple[Split, ...]]:
    """The best split that leads on to K, and a chain for what follows it."""
    best = split(portions, rest[0], _gains(portions, blocks, values))
    assert best is not None  # the plan asks for nothing else
    if has_even_steps(portions) or len(rest) == 1:
        return best, tuple(known[1:])
    below = [portion.within(0, count) for portion, count in zip(portions, best, strict=True)]
    onward = chain(below, rest[1:])
    if onward is not None:
        return best, onward
    above = [portion.within(least, portion.counts[-1]) for portion, least in zip(portions, known[1], strict=True)]
    safe = split(above, rest[0], _gains(above, blocks, values))
    assert safe is not None  # the known chain is one
    return safe, tuple(known[1:])


def _gains(
    portions: Sequence[Portion], blocks: Sequence[Sequence[Indices]], values: NDArray[np.float64]
) -> list[NDArray[np.float64]]:
    """By portion, the sum of the values of what stays, for each of its counts."""
    gains = []
    for portion, living in zip(portions, blocks, strict=True):
        lost = (sum(map(len, living)) - np.asarray(portion.counts, np.int64)) // len(living)
        sums = [np.concatenate([[0.0], np.cumsum(values[block])]) for block in living]
        gains.append(sum((total[len(block) - lost] for total, block in zip(sums, living, strict=True)), np.zeros(1)))
    return gains
