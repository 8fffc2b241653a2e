"""Big tensors read in pieces that fit in the cache: the ground under the exact selection."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Ranked(NamedTuple):
    """One tensor whose entries are ranked.

    ``dead`` entries (pruned before) are never eligible, whatever their score. ``absolute`` ranks by ``|scores|``:
    the scores are then the weights themselves. At least ``min(floor, alive)`` entries are kept.
    """

    name: str
    scores: Tensor
    dead: Tensor | None = None
    absolute: bool = False
    floor: int = 0


@dataclass(frozen=True)
class Sizes:
    """How much is read, sampled and gathered at a time: it sets speed and memory, never the result."""

    piece: int = 1 << 18  # a piece and its flags stay in the cache of one core
    accelerator_piece: int = 1 << 24  # few long launches
    sample: int = 1 << 18
    room: int = 1 << 23  # entries gathered for the last, exact step


@contextmanager
def one_thread() -> Iterator[None]:
    """CPU kernels without a thread pool: on pieces of this size its threads would wait more than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pieces(sizes: Sizes, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape, piece by piece in row-major order, none above the piece size."""
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    first = tensors[0]
    if first.numel() == 0:
        return
    size = sizes.piece if first.device.type == "cpu" else sizes.accelerator_piece
    if first.numel() <= size:
        yield tensors
        return
    row = first[0].numel()
    if row <= size:
        yield from zip(*(torch.split(tensor, size // row) for tensor in tensors), strict=True)
        return
    for rows in zip(*(tensor.unbind() for tensor in tensors), strict=True):
        yield from pieces(sizes, *rows)


def memory_order(scores: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The same tensors with their axes in the order in which ``scores`` lies in memory (channels_last)."""
    axes = sorted(range(scores.dim()), key=scores.stride, reverse=True)
    return tuple(tensor.permute(axes) for tensor in (scores, *others))


def round_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` that is <= value: the same numbers of ``dtype`` are above both.

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
    """How many of the flags are set."""
    if flags.numel() % 1024:
        return flags.count_nonzero()
    # 128 rows of eight flags a word cannot overflow a byte, and words add up ten times faster than flags
    return flags.view(torch.int64).view(128, -1).sum(0).view(torch.uint8).sum()


def gather(values: Tensor, flags: Tensor) -> Tensor:
    """``values[flags]``, for flags that are rarely set."""
    if values.numel() % 8:
        return values[flags]
    # most words of eight flags are empty: finding the others first is six times faster
    words = flags.view(torch.int64).nonzero().squeeze(1)
    return values.view(-1, 8).index_select(0, words)[flags.view(-1, 8).index_select(0, words)]


class Reader:
    """Reads and compares the pieces of one tensor, in buffers that every piece uses again."""

    def __init__(self, tensor: Ranked, sizes: Sizes) -> None:
        scores = tensor.scores
        cpu = scores.device.type == "cpu"
        length = min(scores.numel(), sizes.piece if cpu else sizes.accelerator_piece)
        self.absolute = tensor.absolute
        self._values = torch.empty(length, dtype=scores.dtype, device=scores.device)
        self._compared = torch.empty_like(self._values) if cpu else None
        self._flags = [torch.empty(length, dtype=torch.bool, device=scores.device) for _ in range(2)]

    def values(self, piece: Tensor) -> Tensor:
        """What a piece is ranked by, flat; it lasts until the next piece."""
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
        """``operator(values, bound)`` into flags of any shape; ``bound`` must be a number of the dtype."""
        if self._compared is None:
            return out.copy_(operator(values, bound).view(out.shape))
        # on a CPU floats compare into floats, and become flags, three times faster than into flags
        compared = self._compared[: values.numel()]
        operator(values, bound, out=compared)
        return out.copy_(compared.view(out.shape))
