"""The exact selection of weights that are sharded over processes, with three sums over the processes.

The order is that of `rank.weights`: by score, then by tensor, then by row-major index in the whole tensor. So all
processes together keep the same entries as one process with the whole tensors would.

Floats sort like their bits: for positive ones, the bits read as an integer are in the same order. Each process counts
its entries by the upper 16 bits of their scores, and the sum of these histograms says in which bucket the k-th largest
lies. A second histogram, of the lower bits within this bucket, gives its value exactly. (Scores of 16 bits need one
histogram, scores of 64 bits four.) The last sum counts the entries above and equal to it in each tensor. A histogram
has 65,536 counts, whatever the size of the model.

Ties are the entries equal to the k-th largest score. If not all of them stay, those do that come first in the whole
tensors. For this the last sum also counts ties by ranges of each tensor. Where shards are ranges of rows, as FSDP2
makes them, the ranges are the shards, and the process that holds the range in which the ties end decides there alone.
Otherwise, this range is divided again until it has one entry.

>>> part = Part(Ranked("fc", torch.tensor([0.1, -3.0, 2.0, -2.0]), absolute=True), Block((4,), (0,), (4,), True, (0,)))
>>> [cut] = cut_points([part], [4], 2, lambda stage, count: count())  # one process: nothing to add up
>>> cut.point, dead_mask(part, cut)
(CutPoint(value=2.0, ties=1, kept=2), tensor([ True, False, False,  True]))
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from keepk.model.sharded import Block
from keepk.rank.kth_largest import Ranked, Reader, Sizes, one_thread, pieces, round_down
from keepk.rank.weights import CutPoint, checked, with_floors
from keepk.rank.weights import dead_mask as whole_dead_mask

# The sum over all processes of the int64 vector that each of them computes. It gets a text that says which sum it is,
# equal in all processes, and the function that computes the own vector.
Total = Callable[[str, Callable[[], Tensor]], Tensor]
DIGIT = 16  # bits that one histogram resolves
ROOM = 110_000  # counts in one sum, 880 kB
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """The part of a tensor that a process holds: its scores and mask, and where it lies in the whole tensor."""

    ranked: Ranked
    block: Block


@dataclass(frozen=True)
class ShardedCut:
    """Where one tensor is cut, equal in all processes.

    Attributes:
        point: The cut of the whole tensor. Its ties are the first ones in row-major order.
        low: Ties before this flat index of the whole tensor are kept.
        high: Ties from this index on are pruned.
        first: The number of ties between `low` and `high` that are kept. They are in the block of a single process (and
            in its replicas).
    """

    point: CutPoint
    low: int = 0
    high: int = 0
    first: int = 0

    @property
    def kept(self) -> int:
        """How many entries of the whole tensor are kept."""
        return self.point.kept


def cut_points(parts: Sequence[Part], alive: Sequence[int], k: int, total: Total) -> list[ShardedCut]:
    """Where to cut so that exactly the k best entries of all tensors are kept; see `rank.weights.cut_points`.

    Args:
        parts: This process's parts of the tensors, in the same order in all processes.
        alive: For each tensor, how many entries of the whole tensor are not pruned.
        k: How many entries are kept in total.
        total: Sums a vector over the processes.
    """
    floors = [min(part.ranked.floor, count) for part, count in zip(parts, alive, strict=True)]
    unchecked = [*parts]

    def shared(places: Sequence[int], budget: int) -> list[ShardedCut]:
        if budget == 0:
            return [ShardedCut(CutPoint(math.inf, 0, 0))] * len(places)

        def check_first() -> None:  # within a sum, so that an error reaches the other processes
            while unchecked:
                checked(unchecked.pop().ranked, Sizes())

        return _shared_cut([parts[i] for i in places], budget, total, check_first)

    return with_floors(k, alive, floors, shared)


@one_thread()
def dead_mask(part: Part, cut: ShardedCut) -> Tensor:
    """A new mask of this process's pruned entries, those pruned before included."""
    ranked = part.ranked
    pruned = whole_dead_mask(ranked, replace(cut.point, ties=0))
    left = cut.first
    if cut.point.ties == 0:
        return pruned
    done = 0
    dead = () if ranked.dead is None else (ranked.dead,)
    for scores, flags, *before in pieces(Sizes(), ranked.scores.detach(), pruned, *dead):
        equal = (scores.abs() if ranked.absolute else scores) == cut.point.value
        for gone in before:
            equal &= ~gone
        places = equal.reshape(-1).nonzero().squeeze(1)
        flat = part.block.flat(places + done)
        inside = (flat >= cut.low) & (flat < cut.high)
        stays = (flat < cut.low) | (inside & (inside.cumsum(0) <= left))
        left -= min(left, int(inside.sum()))
        kept = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
        kept[places[stays]] = True
        flags.logical_and_(~kept.view(flags.shape))
        done += scores.numel()
    return pruned


