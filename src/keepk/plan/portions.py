"""Counts that bind each other: which totals can be met, how a total is split, and plans that ask for no other.

A portion is a set of channels of which only certain numbers may stay: equally many of each group of a convolution, or
multiples of 8 of a layer. A plan over portions is a falling chain of splits. Met totals alone do not make one: of
portions in steps of 3 and of 5, keeping 3 + 10 on the way to 6 + 5 = 11 strands it. So a plan has a chain that is known
to lead to K, and whoever splits in another way has to find another.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Split = tuple[int, ...]
Gains = Sequence[NDArray[np.float64]]


@dataclass(frozen=True)
class Portion:
    """How many of some units may stay, in rising order."""

    counts: tuple[int, ...]

    def within(self, least: int, most: int) -> "Portion":
        """The part of it between two bounds."""
        return Portion(self.counts[bisect_left(self.counts, least) : bisect_right(self.counts, most)])

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The counts as runs of equal steps: (first, step, number of counts).

        >>> list(Portion((8, 16, 24, 30)).runs()), list(Portion((5,)).runs())
        ([(8, 8, 3), (30, 1, 1)], [(5, 1, 1)])
        """
        counts, steps, begin = self.counts, self.steps, 0
        turns = np.flatnonzero(steps[1:] != steps[:-1]) + 1  # where a step differs from the one before it
        ends = [*turns.tolist(), len(counts) - 1]
        for end in ends:  # the number of the last count that the steps so far lead to
            if begin <= end:
                step = int(steps[begin]) if begin < end else 1
                yield counts[begin], step, end - begin + 1
                begin = end + 1

    @property
    def steps(self) -> NDArray[np.int64]:
        """From each count to the next."""
        counts = np.asarray(self.counts, np.int64)
        return counts[1:] - counts[:-1]


def totals(portions: Iterable[Portion]) -> int:
    """The totals that can be met, as the set bits of an int.

    >>> [total for total in range(12) if totals([Portion((3, 6)), Portion((5,))]) >> total & 1]
    [8, 11]
    """
    met = 1
    for portion in portions:
        with_one_more = 0
        for first, step, number in portion.runs():
            with_one_more |= _shifted(met, step, number) << first
        met = with_one_more
    return met


def _shifted(bits: int, step: int, number: int) -> int:
    """The union of `bits` shifted by 0, step, 2 step, ..., `number` of them; each round doubles what is there."""
    done = 1
    while done < number:
        more = min(done, number - done)
        bits |= bits << step * more
        done += more
    return bits


def nearest_totals(portions: Sequence[Portion], wanted: int) -> list[int]:
    """The total that is wanted, if it can be met; otherwise the nearest ones below and above it.

    >>> nearest_totals([Portion((3, 6)), Portion((5,))], 10), nearest_totals([Portion((3, 6)), Portion((5,))], 11)
    ([8, 11], [11])
    """
    return _nearest_set(totals(portions), wanted)


def _nearest_set(met: int, wanted: int) -> list[int]:
    if met >> wanted & 1:
        return [wanted]
    below, above = met & ((1 << wanted) - 1), met >> wanted
    nearest = [below.bit_length() - 1] if below else []
    return nearest + ([wanted + (above & -above).bit_length() - 1] if above else [])


