"""Choosing units without ranking them: for `Graph.choose`, and for the trial cuts of `probe`.

All choices meet the same conditions. Units that are bound (`Graph.bindings`) are removed in equal numbers from each
block, every block keeps at least one unit, and the number left is divisible by the group's `multiple`. They differ in
the number of units to remove, a function of type `Going`, and in the order in which units are chosen:

>>> half, uneven = share_of(Fraction(1, 2)), uneven_share(1)
>>> [(size, half(size, size), uneven(size, size), one(size, size)) for size in (1, 2, 16, 64)]
[(1, 0, -1, 0), (2, 1, 0, 1), (16, 8, 10, 1), (64, 32, 48, 1)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import count, repeat
from math import floor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from keepk.errors import ShrinkError
from keepk.graph.ids.maps import Flags
from keepk.graph.solve.solve import ALIGNED
from keepk.model.edits import Indices
from keepk.plan.names import shown
from keepk.plan.numbers import exact_share

if TYPE_CHECKING:
    from keepk.graph.graph import Graph

# The number of units to remove from a block, given how many may be chosen and how many are alive.
Going: TypeAlias = Callable[[int, int], int]


def share_of(share: Fraction) -> Going:
    """A share of the units that may be chosen, rounded down; one unit stays."""
    return lambda choosable, living: min(floor(choosable * share), living - 1)


def uneven_share(place: int) -> Going:
    """A share that depends on the place of the block, so that equal widths become different ones.

    At least two units stay, because torch treats dims of size 1 differently. Wide blocks keep a multiple of 8; a
    separate cut of one unit each (`choose_one`) tests whether other widths fit.
    """
    share = Fraction(1 + 5 * place % 8, 9)  # ninths in a mixed-up order: 1, 6, 3, 8, 5, 2, 7, 4

    def going(choosable: int, living: int) -> int:
        left = max(living - floor(choosable * share), 2)
        return living - (left if living < 4 * ALIGNED else max(left // ALIGNED, 1) * ALIGNED)

    return going


def one(choosable: int, living: int) -> int:
    """A single unit, if another one stays."""
    return 1 if choosable and living > 1 else 0


def choose(graph: Graph, share: float, *, seed: int | None, lossy: bool) -> Indices:
    """See `Graph.choose`."""
    exact = exact_share(share, "choose: share", ShrinkError)
    size = len(graph.units)
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ShrinkError(f"choose: seed={shown(seed)}. Pass an int of 0 or more, or None for the first ones.")
    rank = np.zeros(size, np.int64) if seed is None else np.random.default_rng(seed).permutation(size)
    chosen = _chosen(graph, repeat(share_of(exact)), rank, lossy=lossy)
    # The rank of a LoRA adapter is a user's setting, not a width of the model.
    ranks = [group.units for group in graph.groups if graph.adapter_of(group)]
    return chosen[~np.isin(chosen, np.concatenate(ranks))] if ranks else chosen


def choose_half(graph: Graph, *, lossy: bool = False) -> Indices:
    """Half of every group at random, including its last unit.

    Without the last unit, positions counted from the end (``x[:, -2]``) are different channels.
    """
    rank = np.random.default_rng(0).permutation(len(graph.units))
    for block in (block for blocks in graph.choices() for block in blocks):
        rank[block[-1:]] = -1
    return _chosen(graph, repeat(share_of(Fraction(1, 2))), rank, lossy=lossy)


def choose_unevenly(graph: Graph, *, lossy: bool = False) -> Indices:
    """A different share of every group, so that widths that were equal by coincidence become different."""
    rank = np.random.default_rng(1).permutation(len(graph.units))
    return _chosen(graph, map(uneven_share, count()), rank, lossy=lossy)


def choose_one(graph: Graph, *, lossy: bool = False) -> Indices:
    """The first unit of every group that has at least two, which shifts the positions of all others."""
    return _chosen(graph, repeat(one), np.zeros(len(graph.units), np.int64), lossy=lossy)


def choose_sources(graph: Graph, *, lossy: bool = False) -> Indices:
    """Half of every group of sources, unless that would empty some axis; their readings are removed with them."""
    free = _free(graph, lossy=lossy)
    source = np.isin(graph.units.group, [n for n, group in enumerate(graph.groups) if group.kind == "source"])
    half, rank = share_of(Fraction(1, 2)), np.zeros(len(free), np.int64)
    picks = [
        first_of(blocks, rank, graph.alive, free, half, graph.multiple(blocks))
        for blocks in graph.choices()
        if source[np.concatenate(blocks)].any()
    ]
    chosen = np.unique(np.concatenate([*picks, np.zeros(0, np.int64)]))
    if _is_possible(graph, chosen):
        return chosen
    # Together they would leave some reader without channels. Add them one by one while the cut stays possible.
    chosen = chosen[:0]
    for pick in picks:
        chosen = both if _is_possible(graph, both := np.union1d(chosen, pick)) else chosen
    return chosen


def _is_possible(graph: Graph, units: Indices) -> bool:
    try:
        graph.edits(units)
    except ShrinkError:
        return False
    return True


def _free(graph: Graph, *, lossy: bool) -> Flags:
    """The units that may be chosen: those alive, and lossy ones only on request."""
    return graph.alive if lossy else graph.alive & ~graph.units.lossy


def _chosen(graph: Graph, going: Iterable[Going], rank: Indices, *, lossy: bool) -> Indices:
    """The units with the lowest ranks; for each of `Graph.choices`, the next entry of `going` says how many."""
    free = _free(graph, lossy=lossy)
    for group in graph.groups:
        if group.kind == "source":  # removed when its last reading is
            free[group.units] = False
    chosen = [
        first_of(blocks, rank, graph.alive, free, how_many, graph.multiple(blocks))
        for blocks, how_many in zip(graph.choices(), going, strict=False)
    ]
    return _with_sources_left(graph, np.sort(np.concatenate([*chosen, np.zeros(0, np.int64)])))


def _with_sources_left(graph: Graph, chosen: Indices) -> Indices:
    """The choice without the readings of one source in each group that would otherwise lose all of its sources."""
    links = graph.links()
    for group in graph.groups:
        if group.kind == "source" and len(links):
            gone = ~graph.alive
            gone[chosen] = True
            own = links[np.isin(links[:, 0], group.units[graph.alive[group.units]])]
            if len(own) and gone[own[:, 1]].all():
                last = own[own[:, 0] == own[-1, 0], 1]
                chosen = chosen[~np.isin(chosen, last)]
    return chosen


def first_of(
    blocks: Sequence[Indices], rank: Indices, alive: Flags, free: Flags, going: Going, multiple: int
) -> Indices:
    """The same number of units from each block: the lowest ranks, in the order of the block where ranks are equal."""
    living = [block[alive[block]] for block in blocks]
    members = [block[np.argsort(rank[block], kind="stable")] for block in (b[free[b]] for b in living)]
    count = min(going(len(some), len(all_)) for some, all_ in zip(members, living, strict=True))
    count = fitting(count, map(len, living), multiple)
    return np.concatenate([some[:count] for some in members])


def fitting(count: int, sizes: Iterable[int], multiple: int) -> int:
    """The largest number up to `count` whose removal leaves a multiple of `multiple` of each size.

    >>> fitting(11, [24, 16], 8), fitting(7, [24], 8), fitting(5, [24], 1)
    (8, 0, 5)
    """
    known = list(sizes)
    fits = (n for n in range(count, 0, -1) if not any((size - n) % multiple for size in known))
    return next(fits, 0)