# The k-th largest score -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Keys:
    """How scores are mapped to integers that sort like them.

    Attributes:
        dtype: The float type that represents the scores of all tensors exactly.
        absolute: Whether scores are absolute values, so that there is no sign.
    """

    dtype: torch.dtype
    absolute: bool

    @property
    def bits(self) -> int:
        """How many bits a key has."""
        return 8 * self.dtype.itemsize - self.absolute

    def of(self, values: Tensor) -> Tensor:
        """The keys of scores, as non-negative integers in the lower `bits` bits."""
        size = self.dtype.itemsize
        values = values.to(self.dtype)
        keys = (values.abs() if self.absolute else values + 0.0).view(INTEGERS[size])  # + 0.0 turns -0.0 into 0.0
        if not self.absolute:
            info = torch.iinfo(keys.dtype)
            keys = torch.where(keys < 0, ~keys, keys ^ info.min)
        return keys.to(torch.int32) & 0xFFFF if size == 2 else keys

    def value(self, key: int) -> float:
        """The score with this key.

        >>> keys = _Keys(torch.float32, False)
        >>> [keys.value(int(key) % 2**32) for key in keys.of(torch.tensor([-0.5, 0.0, 3.0]))]
        [-0.5, 0.0, 3.0]
        """
        size, sign = self.dtype.itemsize, 1 << (8 * self.dtype.itemsize - 1)
        bits = key if self.absolute else key ^ sign if key & sign else ~key
        signed = (bits + sign) % (2 * sign) - sign
        return float(torch.tensor([signed], dtype=INTEGERS[size]).view(self.dtype).item())


def _shared_cut(parts: Sequence[Part], k: int, total: Total, check: Callable[[], None]) -> list[ShardedCut]:
    """One cut through all tensors, without floors."""
    dtype = parts[0].ranked.scores.dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.ranked.scores.dtype)
    keys = _Keys(dtype, parts[0].ranked.absolute)
    key, left, low = 0, k, keys.bits
    what = f"{k} of {[(it.ranked.name, it.block.shape) for it in parts]} by {dtype}"
    while low:
        width = min(DIGIT, low)
        low -= width
        found = total(f"histogram at bit {low}: {what}", partial(_histogram, parts, keys, key, low, width, check))
        above = found.flip(0).cumsum(0)
        reached = int((above < left).sum())  # the number of top buckets that together have too few
        left -= int(above[reached - 1]) if reached else 0
        key = (key << width) | (len(found) - 1 - reached)
        equal = int(found[len(found) - 1 - reached])
    value = keys.value(key)
    ranges = [_ranges(it.block, 0, math.prod(it.block.shape), _room(parts, it)) for it in parts] if left < equal else []
    counts = total(f"ties: {what}", partial(_count, parts, value, ranges))
    over, same = counts[: len(parts)].tolist(), counts[len(parts) : 2 * len(parts)].tolist()
    cuts = list[ShardedCut]()
    for place, (part, higher, ties) in enumerate(zip(parts, over, same, strict=True)):
        stay = min(ties, left)
        left -= stay
        cut = ShardedCut(CutPoint(value, stay, higher + stay, ties), high=0)
        if stay == ties:
            cut = replace(cut, low=math.prod(part.block.shape), high=math.prod(part.block.shape))
        elif stay:
            offset = 2 * len(parts) + sum(len(it) - 1 for it in ranges[:place])
            by_range = counts[offset : offset + len(ranges[place]) - 1].tolist()
            cut = _first_ties(part, cut, ranges[place], by_range, total)
        cuts.append(cut)
    return cuts


def _histogram(
    parts: Sequence[Part], keys: _Keys, prefix: int, low: int, width: int, check: Callable[[], None]
) -> Tensor:
    """Count own entries whose keys begin with a prefix, by the bits from ``low`` to ``low + width``."""
    check()
    counts = torch.zeros(1 << width, dtype=torch.int64, device=parts[0].ranked.scores.device)
    rest = keys.bits - low - width
    for part in (it for it in parts if it.block.counts):
        for values in _alive(part.ranked):
            found = keys.of(values)
            if rest:
                found = found[((found >> (low + width)) & ((1 << rest) - 1)) == prefix]
            digits = (found >> low) & ((1 << width) - 1)
            counts += torch.bincount(digits, minlength=1 << width).to(counts.device)
    return counts


