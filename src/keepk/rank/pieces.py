"""Reading large tensors in pieces that fit in a core's cache; the exact selection is built on this.

A selection over a billion weights is bound by memory. Every step on a whole tensor (abs, compare, count) would write a
temporary of its size and read it back. On a piece of 256K entries the temporaries stay in the cache and are reused for
the next piece, so the weights are read from memory once and nothing large is allocated.
"""

import math
from collections.abc import Callable, Iterator
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
        dead: The entries that were pruned before, which are never kept, whatever their score.
        absolute: Rank by ``|scores|``. The magnitudes are then never stored as a tensor.
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
    # A piece of 256K entries takes tens of microseconds, about as long as waking the threads of a pool and waiting for
    # the slowest one, the more so on a shared machine (docs/decisions/0006).
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
