"""What is left of a model while some atoms live: by tensor its indices and shape, and the sizes that modules repeat."""

from collections.abc import Iterable, Sequence

import numpy as np

from keepk.errors import ShrinkError
from keepk.graph.attributes import Sized
from keepk.graph.edits import Cut, Indices, Setting, Unchanged
from keepk.graph.maps import Flags, Map, predict, support
from keepk.graph.wiring import Constant, Wiring


class Left:
    """Computed tensor by tensor, when it is asked for, and then remembered."""

    def __init__(self, wiring: Wiring, alive: Flags) -> None:
        self.alive = alive
        self._wiring = wiring
        self._atoms = dict[str, dict[int, Map]]()
        self._groups = {sized.module: sized for sized in wiring.sized if sized.attribute == "groups"}

    def atoms(self, tensor: str) -> dict[int, Map]:
        """By axis, the atoms that are left; a matrix where they differ from row to row."""
        if tensor not in self._atoms:
            self._atoms[tensor] = _living(self._wiring.tensors[tensor], self.alive)
        return self._atoms[tensor]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape that a tensor has."""
        sizes = list(self._wiring.shapes[tensor])
        for dim, atoms in self.atoms(tensor).items():
            sizes[dim] = atoms.shape[-1]
        return tuple(sizes)

    def size(self, sized: Sized) -> int:
        """The value that an attribute has."""
        if sized.blocks:
            return self._blocks(sized.tensor, sized.blocks)
        size = self.shape(sized.tensor)[sized.dim]
        groups = self._groups.get(sized.module) if sized.times_groups else None
        if groups is not None:
            size *= self._blocks(groups.tensor, groups.blocks)
        return size // sized.parts

    def constant(self, constant: Constant) -> int | None:
        """The value that a constant has; None if the maps do not tell."""
        shape = predict(constant.shape, constant.maps, self.alive)
        return shape[constant.dim] if shape else None

    def _blocks(self, tensor: str, blocks: int) -> int:
        """How many of the equal blocks of a tensor's rows have a row left."""
        rows = _rows(self._wiring.tensors[tensor])
        return blocks if rows is None else int(self.alive[rows].reshape(blocks, -1).any(axis=1).sum())


def cut_between(now: Left, then: Left, tensor: str) -> Cut | None:
    """What has to be cut from a tensor; None if nothing."""
    before, after = now.atoms(tensor), then.atoms(tensor)
    kept = dict[int, Indices]()
    for dim in before:
        if after[dim].size == 0:
            raise ShrinkError(
                f"shrink: nothing would be left of axis {dim} of {tensor!r} ({before[dim].shape[-1]} now). "
                f"Leave at least one unit of each layer."
            )
        if before[dim].shape[-1] != after[dim].shape[-1]:
            kept[dim] = _positions(before, after, dim, then.alive)
    return Cut(tensor, kept, now.shape(tensor), then.shape(tensor)) if kept else None


def settings_between(now: Left, then: Left, sized: Iterable[Sized], constants: Iterable[Constant]) -> Iterable[Setting]:
    """The attributes that have to change, and the constants of modules that repeat sizes."""
    for it in sized:
        if (old := now.size(it)) != (new := then.size(it)):
            yield Setting(it.module, it.attribute, it.item, old, new)
    for found in constants:
        before, after = now.constant(found), then.constant(found)
        if before is not None and after is not None and before != after:
            yield Setting(found.module, found.attribute, found.item, before, after)


def unchanged_between(now: Left, then: Left, beside: Iterable[Constant]) -> Iterable[Unchanged]:
    """The attributes that are as large as something that changes and do not follow it."""
    gone, seen = now.alive & ~then.alive, set[tuple[str, str, int | None]]()
    for found in beside:
        key = (found.module, found.attribute, found.item)
        if key in seen or not any(gone[index_map].any() for index_map in found.maps):
            continue
        before, after = now.constant(found), then.constant(found)
        if before is not None and after is not None and before != after:
            seen.add(key)
            yield Unchanged(*key, found.shape[found.dim], after)


def _living(maps: Sequence[Map], alive: Flags) -> dict[int, Map]:
    supports = [support(index_map) for index_map in maps]
    left = {dims[0]: _of_row(m, alive) for m, dims in zip(maps, supports, strict=True) if len(dims) == 1}
    for index_map, dims in zip(maps, supports, strict=True):
        if len(dims) > 1:
            left[1] = _by_row(index_map, _rows(maps), alive)
    return left


def _of_row(index_map: Map, alive: Flags) -> Map:
    atoms = index_map.ravel()
    return atoms[alive[atoms]]


def _rows(maps: Iterable[Map]) -> Map | None:
    """The atoms of a tensor's first axis."""
    return next((index_map.ravel() for index_map in maps if support(index_map) == (0,)), None)


def _by_row(index_map: Map, rows: Map | None, alive: Flags) -> Map:
    matrix = index_map.reshape(index_map.shape[:2])
    if rows is not None:
        matrix = matrix[alive[rows]]
    living = alive[matrix]
    counts = living.sum(axis=1)
    if len(counts) == 0 or (counts != counts[0]).any():
        return matrix[:, :0]
    return matrix[living].reshape(len(matrix), int(counts[0]))


def _positions(before: dict[int, Map], after: dict[int, Map], dim: int, alive: Flags) -> Indices:
    """Where what is left afterwards stands in what is left before."""
    if before[dim].ndim == 1:
        return np.flatnonzero(alive[before[dim]])
    rows = before[dim]
    if 0 in before and len(before[0]) != len(after[0]):
        rows = rows[alive[before[0]]]
    return np.nonzero(alive[rows])[1].reshape(after[dim].shape)
