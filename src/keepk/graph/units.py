"""Units as arrays: which slices of which tensors go together, and the spaces that units fall into."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.atoms import Axis
from keepk.graph.edits import Indices
from keepk.graph.facts import Reason, Role
from keepk.graph.solve import ALIGNED, Solution


@dataclass(frozen=True)
class Fixed:
    """An axis, or a part of one, that cannot shrink."""

    tensor: str
    axis: int
    channels: int
    reason: Reason

    @property
    def why(self) -> str:
        """The reason in a line."""
        return str(self.reason)

    @property
    def place(self) -> str:
        """File and line, where there is one."""
        return self.reason.place


@dataclass(frozen=True)
class GraphSpace:
    """Units that have their slices in the same axes.

    Attributes:
        name: The module that produces them; the tensor they come from where no module does.
        units: Their ids.
        axes: (tensor, axis, role) of their slices.
        kind: "channel"; "read", a BatchNorm's reading of a channel that others read too; or "source", such a channel,
            which goes when nobody reads it any more.
        lossy: Why removing one changes more than setting it to zero would; empty where it does not.
        multiple: If any go, a multiple of this must be left.
        aligned: Why that is more than 1; empty where it is not.
    """

    name: str
    units: Indices
    axes: tuple[tuple[str, int, Role | None], ...]
    kind: str
    lossy: str
    multiple: int = 1
    aligned: str = ""


@dataclass(frozen=True)
class Units:
    """All units of a graph, no object for each.

    Attributes:
        classes: The class of atoms of each unit.
        space: The number of its space.
        lossy: Whether removing it changes more than zeroing it would.
        starts: Where its slices begin in `axis` and `index`; one entry more than units.
        axis: For each slice, the number of its axis in the list of axes.
        index: For each slice, its index in the axis.
    """

    classes: Indices
    space: Indices
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
    """Every class that has an atom of a parameter and is not pinned."""
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
    kept = (free & owned)[classes]
    classes, axis, index = classes[kept], axis[kept], index[kept]
    lossy = np.zeros(len(solution.classes), bool)
    lossy[list(solution.lossy)] = True
    space = _space_numbers(classes, axis, lossy[classes] + 2 * _kinds(solution)[classes], len(axes))
    order = np.lexsort((index, axis, classes, space))
    classes, axis, index, space = classes[order], axis[order], index[order], space[order]
    firsts = np.flatnonzero(np.r_[True, classes[1:] != classes[:-1]]) if len(classes) else np.zeros(0, np.int64)
    return Units(
        classes=classes[firsts],
        space=space[firsts],
        lossy=lossy[classes[firsts]],
        starts=np.r_[firsts, len(classes)],
        axis=axis,
        index=index,
    )


def _classes(axis: Axis, solution: Solution) -> NDArray[np.int32]:
    return solution.classes[axis.start : axis.start + axis.size]


KINDS = ("channel", "read", "source")


def _kinds(solution: Solution) -> Indices:
    """For each class the number of its kind; what is read and reads itself is a source."""
    kinds = np.zeros(len(solution.classes), np.int64)
    for number, side in ((1, "readers"), (2, "sources")):
        for read in solution.reads:
            kinds[solution.classes[getattr(read, side)]] = number
    return kinds


def _space_numbers(classes: Indices, axis: Indices, sort: Indices, axes: int) -> Indices:
    """A number for each set of axes, in the order of their first axes; units of different sorts are apart."""
    if not len(classes):
        return np.zeros(0, np.int64)
    pairs = np.sort(classes * axes + axis)
    pairs = pairs[np.r_[True, pairs[1:] != pairs[:-1]]]
    # A sum of random numbers, one for each axis, tells sets of axes apart.
    marks = np.random.default_rng(0).integers(1, 2**62, size=axes, dtype=np.int64)
    sums = np.zeros(int(classes.max()) + 1, np.int64)
    np.add.at(sums, pairs // axes, marks[pairs % axes])
    first = np.full(len(sums), axes, np.int64)
    np.minimum.at(first, classes, axis)
    sorts = np.zeros(len(sums), np.int64)
    sorts[classes] = sort
    members = np.flatnonzero(first < axes)
    keys = np.stack([first, sums, sorts])[:, members]
    order = np.lexsort(keys[::-1])
    begins = np.r_[False, (keys[:, order[1:]] != keys[:, order[:-1]]).any(axis=0)]
    numbers = np.zeros(len(sums), np.int64)
    numbers[members[order]] = np.cumsum(begins)
    return numbers[classes]


def find_spaces(
    units: Units, axes: list[Axis], solution: Solution, roles: dict[tuple[str, int], Role]
) -> list[GraphSpace]:
    """The spaces, with the name of the module that produces their units."""
    kinds = _kinds(solution)
    spaces = []
    for number in range(int(units.space.max()) + 1 if len(units) else 0):
        members = np.flatnonzero(units.space == number)
        first = int(members[0])
        numbers = dict.fromkeys(axis for axis, _ in units.slices(first))
        described = tuple((axes[n].tensor, axes[n].dim, roles.get((axes[n].tensor, axes[n].dim))) for n in numbers)
        homes = [tensor for tensor, _, role in described if role is Role.PRODUCER]
        homes += [tensor for tensor, _, role in described if role is not Role.READER]  # such as a table that is read
        home = next(iter(homes), described[0][0])
        kind = KINDS[kinds[units.classes[first]]]
        lossy, aligned = (
            next((str(why[c]) for c in units.classes[members].tolist() if c in why), "")
            for why in (solution.lossy, solution.aligned)
        )
        name = home.rpartition(".")[0] if home.endswith((".weight", ".bias")) else home
        multiple = ALIGNED if aligned else 1
        spaces.append(GraphSpace(name or home, members, described, kind, lossy, multiple, aligned))
    return spaces


def find_fixed(axes: list[Axis], solution: Solution) -> list[Fixed]:
    """The axes of parameters and buffers that cannot shrink, or only in part."""
    found = []
    for axis in axes:
        if axis.tensor:
            pinned = [c for c in _classes(axis, solution).tolist() if c in solution.pinned]
            if pinned:
                found.append(Fixed(axis.tensor, axis.dim, len(pinned), solution.pinned[pinned[0]]))
    return found
