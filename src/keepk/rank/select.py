"""The one exact selection: exactly k entries of many tensors, the earlier index wins a tie, NaN refused.

Ranking only reads. ``cut_points`` says where each tensor is cut, and may fail; ``dead_mask`` then makes the mask
of one tensor, so that a caller can rank everything before it changes anything.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keepk.errors import RankError
from keepk.rank.bracket import kth_largest
from keepk.rank.pieces import Ranked, Reader, Sizes, memory_order, one_thread, pieces, round_down

__all__ = ["Cut", "Ranked", "cut_points", "dead_mask"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Cut:
    """Where one tensor is cut: what is above ``value`` stays, and the first ``ties`` of the ``equal`` that equal it."""

    value: float
    ties: int
    kept: int
    equal: int = field(default=0, repr=False, compare=False)


@one_thread()
def cut_points(tensors: Sequence[Ranked], k: int, *, sizes: Sizes | None = None) -> list[Cut]:
    """Where to cut so that exactly the k best-ranked alive entries of all tensors stay.

    Entries are ordered by score, then by tensor, then by row-major index. Each tensor first keeps its best
    ``floor`` entries; the rest of k is filled by that order.

    >>> fc1 = Ranked("fc1", torch.tensor([0.1, -3.0, 2.0]), absolute=True)
    >>> fc2 = Ranked("fc2", torch.tensor([-2.0, 0.5]), absolute=True)
    >>> cut_points([fc1, fc2], 2)
    [Cut(value=2.0, ties=1, kept=2), Cut(value=2.0, ties=0, kept=0)]
    """
    sizes = sizes or Sizes()
    tensors = [_checked(tensor, sizes) for tensor in tensors]
    alive = [_alive(tensor) for tensor in tensors]
    floors = [min(tensor.floor, count) for tensor, count in zip(tensors, alive, strict=True)]
    if not sum(floors) <= k <= sum(alive):
        _refuse_count(k, floors, alive)
    cuts: dict[int, Cut] = {}
    free = list(range(len(tensors)))
    while free:
        budget = k - sum(cut.kept for cut in cuts.values())
        shared = _shared_cut([tensors[i] for i in free], [alive[i] for i in free], budget, sizes)
        short = [i for i, cut in zip(free, shared, strict=True) if cut.kept < floors[i]]
        if not short:
            cuts.update(zip(free, shared, strict=True))
            break
        # a smaller budget only raises the shared cut: what is short now stays short
        for i in short:
            cuts.update({i: _shared_cut([tensors[i]], [alive[i]], floors[i], sizes)[0]})
        free = [i for i in free if i not in cuts]
    return [cuts[i] for i in range(len(tensors))]


@one_thread()
def dead_mask(tensor: Ranked, cut: Cut, *, sizes: Sizes | None = None) -> Tensor:
    """A new mask of what is pruned, old and new, in the memory format of the scores.

    >>> dead_mask(Ranked("fc", torch.tensor([2.0, 0.1, 2.0, 3.0])), Cut(value=2.0, ties=1, kept=2))
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
    if cut.ties and bound == cut.value:
        _keep_first(reader, views, cut, sizes)
    return views[1]


def _keep_first(reader: Reader, views: Sequence[Tensor], cut: Cut, sizes: Sizes) -> None:
    """Take the first ``cut.ties`` alive entries that equal the cut out of the mask."""
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


def _shared_cut(tensors: Sequence[Ranked], alive: Sequence[int], k: int, sizes: Sizes) -> list[Cut]:
    """One cut through all tensors, without floors; earlier tensors get the ties."""
    if k == 0:
        return [Cut(math.inf, 0, 0)] * len(tensors)
    value, above, equal = kth_largest(tensors, alive, k, sizes)
    left = k - sum(above)
    cuts = []
    for over, same in zip(above, equal, strict=True):
        ties = min(same, left)
        left -= ties
        cuts.append(Cut(value + 0.0, ties, over + ties, same))  # + 0.0 turns -0.0 into 0.0
    return cuts


def _alive(tensor: Ranked) -> int:
    dead = 0 if tensor.dead is None else int(tensor.dead.count_nonzero())
    return tensor.scores.numel() - dead


def _checked(tensor: Ranked, sizes: Sizes) -> Ranked:
    """The tensor without its gradient history, if it can be ranked."""
    name, scores, dead = tensor.name, tensor.scores.detach(), tensor.dead
    if scores.dtype not in DTYPES:
        raise RankError(f"{name!r}: scores are {scores.dtype}; rank float16, bfloat16, float32 or float64.")
    if dead is not None and (dead.shape, dead.dtype, dead.device) != (scores.shape, torch.bool, scores.device):
        raise RankError(
            f"{name!r}: the mask is {dead.dtype} {tuple(dead.shape)} on {dead.device}, the scores are "
            f"{tuple(scores.shape)} on {scores.device}; give a bool mask of the scores' shape and device."
        )
    tensor = tensor._replace(scores=scores)
    # a finite sum is one read and proves that every entry is finite
    if not math.isfinite(scores.sum(dtype=torch.promote_types(scores.dtype, torch.float32)).item()):
        _refuse_unrankable(tensor, sizes)
    return tensor


def _refuse_unrankable(tensor: Ranked, sizes: Sizes) -> None:
    """Refuse what is alive and NaN, or infinite where the scores are weights."""
    views = [tensor.scores] if tensor.dead is None else [tensor.scores, tensor.dead]
    bad = 0
    for scores, *dead in pieces(sizes, *views):
        flags = ~scores.isfinite() if tensor.absolute else scores.isnan()
        for pruned in dead:
            flags &= ~pruned
        bad += int(flags.count_nonzero())
    if bad and tensor.absolute:
        raise RankError(
            f"parameter {tensor.name!r} holds {bad} NaN or infinite values among {tensor.scores.numel()}; "
            "fix the training before pruning (lower the learning rate, clip the gradients)."
        )
    if bad:
        raise RankError(
            f"the scores of {tensor.name!r} hold {bad} NaN values among {tensor.scores.numel()}; "
            "give every weight that is not pruned a number (inf protects it)."
        )


def _refuse_count(k: int, floors: Sequence[int], alive: Sequence[int]) -> None:
    if k < 0:
        raise RankError(f"asked to keep k={k} entries; choose k >= 0.")
    if k > sum(alive):
        raise RankError(
            f"asked to keep k={k} entries, but only {sum(alive)} are alive in {len(alive)} tensors; "
            f"choose k <= {sum(alive)}: what is pruned does not come back."
        )
    raise RankError(
        f"asked to keep k={k} entries, but the floors of {len(floors)} tensors need {sum(floors)}; "
        f"choose k >= {sum(floors)} or lower the floors."
    )