def split(portions: Sequence[Portion], total: int, gains: Gains) -> Split | None:
    """How many of each portion stay so that `total` do, with the largest sum of gains; None if it cannot be met.

    `gains` has, for each portion, the worth of each of its counts.

    >>> split([Portion((0, 2, 4)), Portion((1, 2, 3))], 5, [np.array([0.0, 9, 10]), np.array([3.0, 4, 5])])
    (2, 3)
    """
    if any(not portion.counts for portion in portions):
        return None
    least = [portion.counts[0] for portion in portions]
    step = _common_step(portions)
    room, rest = divmod(total - sum(least), step)
    if room < 0 or rest:
        return None
    extra = [(np.asarray(it.counts) - least[place]) // step for place, it in enumerate(portions)]
    # The portion with the most counts comes last, where only one total is asked for.
    *order, last = sorted(range(len(portions)), key=lambda place: len(portions[place].counts))
    best, picks = np.zeros(1), list[NDArray[np.int32]]()
    for place in order:
        best, pick = _with_portion(best, extra[place], gains[place], room)
        picks.append(pick)
    number = _last_pick(best, extra[last], gains[last], room)
    if number is None:
        return None
    taken, left = {last: number}, room - extra[last][number]
    for place, pick in zip(reversed(order), reversed(picks), strict=True):
        taken[place] = int(pick[left])
        left -= extra[place][taken[place]]
    return tuple(portion.counts[taken[place]] for place, portion in enumerate(portions))


def _common_step(portions: Sequence[Portion]) -> int:
    return int(np.gcd.reduce(np.concatenate([portion.steps for portion in portions]))) or 1


def _with_portion(
    best: NDArray[np.float64], extra: NDArray[np.int64], gains: NDArray[np.float64], room: int
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """The best sum of gains for each total with one portion more, and which of its counts that takes."""
    size = min(room, len(best) - 1 + int(extra[-1])) + 1
    better, pick = np.full(size, -np.inf), np.zeros(size, np.int32)
    for number, (more, gain) in enumerate(zip(extra.tolist(), gains, strict=True)):
        if more >= size:
            break
        reached = best[: size - more] + gain
        here = slice(more, more + len(reached))
        wins = reached > better[here]
        better[here][wins], pick[here][wins] = reached[wins], number
    return better, pick


def _last_pick(
    best: NDArray[np.float64], extra: NDArray[np.int64], gains: NDArray[np.float64], room: int
) -> int | None:
    """Which count of the last portion, with the best of all others, fills the room; None if none does."""
    others = room - extra
    fits = (others >= 0) & (others < len(best))
    sums = np.where(fits, best[np.where(fits, others, 0)] + gains, -np.inf)
    number = int(sums.argmax())
    return None if sums[number] == -np.inf else number


def even_gains(portions: Sequence[Portion]) -> Gains:
    """Gains under which all portions keep about the same share of what they can keep."""
    return [_even(portion) for portion in portions]


def _even(portion: Portion) -> NDArray[np.float64]:
    # The units that a portion keeps are worth ever less, evenly down to zero: sums over them are squares.
    counts = np.asarray(portion.counts, np.float64)
    gains: NDArray[np.float64] = counts - counts**2 / (2 * max(counts[-1], 1.0))
    return gains


def has_even_steps(portions: Sequence[Portion]) -> bool:
    """Whether every split leads to every lower total that can be met: all portions have the same steps."""
    steps = np.concatenate([portion.steps for portion in portions])
    return not len(steps) or bool((steps == steps[0]).all())


def chain(portions: Sequence[Portion], falling: Sequence[int]) -> tuple[Split, ...] | None:
    """Splits of the totals, none above the one before it; None if the even way finds none."""
    found, least = list[Split](), tuple(portion.counts[0] for portion in portions)
    for total in reversed(falling):
        room = [portion.within(low, portion.counts[-1]) for portion, low in zip(portions, least, strict=True)]
        here = split(room, total, even_gains(room))
        if here is None:
            return None
        found.append(here)
        least = here
    return tuple(reversed(found))


def snapped(portions: Sequence[Portion], falling: Sequence[int]) -> tuple[int, ...]:
    """The plan with each count moved to the nearest that can be met on a chain down to the last one.

    The last one, K, must be one that can be met.

    >>> snapped([Portion((8, 16)), Portion((8, 16))], (30, 25, 24))
    (32, 24, 24)
    """
    if has_even_steps(portions):
        met = totals(portions)
        return tuple(_nearest(met, total, falling[-1]) for total in falling)
    plan, least = list[int](), tuple(portion.counts[0] for portion in portions)
    for total in reversed(falling):
        room = [portion.within(low, portion.counts[-1]) for portion, low in zip(portions, least, strict=True)]
        near = _nearest(totals(room), total, falling[-1])
        here = split(room, near, even_gains(room))
        assert here is not None  # the nearest total can be met
        plan.append(near)
        least = here
    return tuple(reversed(plan))


def _nearest(met: int, total: int, keep: int) -> int:
    """The nearest of the totals that can be met, not below K; of two the lower."""
    near = [found for found in _nearest_set(met, total) if found >= keep]
    return min(near, key=lambda found: abs(found - total))
