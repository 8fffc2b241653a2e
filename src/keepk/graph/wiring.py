"""What a trace found of a model's wiring, before anything is removed."""

from dataclasses import dataclass, field

from keepk.graph.atoms import Axis
from keepk.graph.attributes import Sized
from keepk.graph.facts import Role
from keepk.graph.maps import Map


@dataclass(frozen=True, eq=False)
class Constant:
    """A number in a module that must follow a size of the forward pass, found by trying.

    Attributes:
        module: The module's path.
        attribute: Its attribute.
        item: Which entry, if the attribute is a tuple or list.
        shape: The shape of the tensor whose size it is.
        maps: The maps of that tensor.
        dim: Which of its dims.
    """

    module: str
    attribute: str
    item: int | None
    shape: tuple[int, ...]
    maps: tuple[Map, ...]
    dim: int


@dataclass(frozen=True)
class Wiring:
    """What a trace found, before anything is removed; never changes.

    Attributes:
        axes: Every run of atoms.
        tensors: By name, the maps of each parameter and buffer.
        shapes: By name, its shape.
        parameters: The names that are parameters.
        roles: What each axis does.
        sized: Attributes that repeat sizes.
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
    adapters: dict[str, str] = field(default_factory=dict)
