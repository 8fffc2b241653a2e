"""Index maps: which atom each element of a tensor belongs to.

A map has the tensor's rank, and size 1 on every dim that it does not depend on. Its entries are atom ids; 0 is no atom.
A tensor carries a few maps, one for each group of dims that belong together: a convolution's output has one map over
its channels, a query of an attention one map over (heads, head_dim).
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Map: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]


def support(index_map: Map) -> tuple[int, ...]:
    """The dims that a map depends on.

    >>> support(np.zeros((1, 4, 1, 3), np.int32))
    (1, 3)
    """
    return tuple(dim for dim, size in enumerate(index_map.shape) if size > 1)


def compress(index_map: Map) -> Map:
    """The map without the dims along which it only repeats itself.

    >>> compress(np.array([[1, 2, 3], [1, 2, 3]], np.int32)).shape
    (1, 3)
    """
    for dim in support(index_map):
        first = np.take(index_map, [0], axis=dim)
        if (index_map == first).all():
            index_map = first
    return index_map


def aligned(index_map: Map, rank: int) -> Map:
    """The map with dims of size 1 in front, as broadcasting adds them."""
    return index_map.reshape((1,) * (rank - index_map.ndim) + index_map.shape)


def along(ids: Map, dim: int, rank: int) -> Map:
    """A row of ids as a map over one dim.

    >>> along(np.array([5, 6], np.int32), 1, 3).shape
    (1, 2, 1)
    """
    return ids.reshape([-1 if place == dim else 1 for place in range(rank)])


def fibres(index_map: Map, dims: Sequence[int]) -> Map:
    """The map as a matrix: a row for each place in `dims`, what is found there in the others.

    >>> fibres(np.array([[[1], [2]], [[3], [4]]], np.int32), (1,)).tolist()
    [[1, 3], [2, 4]]
    """
    others = [dim for dim in range(index_map.ndim) if dim not in dims]
    rows = int(np.prod([index_map.shape[dim] for dim in dims], dtype=np.int64))
    return index_map.transpose([*dims, *others]).reshape(rows, -1)


def core(index_map: Map) -> Map:
    """The map with its support's dims only."""
    return index_map.reshape([size for size in index_map.shape if size > 1])


def levels(index_map: Map) -> Iterable[Map]:
    """The matrices in which every row must keep the same number, if the map's elements stay in row-major order.

    >>> [level.shape for level in levels(np.zeros((2, 3, 4), np.int32))]
    [(2, 12), (6, 4)]
    """
    array = core(index_map)
    for split in range(1, array.ndim):
        yield array.reshape(int(np.prod(array.shape[:split])), -1)


def restrict(index_map: Map, alive: Flags) -> Map | None:
    """What is left of a map: the surviving ids in order; None if they do not fill a box.

    >>> left = np.array([True, False, True, True, False])
    >>> restrict(np.array([[1, 2], [3, 4]], np.int32), left).tolist()
    [[2], [3]]
    >>> restrict(np.array([[1, 2], [2, 3]], np.int32), left) is None
    True
    """
    living = alive[index_map]
    if living.all():
        return index_map
    dims = support(index_map)
    shape = _box(core(index_map), living.reshape([index_map.shape[dim] for dim in dims]))
    if shape is None:
        return None
    full = list(index_map.shape)
    for dim, size in zip(dims, shape, strict=True):
        full[dim] = size
    return index_map[living].reshape(full)


def _box(array: Map, living: Flags) -> list[int] | None:
    shape = []
    for level in range(array.ndim):
        there = living.any(axis=tuple(range(level + 1, array.ndim))) if level + 1 < array.ndim else living
        counts = there.sum(axis=-1).ravel()
        counts = counts[counts > 0]
        if len(counts) == 0 or (counts != counts[0]).any():
            return None
        shape.append(int(counts[0]))
    return shape


def restrict_all(maps: Sequence[Map], alive: Flags) -> list[Map] | None:
    """What is left of all maps of one tensor, of which an element goes if any of its atoms does; None if no box is.

    >>> rows, cells = np.array([[1], [2]], np.int32), np.array([[3, 4], [5, 6]], np.int32)
    >>> left = np.ones(7, bool)
    >>> left[[1, 5]] = False
    >>> [index_map.tolist() for index_map in restrict_all([rows, cells], left)]
    [[[2]], [[6]]]
    """
    current = list(maps)
    for place in [place for place, index_map in enumerate(maps) if len(support(index_map)) == 1]:
        dims = support(current[place])
        if dims:
            living = np.flatnonzero(alive[current[place].ravel()])
            if len(living) == 0:
                return None
            current = [np.take(m, living, axis=dims[0]) if m.shape[dims[0]] > 1 else m for m in current]
    left = [restrict(index_map, alive) for index_map in current]
    return None if any(m is None for m in left) else [m for m in left if m is not None]


def predict(shape: Sequence[int], maps: Sequence[Map], alive: Flags) -> tuple[int, ...] | None:
    """The shape of a tensor when only the `alive` atoms are left; None if the maps do not tell."""
    return shape_left(shape, maps, restrict_all(maps, alive))


def shape_left(shape: Sequence[int], maps: Sequence[Map], left: Sequence[Map] | None) -> tuple[int, ...] | None:
    """The shape of a tensor of whose maps so much is left; None if that does not tell."""
    if left is None:
        return None
    sizes = list(shape)
    for dim in range(len(shape)):
        found = {after.shape[dim] for before, after in zip(maps, left, strict=True) if before.shape[dim] > 1}
        if len(found) > 1:
            return None
        sizes[dim] = found.pop() if found else shape[dim]
    return tuple(sizes)
