"""Units, which are sets of slices that are removed together, stored as arrays; and groups of units.

A *unit* is a class of atoms (`solve`) that has at least one slice of a parameter and is not pinned. A *group* is the
set of all units that have their slices in the same axes: usually the output channels of one layer. The units of a group
also have the same `Group.kind`, and are either all lossy or all exact.

`Wiring` has the tensors, axes and size attributes of a model, as traced; it is the immutable part of a `Graph`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keepk.graph.ids.atoms import Axis
from keepk.graph.ids.facts import Reason, Role
from keepk.graph.ids.maps import Map
from keepk.graph.solve.solve import ALIGNED, Solution
from keepk.model.edits import Indices
from keepk.model.layer_sizes import Sized


# Compared by identity: the maps are arrays, which have no plain equality.
@dataclass(frozen=True, eq=False)
class Constant:
    """An attribute of a module that must follow a size of the forward pass; `probe` finds these by trying.

    Attributes:
        module: The module's path.
        attribute: Its attribute.
        item: The position of the number, if the attribute is a tuple or list.
        shape: The shape of the tensor whose size it repeats.
        maps: The maps of that tensor.
        dim: The dim of that tensor.
    """

    module: str
    attribute: str
    item: int | None
    shape: tuple[int, ...]
    maps: tuple[Map, ...]
    dim: int


@dataclass(frozen=True)
class Wiring:
    """The wiring of a model before anything is removed.

    Attributes:
        axes: Every run of atoms; an atom is an index into one axis of one tensor.
        tensors: By name, the maps of each parameter and buffer.
        shapes: By name, its shape.
        parameters: The names that are parameters.
        roles: By (tensor, dim), whether the axis produces, carries or reads channels.
        sized: Attributes of known layers that repeat sizes, such as ``out_channels``.
        headwise: By path of an attention, the names of its in-projections.
        adapters: By name of an adapter's parameter (LoRA), the adapter's path.
    """

    axes: list[Axis]
    tensors: dict[str, tuple[Map, ...]]
    shapes: dict[str, tuple[int, ...]]
    parameters: set[str]
    roles: dict[tuple[str, int], Role]
    sized: tuple[Sized, ...]
    headwise: dict[str, set[str]]
    # Only models wrapped by peft have adapters.
    adapters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fixed:
    """An axis that cannot shrink, or in which some channels cannot be removed.

    Attributes:
        tensor: The name of the parameter or buffer.
        axis: Its dim.
        channels: The number of channels that cannot be removed.
        reason: Why.
    """

    tensor: str
    axis: int
    channels: int
    reason: Reason

    @property
    def why(self) -> str:
        """The reason, as one line."""
        return str(self.reason)

    @property
    def place(self) -> str:
        """File and line in the user's program; empty if unknown."""
        return self.reason.place


@dataclass(frozen=True)
class Group:
    """Units that have their slices in the same axes.

    Attributes:
        name: A unique name: `module`, with a number if several groups have one module.
        units: Their numbers.
        axes: (tensor, axis, role) of their slices.
        kind: "channel"; "read", a BatchNorm's reading of a channel that has other readers; or "source", such a channel,
            which is removed when its last reading is.
        lossy: Why removing a unit changes more than setting it to zero; empty if it does not.
        module: The path of the module that produces the units; the tensor they come from where no module does.
        multiple: After a removal, the number of units left must be divisible by this.
        aligned: Why `multiple` is more than 1; empty if it is 1.
    """

    name: str
    units: Indices
    axes: tuple[tuple[str, int, Role | None], ...]
    kind: str
    lossy: str
    module: str
    multiple: int = 1
    aligned: str = ""


