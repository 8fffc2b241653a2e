"""`Wiring`: the tensors, axes and size attributes of a model, as traced; the immutable part of a `Graph`."""

from dataclasses import dataclass, field

from keepk.graph.atoms import Axis
from keepk.graph.attributes import Sized
from keepk.graph.facts import Role
from keepk.graph.maps import Map


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
