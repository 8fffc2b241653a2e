"""Facts: everything that a trace has learned about atoms.

Facts are only ever added, and their order does not matter. That is why several forward passes (eval mode, train mode,
both outcomes of a branch) can be traced independently and their facts concatenated, and why probing can add what it
learned and solve again from scratch: more facts only make classes larger and pin more of them. Nothing that was once
refused becomes allowed because another fact was recorded first.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from keepk.graph.ids.maps import Map


@dataclass(frozen=True)
class Reason:
    """Why a channel is pinned, bound or lossy, and where in the user's program."""

    why: str
    operation: str = ""
    module: str = ""
    place: str = ""

    def __str__(self) -> str:
        """One line for a report.

        >>> print(Reason("roll does not commute with removal", "aten::roll", "block.2", "net.py:40"))
        roll does not commute with removal (aten::roll in block.2 at net.py:40)
        """
        inside = f"in {self.module}" if self.module else ""
        at = f"at {self.place}" if self.place else ""
        where = " ".join(part for part in (self.operation, inside, at) if part)
        return f"{self.why} ({where})" if where else self.why


class Line(Enum):
    """How one atom (the parent) relates to a row of atoms aligned with it (its cells).

    Queries of shape (heads, head_dim) have an atom for every cell. Summed over head_dim they have one atom per head::

        parents   cells
          21  <-  [1  2  3  4]
          22  <-  [5  6  7  8]

    In every kind the parent is removed exactly when all of its cells are. The kinds differ in which cells may be
    removed without the others.
    """

    COLLAPSE = "the cells are removed together, and the parent with them"
    HEADS = "like COLLAPSE where possible: whole heads, unless the number of heads is written in the model's Python"
    SHARE = "the parent serves every row of a grid, so cells are removed by whole rows or by whole columns"
    LOOSE = "the cells are removed one by one; the parent only once they are one class"


class Role(Enum):
    """The role of a tensor's axis for its channels: it produces, carries (scales, shifts) or reads them."""

    PRODUCER = "producer"
    CARRIER = "carrier"
    READER = "reader"


@dataclass(frozen=True, eq=False)
class Lines:
    """Pairs of parent and cell, as two arrays of the same length."""

    parents: Map
    cells: Map

    def __repr__(self) -> str:
        return f"<Lines: {len(self.parents)} pairs>"


@dataclass(frozen=True)
class Bound:
    """An array of atoms with a condition on its removals. The list in `Facts` that contains it says which condition."""

    array: Map
    reason: Reason

    def __repr__(self) -> str:
        return f"<Bound: {self.array.shape} atoms, {self.reason}>"


@dataclass(frozen=True, eq=False)
class Read:
    """A BatchNorm that reads channels which other layers read as well, so it can stop reading one of them.

    Attributes:
        sources: The atoms of the channels that it reads.
        readers: The atoms of the BatchNorm's parameters, one for each source.
        module: The path of the BatchNorm.
    """

    sources: Map
    readers: Map
    module: str

    def __repr__(self) -> str:
        return f"<Read: {self.module} reads {len(self.sources)} channels>"


@dataclass
class Facts:
    """All facts of a trace.

    Attributes:
        equal: Pairs of atoms that are removed together.
        lines: Parents and cells, by kind.
        even: Matrices whose rows must all keep the same number of entries.
        grids: Arrays of which only whole rows or whole columns may be removed, at every level.
        lossy: Matrices whose rows are normalised or summed: removing part of a row changes the rest.
        pins: Atoms that cannot be removed.
        reads: BatchNorms that can read a selection of their channels.
        uses: Atoms that are read, each with the name of the reader.
        roles: By (tensor, dim), what that axis does.
    """

    # Equal numbers are a condition (`even`), not an equality: chunk(2) of 8 channels needs 3 + 3 or 4 + 4 of them, but
    # channels 0 and 4 need not be removed together. Uniting them would be correct too, but too strict: after eight
    # channel shuffles in a row, only a handful of hundreds of units would be left (docs/decisions/0008).
    equal: list[Lines] = field(default_factory=list)
    lines: dict[Line, list[Lines]] = field(default_factory=lambda: {line: [] for line in Line})
    even: list[Bound] = field(default_factory=list)
    grids: list[Bound] = field(default_factory=list)
    lossy: list[Bound] = field(default_factory=list)
    pins: list[Bound] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    uses: list[tuple[Map, str]] = field(default_factory=list)
    roles: dict[tuple[str, int], Role] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = sum(map(len, self.lines.values()))
        counted = {name: len(getattr(self, name)) for name in ("equal", "even", "grids", "lossy", "pins", "reads")}
        return f"<Facts: {lines} lines, {', '.join(f'{number} {name}' for name, number in counted.items())}>"

    def extend(self, other: "Facts") -> None:
        """Add the facts of another forward pass over the same atoms."""
        # A module that reads two different inputs gets no selection (see `solve`). The same read, seen in eval mode and
        # again in train mode, must not look like two.
        known = [(read.module, read.sources.tobytes()) for read in self.reads]
        self.reads += [read for read in other.reads if (read.module, read.sources.tobytes()) not in known]
        for name in ("equal", "even", "grids", "lossy", "pins", "uses"):
            getattr(self, name).extend(getattr(other, name))
        for kind, lines in other.lines.items():
            self.lines[kind].extend(lines)
        self.roles.update({axis: role for axis, role in other.roles.items() if axis not in self.roles})

    def add_equal(self, one: Map, other: Map) -> None:
        """Record that atoms at the same position are removed together; the maps broadcast."""
        first, second = _pairs(one, other)
        apart = first != second
        if apart.any():
            self.equal.append(Lines(first[apart], second[apart]))

    def add_line(self, parent: Map, cells: Map, kind: Line) -> None:
        """Record parents and their cells; the parent's map broadcasts over the cells'."""
        parents, members = _pairs(parent, cells)
        if len(parents):
            self.lines[kind].append(Lines(parents, members))

    def add_pin(self, atoms: Map, reason: Reason) -> None:
        """Record that these atoms cannot be removed."""
        found = np.unique(atoms[atoms > 0])
        if len(found):
            self.pins.append(Bound(found, reason))


def _pairs(one: Map, other: Map) -> tuple[Map, Map]:
    """Both maps broadcast and flattened, without the positions where one of them has no atom."""
    first, second = (array.ravel() for array in np.broadcast_arrays(one, other))
    tracked = (first > 0) & (second > 0)
    return first[tracked], second[tracked]
