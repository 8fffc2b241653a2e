"""The k-th largest score of many tensors, exactly, in about one read of them.

A sample brackets the k-th largest; one sweep counts what lies above the bracket and gathers what lies inside; the
few gathered entries hold the answer. A bracket that missed, or that holds too much, starts a narrower round.
Values that fill a bracket (zeros, quantized weights) are counted, never gathered.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepk.rank.pieces import Ranked, Reader, Sizes, count, gather, memory_order, pieces, round_down, round_up

DEVIATIONS = 4  # of the sampled rank, on each side of a bracket: one miss in 10,000 on unordered data


class Standing(NamedTuple):
    """Where the k-th largest stands: its value, and how many entries of each tensor are above and equal to it."""

    value: float
    above: list[int]
    equal: list[int]


class Search(NamedTuple):
    """The closed interval that has the answer, and how many entries of each tensor are above and inside."""

    low: float
    high: float
    above: list[int]
    inside: list[int]


class Swept(NamedTuple):
    """What one tensor has above and inside a closed interval; ``picks`` is None if it was too much to gather."""

    above: int
    inside: int
    picks: Tensor | None


def kth_largest(tensors: Sequence[Ranked], alive: Sequence[int], k: int, sizes: Sizes) -> Standing:
    """The k-th largest alive score, 1 <= k <= sum(alive)."""
    search = Search(-math.inf, math.inf, [0] * len(tensors), list(alive))
    dice = random.Random(0)
    while True:
        bottom, top = _next_bracket(tensors, search, k, dice, sizes)
        swept = _sweep_all(tensors, bottom, top, sizes)
        found = _standing(swept, bottom, top, k)
        if found is not None:
            return found
        search = _narrowed(search, swept, bottom, top, k)


def _next_bracket(
    tensors: Sequence[Ranked], search: Search, k: int, dice: random.Random, sizes: Sizes
) -> tuple[float, float]:
    """A bracket by a sample; all that is left, if that is little."""
    among = sum(search.inside)
    if among <= min(sizes.sample, sizes.room):
        return search.low, search.high
    stride = among // sizes.sample | 1  # odd: no resonance with widths, which are often even
    sample = _sample(tensors, search.low, search.high, stride, dice, sizes)
    return _bracket(sample, (k - sum(search.above)) / among, search.low, search.high)


def _standing(swept: Sequence[Swept], bottom: float, top: float, k: int) -> Standing | None:
    """The answer, if it lies in the bracket, and this is one value or was gathered."""
    over, inside = [part.above for part in swept], [part.inside for part in swept]
    if not sum(over) < k <= sum(over) + sum(inside):
        return None
    if bottom == top:
        return Standing(top, over, inside)
    picks = [part.picks for part in swept if part.picks is not None]
    return _exact(picks, over, k - sum(over)) if len(picks) == len(swept) else None


def _narrowed(search: Search, swept: Sequence[Swept], bottom: float, top: float, k: int) -> Search:
    """What a bracket leaves to search: what is above it, what is below, or itself."""
    over, inside = [part.above for part in swept], [part.inside for part in swept]
    down_to = _plus(over, inside)
    if sum(over) >= k:
        return Search(math.nextafter(top, math.inf), search.high, search.above, _minus(over, search.above))
    if sum(down_to) < k:
        rest = _minus(_plus(search.above, search.inside), down_to)
        return Search(search.low, math.nextafter(bottom, -math.inf), down_to, rest)
    return Search(bottom, top, over, inside)


def _sample(
    tensors: Sequence[Ranked], low: float, high: float, stride: int, dice: random.Random, sizes: Sizes
) -> Tensor:
    """Every ``stride``-th entry of each tensor, of which those alive and inside [low, high]."""
    parts = []
    for tensor in tensors:
        bottom, top = round_up(low, tensor.scores.dtype), round_down(high, tensor.scores.dtype)
        for piece in pieces(sizes, *memory_order(*_views(tensor))):
            start = dice.randrange(stride)
            scores, *dead = (view.reshape(-1)[start::stride] for view in piece)
            values = scores.abs() if tensor.absolute else scores
            chosen = (values >= bottom) & (values <= top)
            for flags in dead:
                chosen &= ~flags
            parts.append(values[chosen])
    return torch.cat(_together(parts))


def _bracket(sample: Tensor, share: float, low: float, high: float) -> tuple[float, float]:
    """The closed interval around the value that has ``share`` of the sample above it.

    It excludes the sampled values at its ends, so ties there are never gathered; where an end equals the middle,
    and where the sample is too small to narrow it, the interval is that one value.
    """
    size = len(sample)
    if size == 0:
        return low, high
    whole = low, high
    middle_rank = min(int(share * size), size - 1)
    margin = DEVIATIONS + math.ceil(DEVIATIONS * math.sqrt(size * share * (1 - share)))
    middle = _largest(sample, middle_rank)
    if middle_rank >= margin:
        end = _largest(sample, middle_rank - margin)
        high = math.nextafter(end, -math.inf) if end > middle else middle
    if middle_rank + margin < size:
        end = _largest(sample, middle_rank + margin)
        low = math.nextafter(end, math.inf) if end < middle else middle
    return (middle, middle) if middle in (low, high) or (low, high) == whole else (low, high)


def _largest(values: Tensor, rank: int) -> float:
    """The value with ``rank`` others before it in descending order."""
    if values.is_cuda:  # there kthvalue is refused under torch.use_deterministic_algorithms
        return values.sort(descending=True).values[rank].item()
    return values.kthvalue(len(values) - rank).values.item()


def _sweep_all(tensors: Sequence[Ranked], low: float, high: float, sizes: Sizes) -> list[Swept]:
    room = sizes.room if low < high else 0
    swept = []
    for tensor in tensors:
        swept.append(_sweep(tensor, low, high, room, sizes))
        room = 0 if swept[-1].picks is None else room - swept[-1].inside
    return swept


def _sweep(tensor: Ranked, low: float, high: float, room: int, sizes: Sizes) -> Swept:
    """Count what is alive above and inside [low, high]; gather the inside while there is room for it."""
    reader, dtype = Reader(tensor, sizes), tensor.scores.dtype
    bottom, top = round_up(low, dtype), round_down(high, dtype)
    above = torch.zeros((), dtype=torch.int64, device=tensor.scores.device)
    inside = above.clone()
    picks: list[Tensor] | None = [tensor.scores.new_empty(0)]
    for scores, *dead in pieces(sizes, *memory_order(*_views(tensor))):
        values = reader.values(scores)
        over = reader.compare(torch.gt, values, top, out=reader.flags(0, len(values)))
        within = reader.compare(torch.ge, values, bottom, out=reader.flags(1, len(values)))
        for flags in dead:
            torch.gt(over, flags.reshape(-1), out=over)  # True > False: over and not dead
            torch.gt(within, flags.reshape(-1), out=within)
        within.bitwise_xor_(over)
        above += count(over)
        inside += count(within)
        if picks is not None:
            picks.append(gather(values, within))
            room -= len(picks[-1])
            picks = picks if room >= 0 else None
    return Swept(int(above), int(inside), None if picks is None else torch.cat(picks))


def _exact(parts: list[Tensor], above: list[int], rank: int) -> Standing:
    """The ``rank``-th largest of what was gathered, below what is known to be above."""
    parts = _together(parts)
    value = _largest(torch.cat(parts), rank - 1)
    over = [int((part > value).sum()) for part in parts]
    return Standing(value, _plus(above, over), [int((part == value).sum()) for part in parts])


def _views(tensor: Ranked) -> tuple[Tensor, ...]:
    return (tensor.scores,) if tensor.dead is None else (tensor.scores, tensor.dead)


def _together(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts on one device, in a dtype that holds all of them exactly."""
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return [part.to(parts[0].device, dtype) for part in parts]


def _plus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _minus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]
