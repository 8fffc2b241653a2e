"""The findings of a trace as plain values, for reports: what can shrink, what cannot and why, what must stay equal."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from keepk.graph.choose import choose_half
from keepk.graph.graph import Graph
from keepk.graph.ids.atoms import tensors_kept_by
from keepk.graph.ids.facts import Reason

# Reasons that occur in every model, by their last words. Reports show each kind in one line instead of listing its
# axes.
FOLDED = {
    "an axis of the kernel": "kernel",
    "is an output of the model": "output",
    "with an axis that has no channels": "input",
}


@dataclass(frozen=True)
class Where:
    """An operation, the module in whose forward it ran, and its file and line; each may be empty."""

    operation: str
    module: str
    place: str

    def __str__(self) -> str:
        """One phrase for reports.

        >>> print(Where("aten::view", "block.2", "net.py:40"))
        aten::view in block.2 at net.py:40
        >>> print(Where("", "", "net.py:12"))
        net.py:12
        """
        known = [self.operation, f"in {self.module}" if self.module else "", f"at {self.place}" if self.place else ""]
        return " ".join(word for word in known if word).removeprefix("at ")


@dataclass(frozen=True)
class SpaceAxis:
    """An axis in which the units of a space have slices; its role is producer, carrier, reader or empty."""

    tensor: str
    axis: int
    role: str


@dataclass(frozen=True)
class SpaceFound:
    """Units that have their slices in the same axes.

    Attributes:
        name: The module that produces them.
        kind: "channel", "read" or "source"; see `keepk.graph.units.Group`.
        units: The number of units.
        exact: The number of units whose removal has the same effect as setting them to zero.
        lossy: The number of units whose removal changes more than that.
        why: Why they are lossy; empty if all are exact.
        where: The places in the user's program that make them lossy.
        axes: The axes with their slices.
        multiple: After a removal, the number of units left must be divisible by this.
        why_multiple: Why `multiple` is more than 1; empty if it is 1.
    """

    name: str
    kind: str
    units: int
    exact: int
    lossy: int
    why: str
    where: tuple[Where, ...]
    axes: tuple[SpaceAxis, ...]
    multiple: int
    why_multiple: str


@dataclass(frozen=True)
class FixedAxis:
    """An axis, the number of its channels that cannot be removed, and its size."""

    tensor: str
    axis: int
    channels: int
    total: int


@dataclass(frozen=True)
class FixedGroup:
    """Axes that cannot shrink for the same reason.

    Attributes:
        kind: "kernel", "output", "input" (it meets an axis without channels), or "operation" for all other reasons.
        why: The reason.
        where: The places in the user's program that cause it.
        axes: The axes.
    """

    kind: str
    why: str
    where: tuple[Where, ...]
    axes: tuple[FixedAxis, ...]


@dataclass(frozen=True)
class EqualParts:
    """Parts that must lose the same number of units.

    Attributes:
        spaces: The spaces that contain the parts.
        parts: The number of units of each part.
        why: The reason.
        where: The places in the user's program that cause it.
    """

    spaces: tuple[str, ...]
    parts: tuple[int, ...]
    why: str
    where: tuple[Where, ...]


def spaces_found(graph: Graph) -> tuple[SpaceFound, ...]:
    """The spaces of a graph as plain values."""
    return tuple(_space(graph, number) for number in range(len(graph.groups)))


def _space(graph: Graph, number: int) -> SpaceFound:
    group = graph.groups[number]
    lossy = int(graph.units.lossy[group.units].sum())
    reasons = [graph.solution.lossy.get(found) for found in graph.units.classes[group.units].tolist()]
    first = next((reason for reason in reasons if reason is not None), None)
    return SpaceFound(
        name=group.module,
        kind=group.kind,
        units=len(group.units),
        exact=len(group.units) - lossy,
        lossy=lossy,
        why=first.why if first else "",
        where=_places([first]) if first else (),
        axes=tuple(SpaceAxis(tensor, axis, role.value if role else "") for tensor, axis, role in group.axes),
        multiple=group.multiple,
        why_multiple=group.aligned,
    )


def fixed_groups(graph: Graph) -> tuple[FixedGroup, ...]:
    """The axes that cannot shrink, by reason: first those that the user could change, then those of every model."""
    totals = {(axis.tensor, axis.dim): axis.size for axis in graph.wiring.axes}
    axes, reasons = dict[tuple[str, ...], list[FixedAxis]](), dict[tuple[str, ...], list[Reason]]()
    for fixed in graph.fixed:
        kind, reason = _kind(fixed.reason), fixed.reason
        # The key has no module, so that a line of code that runs in every block is one finding.
        key = (kind, reason.why, reason.operation, reason.place) if kind == "operation" else (kind,)
        found = FixedAxis(fixed.tensor, fixed.axis, fixed.channels, totals[fixed.tensor, fixed.axis])
        axes.setdefault(key, []).append(found)
        reasons.setdefault(key, []).append(reason)
    # Operations come first, because only these reasons can be removed by changing the model's code.
    order = ["operation", "input", "output", "kernel"]
    return tuple(
        FixedGroup(key[0], reasons[key][0].why, _places(reasons[key]), tuple(axes[key]))
        for key in sorted(axes, key=lambda key: order.index(key[0]))
    )


def _kind(reason: Reason) -> str:
    return next((kind for words, kind in FOLDED.items() if reason.why.endswith(words)), "operation")


def is_output(reason: Reason) -> bool:
    """Whether something is fixed because it is an output of the model."""
    return _kind(reason) == "output"


def _places(reasons: Iterable[Reason]) -> tuple[Where, ...]:
    found = dict.fromkeys(Where(reason.operation, reason.module, reason.place) for reason in reasons)
    return tuple(where for where in found if str(where))


def equal_parts(graph: Graph) -> tuple[EqualParts, ...]:
    """The parts of the graph that must lose the same number of units."""
    # `graph.bindings` leaves out bindings without units, so the reasons have to be filtered in the same way.
    kept = (
        binding
        for binding in graph.solution.bindings
        if any(np.isin(block, graph.units.classes).any() for block in binding.blocks)
    )
    return tuple(
        EqualParts(
            spaces=tuple(
                dict.fromkeys(graph.groups[it].module for it in graph.units.group[np.concatenate(blocks)].tolist())
            ),
            parts=tuple(map(len, blocks)),
            why=binding.reason.why,
            where=_places([binding.reason]),
        )
        for blocks, binding in zip(graph.bindings, kept, strict=True)
    )


def attributes_beside(graph: Graph) -> tuple[str, ...]:
    """The attributes that equal a width that can shrink, and that a removal leaves unchanged."""
    # Any cut that changes every width shows them; half of everything does.
    found = graph.edits(choose_half(graph, lossy=True)).unchanged
    return tuple(str(it).partition(" = ")[0] for it in found)


def tensor_specs(example: object) -> tuple[str, ...]:
    """The shapes of an example's tensors, with the dtype where it is not float32.

    >>> tensor_specs((torch.zeros(2, 3), torch.zeros(2, 12, dtype=torch.int64)))
    ('2x3', '2x12:int64')
    """
    return tuple(map(_spec, tensors_kept_by(example)))


def _spec(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return shape if tensor.dtype is torch.float32 else f"{shape}:{str(tensor.dtype).removeprefix('torch.')}"
