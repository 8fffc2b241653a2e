"""Numbers in the model's Python: where they are kept, and what they count."""

from collections.abc import Iterator

import numpy as np
from torch import nn

from keepk.graph.maps import Map, fibres, support
from keepk.graph.wiring import Constant

PARENTS = 3  # how far up a number may be kept
SIZES = 64  # how many numbers a list of sizes has at most: longer ones are tables of indices


def rows_of_both(one: Constant, other: Constant) -> Map:
    """The atoms along the dims that two constants count, a row for each place in other dims; none if they are alike."""
    mine, theirs = _rows(one), _rows(other)
    if not len(mine) or not len(theirs) or np.isin(mine, theirs).any():
        return np.zeros((0, 0), np.int32)
    return np.concatenate([mine, theirs])


def _rows(constant: Constant) -> Map:
    along = [index_map for index_map in constant.maps if constant.dim in support(index_map)]
    if len(along) != 1:  # two axes that are folded into one
        return np.zeros((0, 0), np.int32)
    return fibres(along[0], [dim for dim in support(along[0]) if dim != constant.dim])


def upwards(path: str) -> Iterator[str]:
    """A module's path, and those of its parents."""
    for _ in range(PARENTS):
        yield path
        if not path:
            return
        path = path.rpartition(".")[0]


def holding(module: nn.Module | None, size: int) -> list[tuple[str, int | None]]:
    """The attributes, and entries of attributes, that are this number."""
    found = list[tuple[str, int | None]]()
    for attribute, value in vars(module).items() if module is not None else ():
        if attribute.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int) and value == size:
            found.append((attribute, None))
        elif isinstance(value, list | tuple) and len(value) <= SIZES and all(type(entry) is int for entry in value):
            found += [(attribute, item) for item, entry in enumerate(value) if entry == size]
    return found
