"""How many units go where nothing is ranked: a share of each space, an uneven one, a single one."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import floor
from typing import TypeAlias

import numpy as np

from keepk.graph.edits import Indices
from keepk.graph.maps import Flags
from keepk.graph.solve import ALIGNED

Going: TypeAlias = Callable[[int, int], int]  # of so many that may be chosen, and so many living ones, how many go


def share_of(share: Fraction) -> Going:
    """That share, rounded down; one stays."""
    return lambda choosable, living: min(floor(choosable * share), living - 1)


def uneven_share(place: int) -> Going:
    """Another share at every place. What stays are two or more, since torch goes other ways about dims of size 1."""
    share = Fraction(1 + 5 * place % 8, 9)

    def going(choosable: int, living: int) -> int:
        left = max(living - floor(choosable * share), 2)
        return living - (left if living < 4 * ALIGNED else max(left // ALIGNED, 1) * ALIGNED)

    return going


def one(choosable: int, living: int) -> int:
    """A single one."""
    return 1 if choosable and living > 1 else 0


def first_of(
    blocks: Sequence[Indices], rank: Indices, alive: Flags, free: Flags, going: Going, multiple: int
) -> Indices:
    """The same number of each block: the lowest ranks, and in the order of the block where ranks are equal."""
    living = [block[alive[block]] for block in blocks]
    members = [block[np.argsort(rank[block], kind="stable")] for block in (b[free[b]] for b in living)]
    count = min(going(len(some), len(all_)) for some, all_ in zip(members, living, strict=True))
    count = fitting(count, map(len, living), multiple)
    return np.concatenate([some[:count] for some in members])


def fitting(count: int, sizes: Iterable[int], multiple: int) -> int:
    """The largest number up to `count` that leaves a multiple of each size.

    >>> fitting(11, [24, 16], 8), fitting(7, [24], 8), fitting(5, [24], 1)
    (8, 0, 5)
    """
    known = list(sizes)
    fits = (n for n in range(count, 0, -1) if not any((size - n) % multiple for size in known))
    return next(fits, 0)
