"""The exact selection of weights: exactly k entries of several tensors, the earlier index wins a tie, NaN is refused.

Ranking only reads. `cut_points` finds the score at which each tensor is cut, and may raise; `dead_mask` then makes the
mask of one tensor. A caller can thus rank everything before it changes anything.

A threshold alone cannot keep exactly k when scores are equal. To keep 2 of the scores 2 0 2 2 1: three are above 1, and
none is above 2. A cut point therefore has a value and the number of ties to keep, which are the first ones:

>>> tensor = Ranked("fc", torch.tensor([2.0, 0.0, 2.0, 2.0, 1.0]))
>>> [cut] = cut_points([tensor], 2)
>>> cut
CutPoint(value=2.0, ties=2, kept=2)
>>> ~dead_mask(tensor, cut)
tensor([ True, False,  True, False, False])
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from keepk.errors import RankError
from keepk.rank.kth_largest import Ranked, Reader, Sizes, kth_largest, memory_order, one_thread, pieces, round_down

__all__ = ["CutPoint", "Ranked", "checked", "cut_points", "dead_mask", "with_floors"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class CutPoint:
    """Where one tensor is cut.

    Attributes:
        value: Entries above it are kept.
        ties: Of the entries equal to it, the first ``ties`` are kept.
        kept: How many entries are kept in total.
        equal: How many entries equal the value.
    """

    value: float
    ties: int
    kept: int
    equal: int = field(default=0, repr=False, compare=False)


@one_thread()
def cut_points(tensors: Sequence[Ranked], k: int, *, sizes: Sizes | None = None) -> list[CutPoint]:
    """Where to cut so that exactly the k best entries of all tensors are kept.

    Entries are ordered by score, then by tensor, then by row-major index. Each tensor first keeps its best
    ``floor`` entries; the rest of k is filled in that order.

    Args:
        tensors: The tensors, with scores, masks of entries pruned before, and floors.
        k: How many entries are kept in total.
        sizes: How much is read at a time; for tests.

    Returns:
        One cut for each tensor.

    Raises:
        RankError: If scores are NaN, a dtype or mask does not fit, or k is out of range.

    >>> fc1 = Ranked("fc1", torch.tensor([0.1, -3.0, 2.0]), absolute=True)
    >>> fc2 = Ranked("fc2", torch.tensor([-2.0, 0.5]), absolute=True)
    >>> cut_points([fc1, fc2], 2)
    [CutPoint(value=2.0, ties=1, kept=2), CutPoint(value=2.0, ties=0, kept=0)]
    """
    tensors = [checked(tensor, sizes or Sizes()) for tensor in tensors]
    alive = [_alive(tensor) for tensor in tensors]
    floors = [min(tensor.floor, count) for tensor, count in zip(tensors, alive, strict=True)]

    def shared(places: Sequence[int], budget: int) -> list[CutPoint]:
        return _shared_cut([tensors[i] for i in places], [alive[i] for i in places], budget, sizes or Sizes())

    return with_floors(k, alive, floors, shared)


class Kept(Protocol):
    """The cut of one tensor, which says how many of its entries are kept."""

    @property
    def kept(self) -> int:
        """How many entries are kept."""


AnyCut = TypeVar("AnyCut", bound=Kept)


def with_floors(
    k: int, alive: Sequence[int], floors: Sequence[int], shared: Callable[[Sequence[int], int], list[AnyCut]]
) -> list[AnyCut]:
    """Cuts that keep k entries in total, and in each tensor at least its floor.

    Args:
        k: How many entries are kept in total.
        alive: For each tensor, how many entries are not pruned.
        floors: For each tensor, how many are kept at least.
        shared: Maps indices of tensors and a number of entries to one cut that keeps that number, ignoring floors.

    Raises:
        RankError: If k is out of range.
    """
    if not sum(floors) <= k <= sum(alive):
        _refuse_count(k, floors, alive)
    cuts: dict[int, AnyCut] = {}
    free = list(range(len(alive)))
    while free:
        budget = k - sum(cut.kept for cut in cuts.values())
        found = shared(free, budget)
        short = [i for i, cut in zip(free, found, strict=True) if cut.kept < floors[i]]
        if not short:
            cuts.update(zip(free, found, strict=True))
            break
        # A tensor below its floor gets exactly its floor, and the others share the rest. A smaller budget only raises
        # their shared cut, so a tensor that is short now would stay short: this needs no backtracking.
        for i in short:
            cuts.update({i: shared([i], floors[i])[0]})
        free = [i for i in free if i not in cuts]
    return [cuts[i] for i in range(len(alive))]


@one_thread()
def dead_mask(tensor: Ranked, cut: CutPoint, *, sizes: Sizes | None = None) -> Tensor:
    """A new mask of all pruned entries, those pruned before included, in the memory format of the scores.

    >>> dead_mask(Ranked("fc", torch.tensor([2.0, 0.1, 2.0, 3.0])), CutPoint(value=2.0, ties=1, kept=2))
    tensor([False,  True,  True, False])
    """
    sizes = sizes or Sizes()
    tensor = tensor._replace(scores=tensor.scores.detach())
    views = [tensor.scores, torch.empty_like(tensor.scores, dtype=torch.bool)]
    if tensor.dead is not None:
        views.append(tensor.dead)
    reader = Reader(tensor, sizes)
    bound = round_down(cut.value, tensor.scores.dtype)
    for scores, pruned, *dead in pieces(sizes, *memory_order(*views)):
        reader.compare(torch.le, reader.values(scores), bound, out=pruned)
        for flags in dead:
            pruned.bitwise_or_(flags)
    # If rounding moved the bound, no entry of this dtype can equal the cut, and there are no ties.
    if cut.ties and bound == cut.value:
        _keep_first(reader, views, cut, sizes)
    return views[1]


def _keep_first(reader: Reader, views: Sequence[Tensor], cut: CutPoint, sizes: Sizes) -> None:
    """Clear the mask for the first ``cut.ties`` entries that equal the cut and were not pruned before."""
    # In row-major order and not in memory order: the same weights in channels_last must give the same mask.
    left = cut.ties
    for scores, pruned, *dead in pieces(sizes, *views):
        equal = reader.compare(torch.eq, reader.values(scores), cut.value, out=reader.flags(0, scores.numel()))
        for flags in dead:
            torch.gt(equal, flags.reshape(-1), out=equal)  # True > False: equal and not dead
        found = int(equal.count_nonzero())
        if found > left:
            equal &= equal.cumsum(0) <= left
        pruned.bitwise_xor_(equal.view(pruned.shape))
        left -= min(found, left)
        if left == 0:
            return


def _shared_cut(tensors: Sequence[Ranked], alive: Sequence[int], k: int, sizes: Sizes) -> list[CutPoint]:
    """One cut through all tensors, without floors; earlier tensors get the ties."""
    if k == 0:
        return [CutPoint(math.inf, 0, 0)] * len(tensors)
    value, above, equal = kth_largest(tensors, alive, k, sizes)
    left = k - sum(above)
    cuts = []
    for over, same in zip(above, equal, strict=True):
        ties = min(same, left)
        left -= ties
        cuts.append(CutPoint(value + 0.0, ties, over + ties, same))  # + 0.0 turns -0.0 into 0.0
    return cuts


def _alive(tensor: Ranked) -> int:
    dead = 0 if tensor.dead is None else int(tensor.dead.count_nonzero())
    return tensor.scores.numel() - dead


def checked(tensor: Ranked, sizes: Sizes) -> Ranked:
    """The tensor without its gradient history; refused if it cannot be ranked."""
    name, scores, dead = tensor.name, tensor.scores.detach(), tensor.dead
    if scores.dtype not in DTYPES:
        raise RankError(f"{name!r}: scores are {scores.dtype}; rank float16, bfloat16, float32 or float64.")
    if dead is not None and (dead.shape, dead.dtype, dead.device) != (scores.shape, torch.bool, scores.device):
        raise RankError(
            f"{name!r}: the mask is {dead.dtype} {tuple(dead.shape)} on {dead.device}, the scores are "
            f"{tuple(scores.shape)} on {scores.device}; pass a bool mask of the scores' shape and device."
        )
    tensor = tensor._replace(scores=scores)
    # A finite sum proves in one read that every entry is finite. If the sum is not finite, it may just have overflowed,
    # so the entries are checked one by one.
    if not math.isfinite(scores.sum(dtype=torch.promote_types(scores.dtype, torch.float32)).item()):
        _refuse_unrankable(tensor, sizes)
    return tensor


def _refuse_unrankable(tensor: Ranked, sizes: Sizes) -> None:
    """Refuse NaN among the entries that are not pruned, and infinite values if the scores are weights."""
    # An infinite score is fine in a metric (it protects a weight), an infinite weight means that training diverged.
    views = [tensor.scores] if tensor.dead is None else [tensor.scores, tensor.dead]
    bad = 0
    for scores, *dead in pieces(sizes, *views):
        flags = ~scores.isfinite() if tensor.absolute else scores.isnan()
        for pruned in dead:
            flags &= ~pruned
        bad += int(flags.count_nonzero())
    if bad and tensor.absolute:
        raise RankError(
            f"parameter {tensor.name!r}: {bad} of {tensor.scores.numel()} values are NaN or infinite; "
            "fix the training before pruning (lower the learning rate, clip the gradients)."
        )
    if bad:
        raise RankError(
            f"{bad} of the {tensor.scores.numel()} scores of {tensor.name!r} are NaN; "
            "return a number for every weight that is not pruned (inf protects it)."
        )


def _refuse_count(k: int, floors: Sequence[int], alive: Sequence[int]) -> None:
    if k < 0:
        raise RankError(f"asked to keep k={k} entries; choose k >= 0.")
    if k > sum(alive):
        raise RankError(
            f"asked to keep k={k} entries, but only {sum(alive)} are alive in {len(alive)} tensors; "
            f"choose k <= {sum(alive)}, because pruned entries cannot be restored."
        )
    raise RankError(
        f"asked to keep k={k} entries, but the floors of {len(floors)} tensors need {sum(floors)}; "
        f"choose k >= {sum(floors)} or lower the floors."
    )
