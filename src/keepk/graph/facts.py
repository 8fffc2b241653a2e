"""What a trace finds out about atoms. Facts are only ever added, and their order does not matter."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from keepk.graph.maps import Map


@dataclass(frozen=True)
class Reason:
    """Why something is as it is, and where in the user's program."""

    why: str
    operation: str = ""
    module: str = ""
    place: str = ""

    def __str__(self) -> str:
        """One line for people.

        >>> print(Reason("roll does not commute with removal", "aten::roll", "block.2", "net.py:40"))
        roll does not commute with removal (aten::roll in block.2 at net.py:40)
        """
        inside = f"in {self.module}" if self.module else ""
        at = f"at {self.place}" if self.place else ""
        where = " ".join(part for part in (self.operation, inside, at) if part)
        return f"{self.why} ({where})" if where else self.why


class Line(Enum):
    """How an atom (the parent) stands to a row of atoms that are aligned with it (its cells).

    Always: the parent goes exactly when all of its cells go.
    """

    COLLAPSE = "the cells go together, and the parent with them"
    HEADS = "as COLLAPSE, by preference: heads go as a whole unless the model's Python has their number written in it"
    SHARE = "the parent serves every row of a grid, so that cells go by whole rows or by whole columns"
    LOOSE = "the cells go one by one; the parent only when they are one"


class Role(Enum):
    """What a tensor's axis does with its channels."""

    PRODUCER = "producer"
    CARRIER = "carrier"
    READER = "reader"


@dataclass(frozen=True, eq=False)
class Lines:
    """Parents and their cells, element by element."""

    parents: Map
    cells: Map


@dataclass(frozen=True)
class Bound:
    """An array of atoms with a claim on what may be removed from it."""

    array: Map
    reason: Reason


@dataclass(frozen=True, eq=False)
class Read:
    """A normalisation that reads channels which others read as well: it can drop its reading of one."""

    sources: Map
    readers: Map
    module: str


@dataclass
class Facts:
    """Everything that is known.

    Attributes:
        equal: Pairs of atoms that go together.
        lines: Parents and cells, by kind.
        even: Matrices of which every row must keep the same number.
        grids: Arrays of which whole rows or whole columns must go, at every level.
        lossy: Matrices in whose rows an atom takes part in a normalisation: a part of a row changes the rest.
        pins: Atoms that stay.
        reads: Normalisations that read a selection.
        uses: Atoms that somebody reads, and who.
        roles: What an axis (tensor, dim) does.
    """

    equal: list[Lines] = field(default_factory=list)
    lines: dict[Line, list[Lines]] = field(default_factory=lambda: {line: [] for line in Line})
    even: list[Bound] = field(default_factory=list)
    grids: list[Bound] = field(default_factory=list)
    lossy: list[Bound] = field(default_factory=list)
    pins: list[Bound] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    uses: list[tuple[Map, str]] = field(default_factory=list)
    roles: dict[tuple[str, int], Role] = field(default_factory=dict)

    def extend(self, other: "Facts") -> None:
        """Take over the facts of another forward pass over the same atoms."""
        known = [(read.module, read.sources.tobytes()) for read in self.reads]
        self.reads += [read for read in other.reads if (read.module, read.sources.tobytes()) not in known]
        for name in ("equal", "even", "grids", "lossy", "pins", "uses"):
            getattr(self, name).extend(getattr(other, name))
        for kind, lines in other.lines.items():
            self.lines[kind].extend(lines)
        self.roles.update({axis: role for axis, role in other.roles.items() if axis not in self.roles})

    def add_equal(self, one: Map, other: Map) -> None:
        """Atoms that stand at the same place go together."""
        first, second = _pairs(one, other)
        apart = first != second
        if apart.any():
            self.equal.append(Lines(first[apart], second[apart]))

    def add_line(self, parent: Map, cells: Map, kind: Line) -> None:
        """See `Line`; the parent is broadcast over its cells."""
        parents, members = _pairs(parent, cells)
        if len(parents):
            self.lines[kind].append(Lines(parents, members))

    def add_pin(self, atoms: Map, reason: Reason) -> None:
        """These atoms stay."""
        found = np.unique(atoms[atoms > 0])
        if len(found):
            self.pins.append(Bound(found, reason))


def _pairs(one: Map, other: Map) -> tuple[Map, Map]:
    first, second = (array.ravel() for array in np.broadcast_arrays(one, other))
    tracked = (first > 0) & (second > 0)
    return first[tracked], second[tracked]
