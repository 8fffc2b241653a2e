"""Index maps: which atom each element of a tensor belongs to.

A map is an integer array of the tensor's rank. Its entries are atom ids (see `keepk.graph.ids.atoms`), 0 for "no atom",
and it has size 1 on every dim along which the ids do not change. A tensor has a few maps, one for each set of dims that
belong together: the output of a convolution has one map over its channels, the queries of an attention one map over
(heads, head_dim).

Two convolutions and a residual add, ``y = conv2(conv1(x)) + conv1(x)``, with 4 channels:

>>> first = along(np.array([1, 2, 3, 4], np.int32), 1, 4)  # the output of conv1: (batch, channels, height, width)
>>> first.shape, support(first)
((1, 4, 1, 1), (1,))
>>> second = along(np.array([5, 6, 7, 8], np.int32), 1, 4)  # the output of conv2

The add pairs atom 1 with atom 5, 2 with 6 and so on; `graph.ids.merge` records that, and `graph.solve.solve`
turns it into classes. Suppose channel 2 is removed, hence atoms 2 and 6. The maps then predict the shape of every
tensor of the forward pass and which channel is where:

>>> alive = np.ones(9, bool)
>>> alive[[2, 6]] = False
>>> restrict(second, alive).ravel().tolist()
[5, 7, 8]
>>> predict((32, 4, 28, 28), [first], alive)
(32, 3, 28, 28)
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Why size 1 on dims that a tensor does not depend on: the map of a (256, 64, 56, 56) activation has 64 entries instead
# of 51 million, numpy broadcasts it as torch broadcasts the tensor, and `support` is read off the shape.
# Why int32: atoms number the entries of axes, not of tensors, so there are far fewer than 2**31, in half the memory.
Map: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]


def support(index_map: Map) -> tuple[int, ...]:
    """The dims that a map depends on.

    >>> support(np.zeros((1, 4, 1, 3), np.int32))
    (1, 3)
    """
    return _larger_than_one(index_map.shape)


@lru_cache(maxsize=4096)  # asked for several times in every operation, about few shapes
def _larger_than_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(shape) if size > 1)


def compress(index_map: Map) -> Map:
    """The map reduced to size 1 along each dim on which it only repeats itself.

    >>> compress(np.array([[1, 2, 3], [1, 2, 3]], np.int32)).shape
    (1, 3)
    """
    for dim in support(index_map):
        first = index_map.take([0], axis=dim)
        if (index_map == first).all():
            index_map = first
    return index_map


def aligned(index_map: Map, rank: int) -> Map:
    """The map with leading dims of size 1, as broadcasting adds them."""
    return index_map.reshape((1,) * (rank - index_map.ndim) + index_map.shape)


def along(ids: Map, dim: int, rank: int) -> Map:
    """A vector of ids as a map over one dim of a tensor with `rank` dims.

    >>> along(np.array([5, 6], np.int32), 1, 3).shape
    (1, 2, 1)
    """
    return ids.reshape([-1 if place == dim else 1 for place in range(rank)])


def fibres(index_map: Map, dims: Sequence[int]) -> Map:
    """The map as a matrix: one row for each position in `dims`, with the entries found there along the other dims.

    >>> fibres(np.array([[[1], [2]], [[3], [4]]], np.int32), (1,)).tolist()
    [[1, 3], [2, 4]]
    """
    others = [dim for dim in range(index_map.ndim) if dim not in dims]
    rows = int(np.prod([index_map.shape[dim] for dim in dims], dtype=np.int64))
    return index_map.transpose([*dims, *others]).reshape(rows, -1)


def squeeze(index_map: Map) -> Map:
    """The map without its dims of size 1."""
    return index_map.reshape([size for size in index_map.shape if size > 1])


def row_matrices(index_map: Map) -> Iterable[Map]:
    """The matrices whose rows must all keep the same number of entries if the rest is to fill a box.

    A (2, 3, 4) map stays a box only if both halves keep equally many of their 12 entries, and all six rows of 4 keep
    equally many.

    >>> [matrix.shape for matrix in row_matrices(np.zeros((2, 3, 4), np.int32))]
    [(2, 12), (6, 4)]
    """
    array = squeeze(index_map)
    for split in range(1, array.ndim):
        yield array.reshape(int(np.prod(array.shape[:split])), -1)


def restrict(index_map: Map, alive: Flags) -> Map | None:
    """The map after a removal: the surviving ids in row-major order; None if they do not fill a box.

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
    shape = _box(squeeze(index_map), living.reshape([index_map.shape[dim] for dim in dims]))
    if shape is None:
        return None
    full = list(index_map.shape)
    for dim, size in zip(dims, shape, strict=True):
        full[dim] = size
    return index_map[living].reshape(full)


def _box(array: Map, living: Flags) -> list[int] | None:
    """The shape of the surviving entries; None unless, at every level, all nonempty rows keep the same number."""
    # A tensor is a box: 2 of 4 in one head and 3 of 4 in the next cannot be stored as (heads, head_dim). Rows that are
    # removed entirely do not count, and the survivors need not lie in the same columns, since reshape and view see
    # only the row-major order. Where columns matter (a transpose), the algebra adds a grid.
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
    """All maps of one tensor after a removal; None if one of them does not fill a box.

    An element is removed if any of its atoms is.

    >>> rows, cells = np.array([[1], [2]], np.int32), np.array([[3, 4], [5, 6]], np.int32)
    >>> left = np.ones(7, bool)
    >>> left[[1, 5]] = False
    >>> [index_map.tolist() for index_map in restrict_all([rows, cells], left)]
    [[[2]], [[6]]]
    """
    current = list(maps)
    # Maps over one dim come first: each removes whole slices of the tensor, from the maps over several dims too. Only
    # then can those be checked for a box.
    for place in [place for place, index_map in enumerate(maps) if len(support(index_map)) == 1]:
        dims = support(current[place])
        if dims:
            living = alive[current[place].ravel()]
            if living.all():
                continue
            if not living.any():
                return None
            kept = living.nonzero()[0]
            current = [m.take(kept, axis=dims[0]) if m.shape[dims[0]] > 1 else m for m in current]
    left = [restrict(index_map, alive) for index_map in current]
    return None if any(m is None for m in left) else [m for m in left if m is not None]


def predict(shape: Sequence[int], maps: Sequence[Map], alive: Flags) -> tuple[int, ...] | None:
    """The shape of a tensor once only the `alive` atoms remain; None if the maps do not determine it."""
    return shape_left(shape, maps, restrict_all(maps, alive))


def shape_left(shape: Sequence[int], maps: Sequence[Map], left: Sequence[Map] | None) -> tuple[int, ...] | None:
    """The shape of a tensor from its maps before and after a removal; None if they do not determine it."""
    if left is None:
        return None
    sizes = list(shape)
    for dim in range(len(shape)):
        found = {after.shape[dim] for before, after in zip(maps, left, strict=True) if before.shape[dim] > 1}
        # Two maps over the same dim must agree on what remains of it. If they do not, no guess is made.
        if len(found) > 1:
            return None
        sizes[dim] = found.pop() if found else shape[dim]
    return tuple(sizes)