@dataclass(frozen=True)
class Units:
    """All units of a graph, as arrays: a network may have 100,000 of them.

    Attributes:
        classes: The class of atoms of each unit.
        group: The number of its group.
        lossy: Whether removing it changes more than setting it to zero.
        starts: Where its slices begin in `axis` and `index`; one entry more than there are units.
        axis: For each slice, the number of its axis in the list of axes.
        index: For each slice, its index in the axis.
    """

    classes: Indices
    group: Indices
    lossy: NDArray[np.bool_]
    starts: Indices
    axis: Indices
    index: Indices

    def __len__(self) -> int:
        return len(self.classes)

    def slices(self, unit: int) -> Iterator[tuple[int, int]]:
        """Axis number and index of each slice of a unit."""
        for place in range(self.starts[unit], self.starts[unit + 1]):
            yield int(self.axis[place]), int(self.index[place])


def find_units(axes: list[Axis], parameters: set[str], solution: Solution) -> Units:
    """Every class that has an atom of a parameter and is not pinned, ordered by group, then by class."""
    numbers = [number for number, axis in enumerate(axes) if axis.tensor]
    classes = np.concatenate([_classes(axes[n], solution) for n in numbers] or [np.zeros(0, np.int32)]).astype(np.int64)
    axis = np.concatenate([np.full(axes[n].size, n) for n in numbers] or [np.zeros(0, np.int64)])
    index = np.concatenate([np.arange(axes[n].size) for n in numbers] or [np.zeros(0, np.int64)])
    free = np.ones(len(solution.classes), bool)
    free[list(solution.pinned)] = False
    owned = np.zeros(len(solution.classes), bool)
    for number in numbers:
        if axes[number].tensor in parameters:
            owned[_classes(axes[number], solution)] = True
    # A class with slices of buffers alone, such as a table of positions, has no weights to prune.
    kept = (free & owned)[classes]
    classes, axis, index = classes[kept], axis[kept], index[kept]
    lossy = np.zeros(len(solution.classes), bool)
    lossy[list(solution.lossy)] = True
    group = _group_numbers(classes, axis, lossy[classes] + 2 * _kinds(solution)[classes], len(axes))
    order = np.lexsort((index, axis, classes, group))
    classes, axis, index, group = classes[order], axis[order], index[order], group[order]
    firsts = np.flatnonzero(np.r_[True, classes[1:] != classes[:-1]]) if len(classes) else np.zeros(0, np.int64)
    return Units(
        classes=classes[firsts],
        group=group[firsts],
        lossy=lossy[classes[firsts]],
        starts=np.r_[firsts, len(classes)],
        axis=axis,
        index=index,
    )


def _classes(axis: Axis, solution: Solution) -> NDArray[np.int32]:
    return solution.classes[axis.start : axis.start + axis.size]


KINDS = ("channel", "read", "source")


def _kinds(solution: Solution) -> Indices:
    """For each class the index of its kind in `KINDS`; a class that reads and is read is a source."""
    kinds = np.zeros(len(solution.classes), np.int64)
    for number, side in ((1, "readers"), (2, "sources")):
        for read in solution.reads:
            kinds[solution.classes[getattr(read, side)]] = number
    return kinds


def _group_numbers(classes: Indices, axis: Indices, sort: Indices, axes: int) -> Indices:
    """For each slice the number of its group: units with the same set of axes and the same `sort`.

    Groups are in the order of their first axes. Here classes 1 and 2 have slices in axes 0 and 2, class 5 in axis 1:

    >>> classes, axis = np.array([1, 1, 2, 2, 5]), np.array([0, 2, 0, 2, 1])
    >>> _group_numbers(classes, axis, np.zeros(5, np.int64), axes=3)
    array([0, 0, 0, 0, 1])
    """
    if not len(classes):
        return np.zeros(0, np.int64)
    pairs = np.sort(classes * axes + axis)
    pairs = pairs[np.r_[True, pairs[1:] != pairs[:-1]]]  # np.unique hashes, which takes 40 times as long
    owner, found = np.divmod(pairs, axes)
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    kinds = int(sort.max()) + 1
    keys = np.zeros(int(owner[-1]) + 1, np.int64)  # by class
    keys[classes] = sort
    keys[owner[starts]] += kinds * _axis_sets(found, starts, axes)
    used = np.bincount(keys[owner[starts]]) > 0
    return (np.cumsum(used) - 1)[keys[classes]]


