"""Counts that depend on each other: which totals can be met, and how a total is split.

A `Portion` lists how many channels of a set may be kept, if not every number is possible: the groups of a convolution
keep equal numbers, or a layer keeps a multiple of 8. For example, keep K of the 64 channels of two layers of 32, with
``round_to=8``:

>>> layers = [Portion((8, 16, 24, 32)), Portion((8, 16, 24, 32))]
>>> [total for total in range(65) if totals(layers) >> total & 1]  # these K can be met
[16, 24, 32, 40, 48, 56, 64]
>>> nearest_totals(layers, 20)  # 20 cannot
[16, 24]

Every count of a plan is moved to the nearest total that can be met, before training:

>>> snapped(layers, (50, 30, 24))
(48, 32, 24)

At an event, `split` decides how many channels each layer keeps, so that the sum of their values is largest. With these
values for the best 8, 16, 24 and 32 channels of each layer, 32 is split into 24 + 8:

>>> gains = [np.array([50.0, 90, 120, 130]), np.array([40.0, 50, 55, 57])]
>>> split(layers, 32, gains)
(24, 8)

Meeting every total is not enough. With portions in steps of 3 and 5, a plan may keep 13 and then 11. If the first event
keeps 3 + 10, the only split of 11, 6 + 5, is out of reach, because pruned channels never come back. A plan therefore
has a chain of splits in which no portion grows, down to K. An event may use another split only if another chain leads
on from it.

>>> threes, fives = Portion((3, 6)), Portion((5, 10))
>>> chain([threes, fives], (13, 11)), chain([threes, fives], (16, 11))
(None, ((6, 10), (6, 5)))
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
    """The numbers of units that may be kept, in ascending order."""

    counts: tuple[int, ...]

    def __repr__(self) -> str:
        """Shows runs of equal steps instead of every count.

        >>> Portion(tuple(range(1, 513)))
        <Portion: 1..512>
        >>> Portion((8, 16, 24, 30))
        <Portion: 8..24 by 8, 30>
        """
        runs = (
            f"{first}" if number == 1 else f"{first}..{first + step * (number - 1)}{f' by {step}' if step > 1 else ''}"
            for first, step, number in self.runs()
        )
        return f"<Portion: {', '.join(runs) or 'nothing'}>"

    def within(self, least: int, most: int) -> "Portion":
        """The counts between two bounds, both included."""
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
        """The differences between consecutive counts."""
        counts = np.asarray(self.counts, np.int64)
        return counts[1:] - counts[:-1]


def totals(portions: Iterable[Portion]) -> int:
    """The totals that can be met, as the set bits of an int: bit n is set if n units can be kept.

    >>> [total for total in range(12) if totals([Portion((3, 6)), Portion((5,))]) >> total & 1]
    [8, 11]
    """
    # A Python int as a bitset: adding a count to all totals is one shift, of 12 KB for 100,000 channels.
    met = 1
    for portion in portions:
        with_one_more = 0
        for first, step, number in portion.runs():
            with_one_more |= _shifted(met, step, number) << first
        met = with_one_more
    return met


def _shifted(bits: int, step: int, number: int) -> int:
    """The union of `bits` shifted by 0, step, 2 step, ..., with `number` terms."""
    # Doubling takes log2(number) shifts. One shift per count was quadratic in the number of channels.
    done = 1
    while done < number:
        more = min(done, number - done)
        bits |= bits << step * more
        done += more
    return bits


def nearest_totals(portions: Sequence[Portion], wanted: int) -> list[int]:
    """The wanted total if it can be met; otherwise the nearest totals below and above it that can.

    >>> nearest_totals([Portion((3, 6)), Portion((5,))], 10), nearest_totals([Portion((3, 6)), Portion((5,))], 11)
    ([8, 11], [11])
    """
    return _nearest_set(totals(portions), wanted)


def _nearest_set(met: int, wanted: int) -> list[int]:
    """The position of the set bit at `wanted`, or of the nearest set bits on both sides."""
    if met >> wanted & 1:
        return [wanted]
    below, above = met & ((1 << wanted) - 1), met >> wanted
    nearest = [below.bit_length() - 1] if below else []
    return nearest + ([wanted + (above & -above).bit_length() - 1] if above else [])


def split(portions: Sequence[Portion], total: int, gains: Gains) -> Split | None:
    """How many units of each portion to keep, so that `total` are kept and the sum of gains is largest.

    Args:
        portions: The portions.
        total: The number of units to keep.
        gains: For each portion, the value of keeping each of its counts.

    Returns:
        A count for each portion; None if the total cannot be met.

    >>> split([Portion((0, 2, 4)), Portion((1, 2, 3))], 5, [np.array([0.0, 9, 10]), np.array([3.0, 4, 5])])
    (2, 3)
    """
    if any(not portion.counts for portion in portions):
        return None
    # An exact knapsack over counts: best[n] is the largest gain with n units above the minimum. Dividing by the common
    # step first makes the problem eight times smaller with round_to=8.
    least = [portion.counts[0] for portion in portions]
    step = int(np.gcd.reduce(np.concatenate([portion.steps for portion in portions]))) or 1
    room, rest = divmod(total - sum(least), step)
    if room < 0 or rest:
        return None
    extra = [(np.asarray(it.counts) - least[place]) // step for place, it in enumerate(portions)]
    # The portion with the most counts comes last, where a single total is needed instead of the best for every total.
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


def _with_portion(
    best: NDArray[np.float64], extra: NDArray[np.int64], gains: NDArray[np.float64], room: int
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """The best sum of gains for each total after adding a portion, and the number of the count that reaches it."""
    size = min(room, len(best) - 1 + int(extra[-1])) + 1
    better, pick = np.full(size, -np.inf), np.zeros(size, np.int32)
    for number, (more, gain) in enumerate(zip(extra.tolist(), gains, strict=True)):
        if more >= size:
            break
        reached = best[: size - more] + gain
        here = slice(more, more + len(reached))
        wins = reached > better[here]  # strictly: of equal gains the smaller count wins, on every machine
        better[here][wins], pick[here][wins] = reached[wins], number
    return better, pick


def _last_pick(
    best: NDArray[np.float64], extra: NDArray[np.int64], gains: NDArray[np.float64], room: int
) -> int | None:
    """The index of the best count of the last portion that meets the total, together with the others; None if none."""
    others = room - extra
    fits = (others >= 0) & (others < len(best))
    sums = np.where(fits, best[np.where(fits, others, 0)] + gains, -np.inf)
    number = int(sums.argmax())
    return None if sums[number] == -np.inf else number


def even_gains(portions: Sequence[Portion]) -> Gains:
    """Gains under which all portions keep about the same share of their largest count."""
    return [_even(portion) for portion in portions]


def _even(portion: Portion) -> NDArray[np.float64]:
    # The value of one more unit falls linearly from 1 to 0 at the largest count, so the optimum keeps the same share of
    # every portion. The gain is the sum of these values, which is quadratic.
    counts = np.asarray(portion.counts, np.float64)
    gains: NDArray[np.float64] = counts - counts**2 / (2 * max(counts[-1], 1.0))
    return gains


def has_even_steps(portions: Sequence[Portion]) -> bool:
    """Whether all portions have the same steps, so that every split can lead on to every lower total."""
    steps = np.concatenate([portion.steps for portion in portions])
    return not len(steps) or bool((steps == steps[0]).all())


def chain(portions: Sequence[Portion], falling: Sequence[int]) -> tuple[Split, ...] | None:
    """Splits of falling totals in which no portion ever grows; None if none is found.

    Each split is about even. If this finds no chain, an uneven one may still exist.
    """
    # From K upwards: each split is a lower bound for the split before it. In the other direction, an early split could
    # leave no way to a later total.
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
    """A plan with each count moved to the nearest total that can be met on a chain down to K.

    Args:
        portions: The portions.
        falling: The plan; its last count, K, must be a total that can be met.

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
    """The nearest total that can be met and is not below K; of two at the same distance, the lower one."""
    near = [found for found in _nearest_set(met, total) if found >= keep]
    return min(near, key=lambda found: abs(found - total))
