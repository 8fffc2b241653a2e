"""Zeroing by mask, as fast as memory allows.

``masked_fill_`` handles one entry at a time. Here a mask is widened to whole words, all ones where a weight lives, and
and-ed with the bits of the weights: vectorised, 0.0 exactly, and NaN is cleared as well,
which a product with 0 would not do. Widened masks are as large as the weights, so they are kept only for small
networks, where they matter; larger ones are widened block by block in a core's cache. Elsewhere than on a CPU
``masked_fill_`` is the fast way: one kernel, and a quarter of the mask's bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 20  # larger ones leave the cache, smaller ones keep threads waiting for each other
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_dead(tensors: Sequence[Tensor], dead: Tensor) -> None:
    """Zero every entry of the tensors that is dead; all have the mask's shape.

    >>> weights = torch.tensor([1.0, float("nan"), 3.0])
    >>> zero_dead([weights], torch.tensor([True, True, False]))
    >>> weights
    tensor([0., 0., 3.])
    """
    by_word: dict[torch.dtype, list[Tensor]] = {}
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
    """Whether a tensor is zeroed by words: both lie on a CPU, and its numbers are as large as a word."""
    cpu = tensor.device.type == dead.device.type == "cpu"
    return cpu and dead.dim() > 0 and tensor.element_size() in WORDS


def alive_words(dead: Tensor, word: torch.dtype) -> Tensor:
    """The mask widened to words: all bits where alive, none where dead.

    >>> alive_words(torch.tensor([True, False]), torch.int32)
    tensor([ 0, -1], dtype=torch.int32)
    """
    return dead.view(torch.int8).to(word).sub_(1)