def _axis_sets(found: Indices, starts: Indices, axes: int) -> Indices:
    """For each class the number of its set of axes, in the order of their first axes.

    Args:
        found: The axes of all classes, one class after the other, each in ascending order.
        starts: Where each class begins in `found`.
        axes: The number of axes.
    """
    lengths = np.diff(np.r_[starts, len(found)])
    random = np.random.default_rng(0).integers(1, 2**62, size=axes, dtype=np.int64)
    marks = np.add.reduceat(random[found], starts)
    # Sorted by marks, classes with equal axes become neighbours. Unequal neighbours begin a new run; they are compared
    # axis by axis, which makes that exact whatever the marks are.
    order = np.argsort(marks)
    sizes = lengths[order]
    begins = np.r_[0, np.cumsum(sizes)[:-1]]
    place = np.arange(len(found)) - begins.repeat(sizes)
    ordered = found[place + starts[order].repeat(sizes)]
    before = ordered[place + np.r_[0, begins[:-1]].repeat(sizes)]
    same = np.logical_and.reduceat(ordered == before, begins) & (sizes == np.r_[-1, sizes[:-1]])
    # Two sets with the same mark may alternate, so that a set has several runs; the dict maps these to one number.
    known, runs = dict[bytes, int](), np.flatnonzero(~same)
    sets = [known.setdefault(ordered[begins[n] : begins[n] + sizes[n]].tobytes(), len(known)) for n in runs]
    _, firsts = np.unique(sets, return_index=True)
    firsts = runs[firsts]
    # Sets with the same first axis are in the order of their marks. Saved states contain unit numbers, so this order,
    # which has no meaning, must stay as it is.
    rank = np.argsort(np.lexsort((marks[order[firsts]], ordered[begins[firsts]])))
    numbers = np.zeros(len(starts), np.int64)
    numbers[order] = rank[sets][np.cumsum(~same) - 1]
    return numbers


def find_groups(units: Units, axes: list[Axis], solution: Solution, roles: dict[tuple[str, int], Role]) -> list[Group]:
    """The groups of units, each named after the module that produces it."""
    kinds = _kinds(solution)
    groups, names = [], Counter[str]()
    for number in range(int(units.group.max()) + 1 if len(units) else 0):
        members = np.flatnonzero(units.group == number)
        first = int(members[0])
        numbers = dict.fromkeys(axis for axis, _ in units.slices(first))
        described = tuple((axes[n].tensor, axes[n].dim, roles.get((axes[n].tensor, axes[n].dim))) for n in numbers)
        homes = [tensor for tensor, _, role in described if role is Role.PRODUCER]
        # Without a producer, as for a learned table that layers read, use the name of any tensor that is not a reader.
        homes += [tensor for tensor, _, role in described if role is not Role.READER]
        home = next(iter(homes), described[0][0])
        kind = KINDS[kinds[units.classes[first]]]
        lossy, aligned = (
            next((str(why[c]) for c in units.classes[members].tolist() if c in why), "")
            for why in (solution.lossy, solution.aligned)
        )
        name = home.rpartition(".")[0] if home.endswith((".weight", ".bias")) else home
        multiple = ALIGNED if aligned else 1
        module = name or home
        names[module] += 1
        unique = module if names[module] == 1 else f"{module} ({names[module]})"
        groups.append(Group(unique, members, described, kind, lossy, module, multiple, aligned))
    return groups


def find_fixed(axes: list[Axis], solution: Solution) -> list[Fixed]:
    """The axes of parameters and buffers that cannot shrink, in whole or in part."""
    found = []
    for axis in axes:
        if axis.tensor:
            pinned = [c for c in _classes(axis, solution).tolist() if c in solution.pinned]
            if pinned:
                found.append(Fixed(axis.tensor, axis.dim, len(pinned), solution.pinned[pinned[0]]))
    return found
