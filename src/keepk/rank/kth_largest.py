"""The k-th largest score of several tensors, exactly, in about one read of them.

A random sample gives a bracket [low, high] that very likely contains the k-th largest score. One sweep counts the
scores above the bracket and gathers those inside. If the counts say that the answer is inside, it is found exactly
among the few gathered scores; otherwise the next round searches above or below. Sampling affects only the speed, never
the answer. Values that fill a bracket by themselves (zeros, quantised weights) are counted, not gathered.

Of the scores 5 1 4 / 3 2 in two tensors, the third largest is 3, with two above it in the first tensor:

>>> tensors = [Ranked("a", torch.tensor([5.0, 1.0, 4.0])), Ranked("b", torch.tensor([3.0, 2.0]))]
>>> kth_largest(tensors, alive=[3, 2], k=3, sizes=Sizes())
Threshold(value=3.0, above=[2, 0], equal=[0, 1])

Large tensors are read in pieces that fit in a core's cache. A selection over a billion weights is bound by memory.
Every step on a whole tensor (abs, compare, count) would write a temporary of its size and read it back. On a piece of
256K entries the temporaries stay in the cache and are reused for the next piece, so the weights are read from memory
once and nothing large is allocated.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Ranked(NamedTuple):
    """One tensor whose entries are ranked.

    Attributes:
        name: Its name, for errors.
        scores: The scores, or the weights themselves if ``absolute``.
        dead: A mask of the entries that were pruned before; these are never kept.
        absolute: Whether to rank by ``|scores|``, without storing the magnitudes as a tensor.
        floor: At least ``min(floor, alive)`` entries are kept.
    """

    name: str
    scores: Tensor
    dead: Tensor | None = None
    absolute: bool = False
    floor: int = 0


@dataclass(frozen=True)
class Sizes:
    """How many entries are read, sampled and gathered at a time. This affects speed and memory, never the result."""

    piece: int = 1 << 18  # 1 MB of float32: a piece and its flags stay in the cache of one core
    accelerator_piece: int = 1 << 24  # on a GPU each piece costs kernel launches, so there are few
    sample: int = 1 << 18
    room: int = 1 << 23  # entries gathered for the exact last step


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU kernels on one thread within the context."""
    # A piece of 256K entries takes tens of microseconds. Waking the threads of a pool and waiting for the slowest one
    # takes about as long, and longer on a shared machine (docs/decisions/0006).
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pieces(sizes: Sizes, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of the same shape, piece by piece in row-major order, none larger than the piece size."""
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    first = tensors[0]
    if first.numel() == 0:
        return
    size = sizes.piece if first.device.type == "cpu" else sizes.accelerator_piece
    if first.numel() <= size:
        yield tensors
        return
    # Views along the first axes instead of a flat copy: a channels_last or sliced tensor has no flat view.
    row = first[0].numel()
    if row <= size:
        yield from zip(*(torch.split(tensor, size // row) for tensor in tensors), strict=True)
        return
    for rows in zip(*(tensor.unbind() for tensor in tensors), strict=True):
        yield from pieces(sizes, *rows)


def memory_order(scores: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The same tensors with their axes in the memory order of ``scores``, so that pieces are read contiguously."""
    axes = sorted(range(scores.dim()), key=scores.stride, reverse=True)
    return tuple(tensor.permute(axes) for tensor in (scores, *others))


def round_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` that is <= value, so that the same numbers of ``dtype`` lie above both.

    >>> round_down(0.1, torch.float16), round_down(0.5, torch.float16), round_down(1e9, torch.float16)
    (0.0999755859375, 0.5, 65504.0)
    """
    if math.isinf(value) or dtype == torch.float64:
        return value
    info = torch.finfo(dtype)
    step = max(math.ldexp(info.eps, math.frexp(value)[1] - 1), info.smallest_normal * info.eps)
    rounded = math.floor(value / step) * step
    return min(rounded, info.max) if rounded >= info.min else -math.inf


def round_up(value: float, dtype: torch.dtype) -> float:
    """The smallest number of ``dtype`` that is >= value."""
    return -round_down(-value, dtype)


def count(flags: Tensor) -> Tensor:
    """The number of flags that are set."""
    if flags.numel() % 1024:
        return flags.count_nonzero()
    # Eight flags are added at once as the bytes of an int64, ten times faster than one by one. A byte counts to 255, so
    # summing 128 rows cannot overflow.
    return flags.view(torch.int64).view(128, -1).sum(0).view(torch.uint8).sum()


def gather(values: Tensor, flags: Tensor) -> Tensor:
    """``values[flags]``, for flags that are rarely set."""
    if values.numel() % 8:
        return values[flags]
    # Most words of eight flags are empty. Finding the others first is six times faster.
    words = flags.view(torch.int64).nonzero().squeeze(1)
    return values.view(-1, 8).index_select(0, words)[flags.view(-1, 8).index_select(0, words)]


class Reader:
    """Reads and compares the pieces of one tensor, in buffers that are reused for every piece."""

    def __init__(self, tensor: Ranked, sizes: Sizes) -> None:
        scores = tensor.scores
        cpu = scores.device.type == "cpu"
        length = min(scores.numel(), sizes.piece if cpu else sizes.accelerator_piece)
        self.absolute = tensor.absolute
        self._values = torch.empty(length, dtype=scores.dtype, device=scores.device)
        self._compared = torch.empty_like(self._values) if cpu else None
        self._flags = [torch.empty(length, dtype=torch.bool, device=scores.device) for _ in range(2)]

    def values(self, piece: Tensor) -> Tensor:
        """The values that a piece is ranked by, flat; valid until the next call."""
        if self.absolute:
            torch.abs(piece, out=self._values[: piece.numel()].view(piece.shape))
        elif piece.is_contiguous():
            return piece.view(-1)
        else:
            self._values[: piece.numel()].view(piece.shape).copy_(piece)
        return self._values[: piece.numel()]

    def flags(self, slot: int, length: int) -> Tensor:
        """One of the two flag buffers."""
        return self._flags[slot][:length]

    def compare(self, operator: Callable[..., Tensor], values: Tensor, bound: float, out: Tensor) -> Tensor:
        """Write ``operator(values, bound)`` into flags of any shape; ``bound`` must be exact in the values' dtype."""
        if self._compared is None:
            return out.copy_(operator(values, bound).view(out.shape))
        # On a CPU, comparing floats into floats and converting those to flags is three times faster than comparing
        # into flags.
        compared = self._compared[: values.numel()]
        operator(values, bound, out=compared)
        return out.copy_(compared.view(out.shape))


DEVIATIONS = (
    4  # standard deviations of the sampled rank on each side of a bracket: one miss in 10,000 on unordered data
)


class Threshold(NamedTuple):
    """The k-th largest score, and for each tensor how many entries are above it and equal to it."""

    value: float
    above: list[int]
    equal: list[int]


class Search(NamedTuple):
    """The closed interval known to contain the answer, and for each tensor how many entries are above and inside."""

    low: float
    high: float
    above: list[int]
    inside: list[int]


class Swept(NamedTuple):
    """How many entries of one tensor are above and inside an interval; ``picks`` are those inside, if not too many."""

    above: int
    inside: int
    picks: Tensor | None


def kth_largest(tensors: Sequence[Ranked], alive: Sequence[int], k: int, sizes: Sizes) -> Threshold:
    """The k-th largest score among the entries that are not pruned.

    Args:
        tensors: The tensors.
        alive: For each tensor, how many of its entries are not pruned.
        k: The rank, 1 <= k <= sum(alive).
        sizes: How much is read, sampled and gathered at a time.
    """
    search = Search(-math.inf, math.inf, [0] * len(tensors), list(alive))
    # A generator with a fixed seed, so that an event takes the same time on every process and leaves the user's random
    # state alone.
    generator = random.Random(0)
    while True:
        bottom, top = _next_bracket(tensors, search, k, generator, sizes)
        swept = _sweep_all(tensors, bottom, top, sizes)
        found = _threshold(swept, bottom, top, k)
        if found is not None:
            return found
        search = _narrowed(search, swept, bottom, top, k)


def _next_bracket(
    tensors: Sequence[Ranked], search: Search, k: int, generator: random.Random, sizes: Sizes
) -> tuple[float, float]:
    """A bracket from a sample, or the whole search interval if few entries are left in it."""
    among = sum(search.inside)
    if among <= min(sizes.sample, sizes.room):
        return search.low, search.high
    # An odd stride, because an even one would always hit the same few columns of a layer of even width.
    stride = among // sizes.sample | 1
    sample = _sample(tensors, search.low, search.high, stride, generator, sizes)
    return _bracket(sample, (k - sum(search.above)) / among, search.low, search.high)


def _threshold(swept: Sequence[Swept], bottom: float, top: float, k: int) -> Threshold | None:
    """The answer, if it lies in the bracket and the bracket is a single value or was gathered."""
    over, inside = [part.above for part in swept], [part.inside for part in swept]
    if not sum(over) < k <= sum(over) + sum(inside):
        return None
    if bottom == top:
        return Threshold(top, over, inside)
    picks = [part.picks for part in swept if part.picks is not None]
    return _exact(picks, over, k - sum(over)) if len(picks) == len(swept) else None


def _narrowed(search: Search, swept: Sequence[Swept], bottom: float, top: float, k: int) -> Search:
    """The interval to search next: above the bracket, below it, or the bracket itself."""
    # The bounds are moved by one float64 step, so that the entries at the ends of the bracket are counted once.
    over, inside = [part.above for part in swept], [part.inside for part in swept]
    down_to = _plus(over, inside)
    if sum(over) >= k:
        return Search(math.nextafter(top, math.inf), search.high, search.above, _minus(over, search.above))
    if sum(down_to) < k:
        rest = _minus(_plus(search.above, search.inside), down_to)
        return Search(search.low, math.nextafter(bottom, -math.inf), down_to, rest)
    return Search(bottom, top, over, inside)


def _sample(
    tensors: Sequence[Ranked], low: float, high: float, stride: int, generator: random.Random, sizes: Sizes
) -> Tensor:
    """Every ``stride``-th entry of each tensor, without those that are pruned or outside [low, high]."""
    parts = []
    for tensor in tensors:
        bottom, top = round_up(low, tensor.scores.dtype), round_down(high, tensor.scores.dtype)
        for piece in pieces(sizes, *memory_order(*_views(tensor))):
            # A random start in each piece: the first entries of all pieces could be alike (a filter's corner).
            start = generator.randrange(stride)
            scores, *dead = (view.reshape(-1)[start::stride] for view in piece)
            values = scores.abs() if tensor.absolute else scores
            chosen = (values >= bottom) & (values <= top)
            for flags in dead:
                chosen &= ~flags
            parts.append(values[chosen])
    return torch.cat(_together(parts))


def _bracket(sample: Tensor, share: float, low: float, high: float) -> tuple[float, float]:
    """A closed interval around the value that has ``share`` of the sample above it.

    The interval shrinks to that value if one of its sampled ends equals it, or if the sample is too small to narrow the
    interval.
    """
    size = len(sample)
    if size == 0:
        return low, high
    whole = low, high
    middle_rank = min(int(share * size), size - 1)
    margin = DEVIATIONS + math.ceil(DEVIATIONS * math.sqrt(size * share * (1 - share)))
    middle = _largest(sample, middle_rank)
    # The sampled values at the ends are excluded by one float step: a value that occurs often enough to be sampled
    # there may occur millions of times, and would fill the room for gathering.
    if middle_rank >= margin:
        end = _largest(sample, middle_rank - margin)
        high = math.nextafter(end, -math.inf) if end > middle else middle
    if middle_rank + margin < size:
        end = _largest(sample, middle_rank + margin)
        low = math.nextafter(end, math.inf) if end < middle else middle
    return (middle, middle) if middle in (low, high) or (low, high) == whole else (low, high)


def _largest(values: Tensor, rank: int) -> float:
    """The value at position ``rank`` in descending order."""
    if values.is_cuda:  # kthvalue is refused on CUDA under torch.use_deterministic_algorithms
        return values.sort(descending=True).values[rank].item()
    return values.kthvalue(len(values) - rank).values.item()


def _sweep_all(tensors: Sequence[Ranked], low: float, high: float, sizes: Sizes) -> list[Swept]:
    """Sweep every tensor; the room for gathered entries is shared by all of them."""
    room = sizes.room if low < high else 0  # a single value need not be gathered, only counted
    swept = []
    for tensor in tensors:
        swept.append(_sweep(tensor, low, high, room, sizes))
        # Once one tensor could not be gathered the answer cannot be found in this round, so the others only count.
        room = 0 if swept[-1].picks is None else room - swept[-1].inside
    return swept


def _sweep(tensor: Ranked, low: float, high: float, room: int, sizes: Sizes) -> Swept:
    """Count the entries above and inside [low, high] that are not pruned; gather those inside while there is room."""
    reader, dtype = Reader(tensor, sizes), tensor.scores.dtype
    # Bounds are float64, scores may be float16. Rounded into the interval they compare in the scores' dtype, without
    # converting a whole piece.
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


def _exact(parts: list[Tensor], above: list[int], rank: int) -> Threshold:
    """The ``rank``-th largest of the gathered entries, given how many entries are above all of them."""
    parts = _together(parts)
    value = _largest(torch.cat(parts), rank - 1)
    over = [int((part > value).sum()) for part in parts]
    return Threshold(value, _plus(above, over), [int((part == value).sum()) for part in parts])


def _views(tensor: Ranked) -> tuple[Tensor, ...]:
    return (tensor.scores,) if tensor.dead is None else (tensor.scores, tensor.dead)


def _together(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts on one device, in a dtype that represents all of them exactly."""
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return [part.to(parts[0].device, dtype) for part in parts]


def _plus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _minus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]
