"""The cost of a model after a removal, computed from its trace: the model is neither cut nor run.

A trace knows every operation of a forward pass, and for each tensor which channel is where (`ids.maps`). So it knows
the shape of every tensor after any removal, and with it the number of multiply-accumulates (MACs) of every operation.
Here the 6 hidden neurons of a network are cut to 2:

>>> import keepk, torch
>>> from torch import nn
>>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
>>> costs = CostModel(keepk.trace(net, torch.zeros(4, 8)), batch=4)
>>> nothing = np.zeros(6, bool)
>>> costs.macs(nothing), costs.parameters(nothing)  # 8 * 6 + 6 * 3, and 8 * 6 + 6 + 6 * 3 + 3
(66, 75)
>>> four = np.arange(6) < 4
>>> costs.macs(four), costs.parameters(four)  # 8 * 2 + 2 * 3, and 8 * 2 + 2 + 2 * 3 + 3
(22, 27)

Both follow the convention of `keepk.model.costs`: parameters are counted once, MACs are those that torch's
`FlopCounterMode` counts on a copy without weights, in eval mode, divided by the batch size of the example. Only
matrix products and convolutions are counted; `uncounted_operations` lists the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import nn

from keepk.errors import ShrinkError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags, Map, restrict_all, shape_left, support
from keepk.graph.remaining import Left, closure
from keepk.graph.solve.solve import alive_atoms
from keepk.graph.tracer import MAY_DIFFER, Step
from keepk.model.copies import Workshop
from keepk.model.costs import FORMULAS, Shape, module_flops
from keepk.model.edits import Edits, Indices

NO_ATOMS = np.zeros(0, np.int32)


class CostModel:
    """The parameters and MACs of a traced model for any set of removed units.

    Args:
        graph: The graph of the model. Units that were removed from it count as removed.
        batch: The batch size of the example that was traced; None if it is not known, in which case MACs are those of
            the whole example (see `keepk.model.costs.Costs`).
        model: The model of the graph, without wrappers, in its current size. With it, MACs are exact for an `einsum`
            that sums over a single remaining channel too: torch then multiplies elementwise, which it does not count,
            so these MACs are counted on a cut copy.
    """

    def __init__(self, graph: Graph, batch: int | None, model: nn.Module | None = None) -> None:
        self._graph, self._batch, self._model = graph, batch or 1, model
        self._moving, self._axes = _removable(graph), _Axes()
        self._fixed_parameters = 0
        self._parameters = list[tuple[str, _Sized | None]]()
        for name in (it for it in graph.wiring.tensors if it in graph.wiring.parameters):
            maps, shape = graph.wiring.tensors[name], graph.wiring.shapes[name]
            if self._changes(maps):
                self._parameters.append((name, self._sized(shape, maps)))
            else:
                self._fixed_parameters += prod(shape)
        assert graph.replays is not None  # every graph of keepk.trace has them
        # The first pass is that of the first example in eval mode, the one that `model_costs` counts.
        _, recorded = graph.replays.runs[0]
        self._fixed_flops = Counter[str]()  # by module, of the operations that no removal changes
        self._products = list[tuple[Step, list[_Sized | None]]]()  # the others, with their inputs and the output
        for step in recorded.steps:
            if (formula := FORMULAS.get(step.name)) is None:
                continue
            count = len(step.origins)  # the inputs that follow are counts among the arguments
            if any(self._changes(maps) for _, maps in (*step.outputs, *step.inputs[:count])):
                tensors = [*step.inputs[:count], step.outputs[0]]
                self._products.append((step, [self._sized(shape, maps) for shape, maps in tensors]))
            else:
                self._fixed_flops[step.module] += formula(
                    [shape for shape, _ in step.inputs[:count]], step.outputs[0][0], dict(step.numbers)
                )

    def _changes(self, maps: Sequence[Map]) -> bool:
        """Whether any of the maps has a channel that can be removed."""
        return any(self._moving[index_map].any() for index_map in maps)

    def _sized(self, shape: Shape, maps: Sequence[Map]) -> "_Sized | None":
        """A tensor whose axes are independent of each other; None if its shape follows from several maps together."""
        found, dims = list[tuple[int, int]](), [support(index_map) for index_map in maps]
        for index_map, own in zip(maps, dims, strict=True):
            if not self._moving[index_map].any():
                continue
            if len(own) != 1 or dims.count(own) > 1:
                return None
            found.append((own[0], self._axes.number(index_map.ravel())))
        if any(len(own) > 1 for own in dims):
            return None
        return _Sized(shape, tuple(found))

    def gone(self, removed: Flags) -> Flags:
        """By unit, whether it is gone once the units in `removed` are: those removed with them are gone too."""
        return closure(self._graph, removed | ~self._graph.alive)

    def macs(self, removed: Flags) -> int:
        """The MACs of one forward pass per sample, once units are removed.

        Args:
            removed: By unit, whether it is removed.

        Raises:
            ShrinkError: The units left do not fill a box somewhere, so they cannot be removed.
        """
        return sum(flops // 2 // self._batch for flops in self.flops(removed).values())

    def parameters(self, removed: Flags) -> int:
        """The number of parameters once units are removed; shared ones count once."""
        alive = self._alive(removed)
        left, sizes = Left(self._graph.wiring, alive), self._axes.sizes(alive)
        shapes = ((sized and sized.after(sizes)) or left.shape(name) for name, sized in self._parameters)
        return self._fixed_parameters + sum(map(prod, shapes))

    def flops(self, removed: Flags) -> dict[str, int]:
        """By path of a module, the FLOPs of its forward, without those of the modules inside it."""
        alive, restricted = self._alive(removed), dict[int, list[Map] | None]()
        found = self._fixed_flops.copy()

        def after(shape: Shape, maps: tuple[Map, ...], step: Step) -> Shape:
            if not maps:
                return shape
            if id(maps) not in restricted:  # the record keeps the maps alive, so their ids are unique
                restricted[id(maps)] = restrict_all(maps, alive)
            predicted = shape_left(shape, maps, restricted[id(maps)])
            if predicted is None:
                raise ShrinkError(
                    f"module {step.module!r}: the units left do not fill a tensor of {step.name} at {step.place}, "
                    f"whose shape is {shape}, so its cost is not known."
                )
            return predicted

        sizes = self._axes.sizes(alive)
        for step, tensors in self._products:
            known = [*step.inputs[: len(tensors) - 1], step.outputs[0]]
            *inputs, output = (
                (sized and sized.after(sizes)) or after(*it, step)  # refuses a removal that leaves nothing of an axis
                for it, sized in zip(known, tensors, strict=True)
            )
            # An einsum over one channel is no longer a product that torch counts; see `model` above.
            if step.name == "aten::bmm" and self._model is not None and inputs[0][-1] == 1 < step.inputs[0][0][-1]:
                return self._counted_flops(self._model, removed)
            found[step.module] += FORMULAS[step.name](inputs, output, dict(step.numbers))
        return dict(found)

    def counted_macs(self, edits: Edits) -> int | None:
        """The MACs after a removal, counted in a forward pass of a cut copy of the model.

        Args:
            edits: The removal.

        Returns:
            The MACs; None if forward reads values, which the copy does not have.
        """
        assert self._model is not None  # without the model there is nothing to copy
        try:
            counted = self._flops_of_copy(self._model, edits)
        except Exception:  # forward may raise anything on the meta device and still work with weights
            return None
        return sum(flops // 2 // self._batch for flops in counted.values())

    def _counted_flops(self, model: nn.Module, removed: Flags) -> dict[str, int]:
        """The same as `flops`, counted on a cut copy of the model."""
        graph = self._graph
        return self._flops_of_copy(model, graph.edits(np.flatnonzero(self.gone(removed) & graph.alive)))

    def _flops_of_copy(self, model: nn.Module, edits: Edits) -> dict[str, int]:
        replays = self._graph.replays
        assert replays is not None
        return module_flops(Workshop(model, replays.runs[0][0].example, replays.device), edits)

    def _alive(self, removed: Flags) -> Flags:
        graph = self._graph
        gone = np.flatnonzero(self.gone(removed))
        return alive_atoms(graph.solution.classes, graph.units.classes[gone])


@dataclass(frozen=True)
class _Sized:
    """The shape of a tensor before a removal, and the axes that shrink: pairs of a dim and a number of `_Axes`."""

    shape: Shape
    axes: tuple[tuple[int, int], ...]

    def after(self, sizes: Sequence[int]) -> Shape | None:
        """The shape after a removal; None if nothing is left of an axis."""
        shape = list(self.shape)
        for dim, number in self.axes:
            if not sizes[number]:
                return None
            shape[dim] = sizes[number]
        return tuple(shape)


class _Axes:
    """The distinct axes of all tensors, for counting what is left of all of them in one pass.

    Most tensors have few distinct axes between them: the output of a layer is the input of the next one, and every
    evaluation of a cost needs the sizes of all of them.
    """

    def __init__(self) -> None:
        self._numbers = dict[bytes, int]()
        self._atoms = list[Map]()
        self._together: tuple[Map, Indices] | None = None

    def number(self, atoms: Map) -> int:
        """The number of an axis with these atoms."""
        found = self._numbers.setdefault(atoms.tobytes(), len(self._atoms))
        if found == len(self._atoms):
            self._atoms.append(atoms)
        return found

    def sizes(self, alive: Flags) -> list[int]:
        """By number of an axis, how many of its atoms are alive."""
        if self._together is None:
            lengths = np.array([len(it) for it in self._atoms], np.int64)
            self._together = np.concatenate([NO_ATOMS, *self._atoms]), np.cumsum(lengths) - lengths
        atoms, starts = self._together
        found: list[int] = np.add.reduceat(alive[atoms], starts, dtype=np.int64).tolist() if len(starts) else []
        return found


def _removable(graph: Graph) -> Flags:
    """By atom, whether it belongs to a unit."""
    units = np.zeros(len(graph.solution.classes), bool)
    units[graph.units.classes] = True
    return units[graph.solution.classes]


def uncounted_operations(graph: Graph) -> Mapping[str, int]:
    """By name, how often the first pass runs operations that compute something and are not counted as MACs.

    >>> import keepk, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3), torch.nn.Softmax(1))
    >>> uncounted_operations(keepk.trace(net, torch.zeros(4, 8)))
    {'relu': 1, '_softmax': 1}
    """
    assert graph.replays is not None
    names = Counter(step.name for step in graph.replays.runs[0][1].steps)
    return {
        name.rpartition(":")[2]: number
        for name, number in names.items()
        if name not in FORMULAS and name not in MAY_DIFFER and _computes(name)
    }


def _computes(name: str) -> bool:
    """Whether an operation computes values from tensors, unlike a view or a tensor made from numbers."""
    space, _, plain = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), plain, None)
    if packet is None:  # an entry of the trace that is not an operation of torch
        return False
    schema = getattr(packet, packet.overloads()[0])._schema
    views = not schema.is_mutable and any(it.alias_info is not None for it in schema.returns)
    return not views and any("Tensor" in str(it.type) for it in schema.arguments)