def _alive(ranked: Ranked) -> Iterator[Tensor]:
    """The scores of entries that are not pruned, piece by piece."""
    reader = Reader(ranked, Sizes())
    for scores, *dead in pieces(Sizes(), ranked.scores.detach(), *(() if ranked.dead is None else (ranked.dead,))):
        values = reader.values(scores)
        yield values[~dead[0].reshape(-1)] if dead else values


# Ties -----------------------------------------------------------------------------------------------------------------


def _room(parts: Sequence[Part], part: Part) -> int:
    """Into how many ranges a tensor is divided in the sum over all tensors."""
    of_shards = sum(len(it.block.edges) for it in parts if it.block.edges is not None)
    others = sum(it.block.edges is None for it in parts)
    room = ROOM - 2 * len(parts)
    if part.block.edges is not None:
        return len(part.block.edges) if of_shards + others <= room else 1
    return max(1, (room - of_shards) // others)


def _ranges(block: Block, low: int, high: int, most: int) -> list[int]:
    """The ends of at most `most` ranges that divide the flat indices from `low` to `high`, at borders of shards."""
    if block.edges is None:
        starts = list(range(low, high, max(1, -(-(high - low) // most))))  # an empty tensor has none
    else:
        inside = block.edges[bisect_right(block.edges, low) : bisect_left(block.edges, high)]
        starts = [low, *inside]
        starts = starts[:: -(-len(starts) // most)]
    return [*starts, high]


def _count(parts: Sequence[Part], value: float, ranges: Sequence[Sequence[int]]) -> Tensor:
    """Count own entries above a score in each tensor, those equal to it, and these by ranges of the tensors."""
    device = parts[0].ranked.scores.device
    above, equal = (torch.zeros(len(parts), dtype=torch.int64, device=device) for _ in range(2))
    by_range = [torch.zeros(len(ends) - 1, dtype=torch.int64, device=device) for ends in ranges]
    for place, part in enumerate(parts):
        if not part.block.counts:
            continue
        bound = round_down(value, part.ranked.scores.dtype)
        for values in _alive(part.ranked):
            above[place] += (values > bound).sum().to(device)
            equal[place] += (values == bound).sum().to(device) if bound == value else 0
        if ranges and bound == value:
            by_range[place] += _ties_by_range(part, value, ranges[place]).to(device)
    return torch.cat([above, equal, *by_range])


def _ties_by_range(part: Part, value: float, ends: Sequence[int]) -> Tensor:
    """How many of this process's entries equal a score, by ranges of flat indices of the whole tensor."""
    ranked, done = part.ranked, 0
    bounds = torch.tensor(ends, device=ranked.scores.device)
    counts = torch.zeros(len(ends) + 1, dtype=torch.int64, device=ranked.scores.device)
    dead = () if ranked.dead is None else (ranked.dead,)
    for scores, *before in pieces(Sizes(), ranked.scores.detach(), *dead):
        equal = (scores.abs() if ranked.absolute else scores) == value
        for gone in before:
            equal &= ~gone
        flat = part.block.flat(equal.reshape(-1).nonzero().squeeze(1) + done)
        counts += torch.bincount(torch.bucketize(flat, bounds, right=True), minlength=len(counts))
        done += scores.numel()
    return counts[1:-1]  # without those before the first range and after the last one


def _first_ties(part: Part, cut: ShardedCut, ends: Sequence[int], by_range: Sequence[int], total: Total) -> ShardedCut:
    """The cut with the range in which the last kept tie lies, divided until one process can decide in it."""
    left, edges = cut.point.ties, part.block.edges
    while True:
        place = 0
        while left > by_range[place]:
            left -= by_range[place]
            place += 1
        low, high, ties = ends[place], ends[place + 1], by_range[place]
        of_one = edges is not None and bisect_left(edges, high) - bisect_right(edges, low) == 0
        if left == ties or of_one or high - low == 1:
            return replace(cut, low=high if left == ties else low, high=high, first=left)
        ends = _ranges(part.block, low, high, ROOM)
        count = partial(_ties_or_none, part, cut.point.value, ends)
        by_range = total(f"ties of {part.ranked.name} from {low} to {high}", count).tolist()


def _ties_or_none(part: Part, value: float, ends: Sequence[int]) -> Tensor:
    found = _ties_by_range(part, value, ends)
    return found if part.block.counts else torch.zeros_like(found)
