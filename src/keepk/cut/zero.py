"""Zeroing by mask, as fast as memory allows.

On a CPU, ``masked_fill_`` handles one entry at a time. Here a mask is widened to words of the weights' size, with all
bits set where a weight is alive, and combined with the bits of the weights by a bitwise and. That is vectorized, gives
exactly 0.0, and clears NaN too, which a product with 0 would not. Widened masks are as large as the weights, so they
are kept only for small networks, where they matter; larger ones are widened block by block in a core's cache. On other
devices ``masked_fill_`` is faster: one kernel, and a quarter of the mask's bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 20  # entries; larger blocks leave the cache, smaller ones cost more in synchronizing threads
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_dead(tensors: Sequence[Tensor], dead: Tensor) -> None:
    """Zero the dead entries of tensors that have the mask's shape.

    >>> weights = torch.tensor([1.0, float("nan"), 3.0])
    >>> zero_dead([weights], torch.tensor([True, True, False]))
    >>> weights
    tensor([0., 0., 3.])
    """
    by_word: dict[torch.dtype, list[Tensor]] = {}  # a block of the mask is widened once for all tensors of one size
    for tensor in tensors:
        if takes_words(tensor, dead):
            by_word.setdefault(WORDS[tensor.element_size()], []).append(tensor)
        else:
            tensor.masked_fill_(dead.to(tensor.device), 0)
    rows = max(1, BLOCK * len(dead) // max(1, dead.numel())) if by_word else 0
    for word, several in by_word.items():
        for start in range(0, len(dead), rows):
            block = slice(start, start + rows)
            alive = alive_words(dead[block], word)
            for tensor in several:
                tensor[block].view(word).bitwise_and_(alive)


def takes_words(tensor: Tensor, dead: Tensor) -> bool:
    """Whether a tensor can be zeroed by words: tensor and mask are on a CPU, and an element is as large as a word."""
    cpu = tensor.device.type == dead.device.type == "cpu"
    return cpu and dead.dim() > 0 and tensor.element_size() in WORDS


def alive_words(dead: Tensor, word: torch.dtype) -> Tensor:
    """The mask widened to words: all bits set where alive, none where dead.

    >>> alive_words(torch.tensor([True, False]), torch.int32)
    tensor([ 0, -1], dtype=torch.int32)
    """
    return dead.view(torch.int8).to(word).sub_(1)  # True is 1, which becomes 0; False is 0, which becomes -1: all bits
